"""Figures and their intervals."""

import numpy as np
import pytest

from bitdraft.measure.stats import (
    BlockCounts,
    Estimate,
    agreement,
    combine,
    distinct_bigram_ratio,
    median,
    percentiles,
    ratio_of_sums,
    resample,
)
from bitdraft.measure.trace import Score


def test_the_acceptance_meter() -> None:
    """A match behind a rejection counts for nothing (the mistake that most meters make)."""
    blocks = [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]]
    each = [BlockCounts.of_matches([block]) for block in blocks]
    assert [sum(c.accepted) for c in each] == [1, 4, 0, 2]
    assert [sum(c.tested) for c in each] == [2, 4, 1, 3]
    counts = sum(each, BlockCounts(0, (), (), ()))
    assert counts == BlockCounts.of_matches(blocks)
    assert counts.tokens_per_step == 2.75
    assert counts.conditional_acceptance[:3] == (3 / 4, 2 / 3, 1 / 2)
    assert counts.accepted_per_drafted == 7 / 16


def test_blocks_of_different_lengths() -> None:
    counts = BlockCounts.of_blocks([(3, 1), (1, 1), (0, 0), (2, 2)])
    assert (counts.steps, counts.proposed) == (4, (3, 2, 1))
    assert counts.tested == (3, 2, 0)
    assert counts.accepted == (3, 1, 0)
    assert np.isnan(counts.conditional_acceptance[2])
    assert counts.tokens_per_step == 2.0


def test_nothing_drafted_has_no_rate() -> None:
    counts = BlockCounts.of_blocks([(0, 0)])
    assert np.isnan(counts.accepted_per_drafted)
    assert counts.tokens_per_step == 1.0
    assert np.isnan(BlockCounts.of_blocks([]).tokens_per_step)


def test_agreement_by_hand() -> None:
    scores = [
        Score("f", "w", 0, (1.0, 0.5), (1.0, 0.2), (0.9, 0.7), (0.1, 0.3), (0.2, 0.2), (True, False)),
        Score("f", "w", 1, (0.0,), (0.0,), (0.2,), (2.0,), (1.0,), (False,)),
    ]
    found = agreement(scores, resample(2, np.random.default_rng(0), 100))
    assert found.conditional_acceptance.value == pytest.approx(0.5)  # over tokens, not over prompts
    assert found.tv.value == pytest.approx(1 - 1.8 / 3)
    assert found.kl.value == pytest.approx(0.8)
    assert found.kl_median.value == 0.3
    assert found.kl_p99.value == 2.0
    assert found.kl_reverse.value == pytest.approx(1.4 / 3)
    assert found.top1.value == pytest.approx(1 / 3)


def test_one_prompt_has_a_figure_but_no_interval() -> None:
    estimate = ratio_of_sums(np.array([3.0]), np.array([4.0]), resample(1, np.random.default_rng(0), 50))
    assert estimate.value == 0.75
    assert estimate.interval().low is None
    assert estimate.chance_above(0.5) is None


def test_intervals_cover_the_truth() -> None:
    """In 400 repetitions with 40 prompts, the 95% interval of a mean of clustered tokens holds the truth 90-98%."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        lengths = rng.integers(20, 60, 40)
        sums = np.array([np.clip(rng.normal(0.7, 0.1) + rng.normal(0, 0.2, n), None, None).sum() for n in lengths])
        bounds = ratio_of_sums(sums, lengths.astype(float), resample(40, rng, 300)).interval()
        assert bounds.low is not None
        assert bounds.high is not None
        hits += bounds.low <= 0.7 <= bounds.high
    assert 0.90 <= hits / 400 <= 0.98


def test_tokens_of_a_text_are_not_independent() -> None:
    """Resampling prompts sees the spread between prompts, which resampling tokens would miss."""
    rng = np.random.default_rng(1)
    lengths = np.full(30, 100.0)
    between = ratio_of_sums(100 * rng.choice([0.5, 0.9], 30), lengths, resample(30, rng, 500)).interval()
    assert between.low is not None
    assert between.high is not None
    assert between.high - between.low > 0.1  # tokens alone, 3000 of them, would say 0.02


def test_pairing_takes_out_the_difference_between_prompts() -> None:
    rng = np.random.default_rng(2)
    hard = rng.uniform(0.3, 1.0, 30)
    weights, lengths = resample(30, rng, 500), np.ones(30)
    base, lower = ratio_of_sums(hard, lengths, weights), ratio_of_sums(0.98 * hard, lengths, weights)
    share = combine(lambda a, b: a / b, lower, base).interval()
    alone = base.interval()
    assert share.low is not None
    assert share.high is not None
    assert alone.low is not None
    assert alone.high is not None
    assert share.high - share.low < 1e-9
    assert alone.high - alone.low > 0.1


def test_percentiles_and_median_agree_with_numpy() -> None:
    rng = np.random.default_rng(3)
    values = [rng.exponential(size=n).tolist() for n in (5, 12, 1, 30)]
    weights = resample(4, rng, 20)
    half, high = percentiles(values, (0.5, 0.99), weights)
    flat = np.concatenate(values)
    assert half.value == np.quantile(flat, 0.5, method="inverted_cdf")
    assert high.value == np.quantile(flat, 0.99, method="inverted_cdf")
    owner = np.repeat(np.arange(4), [5, 12, 1, 30])
    middle = median(flat, owner, weights)
    assert middle.value == pytest.approx(np.median(flat))
    for row, a, b in zip(weights, half.samples, middle.samples, strict=True):
        drawn = np.repeat(flat, row[owner].astype(int))
        assert a == np.quantile(drawn, 0.5, method="inverted_cdf")
        assert b == pytest.approx(np.median(drawn))


def test_distinct_bigrams() -> None:
    assert distinct_bigram_ratio([1, 2] * 30) == 2 / 59
    assert distinct_bigram_ratio(range(50)) == 1.0
    assert distinct_bigram_ratio([7]) == 1.0


def test_chance_above() -> None:
    estimate = Estimate(1.0, np.array([0.5, 1.5, 2.0, np.nan]))
    assert estimate.chance_above(1.0) == pytest.approx(2 / 3)
