"""From logits to the distribution that a token is drawn from, for the target's p and the draft's q alike.

The order is fixed:

1. repetition, presence and frequency penalties;
2. logit bias;
3. bans: tokens outside `allowed_ids`, tokens that would complete one of `bad_words`, tokens that the grammar does not
   allow, and ending ids before `min_tokens` (with a grammar, only while something else is left);
4. temperature;
5. top-k, top-p, min-p, typical, each on what the one before left (the order of transformers' `generate`);
6. the sum brought back to 1.

What penalties and bans see is the text before the position, drafted tokens included, so one call makes one position and
`History` moves on token by token.

Shape suffixes: V vocabulary, K drafted tokens, D distinct tokens seen.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from .. import ops
from ..errors import NothingLeftError, NumericsError, ShapeError, UsageError
from ..types import SamplingParams
from .constraint import Constraint
from .filters import filtered

_Decision = TypeVar("_Decision")

_RECENT = 32
"""Tokens that a history carries beside its table before the table is made anew."""


@dataclass(frozen=True, eq=False)
class _Table:
    """The output up to some position, and how often each of its tokens and the prompt's occurs in it. Never changed."""

    counts: Mapping[int, int]
    output: tuple[int, ...] = ()

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
        constraint: the grammar after this text; None for any text.
    """

    table: _Table
    recent: tuple[int, ...]
    output_length: int
    constraint: Constraint | None = None

    @classmethod
    def after_prompt(cls, prompt: Iterable[int], constraint: Constraint | None = None) -> "History":
        """The history of the first output token, of an output that follows `constraint`."""
        return cls(_Table(dict.fromkeys(prompt, 0)), (), 0, constraint)

    def extended(self, token: int) -> "History":
        """The history after one more output token."""
        table, recent = self.table, (*self.recent, token)
        if len(recent) == _RECENT:
            table, recent = _Table({**table.counts, **self._recount(recent)}, table.output + recent), ()
        constraint = None if self.constraint is None else self.constraint.after(token)
        return History(table, recent, self.output_length + 1, constraint)

    @property
    def ended(self) -> bool:
        """Whether the grammar allows nothing more, not even an end: the output is complete as it is."""
        allowed_V = None if self.constraint is None else self.constraint.allowed_V
        return allowed_V is not None and not bool(allowed_V.any())

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether the output, without the prompt, ends with these tokens."""
        missing = len(tokens) - len(self.recent)
        if missing <= 0:
            return self.recent[-len(tokens) :] == tuple(tokens) if tokens else True
        return self.table.output[-missing:] + self.recent == tuple(tokens)

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
    min-p, Nguyen et al. 2407.01082; typical, Meister et al. 2202.00666; repetition penalty, Keskar et al. 1909.05858,
    section 4.1, for negative logits multiplied instead of divided.

    Args:
        logits_V: [V] float32 or float64. Minus infinity marks tokens that can never come out.
        params: the request's sampling parameters.
        history: the text before this position.
        ending_ids: ids that would end the output, banned before `params.min_tokens`. Ids outside the vocabulary are
            no error: they cannot come out anyway.

    Returns:
        [V] in the dtype of the logits, summing to 1.

    Raises:
        NumericsError: NaN or plus infinity among the logits, or (`NothingLeftError`) no token that can come out.
        UsageError: a logit bias, a bad word or an allowed id outside the vocabulary.
        ShapeError: logits of another shape or dtype, or a grammar for another vocabulary.
    """
    adjusted_V, peak = _adjusted(logits_V, params, history, ending_ids)
    if params.temperature == 0:
        probs_V = torch.zeros_like(adjusted_V)
        probs_V[torch.argmax(adjusted_V)] = 1
        return probs_V
    # The peak becomes 0 before the division, so no temperature, however small, makes an infinity out of it.
    scaled_V = (adjusted_V - peak) / max(params.temperature, torch.finfo(adjusted_V.dtype).tiny)
    return filtered(scaled_V, params)


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

        def decide(logits_V: Tensor, params: SamplingParams, before: History) -> int:
            return int(torch.argmax(_adjusted(logits_V, params, before, ending_ids)[0]))

        return tuple(_along_block(logits, draft_tokens, params, history, decide, int.__eq__))
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

    def decide(logits_V: Tensor, params: SamplingParams, before: History) -> Tensor:
        return distribution(logits_V, params, before, ending_ids)

    def possible(probs_V: Tensor, token: int) -> bool:
        return bool(probs_V[token] > 0)

    return torch.stack(_along_block(logits, draft_tokens, params, history, decide, possible))


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


def _along_block(
    logits: Tensor,
    draft_tokens: Sequence[int],
    params: SamplingParams,
    history: History,
    decide: Callable[[Tensor, SamplingParams, History], _Decision],
    possible: Callable[[_Decision, int], bool],
) -> list[_Decision]:
    """What `decide` says at each position of a block and after it, each with its own history.

    What follows a drafted token that cannot come out is never reached. The bans end there: together they may leave
    nothing, which is no error where plain decoding never comes.
    """
    decisions: list[_Decision] = []
    for i, logits_V in enumerate(logits):
        if i > 0:
            history = history.extended(draft_tokens[i - 1])
            if _has_bans(params, history) and not possible(decisions[-1], draft_tokens[i - 1]):
                params = replace(params, min_tokens=0, bad_words=(), allowed_ids=None)
                history = replace(history, constraint=None)
        decisions.append(decide(logits_V, params, history))
    return decisions


def _changes_logits(params: SamplingParams, history: History) -> bool:
    """Whether penalties, bias or bans make other logits of those of a block."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return penalties or bool(params.logit_bias) or _has_bans(params, history)


