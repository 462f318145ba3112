"""Small floats: 8-bit ones with a scale for each output, and the micro-scaled ones with a scale for each block of inputs.

    FP8     E4M3 reaches 448 with 3 bits of fraction, E5M2 57344 with 2 (Micikevicius et al., 2209.05433); a float32 scale
            for each output. `fp8` takes the split of exponent and fraction that rounds the tensor with less error.
    MXFP4   E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) with a power of two, E8M0, for each 32 inputs (OCP Microscaling Formats
    MXFP8   Specification v1.0, sections 5 and 6); MXFP8 here is E4M3 with such scales.
    NVFP4   E2M1 with an E4M3 scale for each 16 inputs and one float32 scale for the tensor, which is the inverse of what
            compressed-tensors stores as `weight_global_scale`.

The specification takes a block's scale from its largest magnitude. Here the scale is the one of least squared error among
a few: no power of two fits a block well that has its largest magnitude just above the reach of one, and mapping the
largest to 4 in place of 6 avoids the widest gap of E2M1 (for NVFP4: Cook et al., 2512.02010).

Shape suffixes: N outputs, K inputs, G blocks of inputs, S inputs of a block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ops.encoding import FLOAT8, pack_bits

E2M1_LARGEST, E4M3_LARGEST = 6.0, 448.0

EXPONENTS = (-117, 118)
"""Exponents that E8M0 scales are chosen from: every value of either element with them is a normal bfloat16, or 0."""

_NVFP4_PEAKS = (6.0, 7.0, 5.2, 4.6, 4.0, 3.6)
"""What a block's largest magnitude is mapped to, by candidates for its scale."""

_BLOCK = 2**19
"""Weights that are rounded at once: few enough to stay in a processor's cache."""

_EXPONENT_BITS = 0x7F800000

Round = Callable[[Tensor], Tensor]


