"""The nouns that cross every border. Frozen, and importing nothing of ours but the errors.

    Sequence ──► Proposal ──► Verification ──► StepRecord

Shape suffixes and letters: B sequences in the batch, K drafted tokens (the longest row), V vocabulary.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .errors import UsageError

Origin = Literal["draft", "corrected", "free"]
"""Where an emitted token came from: accepted from the draft, drawn from the residual after a rejection, or drawn from
the target itself (after a fully accepted block, or without speculation)."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens. The same rules make the target's p and the draft's q.

    Attributes:
        temperature: 0 is greedy (a point mass on the largest logit, lowest id on ties).
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.
        min_p: drop tokens less likely than min_p times the likeliest one; 0 drops none.
        typical_p: keep the tokens whose surprise is closest to the entropy, until their mass reaches typical_p; 1 keeps
            all.
        repetition_penalty: divides positive and multiplies negative logits of every token seen in prompt or output.
        presence_penalty: subtracted once from the logit of each token already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these token ids.
        bad_words: sequences of token ids, none of which the output ever completes.
        allowed_ids: the only token ids that may come out; None allows all.
        seed: with the request's number, names the random streams of the request.
        reproducible: above temperature 0, the same seed and number give the same output whatever is drafted, however
            long, and whoever is served beside it; with drafts this accepts fewer tokens. At temperature 0 it is so
            anyway.
        max_tokens: output tokens at most.
        min_tokens: no end of sequence and no stop id before so many output tokens.
        stop: strings that end the output; the output is cut before the first one.
        stop_ids: token ids that end the output like an end-of-sequence token.
        ignore_eos: go on after an end-of-sequence token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_ids: frozenset[int] | None = None
    seed: int = 0
    reproducible: bool = False
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("temperature", self.temperature >= 0, "a number of at least 0"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive count"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and up to 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("typical_p", 0 < self.typical_p <= 1, "a number above 0 and up to 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "a positive number (1 is off)"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("bad_words", all(self.bad_words), "sequences of at least one token id"),
            ("allowed_ids", self.allowed_ids is None or len(self.allowed_ids) > 0, "at least one token id, or None"),
            ("seed", 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1"),
            ("max_tokens", self.max_tokens >= 0, "a count of at least 0"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "a count from 0 to max_tokens"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not ok or (isinstance(getattr(self, name), float) and math.isnan(getattr(self, name))):
                raise UsageError(f"{name} is {getattr(self, name)!r}. Expected {expected}.")

    def ending_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end an output: the model's end-of-sequence ids unless they are ignored, and the stop ids."""
        return eos_ids.union(self.stop_ids) if not self.ignore_eos else frozenset(self.stop_ids)


@dataclass(frozen=True)
class TokenLogprob:
    """What the target thought of one token: log-softmax of its own logits, in nats, before penalties and filters.

    Attributes:
        token: the token that came out, or stands in the prompt.
        logprob: of that token.
        top: the likeliest tokens with theirs, likeliest first, lower ids first on ties; as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Blocks:
    """What a model's KV cache has room for.

    Attributes:
        size: tokens a block.
        total: blocks in all.
        free: blocks that hold nothing.
        cached: blocks that only the prefix cache holds, which gives them up where they are wanted.
    """

    size: int
    total: int
    free: int
    cached: int = 0

    @property
    def available(self) -> int:
        """Blocks that a forward call can take."""
        return self.free + self.cached

    def needed(self, length: int, more: int) -> int:
        """New blocks for `more` tokens after `length` that are held."""
        return -(-(length + more) // self.size) - -(-length // self.size)


@dataclass(frozen=True)
class Feed:
    """Tokens to append to one request's KV cache in a forward call.

    Attributes:
        request: whose cache.
        tokens: token ids, at least one.
        start: the cache length before the call; tokens land at positions start, start + 1, ...
        logits_from: rows from this index of `tokens` on return logits; `len(tokens)` returns none.
    """

    request: int
    tokens: Sequence[int]
    start: int
    logits_from: int


@dataclass(frozen=True)
class Proposal:
    """What a drafter suggests for every sequence of a batch.

    Attributes:
        tokens: the drafted tokens of each sequence, B blocks of any lengths; empty where nothing was drafted.
        probs: [B, K, V] float, the distribution that each token was really drawn from, after every filter and
            renormalised, anything past a block's end and for requests that the coupled rule verifies; None when every
            token is a point mass (n-gram and scripted drafts, and models at temperature 0 or under the coupled rule,
            where a token follows from noise that the target knows).
        predicted: places in the batch of the blocks that are from their caller's own prediction: point masses, whatever
            `probs` holds there.
    """

    tokens: tuple[tuple[int, ...], ...]
    probs: Tensor | None = None
    predicted: frozenset[int] = frozenset()

    def drawn_from(self, b: int) -> Tensor | None:
        """What the tokens of block `b` were drawn from, [K, V] with its own K; None for point masses."""
        return None if self.probs is None or b in self.predicted else self.probs[b, : len(self.tokens[b])]


@dataclass(frozen=True)
class Verification:
    """What the target made of a proposal.

    Attributes:
        accepted: how many drafted tokens of each sequence stand, B numbers.
        next_token: the one token that the target adds to each, B ids: corrected where not all of the block was
            accepted, else free.
        overlap: for each sequence, `sum_v min(p, q)` at every reached position, see `StepRecord`.
    """

    accepted: tuple[int, ...]
    next_token: tuple[int, ...]
    overlap: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class StepRecord:
    """What happened to one sequence in one step.

    Attributes:
        request: the number of the request.
        start: output tokens that the request had before the step.
        proposed: drafted tokens.
        accepted: drafted tokens that the target accepted.
        emitted: tokens added to the output, after end of sequence, stop strings and limits cut the block.
        overlap: `sum_v min(p, q)` at each reached position: the accepted ones and, after a rejection, the rejected
            one. Its mean is the conditional acceptance, without the noise of the coin. Under the coupled rule 1
            where the drafted token stands and 0 where not: `sum_v min(p, q)` is only an upper bound there.
        batch: sequences in the step.
        rows: rows of tokens that the target was given in the step, all sequences together.
        draft_seconds, verify_seconds, other_seconds: duration of the step's parts; shared by its sequences.
        predicted: whether the drafted tokens are from the caller's own prediction.
    """

    request: int
    start: int
    proposed: int
    accepted: int
    emitted: int
    overlap: tuple[float, ...]
    batch: int
    rows: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    predicted: bool = False
