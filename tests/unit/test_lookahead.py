"""Draft length policies."""

import pytest

from bitdraft.decoding.lookahead import Confidence, Fixed
from bitdraft.errors import UsageError


def test_a_fixed_block_ends_at_its_length_only() -> None:
    assert [Fixed(3).stop_after(drafted, 0.0, 0.0) for drafted in (1, 2, 3)] == [False, False, True]
    assert Fixed(3).limit == 3


@pytest.mark.parametrize(
    ("statistic", "chosen", "top", "stops"),
    [
        ("chosen", 0.39, 0.9, True),
        ("chosen", 0.4, 0.4, False),
        ("chosen", 0.41, 0.9, False),
        ("top", 0.1, 0.39, True),
        ("top", 0.1, 0.4, False),
    ],
)
def test_confidence_ends_a_block_below_its_threshold(statistic: str, chosen: float, top: float, stops: bool) -> None:
    policy = Confidence(8, 0.4, statistic)  # type: ignore[arg-type]
    assert policy.stop_after(1, chosen, top) is stops
    assert policy.stop_after(8, 1.0, 1.0)


def test_thresholds_at_the_ends() -> None:
    assert not Confidence(8, 0.0).stop_after(1, 0.0, 0.0)
    assert Confidence(8, 1.0).stop_after(1, 0.999, 1.0)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_block_has_at_least_one_token(limit: int) -> None:
    for make in (Fixed, lambda n: Confidence(n, 0.5)):
        with pytest.raises(UsageError, match="Expected at least 1"):
            make(limit)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_probability(threshold: float) -> None:
    with pytest.raises(UsageError, match="from 0 to 1"):
        Confidence(2, threshold)


def test_an_unknown_statistic_is_refused() -> None:
    with pytest.raises(UsageError, match="'chosen' or 'top'"):
        Confidence(2, 0.5, "entropy")  # type: ignore[arg-type]
