"""Drafts from what the caller predicts: found again after the output left them, and the law stays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine_lossless import (
    DENSE,
    DRAFTERS,
    GRAMMAR,
    LENGTHS,
    SAMPLING,
    TARGET,
    TOLERANCE,
    Adversary,
    Case,
    distance,
)
from toy import EOS, TableModel

from bitdraft.decoding.protocols import Drafter, DraftRow
from bitdraft.decoding.sampling import History
from bitdraft.decoding.streams import Streams
from bitdraft.drafters.predicted import SHORTEST, PredictedDrafter
from bitdraft.drafters.scripted import Scripted, always
from bitdraft.engine.controller import FixedLengths
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.types import SamplingParams, StepRecord

PREDICTIONS = [(0, 1, 0, 0), (1, 0, 1, 1, EOS)]


def combined(kind: str) -> Drafter:
    return PredictedDrafter(DRAFTERS[kind]() if kind else None)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["", "model, fixed", "n-gram"])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_the_law_is_the_target_s(prediction: tuple[int, ...], kind: str, rule: str) -> None:
    case = Case(LENGTHS, SAMPLING, prediction=prediction)
    assert distance([case], lambda: combined(kind), rule=rule) <= TOLERANCE


@pytest.mark.parametrize(
    "params",
    [
        replace(SAMPLING, temperature=0),
        replace(SAMPLING, top_p=0.8, min_p=0.1),
        replace(SAMPLING, repetition_penalty=1.5, frequency_penalty=0.4),
        replace(SAMPLING, ignore_eos=True, max_tokens=3),
    ],
    ids=["greedy", "filters", "penalties", "ignore_eos"],
)
def test_under_every_kind_of_sampling(params: SamplingParams) -> None:
    case = Case(LENGTHS, params, prediction=(1, 0, 1, 1, 0))
    assert distance([case], lambda: combined("model, fixed")) <= TOLERANCE


def test_under_the_coupled_rule() -> None:
    case = Case(LENGTHS, replace(SAMPLING, reproducible=True), prediction=(1, 0, 1, 1, 0))
    assert distance([case], lambda: combined("")) <= TOLERANCE


def test_beside_requests_that_a_model_drafts_for() -> None:
    """One proposal then holds point masses and distributions, of blocks of different lengths."""
    cases = [
        Case(LENGTHS, replace(SAMPLING, max_tokens=2), prediction=(0, 1, 0)),
        Case((1, 1), replace(SAMPLING, max_tokens=3, seed=1)),
    ]
    for lengths in (lambda: None, Adversary):
        assert distance(cases, lambda: combined("model, fixed"), rule="block", lengths=lengths) <= TOLERANCE


@pytest.mark.parametrize("rule", ["token", "block"])
def test_with_a_grammar_and_bad_words(rule: str) -> None:
    case = Case(LENGTHS, replace(SAMPLING, bad_words=((1, 1),), min_tokens=2), GRAMMAR, (0, 1, 0, 1, 1))
    assert distance([case], lambda: combined("model, fixed"), rule=rule, target=DENSE) <= TOLERANCE


def test_a_prediction_is_followed_where_other_drafts_do_not_pay() -> None:
    """The length that is decided is the other drafter's: looking a prediction up costs nothing."""
    records: list[StepRecord] = []
    model = TableModel(TARGET)
    prompt, output = (0, 1, 0), []
    while len(output) < 8:
        logits = TARGET((*prompt, *output)).clone()
        logits[EOS] = float("-inf")
        output.append(int(logits.argmax()))
    engine = Engine(
        model,
        PredictedDrafter(Scripted(lambda row: pytest.fail("asked"))),
        eos_ids=[EOS],
        max_draft=3,
        max_batch=1,
        lengths=FixedLengths(0),
        on_record=records.append,
    )
    params = SamplingParams(temperature=0, max_tokens=8, logit_bias={EOS: -100.0}, ignore_eos=True)
    engine.submit(Request(0, prompt, params, prediction=tuple(output)))
    assert [token for emission in engine.run() for token in emission.tokens] == output
    assert [(r.proposed, r.accepted, r.predicted) for r in records] == [(3, 3, True), (3, 3, True)]


def row(output: list[int], prediction: list[int], room: int = 4) -> DraftRow:
    tokens = [9, 9, *output]
    params = SamplingParams()
    return DraftRow(0, tokens, 2, 0, params, History.after_prompt(tokens), Streams(0, 0), tuple(prediction), room)


def ahead(output: list[int], prediction: list[int], room: int = 4) -> list[int]:
    return list(PredictedDrafter(None).propose([row(output, prediction, room)]).tokens[0])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([], [1, 2, 3, 4]),
        ([1, 2], [3, 4, 5, 6]),
        ([1, 2, 50], []),  # left it
        ([1, 2, 50, 4], []),  # one token is no sign
        ([1, 2, 50, 4, 5], [6, 7, 8, 1]),  # a token was replaced
        ([1, 2, 50, 51, 3, 4], [5, 6, 7, 8]),  # some were put in
        ([1, 2, 6, 7], [8, 1, 2, 60]),  # some were left out
        ([1, 2, 3, 4, 5, 6, 7, 50, 1, 2], [60]),  # of two places the nearest one after it
        ([7, 8], [1, 2, 60]),  # it began elsewhere
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 60], []),  # its end
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 60, 70, 3, 4], [5, 6, 7, 8]),  # back, when nothing is ahead
    ],
)
def test_where_the_output_stands(output: list[int], expected: list[int]) -> None:
    assert ahead(output, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 60]) == expected


def test_a_place_that_was_wrong_is_harder_to_find_again() -> None:
    prediction = [1, 2, 3, 4, 5, 6, 7]
    assert ahead([50, 1, 2], prediction) == [3, 4, 5, 6]
    assert ahead([50, 1, 2, 51, 1, 2], prediction) == [], "two tokens misled it once"
    assert ahead([50, 1, 2, 51, 1, 2, 3], prediction) == [4, 5, 6, 7]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), min_size=1, max_size=20), st.data())
def test_the_place_depends_on_the_committed_text_alone(output: list[int], prediction: list[int], data) -> None:
    """However the output came, in blocks of whatever size, and whatever was drafted meanwhile."""
    drafter, at = PredictedDrafter(always(0)), 0
    while at < len(output):
        drafter.propose([replace(row(output[:at], prediction), budget=2)])
        at += data.draw(st.integers(1, 4))
    block = drafter.propose([row(output, prediction)]).tokens[0]
    assert list(block) == ahead(output, prediction)
    text = "".join(map(str, prediction))
    assert "".join(map(str, block)) in text
    if block and output and output[: len(prediction)] != prediction[: len(output)]:
        assert "".join(map(str, output[-SHORTEST:])) in text
