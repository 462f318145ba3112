"""The draft lengths that commit the most tokens a second, given what is believed of acceptance and cost.

With S_i(j) the chance that the first j drafts of sequence i are all accepted, lengths k_1 .. k_n commit

    (n + sum_i sum_{j <= k_i} S_i(j)) / (T_draft(k_1 .. k_n) + T_target(n + sum_i k_i))

tokens a second on average. It is the objective of SmartSpec (2406.14066) and of DSpark (2607.05147, algorithm 1), with
two differences: the draft costs time as well, in rounds of as many rows as still draft; and every prefix of the
candidates is tried and not only those before the first decrease, as nothing that is looked at here is the present.

Letters: n sequences of a step, K drafted tokens of one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .step_time import Tables


@dataclass(frozen=True)
class Choice:
    """Lengths and what they promise: tokens that a step commits on average, and its seconds."""

    lengths: tuple[int, ...]
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def fastest(survival: Sequence[Sequence[float]], tables: Tables) -> Choice:
    """The lengths that commit most tokens a second, no drafts included.

    Tokens are taken in the order of their chance to be accepted, which gives each sequence a prefix; all counts are
    tried, under every cap on the longest block, as a round of drafting costs time whoever takes part. Where a round's
    cost is a constant and so much a row, no other lengths are faster; else none is by more than the bend.

    Args:
        survival: for each sequence, S(1), S(2), .. up to its limit; never rising.
        tables: what steps of so many sequences cost.
    """
    n = len(survival)
    items = sorted((-s, j, i) for i, row in enumerate(survival) for j, s in enumerate(row))
    best = Choice((0,) * n, float(n), tables.plain)
    if not items:
        return best
    depth = max(j for _, j, _ in items)
    least = min(after - before for before, after in pairwise(tables.verify))
    for cap in range(depth, -1, -1) if n > 1 else (depth,):
        best = max(best, _best_prefix(items, cap, tables, least, best), key=lambda choice: choice.rate)
    return best


def _best_prefix(
    items: Sequence[tuple[float, int, int]], cap: int, tables: Tables, least: float, best: Choice
) -> Choice:
    """The best of taking the first so many items (minus chance, position, sequence) up to a position.

    Stops where even the cheapest row more would bring fewer tokens a second than the best so far: chances only fall.
    """
    n = len(best.lengths)
    rows, counts = [0] * (cap + 1), [0] * n
    tokens, drafting, taken, rate = float(n), 0.0, 0, best.rate
    for minus_chance, j, i in items:
        if j > cap:
            continue
        if -minus_chance < rate * least:
            break
        table = tables.later if j else tables.first
        drafting += table[rows[j] + 1] - table[rows[j]]
        rows[j] += 1
        counts[i] += 1
        taken += 1
        tokens -= minus_chance
        seconds = drafting + tables.verify[taken]
        if tokens > rate * seconds:
            best, rate = Choice(tuple(counts), tokens, seconds), tokens / seconds
    return best
