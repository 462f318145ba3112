"""Integer codes with a scale per group or per output.

Symmetric: `value = scale * (code - 2^(bits - 1))`, scale = max|w| / (2^(bits - 1) - 1). Asymmetric: the range from
min(w, 0) to max(w, 0) is divided into 2^bits - 1 steps and `zero` is the code of 0. Scales are rounded to what is
stored, float16 for groups and float32 for outputs, before any code is chosen, so that the codes make up for it.

Shape suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.encoding import pack_bits

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
"""The range of float16 above 0: the scale of a group is brought into it."""


class _Grid(NamedTuple):
    """Codes from 0, [N, G, S], the scale of each group, and the code that stands for 0, [N, G, 1]; all float32."""

    code: Tensor
    scale: Tensor
    zero: Tensor | float


def encode(
    weight_NK: Tensor, bits: int, group_size: int | None, symmetric: bool, shrink: Tensor | float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and zero points of a weight, laid out as `ops.packed.Packed` says.

    Args:
        weight_NK: [N, K] float32.
        bits: 2, 3, 4, 6 or 8.
        group_size: inputs that share a scale; None for one scale per output.
        symmetric: without zero points; 8 bits always are.
        shrink: share of each range that is kept, a number or [N, G].

    Returns:
        codes; scales [N, G] float32; zero points [N, G] uint8 or None.
    """
    code, scale, zero = _grid(weight_NK, bits, group_size, symmetric, shrink)
    if bits == 8:
        return code.sub_(zero).to(torch.int8).view(weight_NK.shape), scale[..., 0], None
    codes = pack_bits(code.view(weight_NK.shape), bits)
    return codes, scale[..., 0], zero[..., 0].to(torch.uint8) if isinstance(zero, Tensor) else None


def round_to_nearest(
    weight_NK: Tensor, bits: int, group_size: int | None, symmetric: bool, shrink: Tensor | float
) -> Tensor:
    """The values that the codes of `encode` stand for, [N, K] float32, to the bit."""
    code, scale, zero = _grid(weight_NK, bits, group_size, symmetric, shrink)
    return code.sub_(zero).mul_(scale).view(weight_NK.shape)


def _grid(weight_NK: Tensor, bits: int, group_size: int | None, symmetric: bool, shrink: Tensor | float) -> _Grid:
    N, K = weight_NK.shape
    w_NGS = weight_NK.reshape(N, -1, group_size or K)
    keep = shrink[..., None] if isinstance(shrink, Tensor) else shrink
    top = 2**bits - 1
    if symmetric:
        half = 2 ** (bits - 1)
        scale = _stored(w_NGS.abs().amax(-1, keepdim=True) * keep / (half - 1), bits)
        # Of int8, -128 stays unused: only shrinking could reach it, and outputs are not shrunk.
        code = (w_NGS / scale).round_().add_(half).clamp_(0 if bits < 8 else 1, top)
        return _Grid(code, scale, float(half))
    low = w_NGS.amin(-1, keepdim=True).clamp_(max=0) * keep
    high = w_NGS.amax(-1, keepdim=True).clamp_(min=0) * keep
    scale = _stored((high - low) / top, bits)
    zero = (-low / scale).round_().clamp_(0, top)
    return _Grid((w_NGS / scale).add_(zero).round_().clamp_(0, top), scale, zero)


def _stored(scale: Tensor, bits: int) -> Tensor:
    """A scale as it is kept: float16 for groups, float32 for outputs; never 0."""
    if bits == 8:
        return torch.where(scale > 0, scale, 1.0)
    return scale.clamp_(SMALLEST_SCALE, LARGEST_SCALE).half().float()
