"""Every outcome of a run and its exact probability: a `Randomness` that takes every branch instead of one.

    outcomes = law(lambda branches: run_something(branches.randomness))

`law` runs the function again and again, depth first: the first time every decision takes its first outcome, then the
last decision that has another outcome takes it, and so on until all are done. The function may be anything that takes
its chance from `Randomness` alone and does the same when it is given the same: a function, or a whole engine.

A decision is modelled as `bitdraft.decoding.streams` makes it: a uniform number, named by `streams.counter`, falls into
one of the intervals that the outcomes divide [0, 1) into. A number that is read twice is not uniform the second time:
it is known to lie in the interval of the first outcome, and the second decision's probabilities follow from that. So
code that shares noise is enumerated with the law it really has.

A coupled draw is modelled as a race of exponential clocks, one for each token (`bitdraft.decoding.race`). A second draw
that reads the same clocks has the law of its winner given that of the first, in closed form; a third is refused.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from math import fsum, inf
from typing import TypeVar

from torch import Tensor

from bitdraft.decoding import streams
from bitdraft.decoding.protocols import Purpose

Outcome = TypeVar("Outcome", bound=Hashable)


def law(play: Callable[["Branches"], Outcome]) -> dict[Outcome, float]:
    """The probability of everything that `play` can return."""
    branches = Branches()
    parts: dict[Outcome, list[float]] = defaultdict(list)
    while branches.start():
        outcome = play(branches)
        parts[outcome].append(branches.finish())
    return {outcome: fsum(values) for outcome, values in parts.items()}


def total_variation(p: dict[Outcome, float], q: dict[Outcome, float]) -> float:
    """Half the sum of the absolute differences, between laws that may fail to sum to 1."""
    return fsum(abs(p.get(outcome, 0.0) - q.get(outcome, 0.0)) for outcome in p.keys() | q.keys()) / 2


def expectation(p: dict[float, float]) -> float:
    """The mean of a law of numbers."""
    return fsum(value * chance for value, chance in p.items())


class Branches:
    """The tree of all runs, and the place that the present run has reached in it.

    Attributes:
        reused: whether some run read the same uniform number twice.
    """

    def __init__(self) -> None:
        self.reused = False
        self._path: list[_Decision] = []
        self._depth = 0
        self._known: dict[Hashable, tuple[float, float]] = {}
        self._races: dict[Hashable, list[tuple[list[float], int]]] = {}
        self._started = False

    def randomness(self, seed: int, request: int) -> "BranchingRandomness":
        """The random decisions of one request, to be used where `Streams(seed, request)` is."""
        return BranchingRandomness(self, (seed, request))

    def start(self) -> bool:
        """Go to the next run; False when there is none."""
        if self._started:
            while self._path and not self._path[-1].advance():
                self._path.pop()
        more = bool(self._path) or not self._started
        self._started, self._depth, self._known, self._races = True, 0, {}, {}
        return more

    def finish(self) -> float:
        """The probability of the run that has just ended."""
        assert self._depth == len(self._path), "a run made fewer decisions than when it was here before"
        product = 1.0
        for decision in self._path:
            product *= decision.probability
        return product

    def decide(self, name: Hashable, weights: Sequence[float]) -> int:
        """The outcome that this run takes, an index into `weights`.

        Args:
            name: of the uniform number that decides.
            weights: probabilities of the outcomes; they are not normalised here, so a sum that is not 1 shows.
        """
        assert all(weight >= 0 for weight in weights), f"{weights} are no probabilities"
        self.reused |= name in self._known
        bounds = [0.0]
        for weight in weights:
            bounds.append(bounds[-1] + weight)
        options = _options(weights, bounds, self._known.get(name))
        if self._depth == len(self._path):
            self._path.append(_Decision(name, options))
        decision = self._path[self._depth]
        assert (decision.name, decision.options) == (name, options), "a run did not repeat itself"
        self._depth += 1
        low, high = self._known.get(name, (0.0, bounds[-1]))
        self._known[name] = max(low, bounds[decision.outcome]), min(high, bounds[decision.outcome + 1])
        return decision.outcome

    def race(self, name: Hashable, weights: list[float]) -> int:
        """The winner, in this run, of a race at these speeds.

        Args:
            name: of the clocks. Races at the same speeds have the same winner.
            weights: the speeds.
        """
        before = self._races.setdefault(name, [])
        for speeds, won in before:
            if speeds == weights:
                return won
        if before:
            assert len(before) == 1, "three races of the same clocks have no closed form here"
            speeds, won = before[0]
            chances = [both_win(speeds, weights, won, j) * fsum(speeds) / speeds[won] for j in range(len(weights))]
        else:
            chances = weights
        winner = self.decide((name, len(before)), chances)
        before.append((weights, winner))
        return winner


def both_win(p: Sequence[float], q: Sequence[float], i: int, j: int) -> float:
    """The chance that i wins the race at speeds p and j the race at speeds q, of the same exponential clocks.

    With r the ratio of the two winning times, S(r) = sum_w max(p_w, r q_w). For i = j, r is p_i / q_i and the chance
    p_i / S(r). Else it is p_i q_j times the integral of S**-2 over r from p_j / q_j to p_i / q_i: the density of both
    times, integrated over the common scale. S is linear between the ratios p_w / q_w of the tokens.
    """
    if not (p[i] and q[j]):
        return 0.0

    def total(r: float) -> float:
        return fsum(max(a, r * b) for a, b in zip(p, q, strict=True))

    if i == j:
        return p[i] / total(p[i] / q[i])
    low, high = p[j] / q[j], p[i] / q[i] if q[i] else inf
    ends = [low, *sorted(a / b for a, b in zip(p, q, strict=True) if b and low < a / b < high), high]
    pieces = []
    for start, end in pairwise(ends):
        if start < end < inf:  # linear in between: the integral of S**-2 is the length over the product of the ends
            pieces.append((end - start) / (total(start) * total(end)))
        elif start < end:
            pieces.append(1 / (total(start) * fsum(q)))
    return p[i] * q[j] * fsum(pieces)


class BranchingRandomness:
    """One request's view of `Branches`, a `Randomness`."""

    def __init__(self, branches: Branches, request: Hashable) -> None:
        self._branches, self._request = branches, request

    def coin(self, chance: float, start: int, position: int) -> bool:
        assert 0 <= chance <= 1, f"{chance} is no probability"
        return self._branches.decide(self._name(start, position, Purpose.ACCEPT), (chance, 1 - chance)) == 0

    def draw(self, probs: Tensor, start: int, position: int, purpose: Purpose) -> int:
        return self._branches.decide(self._name(start, position, purpose), probs.tolist())

    def coupled_draw(self, probs: Tensor, position: int) -> int:
        return self._branches.race((self._request, "clocks", position), probs.tolist())

    def _name(self, start: int, position: int, purpose: Purpose) -> Hashable:
        return self._request, streams.counter(start, position, purpose)


class _Decision:
    """A node of the tree: its possible outcomes, and the one that is being walked."""

    def __init__(self, name: Hashable, options: list[tuple[int, float]]) -> None:
        assert options, "a decision without a possible outcome"
        self.name, self.options, self._at = name, options, 0

    @property
    def outcome(self) -> int:
        return self.options[self._at][0]

    @property
    def probability(self) -> float:
        return self.options[self._at][1]

    def advance(self) -> bool:
        """Take the next outcome; False if this was the last."""
        self._at += 1
        return self._at < len(self.options)


def _options(
    weights: Sequence[float], bounds: Sequence[float], known: tuple[float, float] | None
) -> list[tuple[int, float]]:
    """Outcomes that can happen and their probabilities, given the interval in which the number is known to lie."""
    if known is None:
        return [(i, weight) for i, weight in enumerate(weights) if weight > 0]
    low, high = known
    shares = [(i, (min(high, bounds[i + 1]) - max(low, bounds[i])) / (high - low)) for i in range(len(weights))]
    return [(i, share) for i, share in shares if share > 0]
