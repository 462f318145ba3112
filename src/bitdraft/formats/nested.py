"""Eight-bit weights whose high nibble is a four-bit weight by itself: a target and its draft in one set of bytes.

    value8 = scale * code             code = 16 * high + low,  high from -8 to 7, low from -8 to 7
    value4 = 16 * scale * high

The low nibble is signed, so that `high` is the four-bit code nearest to the weight, and not the one below it. Its mean
is -1/2, of 16. An offset for that is not made: it changes the four-bit view's error by -0.2 % (Gaussian weights) to
0.7 % (real ones).

A group's scale has the sign that brings its largest weight to -127: the negative codes of both views reach further.
Then its size is chosen for the four-bit view, as far as the eight-bit view's squared error grows by `WORSE` at most.

Source of the idea: hierarchical codes of QuantSpec (Tiwari et al., 2502.10424), there of keys and values.

Shape suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import FormatError
from ..ops.encoding import pack_bits
from ..ops.packed import Packed
from .integer import LARGEST_SCALE, SMALLEST_SCALE

LOWEST, HIGHEST = -127, 119
"""Codes: -128 does not multiply 8-bit inputs, and the high nibble of 120 would be 8."""

WORSE = 1.5
"""How many times the squared error that the eight-bit view has at the scale which just holds its group."""

_SHARES = (1.0, 0.98, 1.03, 1.06, 1.09, 1.12, 1.15, 1.18)
"""Of that scale, what is tried."""

_BLOCK = 2**19
"""Weights that are rounded at once: few enough to stay in a processor's cache."""


def encode(weight_NK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int8 and scales [N, G] float32, exact in float16, of a weight [N, K] float32."""
    scale_NG = torch.cat([_best_scale(part_NK, group_size) for part_NK in _parts(weight_NK)])
    code_NGS = _codes(weight_NK.view(*scale_NG.shape, -1), scale_NG)
    return code_NGS.to(torch.int8).view(weight_NK.shape), scale_NG


def high_nibble(packed: Packed) -> Packed:
    """The four-bit view as a weight of its own, an ordinary w4a8 or w4a16 with as many groups; it shares no memory.

    Raises:
        FormatError: not a nested weight.
    """
    if not packed.format.startswith("w8n4") or packed.scales is None:
        raise FormatError(
            f"{packed.format}: no weight whose high nibble is a weight by itself. Expected w8n4a8 or w8n4a16."
        )
    high_NK = _high(packed.codes.float()) + 8
    name = packed.format.replace("w8n4", "w4")
    return replace(packed, format=name, bits=4, codes=pack_bits(high_NK, 4), scales=16 * packed.scales)


def _parts(weight_NK: Tensor) -> tuple[Tensor, ...]:
    return torch.split(weight_NK, max(1, _BLOCK // weight_NK.shape[1]))


def _codes(w_NGS: Tensor, scale_NG: Tensor) -> Tensor:
    return (w_NGS / scale_NG[..., None]).round_().clamp_(LOWEST, HIGHEST)


def _high(code: Tensor) -> Tensor:
    return ((code + 8) * 0.0625).floor_()


def _best_scale(weight_NK: Tensor, group_size: int) -> Tensor:
    """[N, G]: the scale with the least error of the four-bit view among those that the eight-bit view allows."""
    w_NGS = weight_NK.view(len(weight_NK), -1, group_size)
    high_NG, low_NG = w_NGS.amax(-1).clamp_(min=0), -w_NGS.amin(-1).clamp_(max=0)
    sign_NG = torch.where(high_NG > low_NG, -1.0, 1.0)  # the larger side takes the negative codes
    most_NG, least_NG = torch.maximum(high_NG, low_NG), torch.minimum(high_NG, low_NG)
    holds_NG = torch.maximum(most_NG / -LOWEST, least_NG / HIGHEST)
    unit = holds_NG.clamp(min=SMALLEST_SCALE)[..., None]  # errors are counted in it, so that none over- or underflows
    best_NG, error4_NG = torch.zeros_like(holds_NG), torch.full_like(holds_NG, torch.inf)
    allowed_NG = error4_NG
    for share in _SHARES:
        scale_NG = (share * holds_NG).clamp_(SMALLEST_SCALE, LARGEST_SCALE).half().float() * sign_NG
        code_NGS, step = _codes(w_NGS, scale_NG), scale_NG[..., None]
        error_NG = ((code_NGS * step - w_NGS) / unit).square_().sum(-1)
        if share == 1.0:
            allowed_NG = WORSE * error_NG
        rough_NG = ((_high(code_NGS) * (16 * step) - w_NGS) / unit).square_().sum(-1)
        better_NG = (error_NG <= allowed_NG) & (rough_NG < error4_NG)
        best_NG = torch.where(better_NG, scale_NG, best_NG)
        error4_NG = torch.where(better_NG, rough_NG, error4_NG)
    return best_NG
