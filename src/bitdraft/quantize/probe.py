"""How often a draft's tokens would stand: texts that the target wrote, and its distributions, to hold a draft against.

A probe is the yardstick of every choice that is made by acceptance. The target is run once, to write; of its side the
last hidden rows are kept, a hundredth of the size of its distributions, and turned into p whenever a draft is judged
(docs/decisions/0004-hidden-states.md). The figure is the chance that a drafted token is accepted at the place
(Leviathan et al. 2023, section 3.1, beta): sum_v min(p(v), q(v)).

Letters: T tokens of a text's output, D hidden size of the target, V vocabulary.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import ops
from ..errors import UsageError
from ..formats import Recipe
from ..models.cached import CachedModel
from ..types import Feed
from .load import Source, open_source

Progress = Callable[[int, int | None, str], None]

Logits = Callable[[Tensor], Tensor]
"""From hidden rows [T, D] before the target's final norm to its logits [T, V], float32; -inf on ids without meaning."""

_RECORD, _TENSORS = "probe.json", "probe.safetensors"


@dataclass(frozen=True, eq=False)
class ProbeText:
    """One text of the target.

    Attributes:
        workload, index: which prompt. prompt: its token ids. ids: what the target wrote, T token ids.
        hidden: the target's residual rows before its final norm, [T, D] float32; row t is what it said before token t.
    """

    workload: str
    index: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    hidden: Tensor

    def __post_init__(self) -> None:
        if not self.prompt or not self.ids or self.hidden.ndim != 2 or len(self.hidden) != len(self.ids):
            raise UsageError(
                f"the text of {self.workload} prompt {self.index} has {len(self.prompt)} prompt tokens, "
                f"{len(self.ids)} output tokens and hidden rows {list(self.hidden.shape)}. Expected at least one token "
                "of both, and a row for each output token; make the probe anew."
            )

    @property
    def context(self) -> tuple[int, ...]:
        """What a draft reads to say something about every output token: all tokens but the last."""
        return (*self.prompt, *self.ids[:-1])


@dataclass(frozen=True)
class TargetName:
    """What made a probe's p: enough to make it again.

    Attributes:
        model: the target's name, folder or file. recipe: what it ran in.
    """

    model: str
    recipe: str