def encode_fp8(weight_NK: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round a weight to nearest; the largest weight of an output becomes the largest value of the format.

    Args:
        weight_NK: [N, K] float32.
        kind: `fp8_e4m3` or `fp8_e5m2`; `fp8` for the one with the smaller squared error, E4M3 where they are equal.

    Returns:
        codes [N, K] in that float8 dtype; scales [N, 1] float32.
    """
    if kind == "fp8":
        both = [encode_fp8(weight_NK, name) for name in ("fp8_e4m3", "fp8_e5m2")]
        return min(both, key=lambda found: float((found[0].float() * found[1] - weight_NK).square().sum()))
    limit = torch.finfo(FLOAT8[kind]).max
    scale = weight_NK.abs().amax(-1, keepdim=True) / limit
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight_NK / scale).clamp(-limit, limit).to(FLOAT8[kind]), scale


def encode_mxfp4(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4: codes [N, K / 2] uint8 as `ops.packed.Packed` says; scales [N, K / 32] float8_e8m0fnu."""
    scale_NG = _powers_of_two(weight_NK, round_e2m1, 2)
    return _e2m1_codes(weight_NK, scale_NG), scale_NG.to(torch.float8_e8m0fnu)


def encode_mxfp8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP8 of E4M3 elements: codes [N, K] float8_e4m3fn; scales [N, K / 32] float8_e8m0fnu."""
    scale_NG = _powers_of_two(weight_NK, _round_e4m3, 8)
    codes = _blocks(weight_NK, scale_NG).div(scale_NG[..., None]).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
    return codes.view(weight_NK.shape).to(torch.float8_e4m3fn), scale_NG.to(torch.float8_e8m0fnu)


def encode_nvfp4(weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4: the largest block's scale becomes about the largest E4M3 value.

    Returns:
        codes [N, K / 2] uint8; scales [N, K / 16] float8_e4m3fn; the tensor's scale, for each output, [N, 1] float32.
    """
    N, K = weight_NK.shape
    whole = weight_NK.abs().amax() / (E2M1_LARGEST * E4M3_LARGEST)
    whole = torch.where(whole > 0, whole, 1.0)
    w_NK = weight_NK / whole
    peak_NG = w_NK.view(N, K // 16, 16).abs().amax(-1)
    # Of a block of zeros any scale will do but 0, which no block may have: its weights could not be told from rounding.
    least = torch.finfo(torch.float8_e4m3fn).smallest_normal / 8
    candidates = [(peak_NG / p).clamp_(least, E4M3_LARGEST).to(torch.float8_e4m3fn).float() for p in _NVFP4_PEAKS]
    scale_NG = _least_error(w_NK, candidates, round_e2m1)
    return _e2m1_codes(w_NK, scale_NG), scale_NG.to(torch.float8_e4m3fn), whole.expand(N, 1).contiguous()


def round_e2m1(x: Tensor) -> Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code; beyond 6 to 6."""
    inside = x.clamp(-E2M1_LARGEST, E2M1_LARGEST)
    # 1.5 * 2^(e + 22) for numbers of exponent e >= 0: their sum with it has steps of 2^(e - 1), those of E2M1.
    exponent = (inside.view(torch.int32) & _EXPONENT_BITS).clamp_(min=127 << 23)
    large = exponent.add_((22 << 23) + (1 << 22)).view(torch.float32)
    return inside.add_(large).sub_(large)


def _round_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def _blocks(weight_NK: Tensor, scale_NG: Tensor) -> Tensor:
    return weight_NK.view(*scale_NG.shape, -1)


def _e2m1_codes(weight_NK: Tensor, scale_NG: Tensor) -> Tensor:
    """Sign, two bits of exponent and one of fraction of the rounded weights, packed; 0 has no sign."""
    value = round_e2m1(_blocks(weight_NK, scale_NG) / scale_NG[..., None]).view(weight_NK.shape)
    size = value.abs()
    code = (size.view(torch.int32) >> 22).sub_(252).clamp_(min=0)  # 252: twice the exponent's bits of 0.5
    return pack_bits(code.add_(size == 0.5).add_(value < 0, alpha=8), 4)


def _powers_of_two(weight_NK: Tensor, round_to: Round, largest_exponent: int) -> Tensor:
    """The power of two for each 32 inputs, [N, G] float32: the specification's floor(log2(largest)) less the exponent of
    the element's largest value, or the next one."""
    N, K = weight_NK.shape
    peak_NG = weight_NK.view(N, K // 32, 32).abs().amax(-1)
    peak_NG = torch.where(peak_NG > 0, peak_NG, peak_NG.amax(-1, keepdim=True))  # zeros take their row's largest
    exponent_NG = torch.frexp(peak_NG).exponent - 1 - largest_exponent
    one_NG = torch.ones_like(peak_NG)
    candidates = [torch.ldexp(one_NG, (exponent_NG + more).clamp_(*EXPONENTS)) for more in (0, 1)]
    return _least_error(weight_NK, candidates, round_to)


def _least_error(weight_NK: Tensor, candidates: Sequence[Tensor], round_to: Round) -> Tensor:
    """Block by block, the candidate [N, G] under which rounding changes the weights least; the first of equals."""
    rows = max(1, _BLOCK // weight_NK.shape[1])
    best_NG = candidates[0].clone()
    for first in range(0, len(weight_NK), rows):
        part = slice(first, first + rows)
        w_NGS = _blocks(weight_NK[part], best_NG[part])
        least_NG = torch.full(best_NG[part].shape, torch.inf)
        for candidate_NG in candidates:
            scale = candidate_NG[part]
            off_NGS = round_to(w_NGS / scale[..., None]).mul_(scale[..., None]).sub_(w_NGS)
            # Relative to the block's largest, or squares of small weights would vanish and those of large ones overflow.
            error_NG = off_NGS.div_(candidates[0][part][..., None]).square_().sum(-1)
            best_NG[part] = torch.where(error_NG < least_NG, scale, best_NG[part])
            least_NG = torch.minimum(least_NG, error_NG)
    return best_NG
