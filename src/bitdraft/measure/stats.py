"""Figures and how well they are known.

Every figure is an `Estimate`: its value on the texts that were measured, and what it would have been on other texts of
the same kind, by the bootstrap (Efron, Annals of Statistics 7, 1979). Tokens of one text hang together, so whole
prompts are resampled, not tokens; and everything computed from one set of weights is *paired*: two formats are compared
on the same resampled prompts, which takes the difference between prompts out of their comparison.

Why the acceptance needs no coin. A drafted token y ~ q is accepted with probability min(1, p(y) / q(y)). So a token y
is drafted and accepted with probability min(p(y), q(y)), and

    P(accepted)                     = sum_v min(p(v), q(v))                      `overlap`
    P(accepted | y is emitted)      = min(p(y), q(y)) / p(y) = min(1, q(y)/p(y))  `ratio`

The second line holds because y is emitted with probability p(y): that is what lossless means. The first is an unbiased
figure at every position that a block reaches; the second follows one text, as the target wrote it.

Letters: P prompts, N tokens of the longest text, B bootstrap resamples.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np
from numpy.typing import NDArray

from .trace import Score

Floats = NDArray[np.float64]

RESAMPLES = 2000
DEGENERATE_BELOW = 0.1
"""A text whose distinct bigrams are fewer than this share of its bigrams is a loop, not language."""


@dataclass(frozen=True)
class Interval:
    """A figure with the interval that its true value lies in, at 95% confidence; no bounds if they are not known."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class Estimate:
    """A figure and its bootstrap distribution.

    Attributes:
        value: the figure itself; NaN if there is nothing to compute it from.
        samples: [B] float64, the figure on each resample; NaN where a resample cannot give it.
    """

    value: float
    samples: Floats

    def interval(self, level: float = 0.95) -> Interval:
        """The percentile interval. Without a second prompt (or timing) there is none."""
        known = self.samples[np.isfinite(self.samples)]
        if known.size < self.samples.size / 2 or not known.size:
            return Interval(self.value, None, None)
        low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
        return Interval(self.value, float(low), float(high))

    def chance_above(self, threshold: float) -> float | None:
        """The share of resamples above a threshold: how sure it is that the figure is. None without an interval."""
        known = self.samples[np.isfinite(self.samples)]
        return float(np.mean(known > threshold)) if known.size else None


def combine(function: Callable[..., Floats | float], *parts: Estimate) -> Estimate:
    """An estimate of a function of estimates; the function must work on arrays, element by element."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = function(*(np.float64(part.value) for part in parts))
        samples = function(*(part.samples for part in parts))
    return Estimate(float(value), np.asarray(samples, dtype=np.float64))


def resample(count: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> Floats:
    """How often each of `count` prompts is drawn, with replacement, in each resample: [B, P].

    One prompt tells nothing about the spread between prompts: all weights are then NaN, and so is every interval.
    """
    assert count > 0
    if count == 1:
        return np.full((resamples, 1), np.nan)
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


def ratio_of_sums(numerators: Floats, denominators: Floats, weights: Floats) -> Estimate:
    """sum(numerators) / sum(denominators) over prompts, [P] each, with the `weights` of `resample`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = np.float64(numerators.sum()) / denominators.sum()
        samples = (weights @ numerators) / (weights @ denominators)
    return Estimate(float(value), samples)


def percentiles(values: Sequence[Sequence[float]], shares: Sequence[float], weights: Floats) -> list[Estimate]:
    """For each share, the value that this share of all tokens do not exceed; `values` holds one list a prompt."""
    flat = np.concatenate([np.asarray(v, dtype=np.float64) for v in values])
    owner = np.repeat(np.arange(len(values)), [len(v) for v in values])
    return [_estimate(rows) for rows in _order_statistics(flat, owner, weights, [(share, share) for share in shares])]


def median(values: Floats, owner: NDArray[np.int64], weights: Floats) -> Estimate:
    """The median of values, each of which belongs to a prompt; the mean of the middle two if they are even.

    Args:
        values: [M]. owner: [M], indices of prompts. weights: [B, P] of `resample`.
    """
    return _estimate(_order_statistics(values, owner, weights, [(0.5, 0.5 + 1e-9)])[0])


def _estimate(rows: Floats) -> Estimate:
    return Estimate(float(rows[0]), rows[1:])