def _has_bans(params: SamplingParams, history: History) -> bool:
    choice = params.allowed_ids is not None or bool(params.bad_words) or history.constraint is not None
    return choice or history.output_length < params.min_tokens


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
        raise NothingLeftError(
            f"{where} are minus infinity for every token, so none can be drawn. Expected one finite logit. Relax what "
            "bans tokens (logit_bias, allowed_ids, bad_words, min_tokens, a grammar), or check the model's output head."
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
    _check_ids("logit_bias", params.logit_bias, len(logits_V))
    ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
    bias = torch.tensor(list(params.logit_bias.values()), dtype=logits_V.dtype)
    return logits_V.index_add(0, ids.to(logits_V.device), bias.to(logits_V.device))


def _banned(logits_V: Tensor, params: SamplingParams, history: History, ending_ids: Collection[int]) -> Tensor:
    """Minus infinity for what must not come next."""
    banned_V, constraint = _without_bad_words(_only_allowed(logits_V, params), params, history), history.constraint
    # A grammar that allows nothing has ended the output: what would stand here is never reached.
    if constraint is not None and constraint.allowed_V is not None and not history.ended:
        if constraint.allowed_V.shape != logits_V.shape:
            raise ShapeError(
                f"the grammar's mask is {list(constraint.allowed_V.shape)} for logits {list(logits_V.shape)}. "
                "Expected one entry per token of the target: compile it for the target's vocabulary size."
            )
        banned_V = torch.where(constraint.allowed_V.to(logits_V.device), banned_V, -math.inf)
    if history.output_length >= params.min_tokens:
        return banned_V
    ids = [i for i in ending_ids if 0 <= i < len(logits_V)]
    unended_V = banned_V.index_fill(0, torch.tensor(ids, dtype=torch.int64, device=logits_V.device), -math.inf)
    must_end = constraint is not None and float(unended_V.max()) == -math.inf
    return banned_V if must_end else unended_V


def _only_allowed(logits_V: Tensor, params: SamplingParams) -> Tensor:
    if params.allowed_ids is None:
        return logits_V
    return torch.where(_mask(params.allowed_ids, len(logits_V)).to(logits_V.device), logits_V, -math.inf)


@lru_cache(maxsize=32)
def _mask(ids: frozenset[int], size: int) -> Tensor:
    """True at the ids, [V] bool, kept for the next position."""
    _check_ids("allowed_ids", ids, size)
    mask_V = torch.zeros(size, dtype=torch.bool)
    mask_V[torch.tensor(sorted(ids), dtype=torch.int64)] = True
    return mask_V


def _without_bad_words(logits_V: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Bans the last token of every bad word whose others end the output. The prompt does not count, as in vLLM."""
    last = [word[-1] for word in params.bad_words if history.ends_with(word[:-1])]
    if not last:
        return logits_V
    _check_ids("bad_words", last, len(logits_V))
    return logits_V.index_fill(0, torch.tensor(last, dtype=torch.int64, device=logits_V.device), -math.inf)


def _check_ids(name: str, ids: Collection[int], size: int) -> None:
    if min(ids) < 0 or max(ids) >= size:
        raise UsageError(
            f"{name} has ids from {min(ids)} to {max(ids)}. Expected ids from 0 to {size - 1}: use ids of the target's "
            "own tokenizer."
        )
