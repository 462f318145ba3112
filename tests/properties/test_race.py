"""Coupled draws: their law by identities and by enumeration, and how often two of them agree."""

from collections import Counter
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from enumeration import both_win
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.decoding import race
from bitdraft.decoding.streams import Streams

Array = npt.NDArray[np.float64]


def given_numbers(numbers: Array) -> race.Uniforms:
    return lambda ids_N: numbers[ids_N]


def definition(probs: Array, numbers: Array) -> float:
    """The time at which the first clock rings, by the words of the definition."""
    return min(-np.log1p(-u) / p for p, u in zip(probs, numbers, strict=True) if p > 0)


weights = st.lists(st.integers(0, 50), min_size=2, max_size=9).filter(lambda values: sum(values) > 0)


@settings(max_examples=200)
@given(weights, st.integers(0, 2**32), st.integers(1, 9))
def test_the_first_clock_wins_whatever_is_looked_at_together(values: list[int], seed: int, piece: int) -> None:
    """The short cut without logarithms and the pieces change nothing; impossible tokens never win."""
    numbers = np.random.default_rng(seed).random(len(values)) ** 3 + 2.0**-60
    probs = np.array(values) / sum(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race, "_PIECE", piece)
        won = race.winner(torch.from_numpy(probs), given_numbers(numbers))
    assert probs[won] > 0
    # A time that is equal but for the last bits of a logarithm is as good.
    assert -np.log1p(-numbers[won]) / probs[won] == pytest.approx(definition(probs, numbers), rel=1e-14)


def wins_below(probs: Array, numbers: Array, token: int) -> float:
    """Below which number of its own `token` wins, all other numbers given; found by halving, from the code itself."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        numbers[token] = middle
        low, high = (
            (middle, high) if race.winner(torch.from_numpy(probs), given_numbers(numbers)) == token else (low, middle)
        )
    return low


@settings(max_examples=60)
@given(weights, st.integers(0, 2**32))
def test_a_token_wins_on_the_interval_that_its_law_needs(values: list[int], seed: int) -> None:
    """Given that the others ring first at m, v wins with chance 1 - exp(-p_v m). As m is exponential with the rate of
    the others' sum 1 - p_v, the mean of that over m is p_v: the law of the draw."""
    numbers, probs = np.random.default_rng(seed).random(len(values)), np.array(values) / sum(values)
    token = int(probs.argmax())
    others = np.where(np.arange(len(probs)) == token, 0.0, probs)
    if not others.any():
        return
    m = definition(others, numbers)
    assert wins_below(probs, numbers, token) == pytest.approx(-np.expm1(-probs[token] * m), abs=1e-14)


@pytest.mark.parametrize("first", [0.7, 0.3, 0.04])
def test_the_law_of_two_tokens_summed_over_all_noise(first: float) -> None:
    """The other's time is integrated out by Gauss-Laguerre quadrature, the token's own number by halving. The integrand
    is a sum of exponentials no faster than 25 to 1, for which 150 nodes leave less than 1e-12."""
    nodes, shares = np.polynomial.laguerre.laggauss(150)
    probs = np.array([first, 1 - first])
    slow = int(probs.argmin())
    chance = 0.0
    for time, share in zip(nodes, shares, strict=True):
        if share > 1e-17:  # what the tail leaves out is less than its sum
            numbers = np.full(2, -np.expm1(-time))
            numbers[1 - slow] = min(numbers[1 - slow], 1 - 2.0**-53)
            chance += share * wins_below(probs, numbers, slow)
    assert chance == pytest.approx(probs[slow], abs=1e-12)


def test_the_numbers_are_splitmix64_entered_at_the_id() -> None:
    """The first outputs from the seed 0, which other implementations print as well."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert race.uniforms(0, np.arange(1, 4)).tolist() == [(x + 0.5) / 2**64 for x in published]


def test_a_number_depends_on_nothing_but_key_and_id() -> None:
    ids = np.array([0, 3, 7, 150_000])
    whole = race.uniforms(2**64 - 1, np.arange(150_001))
    assert race.uniforms(2**64 - 1, ids).tolist() == whole[ids].tolist()
    assert whole.min() > 0
    assert whole.max() < 1
    sparse = torch.zeros(150_001).index_fill(0, torch.from_numpy(ids), 0.25)
    dense = (sparse + 1e-12).double()
    positions = range(20)
    assert [Streams(1, 0).coupled_draw(sparse, i) for i in positions] == [
        Streams(1, 0).coupled_draw(dense, i) for i in positions
    ], "tokens that hardly ever win change nothing"


@pytest.mark.parametrize("vocab_size", [3, 40_000])
def test_draws_at_many_positions_follow_the_distribution(vocab_size: int) -> None:
    """Chi-square over 3000 positions with five classes of tokens, and over pairs of neighbours with nine."""
    runs = 3000
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, vocab_size))
    probs = torch.softmax(logits, 0)
    classes = np.arange(vocab_size) % 5
    streams = Streams(7, 0)
    drawn = [int(classes[streams.coupled_draw(probs, i)]) for i in range(runs)]
    expected = {c: float(probs[torch.from_numpy(classes == c)].sum()) for c in set(classes.tolist())}
    counts = Counter(drawn)
    statistic = sum((counts[c] - runs * e) ** 2 / (runs * e) for c, e in expected.items())
    assert statistic < 23.5  # 1 in 10 000 at 4 degrees of freedom, rarer at 2
    pairs = Counter((min(a, 2), min(b, 2)) for a, b in zip(drawn[::2], drawn[1::2], strict=True))
    merged = Counter()
    for c, e in expected.items():
        merged[min(c, 2)] += e  # type: ignore[assignment]
    means = {(a, b): runs / 2 * merged[a] * merged[b] for a in merged for b in merged}
    assert sum((pairs[k] - m) ** 2 / m for k, m in means.items()) < 31.8  # 8 degrees of freedom


@settings(max_examples=200)
@given(st.integers(2, 7), st.integers(0, 2**32))
def test_agreement_lies_between_its_bounds(size: int, seed: int) -> None:
    """The closed form that the enumerator uses: its margins are p and q, its diagonal obeys the published bounds."""
    rng = np.random.default_rng(seed)
    p, q = (rng.random(size) ** 3 * (rng.random(size) > 0.3) + 1e-3 * (np.arange(size) == 0) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    joint = np.array([[both_win(p.tolist(), q.tolist(), i, j) for j in range(size)] for i in range(size)])
    assert joint.sum(1) == pytest.approx(p, abs=1e-13)
    assert joint.sum(0) == pytest.approx(q, abs=1e-13)
    distance = abs(p - q).sum() / 2
    assert (1 - distance) / (1 + distance) - 1e-13 <= joint.trace() <= 1 - distance + 1e-13


def test_real_draws_agree_as_often_as_the_closed_form_says() -> None:
    """4000 positions for each pair of four distributions: within four standard errors, 1 in 16 000 each."""
    rng, runs, streams = np.random.default_rng(3), 4000, Streams(5, 0)
    laws = [rng.dirichlet(np.full(5, 0.7)) for _ in range(4)]
    drawn = [[streams.coupled_draw(torch.from_numpy(law), i) for i in range(runs)] for law in laws]
    for a, b in combinations(range(4), 2):
        chance = sum(both_win(laws[a].tolist(), laws[b].tolist(), v, v) for v in range(5))
        agreed = sum(x == y for x, y in zip(drawn[a], drawn[b], strict=True)) / runs
        assert abs(agreed - chance) < 4 * (chance * (1 - chance) / runs) ** 0.5