def _order_statistics(
    values: Floats, owner: NDArray[np.int64], weights: Floats, shares: Sequence[tuple[float, float]]
) -> list[Floats]:
    """For each pair of shares, the mean of the two weighted order statistics: [1 + B], the unweighted one first.

    Resamples are handled a few at a time, so that memory stays bounded however long the texts are.
    """
    order = np.argsort(values, kind="stable")
    values, owner = np.append(values[order], np.nan), owner[order]  # NaN answers for resamples without any value
    every = np.vstack([np.ones(weights.shape[1]), weights])
    found = [np.empty(len(every)) for _ in shares]
    step = max(1, 1_000_000 // max(len(owner), 1))
    for at in range(0, len(every), step):
        mass = np.cumsum(every[at : at + step, owner], axis=1)
        total = mass[:, -1:] if len(owner) else np.zeros((len(mass), 1))
        for rows, (low, high) in zip(found, shares, strict=True):
            first, last = ((mass < share * total).sum(axis=1) for share in (low, high))
            known = total[:, 0] > 0
            rows[at : at + step] = np.where(known, (values[first] + values[last]) / 2, np.nan)
    return found


def distinct_bigram_ratio(ids: Sequence[int]) -> float:
    """Different pairs of neighbouring tokens over all pairs; 1 for a text of fewer than two tokens."""
    pairs = list(pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


@dataclass(frozen=True, eq=False)
class Agreement:
    """How near a draft's distributions are to the target's, averaged over the tokens of the target's texts.

    Attributes:
        conditional_acceptance: mean `overlap`, at the serving temperature. A bare 'alpha' means this one.
        tv: mean total variation distance of the raw distributions.
        kl, kl_median, kl_p99: KL(p || q) of the raw distributions in nats, target first.
        kl_reverse: mean KL(q || p).
        top1: share of tokens at which both are largest at the same token.
    """

    conditional_acceptance: Estimate
    tv: Estimate
    kl: Estimate
    kl_median: Estimate
    kl_p99: Estimate
    kl_reverse: Estimate
    top1: Estimate


def agreement(scores: Sequence[Score], weights: Floats) -> Agreement:
    """The agreement figures of one format on one workload: a score a prompt, and the `weights` of `resample`."""
    lengths = np.array([len(score.overlap) for score in scores], dtype=np.float64)

    def mean(lists: Sequence[Sequence[float]]) -> Estimate:
        return ratio_of_sums(np.array([np.sum(values) for values in lists], dtype=np.float64), lengths, weights)

    kl = [score.kl_pq for score in scores]
    kl_median, kl_p99 = percentiles(kl, (0.5, 0.99), weights)
    return Agreement(
        conditional_acceptance=mean([score.overlap for score in scores]),
        tv=combine(lambda overlap: 1 - overlap, mean([score.overlap_t1 for score in scores])),
        kl=mean(kl),
        kl_median=kl_median,
        kl_p99=kl_p99,
        kl_reverse=mean([score.kl_qp for score in scores]),
        top1=mean([score.top1 for score in scores]),
    )


@dataclass(frozen=True)
class BlockCounts:
    """The acceptance meter: what became of drafted tokens, by their position in the block.

    A position is *tested* when every earlier one was accepted. Behind a rejection nothing is known, and a match there
    counts for nothing. So there are two different rates, and neither is ever called just 'acceptance':
    `conditional_acceptance` by position is accepted over tested; `accepted_per_drafted` is accepted over proposed.

    Attributes:
        steps: blocks, empty ones included.
        proposed, tested, accepted: counts, one a position.
    """

    steps: int
    proposed: tuple[int, ...]
    tested: tuple[int, ...]
    accepted: tuple[int, ...]

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[int, int]]) -> "BlockCounts":
        """Count blocks given as (drafted tokens, accepted tokens)."""
        pairs = list(blocks)
        depth = max((proposed for proposed, _ in pairs), default=0)
        return cls(
            steps=len(pairs),
            proposed=tuple(sum(n > j for n, _ in pairs) for j in range(depth)),
            tested=tuple(sum(n > j and a >= j for n, a in pairs) for j in range(depth)),
            accepted=tuple(sum(a > j for _, a in pairs) for j in range(depth)),
        )

    @classmethod
    def of_matches(cls, blocks: Iterable[Sequence[int]]) -> "BlockCounts":
        """Count blocks given as one truth value a drafted token: would it match, were it reached."""
        return cls.of_blocks((len(block), [*map(bool, block), False].index(False)) for block in blocks)

    def __add__(self, other: "BlockCounts") -> "BlockCounts":
        def total(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))

        return BlockCounts(
            self.steps + other.steps,
            total(self.proposed, other.proposed),
            total(self.tested, other.tested),
            total(self.accepted, other.accepted),
        )

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """P(accepted | tested) by position; NaN where nothing was tested."""
        return tuple(a / t if t else float("nan") for a, t in zip(self.accepted, self.tested, strict=True))

    @property
    def accepted_per_drafted(self) -> float:
        """Accepted over proposed tokens; NaN if none was proposed."""
        return sum(self.accepted) / sum(self.proposed) if sum(self.proposed) else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """1 + accepted / steps: the target adds one token to every block. NaN without steps."""
        return 1 + sum(self.accepted) / self.steps if self.steps else float("nan")
