"""Log-probabilities of tokens, from the target's own logits.

Shape suffixes: R rows, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import NumericsError
from ..types import TokenLogprob


def token_logprobs(logits_RV: Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprob]:
    """What each row of logits says of one token, and of the likeliest ones.

    Row by row, so that the numbers do not depend on which rows were computed together.

    Args:
        logits_RV: [R, V], as the target returned them.
        tokens: R token ids.
        count: how many of the likeliest to name.

    Raises:
        NumericsError: logits that are not numbers.
    """
    return [_of_row(logits_V, token, count) for logits_V, token in zip(logits_RV, tokens, strict=True)]


def _of_row(logits_V: Tensor, token: int, count: int) -> TokenLogprob:
    logprobs_V = torch.log_softmax(logits_V.float(), dim=0)
    count = min(count, len(logprobs_V))
    smallest = float(logprobs_V.topk(count).values[-1]) if count else float(logprobs_V.max())
    if math.isnan(smallest):
        raise NumericsError(
            "the logits behind a log-probability hold NaN or infinity. Expected finite numbers. "
            "Check the model file, or use a number format with a wider range."
        )
    top: tuple[tuple[int, float], ...] = ()
    if count:  # topk promises nothing about which of several equal entries it returns: only its smallest value is used
        ids = (logprobs_V >= max(smallest, torch.finfo(torch.float32).min)).nonzero()[:, 0]
        values, order = torch.sort(logprobs_V[ids], descending=True, stable=True)
        top = tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
    return TokenLogprob(token, float(logprobs_V[token]), top)
