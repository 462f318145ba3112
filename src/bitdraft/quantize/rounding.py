"""How weights are rounded: to nearest, or activation-aware (AWQ).

AWQ (Lin et al., 2306.00978, section 3.2) scales inputs that carry much before rounding, so that their weights are
rounded finely, and undoes the scale in whatever produces those inputs: nothing changes but the rounding. The scale is
`mean|x|^alpha`, with the alpha that changes the layer's output least. Then each group's range is shrunk as far as that
lowers its error on real inputs.

Shape suffixes: N outputs, K inputs, T rows, G groups, S inputs of a group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import Format
from ..ops.packed import Packed

COARSE = (0.0, 0.25, 0.5, 0.75, 1.0)
FINE = 0.125
"""Alphas are tried in steps of 0.25 and then 0.125 to both sides of the best: the error is smooth in alpha."""

SEARCH_OUTPUTS = 512
"""Outputs of each weight, evenly spread over its rows, that alphas are judged by: one alpha for thousands of outputs
needs no more, and the search takes a third of the time."""

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of a group's range that are tried."""

_BLOCK = 2**20
"""Weights that are rounded at once while clipping: few enough to stay in a processor's cache."""


def nearest(weight_NK: Tensor, form: Format) -> Packed:
    """Round a weight [N, K] float32 to the nearest value of a format."""
    return form.encode(weight_NK)


def best_scale(weights: Sequence[Tensor], rows_TK: Tensor, magnitude_K: Tensor, form: Format) -> Tensor:
    """The scale of the inputs, [K], under which rounding changes the outputs least.

    Args:
        weights: one or more [N, K] float32 that read the same inputs.
        rows_TK: a sample of the inputs.
        magnitude_K: mean |x| of every input.
        form: the format that will be rounded to.

    Returns:
        positive factors for the weights' columns, to be divided out where the inputs are made.
    """
    sample_NK = torch.cat([w[:: -(-len(w) // SEARCH_OUTPUTS)] for w in weights])
    exact_TN = rows_TK @ sample_NK.T

    def error(alpha: float) -> float:
        scale_K = _scale(magnitude_K, alpha)
        x_TK = form.round_inputs(rows_TK / scale_K)
        return float((x_TK @ form.round(sample_NK * scale_K).T - exact_TN).square().sum())

    errors = {alpha: error(alpha) for alpha in COARSE}
    middle = min(errors, key=lambda alpha: errors[alpha])
    errors |= {alpha: error(alpha) for alpha in (middle - FINE, middle + FINE) if 0 <= alpha <= 1}
    return _scale(magnitude_K, min(errors, key=lambda alpha: errors[alpha]))


def _scale(magnitude_K: Tensor, alpha: float) -> Tensor:
    """`mean|x|^alpha`, centred so that its largest and smallest factors are each other's inverse."""
    scale_K = magnitude_K.clamp(min=1e-4).pow(alpha)
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def clipped(weight_NK: Tensor, products_GSS: Tensor, form: Format) -> Packed:
    """Round with the range of every group shrunk to the share that gives the least error on real inputs.

    The error of a group is `d^T (X^T X) d` with d its rounding error and X its inputs. How the inputs are rounded in
    turn does not enter: that error is as large whatever the weights are rounded to.

    Args:
        weight_NK: [N, K] float32, scaled already.
        products_GSS: X^T X of every group's inputs, scaled likewise.
        form: an integer format with groups.
    """
    blocks = torch.split(weight_NK, max(1, _BLOCK // weight_NK.shape[1]))
    return form.encode(weight_NK, torch.cat([_best_shrink(block_NK, products_GSS, form) for block_NK in blocks]))


def _best_shrink(weight_NK: Tensor, products_GSS: Tensor, form: Format) -> Tensor:
    """The share of each group's range that gives the least error, [N, G]."""
    G, S, _ = products_GSS.shape
    N = len(weight_NK)
    best_NG, shrink_NG = torch.full((N, G), torch.inf), torch.ones(N, G)
    for share in SHRINKS:
        off_GNS = form.round(weight_NK, share).sub_(weight_NK).view(N, G, S).transpose(0, 1)
        error_NG = ((off_GNS @ products_GSS) * off_GNS).sum(-1).T
        shrink_NG[error_NG < best_NG] = share
        best_NG = torch.minimum(best_NG, error_NG)
    return shrink_NG
