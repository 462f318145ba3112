"""How fast speculation will be, from how well a draft guesses and what the parts of a step cost.

One text is followed exactly. Given that the target wrote the tokens x_1 .. x_N, a draft of x_i is accepted with
probability r_i = min(1, q(x_i) / p(x_i)), independently (stats.py says why). A block of K drafts that starts after s
tokens therefore emits at least j + 1 tokens with probability r_{s+1} ... r_{s+j}, and the next block starts where this
one ends. Following these chances from the first token on gives the probability v(s) that a block starts at s, and

    tokens per step (K) = sum_s v(s) (1 + sum_{j=1..K} r_{s+1} ... r_{s+j}) / sum_s v(s)

No coin is thrown, and no independence between positions assumed: hard tokens that come in clusters cost what they cost.
The sums run over the blocks that lie wholly in the text: one that its end cuts would make the draft look worse than it
is on a longer text. Whether a block counts depends on its start alone, so leaving it out favours no outcome.

The token rule of verification is meant (Leviathan et al. 2023, algorithm 1). The block rule accepts as much or more.

    S(K) = tokens_per_step(K) T_target(1) / (K T_draft + T_target(K + 1) + overhead)

Letters: P prompts, N tokens of the longest text, K draft length, B bootstrap resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .stats import Estimate, Floats, combine, ratio_of_sums
from .trace import CostSample


@dataclass(frozen=True, eq=False)
class Texts:
    """One draft's chances on the texts of one workload, padded to one length.

    Attributes:
        ratio_PN, overlap_PN: float64, see `trace.Score`; 0 behind the end of a text.
        lengths_P: int64, tokens of each text.
    """

    ratio_PN: Floats
    overlap_PN: Floats
    lengths_P: NDArray[np.int64]

    @classmethod
    def of(cls, ratio: Sequence[Sequence[float]], overlap: Sequence[Sequence[float]]) -> "Texts":
        """Pad lists, one a text."""
        lengths = np.array([len(row) for row in ratio], dtype=np.int64)
        padded = np.zeros((2, len(ratio), max(lengths, default=0)))
        for i, (ratios, overlaps) in enumerate(zip(ratio, overlap, strict=True)):
            padded[0, i, : len(ratios)] = ratios
            padded[1, i, : len(overlaps)] = overlaps
        return cls(padded[0].clip(0, 1), padded[1].clip(0, 1), lengths)

    def survival(self, k: int) -> Floats:
        """[P, N, k + 1]: P(the first j drafts of a block that starts after s tokens are all accepted), j = 0 .. k."""
        count, length = self.ratio_PN.shape
        ahead = np.concatenate([self.ratio_PN, np.zeros((count, k))], axis=1)
        chances = np.ones((count, length, k + 1))
        for j in range(k):
            chances[:, :, j + 1] = chances[:, :, j] * ahead[:, j : j + length]
        return chances

    def block_starts(self, k: int) -> Floats:
        """[P, N]: v(s), the probability that a block starts after s tokens; the first block starts after none."""
        survival = self.survival(k)
        ends = survival.copy()
        ends[:, :, :-1] -= survival[:, :, 1:]  # P(the block emits exactly j + 1 tokens)
        count, length = self.ratio_PN.shape
        starts = np.zeros((count, length + k + 1))
        starts[:, 0] = 1
        for s in range(length):
            starts[:, s + 1 : s + k + 2] += starts[:, s, None] * ends[:, s]
        return starts[:, :length] * (np.arange(length) < self.lengths_P[:, None])

    def block_sums(self, k: int) -> tuple[Floats, Floats]:
        """Expected tokens and expected number of the whole blocks in each text, [P] and [P]."""
        starts = self.block_starts(k) * (np.arange(self.ratio_PN.shape[1]) + k < self.lengths_P[:, None])
        return (starts * self.survival(k).sum(axis=2)).sum(axis=1), starts.sum(axis=1)

    def run_sums(self, k: int) -> tuple[Floats, Floats]:
        """Expected tokens and steps of each text behind its first block, the one cut by its end included: [P], [P].

        This is what a run of just these texts does, reading the prompt (the first step) left out.
        """
        starts = self.block_starts(k)
        inside = np.arange(k + 1) < self.lengths_P[:, None]
        first = (self.survival(k)[:, 0] * inside).sum(axis=1)
        return self.lengths_P - first, starts[:, 1:].sum(axis=1)

    def hazard_sums(self, k: int) -> tuple[Floats, Floats]:
        """Accepted and tested drafts by position in blocks of k, expected in each text: [P, k] and [P, k].

        tested_j = sum_s v(s) r_{s+1} ... r_{s+j-1}, and accepted_j has the factor overlap_{s+j} too: given that a
        block reached a position, the chance there is `overlap`. Their ratio is the conditional acceptance at position
        j of real blocks, which start behind a rejection more often than a random token does.
        """
        starts, survival = self.block_starts(k), self.survival(k)
        length = starts.shape[1]
        accepted, tested = np.zeros((2, starts.shape[0], k))
        for j in range(min(k, length)):
            reached = starts[:, : length - j] * survival[:, : length - j, j]
            reached = reached * (np.arange(length - j) + j < self.lengths_P[:, None])
            tested[:, j] = reached.sum(axis=1)
            accepted[:, j] = (reached * self.overlap_PN[:, j:]).sum(axis=1)
        return accepted, tested


def tokens_per_step(texts: Texts, k: int, weights: Floats) -> Estimate:
    """Tokens that a step with k drafts emits, the target's own included; NaN if every text is shorter than a block."""
    return ratio_of_sums(*texts.block_sums(k), weights)