class AcceptanceProbe:
    """Texts of a target, and its distribution at each of their tokens.

    Attributes:
        texts: the texts.
        target: what wrote them.
        temperature: p and q are softmax(logits / temperature). Above 0: at 0 the overlap is 0 or 1 and tells little.
    """

    def __init__(
        self, texts: Sequence[ProbeText], target: TargetName, logits: Logits, temperature: float = 1.0
    ) -> None:
        """Put a probe together.

        Args:
            texts: at least one.
            target: what wrote them.
            logits: the target's final norm and head.
            temperature: see the class.

        Raises:
            UsageError: no text, or a temperature of 0 or below.
        """
        if not texts or not temperature > 0:
            raise UsageError(
                f"a probe of {len(texts)} texts at temperature {temperature}. Expected at least one text, and a "
                "temperature above 0: of greedy traffic the overlap at temperature 1 is the finer figure."
            )
        self.texts, self.target, self.temperature = tuple(texts), target, temperature
        self._logits = logits

    @property
    def workloads(self) -> tuple[str, ...]:
        """The kinds of traffic, each once, as they come."""
        return tuple(dict.fromkeys(text.workload for text in self.texts))

    @property
    def tokens(self) -> int:
        """Positions that a draft is judged at."""
        return sum(len(text.ids) for text in self.texts)

    @property
    def digest(self) -> str:
        """SHA-256 over what the figures depend on: texts, target, temperature."""
        found = sha256(f"{self.target.model} {self.target.recipe} {self.temperature}".encode())
        for text in self.texts:
            found.update(json.dumps([text.prompt, text.ids]).encode())
        return found.hexdigest()

    def short(self, texts: int, tokens: int) -> "AcceptanceProbe":
        """The first `texts` texts of each workload, and the first `tokens` tokens of each of them."""
        chosen = [
            ProbeText(text.workload, text.index, text.prompt, text.ids[:tokens], text.hidden[:tokens])
            for workload in self.workloads
            for text in islice((text for text in self.texts if text.workload == workload), texts)
        ]
        return AcceptanceProbe(chosen, self.target, self._logits, self.temperature)

    def probabilities(self, text: ProbeText) -> Tensor:
        """The target's p at each token of a text, [T, V] float32."""
        return (self._logits(text.hidden) / self.temperature).softmax(-1)

    def overlap(self, text: ProbeText, draft_logits_TV: Tensor) -> Tensor:
        """The chance that a token drawn from the draft is accepted, at each token of a text: [T] float32.

        Args:
            text: one of the texts.
            draft_logits_TV: what the draft says before each of its tokens, [T, V] float32, as wide as the target's.

        Raises:
            UsageError: logits of another shape.
        """
        p_TV = self.probabilities(text)
        if draft_logits_TV.shape != p_TV.shape:
            raise UsageError(
                f"draft logits of shape {list(draft_logits_TV.shape)} for {text.workload} prompt {text.index}. "
                f"Expected {list(p_TV.shape)}: a row for each token, as wide as the target's. Load the draft with its "
                "target."
            )
        return overlap(p_TV, draft_logits_TV, self.temperature)

    def judge(self, draft: CachedModel, progress: Progress | None = None, what: str = "judging") -> list[Tensor]:
        """Run a draft over all texts, one pass each, the target's text as its context: for each text the overlaps [T].

        Args:
            draft: loaded with its target, so that its logits are as wide; its cache holds the longest text.
            progress: called with (texts done, texts, what).
            what: what is being done.
        """
        found = []
        for done, text in enumerate(self.texts, start=1):
            logits_TV = draft.forward([Feed(0, text.context, 0, len(text.prompt) - 1)])
            draft.release(0)
            found.append(self.overlap(text, logits_TV))
            if progress:
                progress(done, len(self.texts), what)
        return found

    def save(self, folder: Path) -> None:
        """Write the probe to a folder; of the target's head only the name is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for i, text in enumerate(self.texts):
            tensors[f"{i}.prompt"], tensors[f"{i}.ids"] = torch.tensor(text.prompt), torch.tensor(text.ids)
            tensors[f"{i}.hidden"] = text.hidden.contiguous()
        save_file(tensors, folder / _TENSORS)
        record = {
            "target": self.target.model,
            "recipe": self.target.recipe,
            "temperature": self.temperature,
            "texts": [[text.workload, text.index] for text in self.texts],
            "digest": self.digest,
        }
        (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, logits: Logits | None = None) -> "AcceptanceProbe":
        """Read a folder that `save` wrote.

        Args:
            folder: the folder.
            logits: the target's final norm and head; None opens the target by the name in the folder and reads them.

        Raises:
            UsageError: no probe there, or a damaged one.
        """
        try:
            record: dict[str, Any] = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
            target = TargetName(record["target"], record["recipe"])
            with safe_open(folder / _TENSORS, framework="pt") as opened:
                texts = [_read_text(opened, i, *key) for i, key in enumerate(record["texts"])]
            temperature, digest = record["temperature"], record["digest"]
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UsageError(
                f"{folder}: no probe can be read there ({error}). Expected {_RECORD} and {_TENSORS}; make it again."
            ) from None
        logits = logits or target_logits(open_source(target.model), Recipe.parse(target.recipe))
        probe = cls(texts, target, logits, temperature)
        if probe.digest != digest:
            raise UsageError(f"{folder}: the texts are not those that {_RECORD} was written for. Make the probe again.")
        return probe


def overlap(p_TV: Tensor, draft_logits_TV: Tensor, temperature: float) -> Tensor:
    """sum_v min(p, q) with q = softmax(logits / temperature): [T] float32, from 0 to 1."""
    q_TV = (draft_logits_TV / temperature).softmax(-1)
    return torch.minimum(p_TV, q_TV).sum(-1).clamp(0, 1)


def target_logits(source: Source, recipe: Recipe) -> Logits:
    """A target's final norm and head alone, without its layers.

    Args:
        source: the target.
        recipe: what it runs in.
    """
    checkpoint, vocabulary = source.checkpoint, source.tokenizer.vocab_size
    form = recipe.format_of("lm_head")
    packed = (
        form.keep(checkpoint.packed("lm_head.weight"))
        if form.kind == "stored"
        else form.encode(checkpoint.tensor("lm_head.weight"))
    )
    head, norm, eps = ops.prepare(packed), checkpoint.tensor("model.norm.weight"), checkpoint.config.norm_eps
    return lambda x_TD: ops.logits(x_TD, norm, eps, head)[:, :vocabulary]


def mean_overlap(texts: Iterable[Tensor]) -> float:
    """The mean over all tokens of several texts' overlaps; NaN without any."""
    return float(torch.cat([torch.empty(0), *texts]).double().mean())


def _read_text(opened: Any, i: int, workload: str, index: int) -> ProbeText:
    prompt, ids = (tuple(opened.get_tensor(f"{i}.{part}").tolist()) for part in ("prompt", "ids"))
    return ProbeText(workload, index, prompt, ids, opened.get_tensor(f"{i}.hidden"))
