"""The coupled rule: the output is the one that the same seed gives without a draft, and has the target's law.

The law is enumerated, with the joint law of draws that share their clocks. Equality of texts is checked on the real
streams: against every drafter, length, batch and shortage of room, the text must be that of plain decoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import checks
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import EOS as PAGED_EOS
from paged import V, model_drafter, paged, target_table
from test_engine_lossless import DRAFT, DRAFTERS, LENGTHS, SAMPLING, TARGET, Adversary, Case, distance, model
from test_lossless import FILTERS, MODELS, POINT_MASSES, POLICIES, first_block, make_game
from test_planted_bugs import BASIC, FLAT
from toy import Game, TableModel, constant_table, random_table
from toy import model_drafter as toy_drafter

from bitdraft.decoding import verify
from bitdraft.decoding.lookahead import Confidence, Fixed
from bitdraft.decoding.protocols import Drafter, Randomness
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.drafters.scripted import Scripted
from bitdraft.engine import sequence as sequence_module
from bitdraft.engine.controller import Asked
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.types import SamplingParams, StepRecord

COUPLED = replace(SAMPLING, reproducible=True)


def coupled(game: Game) -> Game:
    return replace(game, params=replace(game.params, reproducible=True))


# The law


@pytest.mark.parametrize("filter_name", FILTERS)
def test_the_law_is_the_target_s(filter_name: str) -> None:
    """Every drafter and policy that the other rules are enumerated with."""
    for drafter in (*MODELS, *POINT_MASSES):
        for name, policy in POLICIES.items():
            if drafter in MODELS or name in ("one", "two"):
                checks.lossless(coupled(make_game("block", drafter, FILTERS[filter_name], policy)))


@pytest.mark.parametrize("seed", range(4))
def test_longer_blocks(seed: int) -> None:
    target, draft = random_table(seed), random_table(seed + 50)
    for policy in (Fixed(3), Confidence(3, 0.5, "chosen")):
        checks.lossless(Game(target, toy_drafter(draft, policy), replace(COUPLED, max_tokens=4), max_draft=3))


def test_whole_runs_through_the_engine() -> None:
    """No closed form knows three races of the same clocks, so model drafts are one long here."""
    alone = [Case(LENGTHS, COUPLED)]
    assert distance(alone, lambda: model(Fixed(1))) <= checks.EXACT
    for drafter in ("n-gram", "end of sequence everywhere"):
        assert distance(alone, DRAFTERS[drafter]) <= checks.EXACT
        assert distance(alone, DRAFTERS[drafter], lengths=Adversary) <= checks.EXACT
    assert distance(alone, lambda: None) <= checks.EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_of_all_rules_in_one_batch(rule: str) -> None:
    """Each keeps its law beside the others; the rows that are not coupled still come with their distributions."""
    short = replace(COUPLED, max_tokens=2)
    cases = [
        Case(LENGTHS, short),
        Case((1, 1), replace(SAMPLING, max_tokens=2, seed=1)),
        Case((1,), replace(SAMPLING, temperature=0, max_tokens=3)),
        Case((1, 0), replace(SAMPLING, temperature=0, max_tokens=2, reproducible=True)),
    ]
    assert distance(cases, lambda: model(Fixed(1)), rule=rule) <= checks.EXACT


def test_greedy_requests_are_the_same_with_it() -> None:
    for drafter in DRAFTERS.values():
        records: list[list[StepRecord]] = []
        for reproducible in (False, True):
            records.append([])
            case = Case(LENGTHS, replace(SAMPLING, temperature=0, reproducible=reproducible))
            assert distance([case], drafter, on_record=records[-1].append) == 0
        assert records[0] == records[1]


# Acceptance


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_lies_between_its_bounds(seed: int) -> None:
    """Of the first position, through drafter and verification; a draft that is the target is accepted whole."""
    target, draft = random_table(seed), random_table(seed + 50)
    game = coupled(first_block(target, draft, 1))
    p, q = game.p(()), replace(game, target=draft).p(())
    far = float((p - q).abs().sum()) / 2
    accepted = checks.accepted_law(game).get(1.0, 0.0)
    assert (1 - far) / (1 + far) - checks.EXACT <= accepted <= 1 - far + checks.EXACT
    checks.equal_draft_is_accepted(coupled(first_block(target, target, 3)))


def test_what_sharing_noise_gains() -> None:
    """Drawn apart, two tokens agree with chance sum p q; the token rule would accept 0.6, and the bound is 0.43."""
    p, q = (0.6, 0.3, 0.1), (0.2, 0.3, 0.5)
    game = coupled(first_block(constant_table(*p), constant_table(*q), 1))
    accepted = checks.accepted_law(game)[1.0]
    assert accepted == pytest.approx(0.2 / 1 + 0.3 / 1.4 + 0.1 / 1, abs=checks.EXACT)
    assert accepted > 1.9 * sum(a * b for a, b in zip(p, q, strict=True))


def test_the_record_tells_what_became_of_the_reached_positions() -> None:
    records: list[StepRecord] = []
    for seed in range(30):
        request = Request(0, (0, 1, 0), replace(COUPLED, max_tokens=12, seed=seed, ignore_eos=True))
        engine = Engine(
            TableModel(TARGET),
            ModelDrafter(TableModel(DRAFT), Fixed(3), ()),
            eos_ids=(),
            max_draft=3,
            max_batch=1,
            on_record=records.append,
        )
        engine.submit(request)
        list(engine.run())
    assert any(0 < r.accepted < r.proposed for r in records)
    for r in records:
        assert r.overlap == (1.0,) * r.accepted + (0.0,) * (r.accepted < r.proposed)


# The text


class RandomLengths:
    """Any length at all, each from a generator: what measured times may come to."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def lengths(self, asked: Sequence[Asked]) -> list[int]:
        return [self._random.randint(0, one.limit) for one in asked]

    def observe(self, record: StepRecord) -> None:
        """Nothing is learnt."""

    def forget(self, request: int) -> None:
        """Nothing is kept."""

    def reasons(self) -> str:
        return "None."


