"""Why a weight is not what it should be: each known fault is undone on a sample of rows, and what mends it, it was.

Shape suffixes: N sampled outputs, K inputs, G groups along K, S inputs of a group, M outputs of the original.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops.packed import Packed
from .model_doctor_weights import Folding, TensorFacts, group_of, some_rows, spread, values

_LIKE = 0.6
"""Correlation from which on two weights are the same one, whatever their formats: that of unrelated ones is near 0."""
_NIBBLES = {
    "the two codes of every byte": (1, 0),
    "the eight codes of every word, as AWQ interleaves them": (0, 2, 4, 6, 1, 3, 5, 7),
    "the eight codes of every word, as AWQ interleaves them, ": (0, 4, 1, 5, 2, 6, 3, 7),
}


@dataclass(frozen=True)
class Cause:
    """What mends a weight.

    Attributes:
        kind: 'constant scales', 'tensor' (another one of the original), 'scales of' (another one's), 'factor',
            'zero off by one', 'zeros ignored', 'zeros', 'code order', 'rows', 'columns', 'row scales', 'group scales',
            'unrelated' or 'some rows'.
        other: the other tensor, or which codes.
        value: the factor, or how many.
    """

    kind: str
    other: str = ""
    value: float = 0.0


def cause_of(
    facts: TensorFacts,
    original: Mapping[str, Packed],
    model: Mapping[str, Packed],
    folding: Folding,
    layers: int,
    tied: bool,
) -> Cause | None:
    """Find what mends a weight; None if nothing does.

    Args:
        facts: the weight, with a `match`.
        original, model: the weights of both, by name.
        folding: of this weight.
        layers: of the model, to look for the weight elsewhere.
        tied: whether the model has no head of its own to look for.
    """
    assert facts.match is not None
    if facts.constant_scale is not None:
        return Cause("constant scales", value=facts.constant_scale)
    exact, packed = original[facts.name], model[facts.name]
    rows = spread(min(exact.shape[0], packed.shape[0]))
    sample = _Sample(values(some_rows(exact, rows)), some_rows(packed, rows), folding, rows, facts)
    found = next((c for c in _others(facts, original, model, sample, layers, tied)), None)
    found = found or sample.factor() or sample.zeros() or sample.order()
    if found is None and facts.match.correlation < _LIKE * facts.match.correlation_expected:
        return _permuted(exact, packed, sample) or sample.scales() or Cause("unrelated")
    if found is None and facts.match.rows_off and facts.match.rows_off < 0.5 * packed.shape[0]:
        return Cause("some rows", value=facts.match.rows_off)
    return found or sample.scales()


class _Sample:
    """A few rows of a weight, and what they should be."""

    def __init__(self, exact_NK: Tensor, packed: Packed, folding: Folding, rows: Tensor, facts: TensorFacts) -> None:
        assert facts.match is not None
        self.rows, self.packed = rows, packed
        self.plain, self.wanted = exact_NK, folding.apply(exact_NK, rows)
        self.found = values(packed)
        self.error = _error(self.found, self.wanted)
        self._well = 1.35 * facts.match.expected + 0.02
        self._group = group_of(packed) or packed.shape[1]

    def mended(self, found: Tensor) -> bool:
        """Whether these rows are as near to what they should be as their format can come, and much nearer than now."""
        error = _error(found, self.wanted)
        return error <= self._well and error < 0.75 * self.error

    def factor(self) -> Cause | None:
        """All scales off by one factor."""
        gain = float((self.found * self.wanted).sum() / self.wanted.square().sum().clamp(min=1e-30))
        return Cause("factor", value=gain) if gain > 0 and self.mended(self.found / gain) else None

    def scales(self) -> Cause | None:
        """A factor for every row, or for every group."""
        for kind, size in (("row scales", self.packed.shape[1]), ("group scales", self._group)):
            found, wanted = (w.view(len(self.rows), -1, size) for w in (self.found, self.wanted))
            gain = (found * wanted).sum(-1, keepdim=True) / found.square().sum(-1, keepdim=True).clamp(min=1e-30)
            if self.mended((found * gain).view_as(self.found)):
                return Cause(kind)
        return None

    def zeros(self) -> Cause | None:
        """A constant added to every group: one step, or as much as its zero point."""
        if self.packed.scales is None and self.packed.blocks is None:
            return None
        lost = (self.found - self.wanted).view(len(self.rows), -1, self._group)
        shift = lost.mean(-1, keepdim=True)
        if not self.mended((self.found.view_as(lost) - shift).view_as(self.found)):
            return None
        if self.packed.scales is None:
            return Cause("zeros")
        steps = shift[..., 0] / self.packed.scales.float()
        middle = float(steps.median())
        if abs(abs(middle) - 1) < 0.25 and float((steps - middle).abs().median()) < 0.25:
            return Cause("zero off by one", value=round(middle))
        zeros = self.packed.zeros
        return Cause("zeros ignored" if zeros is None or bool((zeros == zeros.flatten()[0]).all()) else "zeros")

    def order(self) -> Cause | None:
        """4-bit codes in another order."""
        if self.packed.bits != 4 or self.packed.codes.dtype != torch.uint8 or self.packed.blocks is not None:
            return None
        nibbles = torch.stack([self.packed.codes & 15, self.packed.codes >> 4], -1).flatten(1)
        for what, order in _NIBBLES.items():
            if nibbles.shape[1] % len(order):
                continue
            moved = nibbles.view(len(self.rows), -1, len(order))[..., list(order)].reshape(len(self.rows), -1, 2)
            codes = moved[..., 0] | moved[..., 1] << 4
            if self.mended(values(replace(self.packed, codes=codes))):
                return Cause("code order", what.rstrip(", "))
        return None


def _others(
    facts: TensorFacts,
    original: Mapping[str, Packed],
    model: Mapping[str, Packed],
    sample: _Sample,
    layers: int,
    tied: bool,
) -> Iterator[Cause]:
    """Another tensor of the original in this one's place, or another's scales."""
    unlike = facts.match is not None and facts.match.correlation < _LIKE * facts.match.correlation_expected
    for name in _candidates(facts.name, layers, tied):
        exact, other = original[name], model[name]
        shape = (len(sample.rows), facts.inputs)
        fits = unlike and exact.shape[1] == facts.inputs and exact.shape[0] > int(sample.rows[-1])
        if fits and _correlation(sample.found, values(some_rows(exact, sample.rows))) > _LIKE:
            yield Cause("tensor", name)
        if other.scales is None or sample.packed.scales is None or other.shape[0] <= int(sample.rows[-1]):
            continue
        scales = other.scales[sample.rows]
        if scales.shape == sample.packed.scales.shape and sample.found.shape == shape:
            zeros = other.zeros[sample.rows] if other.zeros is not None and sample.packed.zeros is not None else None
            for kept in (sample.packed.zeros, zeros):
                if sample.mended(values(replace(sample.packed, scales=scales, zeros=kept))):
                    yield Cause("scales of", name)


def _candidates(name: str, layers: int, tied: bool) -> Iterator[str]:
    """Weights that may have changed places with this one: its neighbours, then its like in other layers."""
    if not name.startswith("model.layers."):
        yield from ([] if tied else ["lm_head" if name != "lm_head" else "model.embed_tokens"])
        return
    _, _, number, part = name.split(".", 3)
    pairs = ("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_proj", "o_proj"), ("q_proj", "k_proj")
    for pair in pairs:
        if (own := part.rpartition(".")[2]) in pair:
            yield f"model.layers.{number}.{part.removesuffix(own)}{pair[pair[0] == own]}"
    yield from (f"model.layers.{i}.{part}" for i in range(layers) if i != int(number))


def _permuted(exact: Packed, packed: Packed, sample: _Sample) -> Cause | None:
    """Rows, or columns, of the original elsewhere than where they belong."""
    if exact.shape[0] * exact.shape[1] <= 1 << 26:
        like = _nearest(sample.found, values(exact))
        if (found := like[0] > _LIKE).float().mean() > 0.7 and (like[1] != sample.rows)[found].any():
            return Cause("rows")
    columns = spread(packed.shape[1])
    many = torch.arange(min(exact.shape[0], packed.shape[0], 256))
    found_NK, exact_NK = values(some_rows(packed, many)), values(some_rows(exact, many))
    like = _nearest(found_NK.T[columns], exact_NK.T)
    if (found := like[0] > _LIKE).float().mean() > 0.7 and (like[1] != columns)[found].any():
        return Cause("columns")
    return None


def _nearest(a_NK: Tensor, b_MK: Tensor) -> tuple[Tensor, Tensor]:
    """The largest correlation of every row of `a` with a row of `b`, and which row that is."""
    unit_a = a_NK / a_NK.norm(dim=1, keepdim=True).clamp(min=1e-30)
    unit_b = b_MK / b_MK.norm(dim=1, keepdim=True).clamp(min=1e-30)
    best = (unit_a @ unit_b.T).max(1)
    return best.values, best.indices


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


def _correlation(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30))
