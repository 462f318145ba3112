"""The rules of verification, by hand and at the edges. That they are lossless is proved in tests/properties."""

from itertools import product

import pytest
import torch

from bitdraft.decoding.protocols import DraftRow, Purpose
from bitdraft.decoding.sampling import History, PointMasses
from bitdraft.decoding.streams import Streams
from bitdraft.decoding.verify import (
    acceptance_chances,
    accepted_count,
    next_distribution,
    overlap,
    residual,
    rule_for,
    verify,
)
from bitdraft.errors import ShapeError, UsageError
from bitdraft.types import Proposal, SamplingParams


def of(*rows: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype)


class Recorder:
    """A `Randomness` with given coins that writes down what it was asked; draws take the likeliest token."""

    def __init__(self, *coins: bool) -> None:
        self.coins = coins
        self.asked: list[tuple[str, int, int]] = []
        self.chances: list[float] = []

    def coin(self, chance: float, start: int, position: int) -> bool:
        self.asked.append(("coin", start, position))
        self.chances.append(chance)
        return self.coins[position - start]

    def draw(self, probs: torch.Tensor, start: int, position: int, purpose: Purpose) -> int:
        self.asked.append((purpose.name, start, position))
        return int(probs.argmax())


def row_of(randomness: object, start: int = 0, request: int = 0) -> DraftRow:
    return DraftRow(
        request=request,
        tokens=[0] * (2 + start),
        prompt_length=2,
        budget=8,
        sampling=SamplingParams(),
        history=History.after_prompt((0,)),
        randomness=randomness,  # type: ignore[arg-type]
    )