class Whim:
    """Drafts anything, of any length, and knows a part of what will come."""

    def __init__(self, seed: int, outputs: dict[int, list[int]]) -> None:
        self._random, self._outputs = Random(seed), outputs
        self._inner = Scripted(self._script)
        self.propose, self.commit, self.release = self._inner.propose, self._inner.commit, self._inner.release

    def _script(self, row: object) -> list[int]:
        ahead = self._outputs[row.request][row.start : row.start + row.budget]  # type: ignore[attr-defined]
        told = [t if self._random.random() < 0.8 else self._random.randrange(V) for t in ahead]
        return told[: self._random.randint(0, len(told))]


def texts(engine: Engine, requests: Sequence[Request]) -> dict[int, list[int]]:
    for request in requests:
        engine.submit(request)
    outputs: dict[int, list[int]] = {request.number: [] for request in requests}
    for emission in engine.run():
        outputs[emission.request] += emission.tokens
    return outputs


def plain(requests: Sequence[Request]) -> dict[int, list[int]]:
    """Each alone, without a draft, in a large cache."""
    found: dict[int, list[int]] = {}
    for request in requests:
        engine = Engine(
            paged(target_table, 200, prefix_cache=False), None, eos_ids=(PAGED_EOS,), max_draft=0, max_batch=1
        )
        found |= texts(engine, [request])
    return found


MAKERS: dict[str, Callable[[int, int, dict[int, list[int]]], Drafter | None]] = {
    "none": lambda k, seed, outputs: None,
    "n-gram": lambda k, seed, outputs: NGramDrafter(2),
    "model": lambda k, seed, outputs: model_drafter(max(k, 1), blocks=200),
    "model, hardly any room": lambda k, seed, outputs: model_drafter(max(k, 1), blocks=4),
    "model, fed in parts": lambda k, seed, outputs: model_drafter(max(k, 1), blocks=200, max_rows=7),
    "anything": lambda k, seed, outputs: Whim(seed, outputs),
}

requests = st.lists(
    st.builds(
        lambda prompt, sampling, max_draft: Request(0, tuple(prompt), sampling, max_draft=max_draft),
        st.lists(st.integers(0, 4), min_size=1, max_size=30),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
            top_k=st.sampled_from([0, 3]),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
            bad_words=st.sampled_from([(), ((0, 1), (3,))]),
            seed=st.integers(0, 3),
            reproducible=st.just(True),
            max_tokens=st.sampled_from([1, 9, 30]),
            ignore_eos=st.booleans(),
        ),
        st.sampled_from([None, None, 0, 2]),
    ),
    min_size=1,
    max_size=6,
).map(lambda all: [replace(request, number=n) for n, request in enumerate(all)])


@settings(max_examples=80)
@given(
    asked=requests,
    k=st.integers(0, 8),
    seed=st.integers(0, 99),
    drafter=st.sampled_from(list(MAKERS)),
    max_batch=st.integers(1, 5),
    max_rows=st.sampled_from([1, 9, 512]),
    blocks=st.integers(4, 9),
    random_lengths=st.booleans(),
)
def test_the_text_is_that_of_plain_decoding(
    asked: list[Request],
    k: int,
    seed: int,
    drafter: str,
    max_batch: int,
    max_rows: int,
    blocks: int,
    random_lengths: bool,
) -> None:
    """Whatever is drafted, in whatever batch, and whoever gives a place up; some other requests run beside them."""
    expected = plain(asked)
    others = [replace(r, number=10 + r.number, sampling=replace(r.sampling, reproducible=False)) for r in asked[::2]]
    engine = Engine(
        paged(target_table, blocks),
        MAKERS[drafter](k, seed, expected | {10 + n: text for n, text in expected.items()}),
        eos_ids=(PAGED_EOS,),
        max_draft=k,
        max_batch=max_batch,
        max_rows=max_rows,
        lengths=RandomLengths(seed) if random_lengths else None,
    )
    found = texts(engine, [*others, *asked])
    assert {n: found[n] for n in expected} == expected


