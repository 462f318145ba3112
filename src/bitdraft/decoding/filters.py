"""Which tokens are likely enough to be drawn, and the softmax of those: top-k, top-p, min-p and typical sampling.

Where a filter has to choose between equal values, the lower ids stay, so that p and q never differ by a sort's whim.

Shape suffixes: V vocabulary, N likeliest tokens.
"""

import math

import torch
from torch import Tensor

from ..types import SamplingParams

_PREFIX = 1024
"""Tokens that a filter sorts first. Most nuclei are far smaller than a vocabulary of 150 000."""


def filtered(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, top-p, min-p and typical, then the softmax of what is left, [V]. The largest entry of `scaled_V` is 0."""
    whole = params.top_k == 0 and params.top_p == 1
    ids_N, kept_N = (None, scaled_V) if whole else _top(scaled_V, params.top_k, params.top_p)
    if params.min_p > 0:
        kept_N = kept_N.masked_fill(kept_N < math.log(params.min_p), -math.inf)
    if params.typical_p < 1:
        if ids_N is not None:
            ids_N, order_N = torch.sort(ids_N)
            kept_N = kept_N[order_N]
        kept_N = _typical(kept_N, params.typical_p)
    probs_N = torch.softmax(kept_N, dim=0)
    return probs_N if ids_N is None else torch.zeros_like(scaled_V).index_copy_(0, ids_N, probs_N)


def _typical(scaled_N: Tensor, typical_p: float) -> Tensor:
    """Minus infinity for all but the tokens whose surprise is closest to the entropy, as few as reach `typical_p`."""
    surprise_N = -torch.log_softmax(scaled_N, dim=0)
    probs_N = torch.exp(-surprise_N)
    entropy = torch.xlogy(probs_N, probs_N).sum(dtype=torch.float64).neg().to(scaled_N.dtype)
    closeness_N = -(surprise_N - entropy).abs()  # minus infinity where the probability is 0
    wanted, size = typical_p * float(probs_N.sum(dtype=torch.float64)), _PREFIX
    while True:
        places, _ = _likeliest(closeness_N, size)
        count = int(torch.searchsorted(probs_N[places].cumsum(0, dtype=torch.float64), wanted)) + 1
        if count <= len(places) or size >= len(scaled_N):
            kept_N = torch.full_like(scaled_N, -math.inf)
            kept_N[places[:count]] = scaled_N[places[:count]]
            return kept_N
        size *= 16


def _top(scaled_V: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Ids and scaled logits of what top-k and top-p keep, likeliest first."""
    if top_k > 0:
        ids_N, values_N = _likeliest(scaled_V, top_k)
        count = _nucleus_size(values_N, top_p, _mass(values_N)) if top_p < 1 else top_k
        return ids_N[:count], values_N[:count]
    total, size = _mass(scaled_V), _PREFIX
    while True:
        ids_N, values_N = _likeliest(scaled_V, size)
        count = _nucleus_size(values_N, top_p, total)
        if count <= len(ids_N) or size >= len(scaled_V):
            return ids_N[:count], values_N[:count]
        size *= 16


def _likeliest(scaled_V: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Ids and values of the `size` largest entries, or fewer: not those at minus infinity. Lower ids first on ties."""
    # topk promises nothing about which of several equal entries it returns, so only its smallest value is used.
    smallest = torch.topk(scaled_V, min(size, len(scaled_V)), sorted=False).values.min()
    smallest = smallest.clamp_min(torch.finfo(scaled_V.dtype).min)
    ids_N = (scaled_V >= smallest).nonzero()[:, 0]
    values_N, order_N = torch.sort(scaled_V[ids_N], descending=True, stable=True)
    return ids_N[order_N[:size]], values_N[:size]


def _nucleus_size(values_N: Tensor, top_p: float, total: float) -> int:
    """How many of the likeliest tokens reach `top_p` of the total mass; N + 1 if all of them do not."""
    mass_N = values_N.exp().cumsum(0, dtype=torch.float64)
    return int(torch.searchsorted(mass_N, top_p * total)) + 1


def _mass(scaled: Tensor) -> float:
    return float(scaled.exp().sum(dtype=torch.float64))
