"""What holds for every text, every count and every figure."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.measure.predict import StepCost, Texts, break_even_acceptance, expected_tokens, loss
from bitdraft.measure.report.svg import spread_out, ticks
from bitdraft.measure.stats import BlockCounts, Estimate, percentiles, resample

chance = st.floats(0, 1)
ratios = st.lists(chance, min_size=1, max_size=7)


def runs(ratio: list[float], k: int) -> list[tuple[float, list[tuple[int, int]]]]:
    """Every way a run along a text can go: its probability, and (start, accepted) of each block."""
    found = [(1.0, [], 0)]
    done = []
    while found:
        share, blocks, at = found.pop()
        if at >= len(ratio):
            done.append((share, blocks))
            continue
        reached = share
        for accepted in range(k + 1):
            last = accepted == k or at + accepted >= len(ratio)
            here = reached if last else reached * (1 - ratio[at + accepted])
            found.append((here, [*blocks, (at, accepted)], at + accepted + 1))
            if last:
                break
            reached *= ratio[at + accepted]
    return done


@settings(max_examples=60, deadline=None)
@given(ratio=ratios, k=st.integers(1, 4))
def test_following_the_chances_is_enumerating_the_coins(ratio: list[float], k: int) -> None:
    texts, length = Texts.of([ratio], [ratio]), len(ratio)
    every = runs(ratio, k)
    assert sum(share for share, _ in every) == pytest.approx(1)
    for start in range(length):
        wanted = sum(share for share, blocks in every if any(s == start for s, _ in blocks))
        assert texts.block_starts(k)[0, start] == pytest.approx(wanted, abs=1e-12)
    tokens, blocks = texts.block_sums(k)
    whole = [(share, [a for s, a in found if s + k < length]) for share, found in every]
    assert blocks[0] == pytest.approx(sum(share * len(found) for share, found in whole), abs=1e-12)
    assert tokens[0] == pytest.approx(sum(share * sum(a + 1 for a in found) for share, found in whole), abs=1e-12)
    behind, steps = texts.run_sums(k)
    assert steps[0] == pytest.approx(sum(share * (len(found) - 1) for share, found in every), abs=1e-12)
    first = sum(share * min(found[0][1] + 1, length) for share, found in every)
    assert behind[0] == pytest.approx(length - first, abs=1e-9)
    _, tested = texts.hazard_sums(k)
    for j in range(k):
        reached = sum(share * sum(a >= j and s + j < length for s, a in found) for share, found in every)
        assert tested[0, j] == pytest.approx(reached, abs=1e-12)


@given(ratio=st.lists(chance, min_size=2, max_size=30), more=st.integers(0, 5))
def test_padding_changes_nothing(ratio: list[float], more: int) -> None:
    alone = Texts.of([ratio], [ratio])
    beside = Texts.of([ratio, [0.5] * (len(ratio) + more)], [ratio, [0.5] * (len(ratio) + more)])
    for sums in ("block_sums", "run_sums", "hazard_sums"):
        for a, b in zip(getattr(alone, sums)(2), getattr(beside, sums)(2), strict=True):
            assert np.allclose(a[0], b[0], atol=1e-12)


@given(ratio=st.lists(chance, min_size=6, max_size=30), k=st.integers(1, 4))
def test_a_better_draft_never_emits_less(ratio: list[float], k: int) -> None:
    """Every draft accepted is the most, none the least."""
    tokens, blocks = Texts.of([ratio], [ratio]).block_sums(k)
    assert blocks[0] * (1 - 1e-9) <= tokens[0] <= blocks[0] * (k + 1) * (1 + 1e-9)


@given(blocks=st.lists(st.lists(st.booleans(), max_size=6), max_size=12), cut=st.integers(0, 12))
def test_counts_add_up(blocks: list[list[bool]], cut: int) -> None:
    whole = BlockCounts.of_matches(blocks)
    assert BlockCounts.of_matches(blocks[:cut]) + BlockCounts.of_matches(blocks[cut:]) == whole
    assert all(p >= t >= a for p, t, a in zip(whole.proposed, whole.tested, whole.accepted, strict=True))
    assert sum(whole.accepted) == sum(len(list(itertools.takewhile(bool, block))) for block in blocks)
    assert whole.tested[1:] == tuple(
        sum(len(b) > j and all(b[:j]) for b in blocks) for j in range(1, len(whole.tested))
    )


@given(tokens=st.floats(1, 9), k=st.integers(1, 8))
def test_break_even_is_where_the_closed_form_says(tokens: float, k: int) -> None:
    alpha = break_even_acceptance(tokens, k)
    if tokens > k + 1:
        assert np.isnan(alpha)
    else:
        assert expected_tokens([alpha] * k) == pytest.approx(tokens, rel=1e-6)


@given(
    share=st.floats(0.01, 0.999),
    k=st.integers(1, 8),
    parts=st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0, 5)),
)
def test_losses_add_up_to_the_whole(share: float, k: int, parts: tuple[float, float, float]) -> None:
    draft, extra, overhead = (Estimate(v, np.full(1, v)) for v in parts)
    plain, verify = Estimate(10.0, np.full(1, 10.0)), Estimate(10.0 + extra.value, np.full(1, 10.0 + extra.value))
    tokens = 1 + share * k
    cost = StepCost(plain, draft, verify, overhead)
    found = loss(tokens, k, cost)
    speedup = cost.speedup(Estimate(tokens, np.full(1, tokens))).value
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert min(found.shares.values()) >= -1e-12
    assert all(without >= speedup * (1 - 1e-9) for without in found.without.values())


@given(
    values=st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=8), min_size=2, max_size=6),
    low=st.floats(0.01, 0.99),
    high=st.floats(0.01, 0.99),
)
def test_percentiles_are_ordered_and_among_the_values(values: list[list[float]], low: float, high: float) -> None:
    low, high = sorted((low, high))
    weights = resample(len(values), np.random.default_rng(0), 10)
    a, b = percentiles(values, (low, high), weights)
    flat = {v for row in values for v in row}
    assert a.value <= b.value
    assert np.all(a.samples <= b.samples)
    assert {a.value, b.value, *a.samples.tolist()} <= flat


@given(values=st.lists(st.floats(-5, 5), min_size=2, max_size=50))
def test_an_interval_is_ordered(values: list[float]) -> None:
    bounds = Estimate(0.0, np.array(values)).interval()
    assert bounds.low is not None
    assert bounds.high is not None
    assert min(values) <= bounds.low <= bounds.high <= max(values)


@given(wanted=st.lists(st.floats(0, 200), min_size=1, max_size=8))
def test_labels_keep_apart_and_stay_inside(wanted: list[float]) -> None:
    placed = spread_out(wanted, 15, 0, 250)
    assert all(-1e-6 <= at <= 250 + 1e-6 for at in placed)
    order = sorted(placed)
    assert all(b - a >= 15 - 1e-6 for a, b in itertools.pairwise(order))


@given(low=st.floats(-1e3, 1e3), spread=st.floats(1e-3, 1e3))
def test_ticks_cover_what_they_must(low: float, spread: float) -> None:
    marks = ticks(low, low + spread)
    assert marks[0] <= low + 1e-6 * spread
    assert marks[-1] >= low + spread * (1 - 1e-6)
    assert 2 <= len(marks) <= 9
