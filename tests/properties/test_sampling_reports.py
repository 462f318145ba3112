"""What users of other servers reported about sampling under speculation, each row as a test on table models.

Rows U35, U37, U38, U39 and U48: greedy outputs are the same with every drafter as without one, and every rule holds at
every position of a block.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor
from toy import EOS, Automaton, Game, TableModel, random_table

from bitdraft.decoding.lookahead import Fixed
from bitdraft.decoding.protocols import Drafter
from bitdraft.decoding.streams import Streams
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.drafters.scripted import oracle
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.errors import UsageError
from bitdraft.types import SamplingParams, StepRecord

V, K = 8, 4
ENDING = frozenset({EOS})
TARGET = random_table(5, V, lambda text: range(V))
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "itself": lambda: ModelDrafter(TableModel(TARGET, 512), Fixed(K), ENDING),
    "another": lambda: ModelDrafter(TableModel(random_table(6, V, lambda text: range(V)), 512), Fixed(K), ENDING),
    "n-gram": lambda: NGramDrafter(2, 1),
}


def run(
    params: SamplingParams, drafter: Drafter | None, constraint: Automaton | None = None, seed: int = 0
) -> tuple[list[int], list[StepRecord]]:
    records: list[StepRecord] = []
    engine = Engine(
        TableModel(TARGET, 512),
        drafter,
        eos_ids=ENDING,
        max_draft=K,
        max_batch=1,
        on_record=records.append,
    )
    engine.submit(Request(seed, (1, 3, 1, 3), replace(params, seed=seed), constraint=constraint))
    return [token for emission in engine.run() for token in emission.tokens], records


def check_alike(params: SamplingParams, constraint: Automaton | None = None) -> list[int]:
    """The output without drafts, which every drafter's is."""
    plain, _ = run(params, None, constraint)
    for name, make in DRAFTERS.items():
        assert run(params, make(), constraint)[0] == plain, name
    return plain


def test_u35_penalties_are_not_ignored() -> None:
    outputs = {tuple(check_alike(replace(GREEDY, frequency_penalty=penalty))) for penalty in (-2.0, 0.0, 2.0)}
    assert len(outputs) == 3


def test_u37_logit_bias_and_min_p_hold_at_every_position() -> None:
    favourite = max(set(check_alike(GREEDY)), key=check_alike(GREEDY).count)
    assert favourite not in check_alike(replace(GREEDY, logit_bias={favourite: -100.0}))
    warm = SamplingParams(temperature=1.5, min_p=0.4, max_tokens=2, ignore_eos=True)
    seen = {tuple(run(warm, DRAFTERS["another"](), seed=seed)[0]) for seed in range(300)}
    plain = {tuple(run(warm, None, seed=seed)[0]) for seed in range(300)}
    assert seen == plain  # few enough pairs that 300 seeds show each of them


def test_u38_min_tokens_counts_output_tokens() -> None:
    params = replace(GREEDY, ignore_eos=False, logit_bias={EOS: 1.2})
    lengths = [len(check_alike(replace(params, min_tokens=count))) for count in range(10)]
    assert all(length > count for count, length in enumerate(lengths))
    assert lengths[0] < lengths[-1]


def test_u39_a_ban_of_every_second_id_holds_for_200_tokens() -> None:
    odd = frozenset(range(1, V, 2))
    evens_and_odds = oracle({0: list(range(V)) * 25})
    for temperature, drafter in ((0, DRAFTERS["another"]()), (1, DRAFTERS["n-gram"]()), (1, evens_and_odds)):
        params = SamplingParams(temperature=temperature, allowed_ids=odd, max_tokens=200, ignore_eos=True)
        assert set(run(params, drafter)[0]) <= odd


class Broken(Automaton):
    """Fails in state 1."""

    @property
    def allowed_V(self) -> Tensor | None:
        if self.state == 1:
            raise UsageError("the grammar cannot go on")
        return super().allowed_V


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_u45_a_grammar_that_fails_ends_the_draft_and_not_the_step(drafter: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24)
    game = Game(TARGET, DRAFTERS[drafter], params, max_draft=K, prompt=(1, 3, 1, 3), constraint=Broken(({1: 1}, {}), V))
    proposal = game.make_drafter().propose([game.row((), Streams(0, 0))])
    assert proposal.tokens == ((1,),)


def test_u48_drafts_end_before_the_first_token_that_a_grammar_does_not_allow() -> None:
    """Drafts copied from the prompt, (1, 3) again and again, into a text of 1 0 3, 1 0 3, ... or 1 0 4, ..."""
    grammar = Automaton(({1: 1}, {0: 2}, {3: 0, 4: 0}), V)
    output = check_alike(GREEDY, grammar)
    assert {tuple(output[i : i + 2]) for i in range(0, len(output), 3)} == {(1, 0)}
    _, records = run(GREEDY, DRAFTERS["n-gram"](), grammar)
    assert records[0].proposed == 1
    assert sum(record.accepted for record in records) > 0
