"""The greedy on convex hulls against the exact answer by dynamic programming."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.errors import UsageError
from bitdraft.quantize.knapsack import Option, choose, hull, states, steps

OPTIONS = st.lists(st.tuples(st.integers(1, 12), st.floats(0, 10)), min_size=1, max_size=6)
ITEMS = st.lists(OPTIONS, min_size=1, max_size=6)


def named(items):
    return {str(i): [Option(str(j), cost, loss) for j, (cost, loss) in enumerate(its)] for i, its in enumerate(items)}


def exact(items, budget):
    """Least loss for every integer cost up to the budget, item by item."""
    best = [0.0] + [math.inf] * budget
    for its in items.values():
        best = [
            min((best[c - int(o.cost)] + o.loss for o in its if o.cost <= c), default=math.inf)
            for c in range(budget + 1)
        ]
    return min(best)


@given(ITEMS, st.integers(1, 60))
def test_greedy_is_within_one_step_of_the_optimum(items, budget):
    items = named(items)
    best = exact(items, budget)
    if best == math.inf:
        with pytest.raises(UsageError, match="smallest choice costs"):
            choose(items, budget)
        return
    chosen = choose(items, budget)
    assert sum(o.cost for o in chosen.values()) <= budget
    loss = sum(o.loss for o in chosen.values())
    one_step = max((s.before.loss - s.after.loss for s in steps(items)), default=0.0)
    # Sums of a few numbers up to 10 in another order: 1e-9 is far above their rounding.
    assert best - 1e-9 <= loss <= best + one_step + 1e-9


@given(ITEMS)
def test_every_state_without_a_skipped_step_is_optimal_for_its_cost(items):
    items = named(items)
    for state in states(items, 1000):
        cost = int(sum(o.cost for o in state.values()))
        assert sum(o.loss for o in state.values()) <= exact(items, cost) + 1e-9


@given(OPTIONS)
def test_hull_falls_ever_less_steeply_and_lies_under_all_options(options):
    options = named([options])["0"]
    corners = hull(options)
    slopes = [(b.loss - a.loss) / (b.cost - a.cost) for a, b in pairwise(corners)]
    assert all(slope < 0 for slope in slopes)
    assert all(a <= b + 1e-9 for a, b in pairwise(slopes))
    for low, high in pairwise(corners):
        for o in options:
            if low.cost <= o.cost <= high.cost:
                line = low.loss + (high.loss - low.loss) * (o.cost - low.cost) / (high.cost - low.cost)
                assert o.loss >= line - 1e-9
    assert corners[-1].loss == min(o.loss for o in options)
