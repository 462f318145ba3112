"""What the doctor looks at in one weight: how far it is from its original, and what of its codes is used.

A weight may have been scaled before it was rounded, and the scale folded into what makes its inputs or reads its
outputs (AWQ, SmoothQuant). It is compared with the original after the same folding.

Shape suffixes: N outputs, K inputs, G groups along K, S inputs of a group, R rows of text.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from ..formats.resolution import round_like
from ..ops.encoding import dequantize, rotate, round_activations, unpack_bits
from ..ops.packed import Packed

_AT_A_TIME = 1 << 23
"""Weights that are decoded together: bounds the memory, 32 MB for each of a few arrays."""


@dataclass(frozen=True)
class Folding:
    """What a model scaled before rounding, exactly undone elsewhere.

    Attributes:
        inputs: [K], the model's inputs over the original's; its weights are divided by them. None where they are equal.
        outputs: [N], its outputs over the original's. None where they are equal.
    """

    inputs: Tensor | None = None
    outputs: Tensor | None = None

    def apply(self, weight_NK: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """The original's weight as the model had to round it; `rows` of it."""
        if self.inputs is not None:
            weight_NK = weight_NK / self.inputs
        return weight_NK if self.outputs is None else weight_NK * self.outputs[rows][:, None]


@dataclass(frozen=True)
class Match:
    """A weight beside its original; errors are relative, root mean square over root mean square.

    Attributes:
        error: ||W^ - W|| / ||W||.
        expected: the same of rounding the original to nearest on the same grid: what the format's resolution costs.
        gain: factor a of W^ ~ a W, the median over the rows: 1 where the scales are right.
        gain_low, gain_high: the 5th and 95th percentile of the same over groups.
        correlation: of a row with the original's row, the median over the rows: near 0 for another row.
        correlation_expected: the same of rounding to nearest.
        shift: share of the error that is a constant of its group: near 1 for wrong zero points.
        rows_off: rows whose own error is far beyond the format's.
        first_off: the first of them; -1 if there is none.
        output_error: of W^ x for the inputs of the text; None without inputs.
        output_expected: the same of rounding to nearest.
    """

    error: float
    expected: float
    gain: float
    gain_low: float
    gain_high: float
    correlation: float
    correlation_expected: float
    shift: float
    rows_off: int
    first_off: int
    output_error: float | None = None
    output_expected: float | None = None


@dataclass(frozen=True)
class TensorFacts:
    """One linear layer, or the embedding.

    Attributes:
        name: Hugging Face's, without '.weight'.
        stored: its format.
        bits: of a code. group: inputs that share a scale; None without scales. zeros: whether it has zero points.
        inputs: K.
        finite: whether every value is a number.
        constant_scale: the value of all its scales, if they are all the same and it has more than one.
        codes_used: share of the possible codes that occur; None for floats and blocks.
        at_limits: share of the weights at the lowest or highest code; None for floats and blocks.
        match: beside its original; None if there is none, or it is not finite.
    """

    name: str
    stored: str
    bits: int
    group: int | None
    zeros: bool
    inputs: int
    finite: bool
    constant_scale: float | None
    codes_used: float | None
    at_limits: float | None
    match: Match | None


def some_rows(packed: Packed, rows: slice | Tensor) -> Packed:
    """A few rows of a packed weight."""
    tensors: dict[str, Any] = {
        f.name: value[rows] for f in fields(packed) if isinstance(value := getattr(packed, f.name), Tensor)
    }
    if packed.outliers is not None:
        tensors["outliers"] = replace(packed.outliers, side=packed.outliers.side[rows])
    return replace(packed, shape=(len(tensors["codes"]), packed.shape[1]), **tensors)


def values(packed: Packed) -> Tensor:
    """What a packed weight stands for, [N, K] float32, as its original has it: every comparison goes through here."""
    found = dequantize(packed)
    return rotate(found, packed.rotation) if packed.rotation else found


def spread(size: int) -> Tensor:
    """Up to 32 rows or columns of so many, from the first to the last."""
    return torch.tensor(sorted(set(torch.linspace(0, size - 1, 32).long().tolist())))


def group_of(packed: Packed) -> int | None:
    """Inputs that share a scale; None for floats."""
    if packed.blocks is not None:
        return min(packed.blocks.values, 32)
    return None if packed.scales is None else packed.shape[1] // packed.scales.shape[1]


def tensor_facts(name: str, packed: Packed, finite: bool, match: Match | None) -> TensorFacts:
    """All facts about one weight."""
    used, limits = _codes(packed)
    scales = packed.scales
    constant = scales is not None and scales.numel() > 1 and bool((scales.float() == scales.flatten()[0].float()).all())
    return TensorFacts(
        name=name,
        stored=packed.format if packed.blocks is None else packed.blocks.name,
        bits=packed.bits,
        group=group_of(packed),
        zeros=packed.zeros is not None,
        inputs=packed.shape[1],
        finite=finite,
        constant_scale=float(scales.flatten()[0]) if constant and scales is not None else None,
        codes_used=used,
        at_limits=limits,
        match=match,
    )