P = of([0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6])
Q = of([0.25, 0.25, 0.5], [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("rule", "length", "point_mass", "used"),
    [
        ("token", 3, False, "token"),
        ("block", 3, False, "block"),
        ("block", 2, False, "block"),
        ("block", 1, False, "token"),
        ("block", 0, False, "token"),
        ("block", 3, True, "token"),
    ],
)
def test_the_rule_that_is_used(rule: str, length: int, point_mass: bool, used: str) -> None:
    assert rule_for(rule, length, point_mass) == used  # type: ignore[arg-type]


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'typical'. Expected 'token' or 'block'"):
        rule_for("typical", 2, False)  # type: ignore[arg-type]


def test_token_chances_are_capped_ratios() -> None:
    assert acceptance_chances("token", [2, 0], P, Q).tolist() == pytest.approx([0.4, 0.2])
    assert acceptance_chances("token", [0, 1], P, Q).tolist() == [1, 1]
    assert acceptance_chances("token", [2, 1], P, None).tolist() == [0.2, 0.6]


def test_block_chances_by_hand() -> None:
    """Draft 2, 1: p_1 = 0.4, p_2 = 0.4 * 2 = 0.8; Z_1 = (0.24 - 0.3)+ + (0.04 - 0.5)+ + (0.12 - 0.2)+ = 0."""
    assert acceptance_chances("block", [2, 1], P, Q).tolist() == pytest.approx([0, 0.8])


def test_block_chances_with_something_left() -> None:
    """Draft 1, 0: p_1 = 1, p_2 = 0.2; Z_1 = 0.3 + 0.1 = 0.4, so h_1 = 0.4 / (0.4 + 0) = 1."""
    assert acceptance_chances("block", [1, 0], P, Q).tolist() == pytest.approx([1, 0.2])


def test_block_chance_is_one_where_nothing_can_be_left() -> None:
    """p_1 = 1 and equal distributions behind it: 0 / 0 in the formula, 1 by its definition."""
    assert acceptance_chances("block", [0, 1], P, torch.stack([Q[0], P[1]])).tolist() == [1, 1]


def test_block_chances_are_never_more_than_one() -> None:
    """Weights a rounding below 1: the order of the sum decides whether the quotient stays a probability."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        p = torch.softmax(torch.randn(4, 5, generator=generator, dtype=torch.float64), 1)
        q = torch.softmax(p[:3].log() + 1e-15 * torch.randn(3, 5, generator=generator, dtype=torch.float64), 1)
        chances = acceptance_chances("block", [0, 1, 2], p, q)
        assert ((chances >= 0) & (chances <= 1)).all()


@pytest.mark.parametrize(
    ("coins", "token", "block"),
    [
        ([True, True, True], 3, 3),
        ([False, True, True], 0, 3),
        ([True, False, True], 1, 3),
        ([True, True, False], 2, 2),
        ([False, True, False], 0, 2),
        ([False, False, False], 0, 0),
        ([], 0, 0),
    ],
)
def test_how_many_tokens_stand(coins: list[bool], token: int, block: int) -> None:
    assert accepted_count("token", len(coins), coins.__getitem__) == token
    assert accepted_count("block", len(coins), coins.__getitem__) == block


def test_only_coins_that_decide_are_thrown() -> None:
    for rule, expected in (("token", [0, 1]), ("block", [2])):
        asked: list[int] = []

        def coin(i: int, asked: list[int] = asked) -> bool:
            asked.append(i)
            return i != 1

        accepted_count(rule, 3, coin)  # type: ignore[arg-type]
        assert asked == expected


def test_the_next_token_by_hand() -> None:
    tokens = [2, 1]
    assert next_distribution("token", 2, tokens, P, Q).tolist() == P[2].tolist()
    assert next_distribution("token", 0, tokens, P, Q).tolist() == pytest.approx([0.25 / 0.3, 0.05 / 0.3, 0])
    assert next_distribution("token", 1, tokens, P, Q).tolist() == pytest.approx([0, 0.75, 0.25])
    assert next_distribution("token", 1, tokens, P, None).tolist() == pytest.approx([0.25, 0, 0.75])
    assert next_distribution("block", 0, tokens, P, Q).tolist() == pytest.approx([0.25 / 0.3, 0.05 / 0.3, 0])
    q = of([0.25, 0.25, 0.5], [0.02, 0.9, 0.08])
    weighted = next_distribution("block", 1, [2, 1], P, q).tolist()
    assert weighted == pytest.approx([1 / 3, 0, 2 / 3])  # 0.4 * 0.1 - 0.02 = 0.02 and 0.4 * 0.3 - 0.08 = 0.04


def test_overlap_is_the_shared_mass() -> None:
    assert overlap(P[0], Q[0]) == pytest.approx(0.7)
    assert overlap(P[0], P[0]) == pytest.approx(1)
    assert overlap(of([1.0, 0.0])[0], of([0.0, 1.0])[0]) == 0


def test_an_empty_residual_is_p() -> None:
    assert residual(P[0], P[0]).tolist() == P[0].tolist()
    assert residual(P[0], of([1.0, 1.0, 1.0])[0]).tolist() == P[0].tolist()


def test_a_residual_has_nothing_that_p_has_not() -> None:
    p, q = of([0.0, 0.4, 0.6])[0], of([0.5, 0.5, 0.0])[0]
    assert residual(p, q).tolist() == [0, 0, 1]


def test_a_token_without_probability_in_q_is_rejected() -> None:
    """An honest drafter cannot draw it; dividing by 0 would accept it always."""
    assert acceptance_chances("token", [0], P[:2], of([0.0, 0.5, 0.5])).tolist() == [0]


def test_float32_ratios_keep_what_float16_loses() -> None:
    p, q = of([1e-9, 1.0], [1e-9, 1.0], dtype=torch.float32), of([1e-8, 1.0], dtype=torch.float32)
    assert acceptance_chances("token", [0], p, q).tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("rule", ["token", "block"])
def test_greedy_accepts_the_common_prefix(rule: str) -> None:
    """Temperature 0 is the same code: one-hot distributions, and no coin that could fall either way."""
    eye = torch.eye(4)
    said, drafted = [1, 2, 3, 0, 2], [1, 2, 0, 0]
    verdict = verify(
        Proposal((tuple(drafted),), eye[drafted][None]),
        [eye[said]],
        [row_of(Streams(0, 0))],
        rule,  # type: ignore[arg-type]
    )
    assert (verdict.accepted[0], verdict.next_token[0]) == (2, 3)
    assert verdict.overlap == ((1, 1, 0),)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("soft", [False, True])
def test_a_certain_target_is_verified_as_its_one_hot_distributions_are(rule: str, soft: bool) -> None:
    """Every draft of three tokens against every target of four, for point masses and for drafts that were drawn."""
    eye = torch.eye(3, dtype=torch.float64)
    q = of([0.5, 0.3, 0.2], [0.0, 0.6, 0.4], [0.1, 0.0, 0.9])
    for drafted, said in product(product(range(3), repeat=3), product(range(3), repeat=4)):
        proposal = Proposal((drafted,), q[None] if soft else None)
        certain, shown = (
            verify(proposal, [p], [row_of(Streams(0, 0))], rule)  # type: ignore[arg-type]
            for p in (PointMasses(said, 3), eye[list(said)])
        )
        assert (certain.accepted, certain.next_token) == (shown.accepted, shown.next_token)
        assert certain.overlap[0] == pytest.approx(shown.overlap[0])


def test_rows_of_a_batch_are_verified_each_by_itself() -> None:
    """Different lengths, nothing drafted at all, and starts of their own in the names of decisions."""
    randomness = [Recorder(True, False), Recorder(), Recorder(False)]
    rows = [row_of(r, start, request) for request, (r, start) in enumerate(zip(randomness, (0, 5, 9), strict=True))]
    probs = torch.stack([Q, torch.zeros(2, 3, dtype=torch.float64), Q])
    verdict = verify(Proposal(((2, 1), (), (0,)), probs), [P, P[:1], P[:2]], rows, "token")
    assert verdict.accepted == (1, 0, 0)
    assert verdict.next_token == (1, 0, 0)
    assert randomness[0].asked == [("coin", 0, 0), ("coin", 0, 1), ("NEXT", 0, 1)]
    assert randomness[1].asked == [("NEXT", 5, 5)]
    assert randomness[2].asked == [("coin", 9, 9), ("NEXT", 9, 9)]
    assert verdict.overlap[0] == pytest.approx((0.7, 0.6))
    assert [len(reached) for reached in verdict.overlap] == [2, 0, 1]


def test_the_block_rule_asks_from_the_end_and_reaches_one_further() -> None:
    randomness = Recorder(True, False)
    verdict = verify(Proposal(((1, 0),), Q[None]), [P], [row_of(randomness)], "block")
    assert randomness.asked == [("coin", 0, 1), ("coin", 0, 0), ("NEXT", 0, 1)]
    assert randomness.chances == pytest.approx([0.2, 1])
    assert verdict.accepted == (1,)
    assert verdict.overlap[0] == pytest.approx((0.7, 0.6))


def test_point_masses_overlap_by_their_own_probability() -> None:
    verdict = verify(Proposal(((2, 1),)), [P], [row_of(Recorder(True, True))], "block")
    assert verdict.overlap == ((0.2, 0.6),)
    assert (verdict.accepted[0], verdict.next_token[0]) == (2, 2)


def test_no_rows() -> None:
    verdict = verify(Proposal(()), [], [], "block")
    assert verdict.accepted == verdict.next_token == verdict.overlap == ()


@pytest.mark.parametrize(
    ("tokens", "target", "draft", "says"),
    [
        ([2, 1], P[:2], Q, r"\[2, 3\] for 2 drafted tokens. Expected \[K\+1, V\]"),
        ([2, 1], P, Q[:, :2], "pad the draft's with zeros"),
        ([2, 3], P, Q, "ids from 0 to 2"),
        ([-1, 1], P, None, "ids from 0 to 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    tokens: list[int], target: torch.Tensor, draft: torch.Tensor | None, says: str
) -> None:
    proposal = Proposal((tuple(tokens),), None if draft is None else draft[None])
    with pytest.raises(ShapeError, match=says):
        verify(proposal, [target], [row_of(Recorder(True, True))], "token")
