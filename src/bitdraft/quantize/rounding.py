"""How single weights are rounded: to nearest, or with ranges shrunk so far as that lowers the error.

Shape suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

import torch
from torch import Tensor

from ..formats import Format
from ..ops.packed import Packed

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5)
"""Shares of a range that are tried. Two bits on a Gaussian group of 128 want about 0.55, four bits 0.9."""

_BLOCK = 2**20
"""Weights that are rounded at once while clipping: few enough to stay in a processor's cache."""


def nearest(weight_NK: Tensor, form: Format) -> Packed:
    """Round a weight [N, K] float32 to the nearest value of a format."""
    return form.encode(weight_NK)


def clipped(weight_NK: Tensor, form: Format, products_GSS: Tensor | None = None) -> Packed:
    """Round with the range of every group shrunk to the share that gives the least error.

    The error of a group is `d^T (X^T X) d` with d its rounding error and X its inputs, or `d^T d` without data. How the
    inputs are rounded in turn does not enter: that error is as large whatever the weights are rounded to.

    Args:
        weight_NK: [N, K] float32.
        form: an integer format.
        products_GSS: X^T X of every group's inputs; None where no data are at hand.
    """
    return form.encode(weight_NK, best_shrink(weight_NK, form, products_GSS))


def best_shrink(weight_NK: Tensor, form: Format, products_GSS: Tensor | None = None) -> Tensor:
    """The share of each range that gives the least error, [N, G]; arguments as for `clipped`."""
    blocks = torch.split(weight_NK, max(1, _BLOCK // weight_NK.shape[1]))
    return torch.cat([_best_of_block(block_NK, form, products_GSS) for block_NK in blocks])


def _best_of_block(weight_NK: Tensor, form: Format, products_GSS: Tensor | None) -> Tensor:
    N, K = weight_NK.shape
    S = form.group_size or K
    best_NG, shrink_NG = torch.full((N, K // S), torch.inf), torch.ones(N, K // S)
    for share in SHRINKS:
        off_NGS = form.round(weight_NK, share).sub_(weight_NK).view(N, K // S, S)
        if products_GSS is None:
            error_NG = off_NGS.square_().sum(-1)
        else:
            off_GNS = off_NGS.transpose(0, 1)
            error_NG = (off_GNS @ products_GSS).mul_(off_GNS).sum(-1).T
        shrink_NG[error_NG < best_NG] = share
        best_NG = torch.minimum(best_NG, error_NG)
    return shrink_NG
