"""Losslessness by exact enumeration: nothing is sampled, every outcome's probability is summed.

The tables have three or four tokens and outputs of three or four tokens; what is proved on them for every combination
of rule, drafter, filter and draft length holds for the code, not for a sample of its output.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import sqrt

import checks
import pytest
import torch
from enumeration import Branches, expectation, law, total_variation
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    EOS,
    Automaton,
    Game,
    Table,
    constant_table,
    model_drafter,
    plain_law,
    play,
    play_block,
    random_table,
    speculative_law,
    split_tables,
)

from bitdraft.decoding.lookahead import Confidence, Fixed
from bitdraft.decoding.protocols import LookaheadPolicy, Purpose
from bitdraft.decoding.streams import Streams
from bitdraft.decoding.verify import Rule, acceptance_chances, residual
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.drafters.scripted import always
from bitdraft.types import SamplingParams

RULES: tuple[Rule, ...] = ("token", "block")
ENDING = frozenset({EOS})


@dataclass(frozen=True)
class Filter:
    """Sampling parameters and the tokens that end an output under them."""

    params: SamplingParams
    ending_ids: frozenset[int] = frozenset()
    moves: tuple[dict[int, int], ...] = ()

    @property
    def bans(self) -> bool:
        return bool(self.params.bad_words or self.params.allowed_ids or self.moves)


ENDLESS = ({0: 1, 1: 0}, {1: 2, 2: 0}, {0: 1, 1: 2, 2: 0})
WITH_AN_END = ({0: 1, 1: 2}, {1: 2, 2: 3}, {0: 4, 2: 3}, {}, {2: 3})
"""After (0, 1, 0) and (1, 0) nothing but the end is allowed, and after the end nothing."""

FILTERS = {
    "plain": Filter(SamplingParams()),
    "plain, may end": Filter(SamplingParams(), ENDING),
    "temperature 0": Filter(SamplingParams(temperature=0), ENDING),
    "temperature 0.5": Filter(SamplingParams(temperature=0.5)),
    "temperature 2": Filter(SamplingParams(temperature=2)),
    "top-k": Filter(SamplingParams(top_k=2)),
    "top-p": Filter(SamplingParams(top_p=0.7)),
    "min-p": Filter(SamplingParams(min_p=0.4)),
    "repetition": Filter(SamplingParams(repetition_penalty=1.7)),
    "presence": Filter(SamplingParams(presence_penalty=0.8)),
    "frequency": Filter(SamplingParams(frequency_penalty=-0.6)),
    "bias": Filter(SamplingParams(logit_bias={0: -1.3, 1: 0.4})),
    "min tokens": Filter(SamplingParams(min_tokens=2, max_tokens=3), ENDING),
    "typical": Filter(SamplingParams(typical_p=0.5)),
    "bad words": Filter(SamplingParams(bad_words=((0, 1), (1, 1, 0), (2,)))),
    "allowed ids": Filter(SamplingParams(allowed_ids=frozenset({0, 2}))),
    "grammar": Filter(SamplingParams(), moves=ENDLESS),
    "grammar, may end": Filter(SamplingParams(min_tokens=3), ENDING, WITH_AN_END),
    "grammar, the end is silent": Filter(SamplingParams(), moves=WITH_AN_END),
    "grammar, temperature 0": Filter(SamplingParams(temperature=0), moves=ENDLESS),
    "typical, bad words and grammar": Filter(
        SamplingParams(temperature=1.5, top_k=2, typical_p=0.6, bad_words=((1, 1), (0, 2))), moves=ENDLESS
    ),
    "all": Filter(
        SamplingParams(
            temperature=0.8,
            top_k=3,
            top_p=0.95,
            min_p=0.05,
            typical_p=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            logit_bias={1: 0.5},
            min_tokens=1,
            max_tokens=3,
        ),
        ENDING,
    ),
}
POLICIES: dict[str, LookaheadPolicy] = {
    "one": Fixed(1),
    "two": Fixed(2),
    "chosen": Confidence(2, 0.4, "chosen"),
    "top": Confidence(2, 0.6, "top"),
}
LONG_POLICIES: dict[str, LookaheadPolicy] = {
    "three": Fixed(3),
    "chosen 0.2": Confidence(3, 0.2, "chosen"),
    "chosen 0.5": Confidence(3, 0.5, "chosen"),
    "top 0.4": Confidence(3, 0.4, "top"),
    "top 0.7": Confidence(3, 0.7, "top"),
}
MODELS = ("other", "equal", "disjoint")
POINT_MASSES = ("n-gram", "end everywhere")


def make_game(
    rule: Rule, drafter: str, setting: Filter, policy: LookaheadPolicy, *, vocab_size: int = 3, length: int = 3
) -> Game:
    """The setting that the names stand for."""
    target, draft = random_table(7, vocab_size), random_table(8, vocab_size)
    if drafter == "equal":
        draft = target
    elif drafter == "disjoint":
        target, draft = split_tables(9)
    if setting.bans:  # the bans exclude enough; and where a draft knows one token only, they leave it nothing
        narrow = drafter == "disjoint"
        target = random_table(7, vocab_size, lambda text: range(vocab_size))
        draft = target if drafter == "equal" else random_table(8, vocab_size, lambda text: range(1 if narrow else 3))
    makers = {"n-gram": lambda: NGramDrafter(2, 1), "end everywhere": lambda: always(EOS)}
    return Game(
        target,
        makers.get(drafter) or model_drafter(draft, policy, setting.ending_ids),
        replace(setting.params, max_tokens=length),
        rule=rule,
        max_draft=policy.limit,
        ending_ids=setting.ending_ids,
        constraint=Automaton(setting.moves, vocab_size) if setting.moves else None,
    )


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("drafter", MODELS)
@pytest.mark.parametrize("rule", RULES)
def test_model_drafts_are_lossless(rule: Rule, drafter: str, filter_name: str) -> None:
    for policy in POLICIES.values():
        checks.lossless(make_game(rule, drafter, FILTERS[filter_name], policy))


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("drafter", POINT_MASSES)
@pytest.mark.parametrize("rule", RULES)
def test_point_mass_drafts_are_lossless(rule: Rule, drafter: str, filter_name: str) -> None:
    for policy in (Fixed(1), Fixed(2)):
        checks.lossless(make_game(rule, drafter, FILTERS[filter_name], policy))


def covering(*factors: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Combinations in which every two values of different factors meet at least once, greedily few."""
    chosen, met = [], set()
    for wanted in range(len(factors) * (len(factors) - 1) // 2, 0, -1):
        for combination in product(*factors):
            pairs = set(combinations(enumerate(combination), 2)) - met
            if len(pairs) >= wanted:
                chosen.append(combination)
                met |= pairs
    return chosen


@pytest.mark.parametrize("combination", covering(tuple(FILTERS), tuple(LONG_POLICIES), RULES, MODELS), ids=", ".join)
def test_longer_blocks_are_lossless(combination: tuple[str, str, Rule, str]) -> None:
    filter_name, policy, rule, drafter = combination
    checks.lossless(make_game(rule, drafter, FILTERS[filter_name], LONG_POLICIES[policy], length=4))


@pytest.mark.parametrize("drafter", ["other", "n-gram"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("filter_name", ["plain", "top-p", "repetition", "min tokens", "bad words", "grammar"])
def test_a_larger_vocabulary_is_lossless(filter_name: str, rule: Rule, drafter: str) -> None:
    checks.lossless(make_game(rule, drafter, FILTERS[filter_name], Fixed(2), vocab_size=4))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", ["other", "n-gram"])
def test_blocks_cut_at_the_end_of_the_output_are_lossless(rule: Rule, drafter: str) -> None:
    game = make_game(rule, drafter, FILTERS["plain, may end"], Fixed(2))
    checks.lossless(replace(game, overshoot=True))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["two", "chosen"])
@pytest.mark.parametrize("drafter", ["other", "n-gram"])
def test_whole_runs_agree_with_composed_blocks(rule: Rule, policy: str, drafter: str) -> None:
    """Blocks are independent given the output: that is what lets the other tests enumerate them one by one."""
    game = make_game(rule, drafter, FILTERS["frequency"], POLICIES[policy])
    checks.every_decision_has_its_own_number(game)
    checks.lossless_in_whole_runs(game)
    whole = law(lambda branches: play(game, branches.randomness(0, 0)))
    assert total_variation(whole, speculative_law(game)) <= checks.EXACT


def test_seeded_runs_follow_the_enumerated_law() -> None:
    """The enumerator's model of chance against the real streams: chi-square over 2000 seeds, below 1 in 10 000."""
    game = make_game("block", "other", FILTERS["plain"], Fixed(2), length=2)
    law_of_outputs = plain_law(game)
    runs = 2000
    counts = Counter(play(game, Streams(seed, 0)) for seed in range(runs))
    assert counts.keys() <= law_of_outputs.keys()
    assert len(law_of_outputs) == 9
    statistic = sum((counts[o] - runs * chance) ** 2 / (runs * chance) for o, chance in law_of_outputs.items())
    assert statistic < 31.8  # 8 degrees of freedom


def test_two_requests_of_a_batch_are_independent() -> None:
    """The joint law of two requests is the product of their laws."""
    games = [make_game("block", "other", FILTERS[name], Fixed(2), length=2) for name in ("plain", "top-k")]

    def run(branches: Branches) -> tuple[tuple[int, ...], ...]:
        return tuple(play(game, branches.randomness(game.params.seed, number)) for number, game in enumerate(games))

    first, second = (plain_law(game) for game in games)
    expected = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert total_variation(law(run), expected) <= checks.EXACT


@pytest.mark.parametrize("filter_name", [name for name in FILTERS if "end" not in name])
@pytest.mark.parametrize("rule", RULES)
def test_an_equal_draft_is_always_accepted(filter_name: str, rule: Rule) -> None:
    found = FILTERS[filter_name]
    setting = Filter(replace(found.params, min_tokens=0), moves=found.moves)
    checks.equal_draft_is_accepted(make_game(rule, "equal", setting, Fixed(2)))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length", [1, 2, 3])
def test_block_rule_accepts_at_least_as_many(seed: int, length: int) -> None:
    game = first_block(random_table(seed), random_table(seed + 50), length)
    checks.block_rule_accepts_at_least_as_many(game)


def first_block(target: Table, draft: Table, length: int) -> Game:
    """A game whose first block drafts `length` tokens and is not cut."""
    return Game(target, model_drafter(draft, Fixed(length)), SamplingParams(max_tokens=length + 1), max_draft=length)


def accepted(game: Game, rule: Rule) -> float:
    return expectation(checks.accepted_law(replace(game, rule=rule)))


def test_block_rule_gains_from_two_tokens_on() -> None:
    """One token: the rules are the same. Two: the block rule is better (a gate at three would give that away)."""
    target, draft = constant_table(0.6, 0.3, 0.1), constant_table(0.2, 0.3, 0.5)
    gains = []
    for length in (1, 2, 3):
        game = first_block(target, draft, length)
        gains.append(accepted(game, "block") - accepted(game, "token"))
    assert abs(gains[0]) <= checks.EXACT
    assert 0.01 < gains[1] < gains[2]


def test_tokens_per_step_of_independent_positions() -> None:
    """(1 - a^(K+1)) / (1 - a) tokens a step, the free one included (Leviathan et al. 2211.17192, equation 1)."""
    target, draft = constant_table(0.6, 0.3, 0.1), constant_table(0.2, 0.3, 0.5)
    rate = 0.6
    for length in (1, 2, 3, 4):
        tokens = 1 + accepted(first_block(target, draft, length), "token")
        assert tokens == pytest.approx((1 - rate ** (length + 1)) / (1 - rate), abs=checks.EXACT)


def test_point_masses_lose_nothing_by_the_token_rule() -> None:
    """Given as distributions, point masses are accepted as often by either rule: `rule_for` may pick the token rule."""
    target, draft = random_table(3), random_table(4)

    def point(text: tuple[int, ...]) -> torch.Tensor:
        logits = draft(text)
        return torch.full_like(logits, -torch.inf).index_fill(0, logits.argmax(), 0.0)

    game = first_block(target, point, 3)
    assert accepted(game, "block") == pytest.approx(accepted(game, "token"), abs=checks.EXACT)


weights = st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(lambda values: sum(values) > 0)
pairs = (
    st.tuples(weights, weights)
    .map(lambda ws: [w[: min(map(len, ws))] for w in ws])
    .filter(lambda ws: all(map(sum, ws)))
)


def normalised(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64) / sum(values)


@settings(max_examples=200, deadline=None)
@given(pairs)
def test_acceptance_is_one_minus_total_variation(values: list[list[int]]) -> None:
    checks.acceptance_is_overlap(*map(normalised, values))


@settings(max_examples=200, deadline=None)
@given(pairs)
def test_pinsker_bounds_the_rejection(values: list[list[int]]) -> None:
    """The chance of a rejection is at most sqrt(KL(p||q) / 2): what makes KL a proxy, and only a bound."""
    p, q = map(normalised, values)
    divergence = float((torch.xlogy(p, p) - torch.xlogy(p, q)).sum())
    assert float((p - q).abs().sum()) / 2 <= sqrt(divergence / 2) + checks.EXACT


@settings(max_examples=200, deadline=None)
@given(pairs)
def test_one_token_has_the_law_of_p(values: list[list[int]]) -> None:
    """q(x) chance(x) + P(rejected) residual(x) = p(x), by algebra on the functions alone."""
    p, q = map(normalised, values)
    chances = torch.stack([acceptance_chances("token", [x], torch.stack([p, p]), q[None])[0] for x in range(len(p))])
    kept = q * chances
    assert torch.allclose(kept + (1 - kept.sum()) * residual(p, q), p, rtol=0, atol=1e-14)


def test_the_enumerator_knows_the_law_of_shared_numbers() -> None:
    """Two coins of the same name fall together; of different names independently."""

    def same(branches: Branches) -> tuple[bool, bool]:
        randomness = branches.randomness(0, 0)
        return randomness.coin(0.5, 0, 1), randomness.coin(0.25, 0, 1)

    def different(branches: Branches) -> tuple[bool, bool]:
        randomness = branches.randomness(0, 0)
        return randomness.coin(0.5, 0, 1), randomness.coin(0.25, 0, 2)

    assert law(same) == {(True, True): 0.25, (True, False): 0.25, (False, False): 0.5}
    assert law(different) == {(True, True): 0.125, (True, False): 0.375, (False, True): 0.125, (False, False): 0.375}


def test_the_enumerator_refuses_a_run_that_does_not_repeat() -> None:
    calls = iter(range(9))

    def restless(branches: Branches) -> bool:
        return branches.randomness(0, 0).coin(0.5, 0, next(calls))

    with pytest.raises(AssertionError, match="did not repeat"):
        law(restless)


def test_the_enumerator_sees_lost_probability() -> None:
    def leaky(branches: Branches) -> int:
        return branches.randomness(0, 0).draw(torch.tensor([0.5, 0.25]), 0, 0, Purpose.NEXT)

    assert law(leaky) == {0: 0.5, 1: 0.25}


def test_blocks_make_progress_and_end() -> None:
    """No output of any game is longer than asked, and each ends where it should."""
    game = make_game("block", "other", FILTERS["plain, may end"], Fixed(2))
    for output in speculative_law(game):
        assert len(output) == 3 or output[-1] == EOS
        assert EOS not in output[:-1]
    assert len(play_block(game, game.make_drafter(), (), Branches().randomness(0, 0))) >= 1
