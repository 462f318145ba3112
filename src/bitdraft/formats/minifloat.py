"""8-bit floats with a scale per output: E4M3 reaches 448 with 3 bits of fraction, E5M2 57344 with 2.

Source: Micikevicius et al., 2209.05433.
"""

import torch
from torch import Tensor

from ..ops.encoding import FLOAT8


def encode(weight_NK: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round a weight to nearest; the largest weight of an output becomes the largest value of the format.

    Args:
        weight_NK: [N, K] float32.
        kind: `fp8_e4m3` or `fp8_e5m2`.

    Returns:
        codes [N, K] in that float8 dtype; scales [N, 1] float32.
    """
    limit = torch.finfo(FLOAT8[kind]).max
    scale = weight_NK.abs().amax(-1, keepdim=True) / limit
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight_NK / scale).clamp(-limit, limit).to(FLOAT8[kind]), scale