def crowd() -> list[Request]:
    sampling = replace(COUPLED, max_tokens=40, ignore_eos=True)
    return [Request(n, (1, 2, 3, n), replace(sampling, seed=n)) for n in range(6)]


@pytest.mark.parametrize("k", range(9))
def test_places_given_up_and_every_length(k: int) -> None:
    drafter = model_drafter(max(k, 1), blocks=200)
    engine = Engine(paged(target_table, 7), drafter, eos_ids=(PAGED_EOS,), max_draft=k, max_batch=6)
    assert texts(engine, crowd()) == plain(crowd())
    assert engine.load().preemptions > 0


def test_without_it_the_text_depends_on_the_length() -> None:
    """What the rule is for: with the block rule some seed of these gives another text."""
    asked = [replace(r, sampling=replace(r.sampling, reproducible=False)) for r in crowd()]
    engine = Engine(paged(target_table, 200), model_drafter(3, 200), eos_ids=(PAGED_EOS,), max_draft=3, max_batch=6)
    assert texts(engine, asked) != plain(asked)


def test_a_dead_end_that_was_only_drafted_is_not_the_request_s() -> None:
    """After token 1 everything is banned. Who drafts it ends no output that would not have gone there."""
    sampling = SamplingParams(
        max_tokens=6, allowed_ids=frozenset({0, 1}), bad_words=((1, 0), (1, 1)), logit_bias={1: -2.0}, reproducible=True
    )
    asked = [Request(0, (0,), replace(sampling, seed=seed)) for seed in range(12)]
    safe = 0
    for request in asked:
        outcomes = []
        for drafter in (None, Scripted(lambda row: [1] * row.budget)):
            engine = Engine(TableModel(constant_table(0.5, 0.4, 0.1)), drafter, eos_ids=(), max_draft=3, max_batch=1)
            engine.submit(request)
            emissions = []
            while engine.scheduler.running or engine.scheduler.waiting:
                emissions += engine.step()
            outcomes.append(([t for e in emissions for t in e.tokens], emissions[-1].finish))
        assert outcomes[0] == outcomes[1]
        safe += outcomes[0][1] == "length"
    assert 0 < safe < len(asked)


# Bugs


class Named:
    """The clocks of a position have another name in every block."""

    def __init__(self, inner: Randomness, start: int) -> None:
        self._inner, self._start = inner, start
        self.draw, self.coin = inner.draw, inner.coin

    def coupled_draw(self, probs: torch.Tensor, position: int) -> int:
        return self._inner.coupled_draw(probs, position + 1000 * self._start)


def clocks_named_by_the_block(patch: pytest.MonkeyPatch) -> None:
    honest = sequence_module.Sequence.draft_row

    def draft_row(self: sequence_module.Sequence, budget: int, room: int) -> object:
        row = honest(self, budget, room)
        return replace(row, randomness=Named(row.randomness, row.start))

    patch.setattr(sequence_module.Sequence, "draft_row", draft_row)


def accepted_without_comparing(patch: pytest.MonkeyPatch) -> None:
    honest = verify._verify_coupled

    def trusting(tokens: Sequence[int], p: torch.Tensor, row: object) -> object:
        count, token, overlaps = honest(tokens, p, row)  # type: ignore[arg-type]
        if count < 1 <= len(tokens):
            count, token = 1, row.randomness.coupled_draw(p[1], row.start + 1)  # type: ignore[attr-defined]
        return count, token, overlaps

    patch.setattr(verify, "_verify_coupled", trusting)


def likely_drafts_stand(patch: pytest.MonkeyPatch) -> None:
    """The token rule's habit: what the target finds likely is let through, equal or not."""
    honest = verify._verify_coupled

    def lenient(tokens: Sequence[int], p: torch.Tensor, row: object) -> object:
        if tokens and p[0, tokens[0]] > 0.5:
            later, token, overlaps = honest(tokens[1:], p[1:], replace(row, tokens=[*row.tokens, tokens[0]]))  # type: ignore[attr-defined, type-var]
            return later + 1, token, (1.0, *overlaps)
        return honest(tokens, p, row)  # type: ignore[arg-type]

    patch.setattr(verify, "_verify_coupled", lenient)


def texts_are_plain() -> None:
    drafter = model_drafter(3, blocks=200)
    engine = Engine(paged(target_table, 20), drafter, eos_ids=(PAGED_EOS,), max_draft=3, max_batch=6)
    assert texts(engine, crowd()) == plain(crowd())


def law_is_right() -> None:
    """Of a table, and of two tokens of which the draft likes the target's likelier one even more."""
    sure = replace(FLAT, target=constant_table(0.6, 0.4), make_drafter=toy_drafter(constant_table(0.9, 0.1), Fixed(2)))
    for game in (BASIC, sure):
        checks.lossless(coupled(game))


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (clocks_named_by_the_block, texts_are_plain),
        (accepted_without_comparing, texts_are_plain),
        (accepted_without_comparing, law_is_right),
        (likely_drafts_stand, texts_are_plain),
        (likely_drafts_stand, law_is_right),
    ],
    ids=lambda thing: thing.__name__,
)
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
