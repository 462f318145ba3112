"""The engine around a target that recites: stop strings, limits, queues, cancelling, refusals."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.drafters import scripted
from bitdraft.engine.engine import Emission, Engine
from bitdraft.engine.sequence import Request
from bitdraft.errors import UsageError
from bitdraft.types import Blocks, Feed, SamplingParams, StepRecord

V = 128
EOS = 0


class Reciter:
    """A `LanguageModel` that says a text, whatever it is told, and checks that its cache is kept in order."""

    vocab_size = V

    def __init__(self, text: str, context_length: int = 4096) -> None:
        self.script = [ord(c) for c in text] + [EOS] * 64
        self.context_length = context_length
        self.lengths: dict[int, int] = {}
        self.prompts: dict[int, int] = {}

    def blocks(self) -> Blocks:
        return Blocks(16, 1000, 1000)

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        return 0

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = []
        for feed in feeds:
            assert self.lengths.get(feed.request, 0) == feed.start
            self.lengths[feed.request] = feed.start + len(feed.tokens)
            for i in range(feed.logits_from, len(feed.tokens)):
                row = torch.zeros(V)
                row[self.script[feed.start + i + 1 - self.prompts[feed.request]]] = 9
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, V)

    def truncate(self, request: int, length: int) -> None:
        self.lengths[request] = length

    def release(self, request: int) -> None:
        self.lengths.pop(request, None)


class Letters:
    """Token ids that are characters; the end of sequence has none."""

    def push(self, token: int) -> str:
        return chr(token) if token != EOS else ""

    def flush(self) -> str:
        return ""


def recite(text: str, k: int, prompt: int = 3, **sampling: object) -> tuple[list[Emission], list[StepRecord]]:
    target = Reciter(text)
    target.prompts[0] = prompt
    records: list[StepRecord] = []
    drafter = scripted.half_wrong({0: target.script}, V, Random(k)) if k % 2 else scripted.oracle({0: target.script})
    engine = Engine(
        target,
        drafter if k else None,
        eos_ids=[EOS],
        max_draft=k,
        max_batch=1,
        on_record=records.append,
    )
    engine.submit(Request(0, (7,) * prompt, SamplingParams(temperature=0, **sampling), Letters()))  # type: ignore[arg-type]
    emissions = list(engine.run())
    assert target.lengths == {}, "a finished request holds nothing"
    return emissions, records


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", min_size=1, max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    k=st.integers(0, 6),
)
def test_text_ends_before_the_first_stop_string_and_never_shows_part_of_one(
    text: str, stops: list[str], k: int
) -> None:
    emissions, _ = recite(text, k, stop=tuple(stops), max_tokens=40)
    shown = ""
    for emission in emissions:
        shown += emission.text
        assert text.startswith(shown)
    # The stop that is complete first wins; of those that end together, the one that begins first.
    complete = min((text.find(s) + len(s) for s in stops if s in text), default=None)
    if complete is None:
        assert shown == text
    else:
        whole = [s for s in stops if text[:complete].find(s) >= 0]
        assert shown == text[: min(text.find(s) for s in whole)]
    assert emissions[-1].finish == "stop"


@pytest.mark.parametrize("k", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("limit", [1, 2, 5, 11])
def test_max_tokens_is_exact(k: int, limit: int) -> None:
    emissions, _ = recite("abcdefghijklmnop", k, max_tokens=limit)
    assert sum(len(e.tokens) for e in emissions) == limit
    assert emissions[-1].finish == "length"
    assert "".join(e.text for e in emissions) == "abcdefghijklmnop"[:limit]


@pytest.mark.parametrize("k", [0, 3, 4])
@pytest.mark.parametrize("minimum", [0, 3, 5, 8])
def test_min_tokens_by_output_index(k: int, minimum: int) -> None:
    """Users-pain U38: the end is recited after 4 letters; it is banned before `minimum` tokens, and not one longer."""
    emissions, _ = recite("abcd", k, max_tokens=12, min_tokens=minimum)
    tokens = [t for e in emissions for t in e.tokens]
    plain = [t for e in recite("abcd", 0, max_tokens=12, min_tokens=minimum)[0] for t in e.tokens]
    assert tokens == plain
    assert tokens.index(EOS) == max(4, minimum)


def test_an_oracle_is_taken_whole_and_the_records_say_so() -> None:
    emissions, records = recite("abcdefghijkl", 4, max_tokens=10)
    assert [len(e.tokens) for e in emissions] == [5, 5]
    assert [e.origins for e in emissions] == [("draft",) * 4 + ("free",)] * 2
    assert [(r.start, r.proposed, r.accepted, r.emitted, r.rows) for r in records] == [(0, 4, 4, 5, 5), (5, 4, 4, 5, 5)]
    assert all(r.overlap == (1.0,) * 4 for r in records)


def test_more_requests_than_places_all_come_to_their_end() -> None:
    target = Reciter("xyz")
    engine = Engine(target, None, eos_ids=[EOS], max_draft=0, max_batch=2, max_rows=4)
    for number in range(7):
        target.prompts[number] = 1 + number
        engine.submit(Request(number, (5,) * (1 + number), SamplingParams(temperature=0, max_tokens=9), Letters()))
    texts = dict.fromkeys(range(7), "")
    for emission in engine.run():
        texts[emission.request] += emission.text
    assert set(texts.values()) == {"xyz"}
    assert target.lengths == {}


def test_a_cancelled_request_is_gone_and_the_others_are_not() -> None:
    target = Reciter("abcdef")
    engine = Engine(target, None, eos_ids=[EOS], max_draft=0, max_batch=2)
    for number in range(3):
        target.prompts[number] = 2
        engine.submit(Request(number, (5, 5), SamplingParams(temperature=0, max_tokens=6)))
    engine.step()
    engine.cancel(0)  # running
    engine.cancel(2)  # waiting
    engine.cancel(9)  # unknown
    assert {e.request for e in engine.run()} == {1}
    assert target.lengths == {}


def test_no_output_tokens_is_one_empty_emission() -> None:
    emissions, records = recite("abc", 2, max_tokens=0)
    assert (emissions, records) == ([Emission(0, (), (), "", "length")], [])


def test_the_reason_of_a_stop() -> None:
    """The stop id, the stop string that begins first, or neither at the end of the sequence."""
    assert recite("abcd", 3, stop_ids=(ord("c"),))[0][-1].stop_reason == ord("c")
    assert recite("abcd", 3, stop=("cd", "bcd"))[0][-1].stop_reason == "bcd"
    assert recite("abcd", 3)[0][-1].stop_reason is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, (), SamplingParams()), "0 tokens. Expected 1 to 15"),
        (Request(0, (1,) * 16, SamplingParams()), "16 tokens. Expected 1 to 15"),
        (Request(0, (1, V), SamplingParams()), "ids from 1 to 128. Expected ids from 0 to 127"),
        (Request(0, (1, -1), SamplingParams()), "ids from -1"),
        (Request(0, (1,), SamplingParams(stop=("x",))), "stop strings need a detokeniser"),
    ],
)
def test_a_request_that_cannot_run_is_refused(request_: Request, message: str) -> None:
    engine = Engine(Reciter("a", context_length=16), None, eos_ids=[EOS], max_draft=0, max_batch=1)
    with pytest.raises(UsageError, match=message):
        engine.submit(request_)
    assert list(engine.run()) == []