def compare(exact: Packed, packed: Packed, folding: Folding, x_RK: Tensor | None) -> Match:
    """A weight beside its original, piece by piece.

    Args:
        exact: the original, [N, K], in any format.
        packed: the weight, [N', K]; rows that only one of them has are left out.
        folding: what was scaled before rounding.
        x_RK: inputs of the original's layer, [R, K] float32; None for no outputs.
    """
    sums: list[Tensor] = []
    gains: list[Tensor] = []
    shifted = 0.0
    outputs = torch.zeros(3, 0 if x_RK is None else len(x_RK))
    own_RK = _rounded_inputs(x_RK, packed, folding)
    for rows in _pieces(min(exact.shape[0], packed.shape[0]), packed.shape[1]):
        exact_NK = values(some_rows(exact, rows))
        wanted = folding.apply(exact_NK, rows)
        found, nearest = values(some_rows(packed, rows)), round_like(wanted, packed)
        lost = found - wanted
        squares = (wanted * wanted, found * found, nearest * nearest, lost * lost, (nearest - wanted) ** 2)
        products = (wanted * found, wanted * nearest)
        sums.append(torch.stack([p.sum(-1) for p in (*squares, *products)]))
        grouped = (*wanted.shape[:1], -1, group_of(packed) or packed.shape[1])
        gains.append((products[0].view(grouped).sum(-1) / squares[0].view(grouped).sum(-1).clamp(min=1e-30)).flatten())
        shifted += float(lost.view(grouped).mean(-1).square().sum()) * grouped[-1]
        if x_RK is not None and own_RK is not None:
            outputs += _outputs(x_RK, own_RK, exact_NK, found, nearest, folding, rows)
    return _match(torch.cat(sums, -1), torch.cat(gains), shifted, outputs)


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _AT_A_TIME // columns)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _rounded_inputs(x_RK: Tensor | None, packed: Packed, folding: Folding) -> Tensor | None:
    """The inputs as the model's layer reads them."""
    if x_RK is None:
        return None
    x_RK = x_RK if folding.inputs is None else x_RK * folding.inputs
    return round_activations(x_RK, packed.activation, None if packed.outliers is None else packed.outliers.columns)


def _outputs(
    x_RK: Tensor, own_RK: Tensor, exact: Tensor, found: Tensor, nearest: Tensor, folding: Folding, rows: slice
) -> Tensor:
    """Squares over these outputs of the original's, the model's error and the error of rounding to nearest, [3, R]."""
    y_RN = x_RK @ exact.T
    if folding.outputs is not None:
        y_RN = y_RN * folding.outputs[rows]
    return torch.stack(
        [(y**2).sum(-1) for y in (y_RN, own_RK @ found.T - y_RN, own_RK @ nearest.T - y_RN)],
    )


def _match(sums: Tensor, gains: Tensor, shifted: float, outputs: Tensor) -> Match:
    """From sums over rows: of squares (original, found, nearest, both errors) and of products with the original."""
    exact, found, nearest, lost, least, with_found, with_nearest = sums.double()
    total = float(exact.sum()) or 1e-30
    own, best = (lost / exact.clamp(min=1e-30)).sqrt(), (least / exact.clamp(min=1e-30)).sqrt()
    gain, like = with_found / exact.clamp(min=1e-30), with_found / (exact * found).sqrt().clamp(min=1e-30)
    # AWQ spends a row's error on inputs that are small: it keeps the row's size and direction even so. A row of next to
    # no weight says nothing.
    another = (gain < 0.6) | (gain > 1.7) | (like < 0.5)
    off = ((own > 4 * best + 0.05) & another & (exact > 1e-6 * exact.mean())).nonzero().flatten()
    low, high = torch.quantile(_thinned(gains), torch.tensor([0.05, 0.95])).tolist()
    errors: tuple[float | None, ...] = (None, None)
    if outputs.shape[1]:
        errors = tuple(float((part / outputs[0].clamp(min=1e-30)).sqrt().median()) for part in outputs[1:])
    return Match(
        error=float(lost.sum() / total) ** 0.5,
        expected=float(least.sum() / total) ** 0.5,
        gain=float(gain.median()),
        gain_low=low,
        gain_high=high,
        correlation=float(like.median()),
        correlation_expected=float((with_nearest / (exact * nearest).sqrt().clamp(min=1e-30)).median()),
        shift=shifted / max(float(lost.sum()), 1e-30),
        rows_off=len(off),
        first_off=int(off[0]) if len(off) else -1,
        output_error=errors[0],
        output_expected=errors[1],
    )


def _thinned(values: Tensor) -> Tensor:
    """At most some thousands of values: a quantile of more takes long and says the same."""
    return values[:: max(1, len(values) // 10_000)].float()


def _codes(packed: Packed) -> tuple[float | None, float | None]:
    """Share of the possible codes that occur, and share of the weights at the two outermost ones."""
    if packed.scales is None or packed.codes.is_floating_point():
        return None, None
    counts = torch.zeros(2**packed.bits, dtype=torch.int64)
    for rows in _pieces(*packed.shape):
        codes = packed.codes[rows]
        codes = codes.int() + 2 ** (packed.bits - 1) if codes.dtype == torch.int8 else unpack_bits(codes, packed.bits)
        counts += torch.bincount(codes.flatten().int(), minlength=2**packed.bits)
    possible = counts[1:] if packed.bits == 8 and packed.zeros is None else counts  # -128 is not used
    seen = (possible > 0).float().mean()
    return float(seen), float(counts[0] + possible[0] * (possible is not counts) + counts[-1]) / int(counts.sum())
