"""Generate in the terminal, and show which tokens were drafted, corrected or free."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from ..engine.engine import Emission, Engine
from ..engine.sequence import Request
from ..models.tokenizer import Tokenizer
from ..quantize.load import Progress
from ..types import Origin, SamplingParams, StepRecord
from .load import Loading, load_pair, open_pair

COLOURS: dict[Origin, str] = {"draft": "green", "corrected": "bold red", "free": "default"}
"""How each origin is shown; words in the legend say the same without colour."""


@dataclass(frozen=True)
class GenerateConfig:
    """What to run.

    Attributes:
        target: name, folder, .gguf or hub id.
        draft: the same, or 'ngram', or None for no speculation.
        target_format, draft_format: recipes, such as 'bf16' or 'w4a16-awq', or 'auto'.
        draft_length: tokens drafted a step.
        confidence: a block ends after a token that the draft gives less probability than this; 0 never.
        context: tokens of prompt and output together at most; None for the model's own limit.
        kv: format of keys and values of both models; None for bf16, or f32 beside the format f32.
    """

    target: str
    draft: str | None
    target_format: str
    draft_format: str
    draft_length: int
    confidence: float
    context: int | None
    kv: str | None = None


@dataclass
class Generator:
    """A loaded engine with its tokenizer, and the records of the steps that it made."""

    engine: Engine
    tokenizer: Tokenizer
    records: list[StepRecord] = field(default_factory=list)

    def prompt_ids(self, prompt: str, *, raw: bool) -> list[int]:
        """Token ids of a prompt: as it stands if `raw`, else as a user's turn in the model's chat template."""
        if raw:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.chat([{"role": "user", "content": prompt}])

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Iterator[Emission]:
        """Generate after `prompt`, yielding what each step made true."""
        self.records.clear()
        self.engine.submit(Request(0, tuple(prompt), sampling, self.tokenizer.stream()))
        try:
            yield from self.engine.run()
        finally:
            self.engine.cancel(0)


def load(
    config: GenerateConfig, calibration: Sequence[str], progress: Progress | None = None, use_cache: bool = True
) -> Generator:
    """Load what `config` names.

    Args:
        config: models, formats and limits.
        calibration: texts for formats that need activation statistics.
        progress: called while files are fetched and weights are quantised.
        use_cache: read repacked weights from disk where they were kept, and keep them.

    Raises:
        UsageError: anything that cannot be used as given.
    """
    opened = open_pair(config.target, config.draft, config.target_format, config.draft_format, progress, use_cache)
    longest = opened.target.checkpoint.config.context_length
    context = min(config.context or longest, longest)
    how = Loading(config.draft_length, config.confidence, context, context, config.kv, config.kv, calibration)
    pair = load_pair(opened, how, progress)
    tokenizer = opened.target.tokenizer
    records: list[StepRecord] = []
    engine = Engine(
        pair.target,
        pair.drafter,
        eos_ids=tokenizer.eos_ids,
        max_draft=config.draft_length,
        max_batch=1,
        on_record=records.append,
    )
    return Generator(engine, tokenizer, records)


Tokens = list[tuple[int, Origin]]
"""Output tokens with where each came from."""


def collect(emissions: Iterable[Emission]) -> tuple[str, Tokens]:
    """The whole output: its text, cut before a stop string, and its tokens."""
    text, tokens = "", Tokens()
    for emission in emissions:
        text += emission.text
        tokens += zip(emission.tokens, emission.origins, strict=True)
    return text, tokens


def coloured(tokenizer: Tokenizer, emissions: Iterable[Emission], console: Console) -> Iterator[Emission]:
    """Pass emissions on, printing their text with every token in the colour of its origin."""
    stream = tokenizer.stream()
    waiting: list[tuple[str, Origin]] = []
    for emission in emissions:
        waiting += [(stream.push(t), origin) for t, origin in zip(emission.tokens, emission.origins, strict=True)]
        room = len(emission.text)
        while room and waiting:
            piece, origin = waiting.pop(0)
            console.print(Text(piece[:room], style=COLOURS[origin]), end="", soft_wrap=True)
            if len(piece) > room:
                waiting.insert(0, (piece[room:], origin))
            room -= min(room, len(piece))
        yield emission
    console.print()


def summary(records: Sequence[StepRecord], tokens: Tokens, seconds: float) -> dict[str, Any]:
    """The figures of one generation, each by its full name.

    Returns:
        tokens, steps, tokens_per_step, accepted_per_drafted, conditional_acceptance (None where nothing was drafted),
        tokens_per_second, counts by origin, and seconds spent drafting, verifying and otherwise.
    """
    drafted = sum(r.proposed for r in records)
    overlap = [value for r in records for value in r.overlap]
    return {
        "tokens": len(tokens),
        "steps": len(records),
        "tokens_per_step": len(tokens) / len(records) if records else None,
        "accepted_per_drafted": sum(r.accepted for r in records) / drafted if drafted else None,
        "conditional_acceptance": sum(overlap) / len(overlap) if overlap else None,
        "tokens_per_second": len(tokens) / seconds if seconds > 0 else None,
        "origins": {origin: sum(1 for _, o in tokens if o == origin) for origin in COLOURS},
        "draft_seconds": sum(r.draft_seconds for r in records),
        "verify_seconds": sum(r.verify_seconds for r in records),
        "other_seconds": sum(r.other_seconds for r in records),
    }


def print_summary(figures: dict[str, Any], console: Console) -> None:
    """The figures of `summary` in two lines: a legend of the colours, and the speed."""
    legend = "  ".join(f"[{COLOURS[origin]}]{origin}[/]: {n}" for origin, n in figures["origins"].items())
    line = f"{figures['tokens']} tokens in {figures['steps']} steps, {figures['tokens_per_second'] or 0:.1f} tokens/s"
    if figures["accepted_per_drafted"] is None:
        line += ", without drafts"
    else:
        line += (
            f"; {figures['tokens_per_step']:.2f} tokens per step, accepted/drafted "
            f"{figures['accepted_per_drafted']:.0%}, conditional acceptance {figures['conditional_acceptance']:.0%}"
        )
    console.print(f"\n{legend}\n{line}", highlight=False)