def hazards(texts: Texts, k: int, weights: Floats) -> tuple[Estimate, ...]:
    """Conditional acceptance at positions 1 .. k of blocks of k drafts."""
    accepted, tested = texts.hazard_sums(k)
    return tuple(ratio_of_sums(accepted[:, j], tested[:, j], weights) for j in range(k))


def expected_tokens(hazard: Sequence[float]) -> float:
    """1 + sum_j prod_{i<=j} a_i: tokens per step of a block whose position i is accepted with chance a_i if reached."""
    return 1 + float(np.cumprod(hazard).sum())


@dataclass(frozen=True, eq=False)
class Costs:
    """What the parts of a step cost, in milliseconds: medians over rounds of timing.

    Attributes:
        target: by rows in the forward pass.
        draft: by format, for each drafted token.
        overhead: for each speculative step.
    """

    target: Mapping[int, Estimate]
    draft: Mapping[str, Estimate]
    overhead: Estimate

    @classmethod
    def of(cls, samples: Sequence[CostSample], rng: np.random.Generator, resamples: int) -> "Costs":
        """Take medians, resampling rounds: things timed in one round stay together, as neighbours' noise hits both."""
        groups: dict[tuple[str, str | None, int], list[tuple[int, float]]] = {}
        for sample in samples:
            groups.setdefault((sample.kind, sample.format, sample.rows), []).append((sample.round, sample.ms))
        most = max((len(group) for group in groups.values()), default=1)
        draws = rng.random((resamples, most))
        costs = {key: _median([ms for _, ms in sorted(group)], draws) for key, group in groups.items()}
        return cls(
            target={rows: cost for (kind, _, rows), cost in costs.items() if kind == "target"},
            draft={name: cost for (kind, name, _), cost in costs.items() if kind == "draft" and name},
            overhead=costs.get(("overhead", None, 1), Estimate(0.0, np.zeros(resamples))),
        )

    def covers(self, name: str, k: int) -> bool:
        """Whether everything that a step with k drafts in format `name` needs was timed."""
        return name in self.draft and 1 in self.target and k + 1 in self.target

    def step(self, name: str, k: int) -> "StepCost":
        """The cost of a step with k drafts in format `name`; `covers` says whether it is known."""
        return StepCost(
            plain=self.target[1],
            draft=combine(lambda one: k * one, self.draft[name]),
            verify=self.target[k + 1],
            overhead=self.overhead,
        )


def _median(values: Sequence[float], draws: Floats) -> Estimate:
    array = np.array(values, dtype=np.float64)
    if array.size == 1:
        return Estimate(float(array[0]), np.full(len(draws), np.nan))
    chosen = array[(draws[:, : array.size] * array.size).astype(np.int64)]
    return Estimate(float(np.median(array)), np.median(chosen, axis=1))


@dataclass(frozen=True, eq=False)
class StepCost:
    """Milliseconds of one step: `plain` of one without speculation, the others of the parts of a speculative one."""

    plain: Estimate
    draft: Estimate
    verify: Estimate
    overhead: Estimate

    def total(self) -> Estimate:
        """A whole speculative step."""
        return combine(lambda d, v, o: d + v + o, self.draft, self.verify, self.overhead)

    def break_even(self) -> Estimate:
        """The tokens per step at which speculation neither gains nor loses."""
        return combine(lambda total, plain: total / plain, self.total(), self.plain)

    def speedup(self, tokens: Estimate) -> Estimate:
        """S(K), given the tokens per step."""
        return combine(lambda t, even: t / even, tokens, self.break_even())


def break_even_acceptance(tokens: float, k: int) -> float:
    """The acceptance a, the same at all k positions, at which a step emits `tokens`: (1 - a^(k+1)) / (1 - a) = tokens.

    0 if even a step in which every draft fails pays; NaN if not even a perfect draft does.
    """
    if not tokens <= k + 1:
        return float("nan")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens([middle] * k) < tokens else (low, middle)
    return high if tokens > 1 else 0.0


CAUSES = ("acceptance", "drafting", "extra rows", "overhead")


@dataclass(frozen=True)
class Loss:
    """Where the ideal of k + 1 times the speed is lost.

    Attributes:
        without: by cause, the speedup if that cause alone vanished: every draft accepted, drafting free, verifying
            k + 1 rows as cheap as one, no overhead.
        shares: by cause, its share of the loss; they sum to 1. On a log scale, the ideal over S is (k + 1) over tokens
            per step, times step cost over plain cost; the second factor is shared out in proportion to milliseconds.
    """

    without: Mapping[str, float]
    shares: Mapping[str, float]


def loss(tokens: float, k: int, cost: StepCost) -> Loss:
    """Split the way from the ideal, k + 1, to the predicted speedup by its causes."""
    plain = cost.plain.value
    extra = {
        "drafting": cost.draft.value / plain,
        "extra rows": (cost.verify.value - plain) / plain,
        "overhead": cost.overhead.value / plain,
    }
    step = 1 + sum(extra.values())
    without = {"acceptance": (k + 1) / step, **{cause: tokens / (step - part) for cause, part in extra.items()}}
    total = np.log((k + 1) * step / tokens)
    costs = np.log(step)
    shares = {"acceptance": np.log((k + 1) / tokens) / total if total > 0 else 0.0}
    for cause, part in extra.items():
        shares[cause] = costs * part / (step - 1) / total if step > 1 and total > 0 else 0.0
    return Loss(without, {cause: float(share) for cause, share in shares.items()})
