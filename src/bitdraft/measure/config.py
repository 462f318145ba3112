"""What a measurement is asked to do, resolved once and never changed."""

from dataclasses import dataclass

from ..decoding.verify import Rule
from ..errors import UsageError
from ..formats import get_kv_format
from ..types import SamplingParams


@dataclass(frozen=True)
class MeasureConfig:
    """One measurement.

    Attributes:
        target, draft: names, folders, .gguf files or hub ids.
        target_format: the target's recipe, or auto. formats: the draft's recipes to compare.
        workloads: built-in names or files. prompts: how many of each.
        draft_lengths: draft lengths K to compare, ascending.
        sampling: how logits become tokens, in texts, scores and confirmations alike.
        batch: texts that are generated side by side. Timings are always of one sequence.
        timings: rounds of step timings.
        confirm: best combinations of each workload that are run end to end.
        confirm_prompts: prompts of each workload that they run on. rounds: how often each runs.
        rule: how blocks are verified.
        kv: format of keys and values of both models; None for bf16, or f32 beside the format f32.
    """

    target: str
    draft: str
    target_format: str
    formats: tuple[str, ...]
    workloads: tuple[str, ...]
    prompts: int
    draft_lengths: tuple[int, ...]
    sampling: SamplingParams
    batch: int = 8
    timings: int = 7
    confirm: int = 2
    confirm_prompts: int = 4
    rounds: int = 2
    rule: Rule = "block"
    kv: str | None = None

    def __post_init__(self) -> None:
        if self.kv is not None:
            get_kv_format(self.kv)
        for name in ("formats", "workloads", "draft_lengths"):
            given = getattr(self, name)
            if not given or len(set(given)) < len(given):
                raise UsageError(f"{name} is {list(given)}. Expected at least one, and each once.")
        if self.sampling.max_tokens < 2:
            raise UsageError(
                f"max_tokens is {self.sampling.max_tokens}. Expected at least 2: one token is never drafted."
            )
