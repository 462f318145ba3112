"""From logits to the distribution that a token is drawn from, for the target's p and the draft's q alike.

The order of the filters is fixed: penalties, logit bias, the ban of ending ids before `min_tokens`, temperature, top-k,
top-p, min-p, and the sum brought back to 1. What a penalty sees is the text before the position, drafted tokens
included, so one call makes one position and `History` moves on token by token.

Shape suffixes: V vocabulary, K drafted tokens, D distinct tokens seen, N likeliest tokens.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .. import ops
from ..errors import NumericsError, ShapeError, UsageError
from ..types import SamplingParams

_RECENT = 32
"""Tokens that a history carries beside its table before the table is made anew."""

_PREFIX = 1024
"""Likeliest tokens that top-p sorts first. Most nuclei are far smaller than a vocabulary of 150 000."""


@dataclass(frozen=True, eq=False)
class _Table:
    """How often each token of the prompt and the output occurs in the output; 0 for prompt only. Never changed."""

    counts: Mapping[int, int]

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Ids [D] int64 and counts [D] int64."""
        return _as_tensors(self.counts)


@dataclass(frozen=True, eq=False)
class History:
    """The text before a position, as the filters need it.

    A history is a value: `extended` returns a new one and leaves this one as it is, so the positions inside a block
    and the committed text share one table. Extending costs a copy of the few recent tokens, whatever the length of the
    text; every 32 tokens the table is made anew.

    Attributes:
        table: counts up to some earlier position.
        recent: output tokens since then.
        output_length: output tokens so far: the index, from 0, of the output token to be decided.
    """

    table: _Table
    recent: tuple[int, ...]
    output_length: int

    @classmethod
    def after_prompt(cls, prompt: Iterable[int]) -> "History":
        """The history of the first output token."""
        return cls(_Table(dict.fromkeys(prompt, 0)), (), 0)

    def extended(self, token: int) -> "History":
        """The history after one more output token."""
        recent = (*self.recent, token)
        if len(recent) < _RECENT:
            return History(self.table, recent, self.output_length + 1)
        return History(_Table({**self.table.counts, **self._recount(recent)}), (), self.output_length + 1)

    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs of ids and their counts in the output, int64. Where two pairs hold an id, the later one is right."""
        pairs = [self.table.tensors]
        if self.recent:
            pairs.append(_as_tensors(self._recount(self.recent)))
        return pairs

    def _recount(self, recent: Sequence[int]) -> dict[int, int]:
        return {token: self.table.counts.get(token, 0) + n for token, n in Counter(recent).items()}


@dataclass(frozen=True)
class PointMasses:
    """Distributions at temperature 0, each certain of one token: what [K+1, V] zeros and ones would say.

    Attributes:
        tokens: the token of each position, K+1 ids.
        vocab_size: V.
    """

    tokens: tuple[int, ...]
    vocab_size: int


def distribution(
    logits_V: Tensor, params: SamplingParams, history: History, ending_ids: Collection[int] = ()
) -> Tensor:
    """The probabilities of the next token.

    Temperature 0 is a point mass on the largest logit, the lowest id on ties. Where top-k or top-p has to choose
    between equal logits, the lower ids stay. Sources: top-k, Fan et al. 1805.04833; top-p, Holtzman et al. 1904.09751;
    min-p, Nguyen et al. 2407.01082; repetition penalty, Keskar et al. 1909.05858, section 4.1, for negative logits
    multiplied instead of divided.

    Args:
        logits_V: [V] float32 or float64. Minus infinity marks tokens that can never come out.
        params: the request's sampling parameters.
        history: the text before this position.
        ending_ids: ids that would end the output, banned before `params.min_tokens`. Ids outside the vocabulary are
            no error: they cannot come out anyway.

    Returns:
        [V] in the dtype of the logits, summing to 1.

    Raises:
        NumericsError: NaN or plus infinity among the logits, or no token left that can come out.
        UsageError: a logit bias for an id outside the vocabulary.
    """
    adjusted_V, peak = _adjusted(logits_V, params, history, ending_ids)
    if params.temperature == 0:
        probs_V = torch.zeros_like(adjusted_V)
        probs_V[torch.argmax(adjusted_V)] = 1
        return probs_V
    # The peak becomes 0 before the division, so no temperature, however small, makes an infinity out of it.
    scaled_V = (adjusted_V - peak) / max(params.temperature, torch.finfo(adjusted_V.dtype).tiny)
    return _filtered(scaled_V, params)


def greedy_tokens(
    logits: Tensor,
    draft_tokens: Sequence[int],
    params: SamplingParams,
    history: History,
    ending_ids: Collection[int] = (),
) -> tuple[int, ...]:
    """The tokens that `target_distributions` puts all mass on at temperature 0, without writing distributions down.

    Args and errors are those of `target_distributions`.
    """
    assert params.temperature == 0
    _check_rows(logits, draft_tokens)
    if _changes_logits(params, history):
        return tuple(
            int(torch.argmax(_adjusted(logits_V, params, before, ending_ids)[0]))
            for logits_V, before in zip(logits, _histories(history, draft_tokens), strict=True)
        )
    places, peaks = ops.top(logits)
    for i, peak in enumerate(peaks):
        _check_peak(peak, history.output_length + i)
    return places


def target_distributions(
    logits: Tensor,
    draft_tokens: Sequence[int],
    params: SamplingParams,
    history: History,
    ending_ids: Collection[int] = (),
) -> Tensor:
    """The target's distributions at every position of one block, and after it.

    Args:
        logits: [K+1, V] float32 or float64; row i was computed with the first i drafted tokens in the context.
        draft_tokens: the K drafted tokens.
        params: the request's sampling parameters.
        history: the committed text before the block.
        ending_ids: see `distribution`.

    Returns:
        [K+1, V] in the dtype of the logits.

    Raises:
        NumericsError, UsageError: see `distribution`.
    """
    _check_rows(logits, draft_tokens)
    probs = torch.empty_like(logits)
    for i, before in enumerate(_histories(history, draft_tokens)):
        probs[i] = distribution(logits[i], params, before, ending_ids)
    return probs


def verifiable(
    logits: Tensor,
    draft_tokens: Sequence[int],
    params: SamplingParams,
    history: History,
    ending_ids: Collection[int] = (),
) -> Tensor | PointMasses:
    """The target's distributions as `verify` takes them: at temperature 0 only the tokens that they are certain of.

    Args and errors are those of `target_distributions`.
    """
    if params.temperature == 0:
        return PointMasses(greedy_tokens(logits, draft_tokens, params, history, ending_ids), logits.shape[1])
    return target_distributions(logits, draft_tokens, params, history, ending_ids)


def _check_rows(logits: Tensor, draft_tokens: Sequence[int]) -> None:
    if logits.ndim != 2 or logits.shape[0] != len(draft_tokens) + 1:
        raise ShapeError(f"logits are {list(logits.shape)} for {len(draft_tokens)} drafted tokens. Expected [K+1, V].")


def _histories(history: History, tokens: Sequence[int]) -> Iterator[History]:
    """The text before each position of a block, and before the one after it."""
    yield history
    for token in tokens:
        history = history.extended(token)
        yield history


def _changes_logits(params: SamplingParams, history: History) -> bool:
    """Whether penalties, bias or bans make other logits of those of a block."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalties or bool(params.logit_bias) or history.output_length < params.min_tokens


