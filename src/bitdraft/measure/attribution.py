"""Why a low-bit draft is accepted less than the 16-bit one: the loss by cause, each from a draft with one swap.

    loss(cause)  =  mean overlap of the 16-bit draft  -  mean overlap of the same draft with that one thing in low bits
    unexplained  =  loss(whole)  -  sum of loss(tensor classes)  -  loss(inputs)  -  loss(keys and values)

Every term is a draft that was run, on the same texts, so every interval is paired. Single causes need not add up to
the whole: rounding errors add in variance, and what a distribution loses is not linear in it. `unexplained` says by how
much they do not; it is below 0 where one loss hides another.

Letters: P texts, B bootstrap resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import UsageError
from .files import read_lines
from .stats import RESAMPLES, Estimate, combine, ratio_of_sums, resample

FILE = "attribution.jsonl"

Kind = Literal["base", "whole", "rest", "kv", "class", "layers", "inputs", "clipping"]
"""What was swapped: nothing; all; all but keys and values, and these alone, where they are in low bits; a class of
tensors, or some layers, with 16-bit inputs; all weights with 16-bit inputs; the weights that lie outside of what the
codes reach, all others kept."""


@dataclass(frozen=True)
class Swap:
    """What one swap did on one text.

    Attributes:
        format: the low-bit draft. kind, name: what was swapped.
        workload, index: the text. overlap: sum_v min(p, q) at temperature 1, a number for each token.
    """

    format: str
    kind: Kind
    name: str
    workload: str
    index: int
    overlap: tuple[float, ...]


FIELDS = ("format", "kind", "name", "workload", "index")
"""What names a line."""


@dataclass(frozen=True, eq=False)
class Cause:
    """One cause and the acceptance that it costs."""

    kind: str
    name: str
    loss: Estimate


@dataclass(frozen=True, eq=False)
class Attribution:
    """The loss of one low-bit draft, by cause.

    Attributes:
        format: its name. texts, tokens: measured on so many.
        base: acceptance of the 16-bit draft. whole: what the low-bit draft loses.
        classes: by class of tensors, the head among them. layers: by neighbouring layers; the same loss, cut across.
        inputs: what rounding the inputs costs beside rounded weights; 0 if the format does not.
        kv: what keys and values in low bits cost the 16-bit draft; 0 if the measurement had them in 16.
        clipping, resolution: the loss of all rounded weights, cut another way: what lies outside of the range of the
            codes, and the rest, which is their step.
        unexplained: the whole less classes, inputs, and keys and values.
    """

    format: str
    texts: int
    tokens: int
    base: Estimate
    whole: Estimate
    classes: tuple[Cause, ...]
    layers: tuple[Cause, ...]
    inputs: Estimate
    kv: Estimate
    clipping: Estimate
    resolution: Estimate
    unexplained: Estimate

    @property
    def culprits(self) -> tuple[str, str]:
        """The class of tensors and the layers that cost most."""
        worst = [max(causes, key=lambda cause: cause.loss.value).name for causes in (self.classes, self.layers)]
        return worst[0], worst[1]


def load_attributions(folder: Path, rng: np.random.Generator, resamples: int = RESAMPLES) -> tuple[Attribution, ...]:
    """All whole attributions of a measurement; none if there was no `--attribute`.

    Args:
        folder: what `bitdraft measure -o` wrote.
        rng: resamples texts.
        resamples: how many times.

    Raises:
        UsageError: a broken line.
    """
    by_format: dict[str, list[Swap]] = {}
    for line in read_lines(folder / FILE, Swap, FIELDS):
        by_format.setdefault(line.format, []).append(line)
    return tuple(attribution(lines, rng, resamples) for lines in by_format.values() if is_whole(lines))


def is_whole(lines: Sequence[Swap]) -> bool:
    """Whether the lines of one format hold all that an attribution needs, on the same texts."""
    by_swap: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for line in lines:
        by_swap.setdefault((line.kind, line.name), set()).add((line.workload, line.index))
    kinds = {kind for kind, _ in by_swap}
    return kinds >= {"base", "whole", "class", "layers"} and len(set(map(frozenset, by_swap.values()))) == 1


def attribution(lines: Sequence[Swap], rng: np.random.Generator, resamples: int = RESAMPLES) -> Attribution:
    """The loss of one format by cause.

    Args:
        lines: of one format, all swaps on the same texts (`is_whole`).
        rng: resamples texts.
        resamples: how many times.

    Raises:
        UsageError: the lines are not whole.
    """
    if not is_whole(lines):
        raise UsageError("an attribution that is not finished. Expected every swap on every text: run it again.")
    swaps: dict[tuple[Kind, str], dict[tuple[str, int], Swap]] = {}
    for line in lines:
        swaps.setdefault((line.kind, line.name), {})[line.workload, line.index] = line
    keys = sorted(next(iter(swaps.values())))
    lengths = np.array([len(swaps["base", ""][key].overlap) for key in keys], dtype=np.float64)
    weights = resample(len(keys), rng, resamples)

    def acceptance(of: Mapping[tuple[str, int], Swap]) -> Estimate:
        return ratio_of_sums(np.array([np.sum(of[key].overlap) for key in keys]), lengths, weights)

    base = acceptance(swaps["base", ""])
    losses = {what: combine(lambda b, s: b - s, base, acceptance(of)) for what, of in swaps.items()}
    nothing = combine(lambda b: 0 * b, base)
    whole = losses["whole", ""]
    rest = losses.get(("rest", ""), whole)  # all weights and inputs
    rounded = losses.get(("inputs", ""), rest)  # all weights, with 16-bit inputs
    inputs = combine(lambda a, b: a - b, rest, rounded)
    kv = losses.get(("kv", ""), nothing)
    clipping = losses.get(("clipping", ""), nothing)
    parts = {
        kind: tuple(Cause(kind, name, loss) for (k, name), loss in losses.items() if k == kind)
        for kind in ("class", "layers")
    }
    return Attribution(
        format=lines[0].format,
        texts=len(keys),
        tokens=int(lengths.sum()),
        base=base,
        whole=whole,
        classes=parts["class"],
        layers=parts["layers"],
        inputs=inputs,
        kv=kv,
        clipping=clipping,
        resolution=combine(lambda a, b: a - b, rounded, clipping),
        unexplained=combine(lambda w, *rest: w - sum(rest), whole, inputs, kv, *(c.loss for c in parts["class"])),
    )


def attribution_json(found: Attribution) -> dict[str, Any]:
    """Plain types: each figure with its 95 % interval."""

    def plain(estimate: Estimate) -> dict[str, float | None]:
        interval = estimate.interval()
        return {"value": interval.value, "low": interval.low, "high": interval.high}

    return {
        "format": found.format,
        "texts": found.texts,
        "tokens": found.tokens,
        **{name: plain(getattr(found, name)) for name in ("base", "whole", "inputs", "kv", "clipping", "resolution")},
        "unexplained": plain(found.unexplained),
        "classes": {cause.name: plain(cause.loss) for cause in found.classes},
        "layers": {cause.name: plain(cause.loss) for cause in found.layers},
        "culprits": list(found.culprits),
    }


def attribution_markdown(found: Attribution) -> str:
    """A section of the report: losses in points of acceptance."""

    def points(estimate: Estimate) -> str:
        interval = estimate.interval()
        if interval.low is None or interval.high is None:
            return f"{100 * interval.value:.2f}"
        return f"{100 * interval.value:.2f} ({100 * interval.low:.2f} to {100 * interval.high:.2f})"

    rows = [("whole", found.whole)]
    rows += [(cause.name, cause.loss) for cause in found.classes]
    rows += [("rounded inputs", found.inputs), ("keys and values", found.kv)]
    rows += [("not explained by these", found.unexplained)]
    rows += [(f"of which {name}", getattr(found, name)) for name in ("clipping", "resolution")]
    rows += [(cause.name, cause.loss) for cause in found.layers]
    table = "\n".join(f"| {name} | {points(loss)} |" for name, loss in rows)
    tensors, layers = found.culprits
    return (
        f"## Where {found.format} loses acceptance\n\n"
        f"Most by {tensors}, and in {layers}. Acceptance at temperature 1 on {found.texts} texts, {found.tokens} "
        f"tokens: {100 * found.base.value:.1f} % in 16 bits. Points lost when that part alone is in low bits:\n\n"
        f"| cause | points lost |\n|---|---|\n{table}\n\n"
        "Clipping and resolution cut the rounded weights' loss another way, and the layers once more. Rotary angles "
        "are float32 in every draft, and cost nothing."
    )
