"""What exact decoding has to satisfy, as functions that raise AssertionError: the tests use them, and so do the planted
bugs, each of which has to make one of them fail."""

from collections import defaultdict
from dataclasses import replace

import torch
from enumeration import Branches, expectation, law, total_variation
from toy import Game, plain_law, play, play_block, speculative_law

from bitdraft.decoding import sampling, streams, verify
from bitdraft.decoding.protocols import DraftRow, Purpose
from bitdraft.decoding.sampling import History
from bitdraft.types import Proposal, SamplingParams

EXACT = 1e-12
"""Total variation that rounding in float64 may leave; a real bias on these tables is larger by orders of magnitude."""


def lossless(game: Game) -> None:
    """The speculative output has the law of the plain one, and its probabilities sum to 1."""
    plain, speculative = plain_law(game), speculative_law(game)
    assert abs(sum(speculative.values()) - 1) <= EXACT, "probability was lost or made"
    distance = total_variation(plain, speculative)
    assert distance <= EXACT, f"total variation {distance:.3g}"


def lossless_in_whole_runs(game: Game) -> None:
    """The same with all blocks of an output enumerated together, so that noise shared between blocks shows."""
    distance = total_variation(plain_law(game), law(lambda branches: play(game, branches.randomness(0, 0))))
    assert distance <= EXACT, f"total variation {distance:.3g}"


def every_decision_has_its_own_number(game: Game) -> None:
    """No uniform number is read twice in any run."""
    reused: list[bool] = []

    def run(branches: Branches) -> int:
        play(game, branches.randomness(0, 0))
        reused.append(branches.reused)
        return 0

    law(run)
    assert not any(reused), "a random number decided two things"


def accepted_law(game: Game) -> dict[float, float]:
    """The law of how many drafted tokens the first block of a game keeps, where nothing cuts the block."""
    return law(lambda branches: float(len(play_block(game, game.make_drafter(), (), branches.randomness(0, 0))) - 1))


def equal_draft_is_accepted(game: Game) -> None:
    """A draft that has the target's own table is accepted whole: p and q are made by the same rules."""
    assert list(accepted_law(game)) == [game.max_draft], "a draft equal to the target was rejected"


def block_rule_accepts_at_least_as_many(game: Game) -> None:
    """Sun et al. 2403.10444: no rule of its kind accepts more on average, so the token rule does not."""
    token, block = (expectation(accepted_law(replace(game, rule=rule))) for rule in ("token", "block"))
    assert block >= token - EXACT, f"block rule {block}, token rule {token}"


def acceptance_is_overlap(p: torch.Tensor, q: torch.Tensor) -> None:
    """A token drawn from q is accepted with probability sum min(p, q) = 1 - TV(p, q)."""
    accepted = sum(
        float(q[x]) * float(verify.acceptance_chances("token", [x], torch.stack([p, p]), q[None])[0])
        for x in range(len(q))
        if q[x] > 0
    )
    distance = float((p - q).abs().sum()) / 2
    assert abs(accepted - verify.overlap(p, q)) <= EXACT
    assert abs(accepted - (1 - distance)) <= EXACT


class FixedCoins:
    """A `Randomness` whose coins are given by position and whose draws are the likeliest token."""

    def __init__(self, coins: list[bool]) -> None:
        self.coins = coins

    def coin(self, chance: float, start: int, position: int) -> bool:
        return self.coins[position - start]

    def draw(self, probs: torch.Tensor, start: int, position: int, purpose: Purpose) -> int:
        return int(probs.argmax())


def toy_row(randomness: object, tokens: tuple[int, ...] = (0, 1), prompt_length: int = 1) -> DraftRow:
    return DraftRow(
        request=0,
        tokens=tokens,
        prompt_length=prompt_length,
        budget=8,
        sampling=SamplingParams(),
        history=History.after_prompt(tokens),
        randomness=randomness,  # type: ignore[arg-type]
    )


def overlap_is_recorded_where_reached() -> None:
    """Accepted positions and the first rejected one, nothing after it: matches behind a rejection were not reached."""
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.125, 0.875], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.75, 0.25]] * 3, dtype=torch.float64)
    proposal = Proposal(((0, 0, 0),), q[None])
    expected = [0.75, 0.5, 0.375]
    for coins, accepted in (([False] * 3, 0), ([True, False, True], 1), ([True, True, False], 2), ([True] * 3, 3)):
        verdict = verify.verify(proposal, [p], [toy_row(FixedCoins(coins))], "token")
        reached = min(accepted + 1, 3)
        assert verdict.accepted == (accepted,)
        assert list(verdict.overlap[0]) == expected[:reached]


def tiny_ratios_do_not_underflow() -> None:
    """1e-9 over 1e-8 is a tenth; in float16 both are 0."""
    p = torch.tensor([[1e-9, 1 - 1e-9]] * 2, dtype=torch.float32)
    q = torch.tensor([[1e-8, 1 - 1e-8]], dtype=torch.float32)
    chance = float(verify.acceptance_chances("token", [0], p, q)[0])
    assert abs(chance - 0.1) < 1e-6, f"chance {chance}"


def impossible_tokens_are_never_drawn() -> None:
    """At the ends of the uniform interval and at every border between tokens."""
    probs = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0])
    borders = [0.0, 0.25, 0.5, 1 - 2**-53]
    for uniform in borders + [b - 2**-53 for b in borders[1:]]:
        assert probs[streams.token_at(probs, uniform)] > 0, f"token of probability 0 at {uniform}"


def greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 on a tie: the rule that makes greedy output independent of kernels that break ties otherwise."""
    probs = sampling.distribution(
        torch.tensor([0.0, 3.0, 1.0, 3.0]), SamplingParams(temperature=0), History.after_prompt((0,))
    )
    assert probs.tolist() == [0, 1, 0, 0]


def streams_are_named_by_everything() -> None:
    """Seed, request, block, position and purpose: a change of any one gives other numbers."""
    names = [(s, r, b, i, u) for s in (0, 1) for r in (0, 1) for b in (0, 1) for i in (2, 3) for u in Purpose]
    probs = torch.full((2**16,), 2.0**-16)
    seen = defaultdict(list)
    for seed, request, start, position, purpose in names:
        seen[streams.Streams(seed, request).draw(probs, start, position, purpose)].append((seed, request))
    assert len(seen) == len(names), f"{len(names)} streams gave {len(seen)} numbers"