def _adjusted(
    logits_V: Tensor, params: SamplingParams, history: History, ending_ids: Collection[int]
) -> tuple[Tensor, float]:
    """Logits after penalties, bias and bans, and the largest of them."""
    if logits_V.dim() != 1 or logits_V.dtype not in (torch.float32, torch.float64):
        raise ShapeError(
            f"logits are {logits_V.dtype} {list(logits_V.shape)}. Expected [V], float32 or float64: convert them first."
        )
    peak = _check_peak(float(logits_V.max()), history.output_length)
    adjusted_V = _banned(_biased(_penalised(logits_V, params, history), params), params, history, ending_ids)
    return adjusted_V, peak if adjusted_V is logits_V else _check_peak(float(adjusted_V.max()), history.output_length)


def _as_tensors(counts: Mapping[int, int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values()), dtype=torch.int64)


def _check_peak(peak: float, position: int) -> float:
    """The largest logit, which has to be a number (the maximum of a tensor with NaN is NaN)."""
    if math.isfinite(peak):
        return peak
    where = f"the logits for output token {position} (counted from 0)"
    if peak == -math.inf:
        raise NumericsError(
            f"{where} are minus infinity for every token, so none can be drawn. Expected one finite logit. "
            "Relax what bans tokens (logit_bias, min_tokens), or check the model's output head."
        )
    raise NumericsError(
        f"{where} hold {'NaN' if math.isnan(peak) else 'plus infinity'}. Expected finite numbers. "
        "Check the model file, or use a number format with a wider range."
    )


def _penalised(logits_V: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Repetition penalty over prompt and output, presence and frequency penalty over the output."""
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    if repetition == 1 and presence == 0 and frequency == 0:
        return logits_V
    penalised_V = logits_V.clone()
    for ids_D, counts_D in history.tables():
        ids_D = ids_D.to(logits_V.device)
        counts_D = counts_D.to(logits_V.device, logits_V.dtype)
        seen_D = logits_V[ids_D]
        seen_D = torch.where(seen_D > 0, seen_D / repetition, seen_D * repetition)
        penalised_V[ids_D] = seen_D - presence * (counts_D > 0) - frequency * counts_D
    return penalised_V


def _biased(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if not params.logit_bias:
        return logits_V
    ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= len(logits_V):
        raise UsageError(
            f"logit_bias has ids from {int(ids.min())} to {int(ids.max())}. "
            f"Expected ids from 0 to {len(logits_V) - 1}: use ids of the target's own tokenizer."
        )
    bias = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype)
    return logits_V.index_add(0, ids.to(logits_V.device), bias.to(logits_V.device))


def _banned(logits_V: Tensor, params: SamplingParams, history: History, ending_ids: Collection[int]) -> Tensor:
    if history.output_length >= params.min_tokens:
        return logits_V
    ids = [i for i in ending_ids if 0 <= i < len(logits_V)]
    return logits_V.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=logits_V.device), -math.inf)


def _filtered(scaled_V: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, top-p and min-p, then the softmax of what is left, [V]. The largest entry of `scaled_V` is 0."""
    whole = params.top_k == 0 and params.top_p == 1
    ids_N, kept_N = (None, scaled_V) if whole else _top(scaled_V, params.top_k, params.top_p)
    if params.min_p > 0:
        kept_N = kept_N.masked_fill(kept_N < math.log(params.min_p), -math.inf)
    probs_N = torch.softmax(kept_N, dim=0)
    return probs_N if ids_N is None else torch.zeros_like(scaled_V).index_copy_(0, ids_N, probs_N)


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
