"""Random streams: named, not advanced."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from bitdraft.decoding.protocols import Purpose
from bitdraft.decoding.streams import Streams, counter, token_at

FINE = torch.full((2**16,), 2.0**-16)
"""A draw from this reads the first 16 bits of a uniform number."""


def test_the_numbers_are_philox() -> None:
    """Key (seed, request), counter (position, purpose, start, 0), as numpy makes them: the same on every machine."""
    bits = np.random.Philox(key=np.array([2**64 - 1, 5], np.uint64), counter=np.array([9, 1, 7, 0], np.uint64))
    expected = int(np.random.Generator(bits).random() * 2**16)
    assert Streams(2**64 - 1, 5).draw(FINE, 7, 9, Purpose.DRAFT) == expected


def test_the_numbers_stay_what_they_are() -> None:
    """Recorded outputs stay reproducible: a change of these is a change of every seeded output."""
    streams = Streams(1234, 0)
    assert [streams.draw(FINE, 3, 5, purpose) for purpose in Purpose] == [4713, 21813, 38387]


def test_the_order_of_calls_does_not_matter() -> None:
    names = list(product(range(3), range(5), Purpose))
    forward, backward = Streams(3, 4), Streams(3, 4)
    first = {name: forward.draw(FINE, *name) for name in names}
    second = {name: backward.draw(FINE, *name) for name in reversed(names)}
    fresh = {name: Streams(3, 4).draw(FINE, *name) for name in names}
    assert first == second == fresh


def test_every_part_of_the_name_makes_another_stream() -> None:
    numbers = Counter(
        Streams(seed, request).draw(FINE, start, position, purpose)
        for seed, request, start, position, purpose in product((0, 1), (0, 1), (0, 1), (2, 3), Purpose)
    )
    assert max(numbers.values()) == 1


def test_counters_of_different_decisions_differ() -> None:
    names = list(product(range(6), range(6), Purpose))
    assert len({counter(*name) for name in names}) == len(names)


def test_coins_at_the_ends() -> None:
    streams = Streams(0, 0)
    assert all(streams.coin(1.0, 0, i) and not streams.coin(0.0, 0, i) for i in range(1000))


def test_a_coin_is_the_number_of_its_own_purpose() -> None:
    streams = Streams(5, 6)
    uniform = streams.draw(FINE, 1, 2, Purpose.ACCEPT) / 2**16
    assert streams.coin(uniform + 2**-16, 1, 2)
    assert not streams.coin(uniform, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uniform", [0.0, 2**-53, 0.25 - 2**-54, 0.25, 0.5, 0.75, 1 - 2**-53])
def test_impossible_tokens_are_never_drawn(uniform: float, dtype: torch.dtype) -> None:
    probs = torch.tensor([0, 0.25, 0, 0, 0.5, 0.25, 0], dtype=dtype)
    token = token_at(probs, uniform)
    assert token == (1 if uniform < 0.25 else 4 if uniform < 0.75 else 5)


@pytest.mark.parametrize("scale", [1.0, 1 - 1e-7, 1 + 1e-7, 1 + 2**-52, 3.0])
def test_a_sum_that_rounding_moved_from_one_is_no_hole(scale: float) -> None:
    probs = torch.tensor([0.5, 0.0, 0.5, 0.0], dtype=torch.float64) * scale
    assert token_at(probs, 1 - 2**-53) == 2
    assert token_at(probs, 0.5 + 2**-40) == 2
    assert token_at(probs, 0.5 - 2**-40) == 0


def test_a_large_vocabulary_of_float32() -> None:
    """Most entries are zero and none of them comes out; the sum in float64 keeps the small ones apart."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(150_000, generator=generator) * (torch.rand(150_000, generator=generator) < 0.01)
    probs /= probs.sum()
    drawn = [token_at(probs, uniform) for uniform in torch.linspace(0, 1 - 1e-9, 300, dtype=torch.float64).tolist()]
    assert (probs[drawn] > 0).all()
    assert len(set(drawn)) > 250


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


def test_draws_have_their_distribution() -> None:
    """Chi-square over 200 000 draws, 9 degrees of freedom: above 33.7 once in 10 000 times, and the seed is fixed."""
    probs = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01], dtype=torch.float64)
    streams, draws = Streams(11, 0), 200_000
    counts = Counter(streams.draw(probs, i // 7, i, Purpose.NEXT) for i in range(draws))
    assert chi_square([counts[v] for v in range(10)], (probs * draws).tolist()) < 33.7


NEIGHBOURS: dict[
    str, Callable[[int], tuple[tuple[int, int, int, int, Purpose], tuple[int, int, int, int, Purpose]]]
] = {
    "purpose": lambda i: ((0, 0, i, i, Purpose.DRAFT), (0, 0, i, i, Purpose.ACCEPT)),
    "recovery": lambda i: ((0, 0, i, i, Purpose.DRAFT), (0, 0, i, i, Purpose.NEXT)),
    "block": lambda i: ((0, 0, i, i + 2, Purpose.DRAFT), (0, 0, i + 1, i + 2, Purpose.DRAFT)),
    "position": lambda i: ((0, 0, 0, 2 * i, Purpose.DRAFT), (0, 0, 0, 2 * i + 1, Purpose.DRAFT)),
    "request": lambda i: ((0, 2 * i, 0, 0, Purpose.NEXT), (0, 2 * i + 1, 0, 0, Purpose.NEXT)),
    "seed": lambda i: ((2 * i, 0, 0, 0, Purpose.NEXT), (2 * i + 1, 0, 0, 0, Purpose.NEXT)),
}


@pytest.mark.parametrize("difference", NEIGHBOURS)
def test_neighbouring_streams_are_independent(difference: str) -> None:
    """Chi-square of pairs in 16 cells, 15 degrees of freedom: above 44.3 once in 10 000 times, and seeds are fixed."""
    quarters, pairs = torch.full((4,), 0.25), 4000
    counts: Counter[tuple[int, ...]] = Counter()
    for i in range(pairs):
        counts[tuple(Streams(s, r).draw(quarters, b, p, u) for s, r, b, p, u in NEIGHBOURS[difference](i))] += 1
    assert chi_square([counts[cell] for cell in product(range(4), repeat=2)], [pairs / 16] * 16) < 44.3
