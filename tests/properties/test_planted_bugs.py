"""Bugs that speculative decoders really had, planted into the real code one at a time: some exact check fails for each.

A proof is worth what it would catch. Most of these leave the text looking fine and many pass a test that samples.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import checks
import pytest
from enumeration import law
from planted import (
    DRAFT,
    Plant,
    argmax_drafts,
    cut_by_product,
    draft_noise_for_next,
    drop_second,
    drop_unsure,
    first_failure,
    free_token_from_q,
    grammar_on_p_only,
    half_precision_ratio,
    highest_id_on_ties,
    in_verify,
    inverse_ratio,
    last_row_always,
    last_success,
    masked_after_the_draw,
    named_by,
    ones_for_point_masses,
    output_forgotten,
    overlap_everywhere,
    penalty_once_per_block,
    raw_q,
    residual_is_p,
    residual_not_renormalised,
    residual_of_q,
    residual_of_the_next_row,
    residual_without_weight,
    right_z,
    shift_min_tokens,
    spoil_proposals,
    target_after_rejection,
    without,
    without_position,
    without_purpose,
    without_start,
    wrong_side_of_the_border,
    z_of_the_position_before,
    z_with_the_weight_before,
    z_without_weight,
)
from toy import EOS, Automaton, Game, constant_table, model_drafter, play_block, random_table

from bitdraft.decoding.lookahead import Confidence, Fixed
from bitdraft.decoding.protocols import LookaheadPolicy
from bitdraft.decoding.verify import Rule
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.types import SamplingParams

PLAIN = SamplingParams(max_tokens=3)
TARGET = random_table(7)
TWO = Fixed(2)


def game(params: SamplingParams = PLAIN, policy: LookaheadPolicy = TWO, rule: Rule = "token", **others: object) -> Game:
    draft = model_drafter(DRAFT, policy)
    return Game(TARGET, draft, params, rule=rule, max_draft=policy.limit, **others)  # type: ignore[arg-type]


BASIC = game()
BLOCK = game(replace(PLAIN, max_tokens=4), Fixed(3), "block")
PAIR = game(rule="block")
NGRAM = replace(BASIC, make_drafter=lambda: NGramDrafter(2, 1))
FLAT = replace(  # two tokens that the draft cannot tell apart and the target can
    BASIC, target=constant_table(0.7, 0.3), make_drafter=model_drafter(constant_table(0.5, 0.5), Fixed(2)), prompt=(0,)
)
RARE = replace(  # probabilities that float16 cannot hold
    BASIC,
    target=constant_table(1e-9, 1 - 1e-9),
    make_drafter=model_drafter(constant_table(2e-8, 1 - 2e-8), Fixed(1)),
    prompt=(0,),
)
NUCLEUS = game(replace(PLAIN, top_p=0.6))
WARM = game(replace(PLAIN, temperature=0.5))
PENALTY = game(replace(PLAIN, presence_penalty=0.8, repetition_penalty=1.7))
MIN_TOKENS = game(replace(PLAIN, min_tokens=2), ending_ids=frozenset({EOS}))
DENSE = random_table(7, allowed=lambda text: range(3))
GRAMMAR = replace(BASIC, target=DENSE, constraint=Automaton(({0: 1, 1: 0}, {1: 2, 2: 0}, {0: 1, 1: 2, 2: 0})))
BAD_WORDS = replace(game(replace(PLAIN, bad_words=((0, 1), (1, 1, 0), (2,)))), target=DENSE)
TYPICAL = game(replace(PLAIN, typical_p=0.5))
UNSURE = game(policy=Confidence(2, 0.4))


def lossless(one: Game) -> Callable[[], None]:
    return lambda: checks.lossless(one)


def lossless_runs(one: Game) -> Callable[[], None]:
    return lambda: checks.lossless_in_whole_runs(one)


def own_numbers(one: Game) -> Callable[[], None]:
    return lambda: checks.every_decision_has_its_own_number(one)


def equal_is_accepted(one: Game) -> Callable[[], None]:
    same = replace(one, make_drafter=model_drafter(one.target, Fixed(2)))
    return lambda: checks.equal_draft_is_accepted(same)


@dataclass(frozen=True)
class Bug:
    """A bug, how it gets into the code, and the check that has to fail then."""

    name: str
    plant: Plant
    check: Callable[[], None]


BUGS = [
    Bug("raw q in the ratio after top-p", spoil_proposals(raw_q), lossless(NUCLEUS)),
    Bug("raw q in the ratio after temperature", spoil_proposals(raw_q), lossless(WARM)),
    Bug("raw q in the ratio after penalties", spoil_proposals(raw_q), lossless(PENALTY)),
    Bug("token dropped for its own probability", spoil_proposals(drop_unsure), lossless(BASIC)),
    Bug("token dropped by a fixed taste", spoil_proposals(drop_second), lossless(FLAT)),
    Bug("draft cut after the fact by its product", spoil_proposals(cut_by_product), lossless(BASIC)),
    Bug("drafted by argmax, divided by q", argmax_drafts, lossless(BASIC)),
    Bug("penalties on p only", without(presence_penalty=0.0, repetition_penalty=1.0), equal_is_accepted(PENALTY)),
    Bug("temperature on p only", without(temperature=1.0), equal_is_accepted(WARM)),
    Bug("top-p on p only", without(top_p=1.0), equal_is_accepted(NUCLEUS)),
    Bug("typical on p only", without(typical_p=1.0), equal_is_accepted(TYPICAL)),
    Bug("grammar on p only", grammar_on_p_only, equal_is_accepted(GRAMMAR)),
    Bug("drafted without the grammar, q masked afterwards", masked_after_the_draw, lossless(GRAMMAR)),
    Bug("grammar moved once per block", penalty_once_per_block, lossless(GRAMMAR)),
    Bug("bad words looked for once per block", penalty_once_per_block, lossless(BAD_WORDS)),
    Bug("bad word completed across a block border", output_forgotten, lossless(BAD_WORDS)),
    Bug("penalty fed once per block", penalty_once_per_block, lossless(PENALTY)),
    Bug("min_tokens one row too many", shift_min_tokens(-1), lossless(MIN_TOKENS)),
    Bug("min_tokens one row too few", shift_min_tokens(1), lossless(MIN_TOKENS)),
    Bug("highest id on ties", highest_id_on_ties, checks.greedy_takes_the_lowest_of_equals),
    Bug("accept chance min(1, q/p)", in_verify("acceptance_chances", inverse_ratio), lossless(BASIC)),
    Bug("ratio in float16", in_verify("_ratios", half_precision_ratio), lossless(RARE)),
    Bug("ratio in float16, one token", in_verify("_ratios", half_precision_ratio), checks.tiny_ratios_do_not_underflow),
    Bug("residual equal to p", in_verify("residual", residual_is_p), lossless(BASIC)),
    Bug("residual not renormalised", in_verify("residual", residual_not_renormalised), lossless(BASIC)),
    Bug("residual of q - p", in_verify("residual", residual_of_q), lossless(BASIC)),
    Bug("residual of the next row", in_verify("next_distribution", residual_of_the_next_row), lossless(BASIC)),
    Bug("n-gram token left in the residual", in_verify("next_distribution", target_after_rejection), lossless(NGRAM)),
    Bug("free token from q", in_verify("next_distribution", free_token_from_q), lossless(BASIC)),
    Bug("free token after a rejection", in_verify("next_distribution", last_row_always), lossless(BASIC)),
    Bug("block: Z of the row before", in_verify("acceptance_chances", z_of_the_position_before), lossless(BLOCK)),
    Bug("block: Z without its weight", in_verify("acceptance_chances", z_without_weight), lossless(BLOCK)),
    Bug("block: Z with the weight before", in_verify("acceptance_chances", z_with_the_weight_before), lossless(BLOCK)),
    Bug("block: residual without weight", in_verify("next_distribution", residual_without_weight), lossless(BLOCK)),
    Bug("block: stops at the first failure", in_verify("accepted_count", first_failure), lossless(BLOCK)),
    Bug("token: goes on after a rejection", in_verify("accepted_count", last_success), lossless(BASIC)),
    Bug("block rule for point masses with q = 1", ones_for_point_masses, lossless(NGRAM)),
    Bug("overlap counted after a rejection", overlap_everywhere, checks.overlap_is_recorded_where_reached),
    Bug("draft, accept and next share noise", named_by(without_purpose), lossless_runs(BASIC)),
    Bug("the same, as a number read twice", named_by(without_purpose), own_numbers(BASIC)),
    Bug("the same, in the real streams", named_by(without_purpose), checks.streams_are_named_by_everything),
    Bug("the target's token by the draft's noise", named_by(draft_noise_for_next), lossless(PAIR)),
    Bug("the same under the token rule", named_by(draft_noise_for_next), lossless(BASIC)),
    Bug("noise of a rejected suffix used again", named_by(without_start), lossless_runs(PAIR)),
    Bug("the same noise for every position", named_by(without_position), lossless_runs(BASIC)),
    Bug("tokens of probability 0 drawn", wrong_side_of_the_border, checks.impossible_tokens_are_never_drawn),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_check_fails_with_the_bug_and_passes_without(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.check()
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError):
        bug.check()


def test_dropping_a_token_gives_the_published_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of DSpark's counter-example, (0.85, 0.15) in place of (0.7, 0.3).

    They come out of a draft of (0.5, 0.5) whose second token is dropped and drawn anew from p.
    """
    spoil_proposals(drop_second)(monkeypatch)
    one = replace(FLAT, params=replace(PLAIN, max_tokens=2))
    first = law(lambda branches: play_block(one, one.make_drafter(), (), branches.randomness(0, 0))[0])
    assert first == pytest.approx({0: 0.85, 1: 0.15}, abs=checks.EXACT)


def test_the_block_chances_that_carry_bugs_are_right_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    in_verify("acceptance_chances", right_z)(monkeypatch)
    checks.lossless(BLOCK)


def test_keeping_the_token_and_stopping_after_it_is_exact() -> None:
    """The exact form of the policy that the dropped-token bugs get wrong."""
    checks.lossless(UNSURE)
