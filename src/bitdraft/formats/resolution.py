"""What a format's resolution does to a dot product, and how that grows with its length.

    relative error of W x  =  sqrt(e_W^2 + e_x^2),   e_W = ||W^ - W|| / ||W||,   e_x = ||x^ - x|| / ||x||

The rounding errors of single products are independent and centred, so the error of their sum grows like the square
root of the dimension. So does the sum itself: the relative error stays that of a single product. It grows with the
dimension only where the step does, in formats with one scale for a whole row, whose largest element grows like
sqrt(2 ln K) in Gaussian rows. A group's step does not know how long its row is.

A rotation does not change Gaussian numbers' law: what it does about outliers shows on real weights and inputs only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import FormatError
from ..ops.encoding import FLOAT8
from ..ops.packed import Packed
from . import integer, minifloat
from .base import Format, get_format

_ROWS = 16
"""Inputs that outputs are averaged over."""


@dataclass(frozen=True)
class Resolution:
    """Relative errors (root mean square over root mean square) of one format at one dimension.

    Attributes:
        format: its name.
        dimension: length of the dot product.
        weight_error: of the weights, e_W.
        input_error: of the inputs, e_x.
        output_error: of W x.
    """

    format: str
    dimension: int
    weight_error: float
    input_error: float
    output_error: float


def resolution_report(
    format_names: Sequence[str], dimensions: Sequence[int], rng: np.random.Generator, outputs: int = 256
) -> list[Resolution]:
    """Round Gaussian weights and inputs, the same for every format, and see what becomes of W x.

    Args:
        format_names: names of formats.
        dimensions: lengths of the dot product; a format's group size divides each.
        rng: makes weights and inputs.
        outputs: dot products to average over.

    Returns:
        a row per dimension and format, dimension by dimension.

    Raises:
        FormatError: an unknown format, or one that does not fit a dimension.
    """
    found = []
    for K in dimensions:
        weight_NK = torch.from_numpy(rng.standard_normal((outputs, K), dtype=np.float32))
        x_RK = torch.from_numpy(rng.standard_normal((_ROWS, K), dtype=np.float32))
        exact_RN = x_RK @ weight_NK.T
        for name in format_names:
            form = get_format(name)
            weight, x = form.round(weight_NK), form.round_inputs(x_RK)
            errors = _relative(weight, weight_NK), _relative(x, x_RK), _relative(x @ weight.T, exact_RN)
            found.append(Resolution(form.name, K, *errors))
    return found


def _relative(rounded: Tensor, exact: Tensor) -> float:
    return float((rounded - exact).norm() / exact.norm())


_MICRO_SCALED = {torch.float8_e8m0fnu: ("mxfp8", "mxfp4"), torch.float8_e4m3fn: ("nvfp4", "nvfp4")}
"""Formats by what their blocks' scales are stored as: of 8-bit elements, and of 4-bit ones."""


def round_like(weight_NK: Tensor, like: Packed) -> Tensor:
    """Round a weight to nearest on the grid of another: same width, groups and zero points; what its format costs.

    Of a GGUF block it is the width of the codes and groups of 32: a little finer or coarser than the block itself.

    Args:
        weight_NK: [N, K] float32, finite.
        like: a weight of as many inputs.

    Returns:
        [N, K] float32.
    """
    form = _format_of(like)
    if form is None and like.scales is not None and like.scales.dtype in _MICRO_SCALED:
        form = get_format(_MICRO_SCALED[like.scales.dtype][like.element == "e2m1"])
    if form is not None:
        return form.round(weight_NK)
    if like.blocks is not None:
        return integer.round_to_nearest(weight_NK, like.blocks.code_bits, 32, len(like.blocks.scales) == 1, 1.0)
    if like.scales is None:
        return weight_NK.to(like.codes.dtype).float()
    N, K = weight_NK.shape
    group = K // like.scales.shape[1]
    if like.codes.is_floating_point():
        kind = next(name for name, dtype in FLOAT8.items() if dtype == like.codes.dtype)
        codes, scales = minifloat.encode_fp8(weight_NK.reshape(-1, group), kind)
        return (codes.float() * scales).view(N, K)
    return integer.round_to_nearest(weight_NK, like.bits, group, like.zeros is None, 1.0)


def _format_of(like: Packed) -> Format | None:
    """The format of this package that made a weight; None where a file's own did."""
    try:
        form = get_format(like.format)
    except FormatError:
        return None
    return None if form.kind == "stored" else form
