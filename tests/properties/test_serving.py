"""Many requests in a small cache: whatever comes, goes, waits and is thrown out, each output is the one that the same
request has alone, with its log-probabilities, and no block is lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged import EOS, V, draft_table, model_drafter, paged, said, target_table

from bitdraft.decoding.protocols import Drafter
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.drafters.scripted import always_wrong
from bitdraft.engine.controller import FixedLengths
from bitdraft.engine.engine import Emission, Engine
from bitdraft.engine.scheduler import Scheduler
from bitdraft.engine.sequence import Request
from bitdraft.errors import UsageError
from bitdraft.formats import KV_FORMATS
from bitdraft.models.cached import CachedModel
from bitdraft.models.kv import BlockTable
from bitdraft.models.prefix import Path, PrefixCache
from bitdraft.types import Feed, SamplingParams, StepRecord

GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1, max_tokens=20)
SYSTEM = tuple(int(i) for i in torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(0)))
"""What many prompts begin with."""


@dataclass
class Outcome:
    """All that one request was told."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: tuple[object, ...] = ()
    cached_tokens: int = 0

    def add(self, emission: Emission) -> None:
        assert self.finish is None, "told something after the end"
        assert len(emission.tokens) == len(emission.origins)
        assert emission.tokens or emission.finish
        if self.tokens:
            assert not emission.prompt_logprobs
            assert not emission.cached_tokens
        else:
            self.prompt_logprobs, self.cached_tokens = emission.prompt_logprobs, emission.cached_tokens
        self.tokens += emission.tokens
        self.logprobs += emission.logprobs
        self.finish = emission.finish


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "n-gram": lambda: NGramDrafter(2),
    "model": lambda: model_drafter(3, blocks=200),
    "model, hardly any room": lambda: model_drafter(3, blocks=4),
    "model, fed in parts": lambda: model_drafter(3, blocks=200, max_rows=7),
}
FREE = {"model, hardly any room", "model, fed in parts"}
"""These draft less where others are served, so only greedy outputs are token for token the same."""


def make(target: CachedModel, drafter: str, max_batch: int = 4, max_rows: int = 512, **more: object) -> Engine:
    made = DRAFTERS[drafter]()
    return Engine(target, made, eos_ids=(EOS,), max_draft=3, max_batch=max_batch, max_rows=max_rows, **more)  # type: ignore[arg-type]


def serve(
    engine: Engine, arrivals: Sequence[tuple[int, Request]], cancels: Sequence[tuple[int, int]] = ()
) -> dict[int, Outcome]:
    """Run requests that come and are cancelled before the steps of these numbers."""
    outcomes = {request.number: Outcome() for _, request in arrivals}
    left, step = list(arrivals), 0
    while left or engine.scheduler.running or engine.scheduler.waiting:
        for at, request in [item for item in left if item[0] <= step]:
            engine.submit(request)
            left.remove((at, request))
        for at, number in cancels:
            if at == step:
                engine.cancel(number)
        for emission in engine.step():
            outcomes[emission.request].add(emission)
        step += 1
        assert step < 3000, "somebody starves"
    blocks = engine.target.blocks()
    assert blocks.available == blocks.total, "a block was lost"
    assert engine.load().kv_blocks_used == engine.load().running == engine.load().waiting == 0
    return outcomes


def alone(request: Request, drafter: str, context_length: int = 96) -> Outcome:
    """The same request, in a large cache that remembers nothing."""
    engine = make(paged(target_table, 200, context_length, prefix_cache=False), drafter)
    return serve(engine, [(0, request)])[request.number]


requests = st.builds(
    lambda shared, own, sampling, logprobs, prompt_logprobs, max_draft: Request(
        0, (*SYSTEM[:shared], *own), sampling, None, None, logprobs, prompt_logprobs, "", max_draft
    ),
    st.sampled_from([0, 16, 20, 32]),
    st.lists(st.integers(0, 4), min_size=1, max_size=20).map(tuple),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        max_tokens=st.sampled_from([0, 1, 7, 40]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        ignore_eos=st.booleans(),
    ),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, None, 1]),
    st.sampled_from([None, None, 0, 1]),
)


@settings(max_examples=60)
@given(
    asked=st.lists(st.tuples(st.integers(0, 12), requests), min_size=1, max_size=7),
    cancels=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=2),
    blocks=st.integers(3, 9),
    max_batch=st.integers(1, 5),
    max_rows=st.sampled_from([1, 5, 24, 512]),
    max_scored=st.sampled_from([1, 3, 500]),
    drafter=st.sampled_from(list(DRAFTERS)),
    prefix_cache=st.booleans(),
)
def test_each_output_is_that_of_the_request_alone(
    asked: list[tuple[int, Request]],
    cancels: list[tuple[int, int]],
    blocks: int,
    max_batch: int,
    max_rows: int,
    max_scored: int,
    drafter: str,
    prefix_cache: bool,
) -> None:
    arrivals = [(at, replace(request, number=number)) for number, (at, request) in enumerate(asked)]
    if drafter in FREE:
        arrivals = [(at, replace(r, sampling=replace(r.sampling, temperature=0))) for at, r in arrivals]
    limit = min(96, 16 * blocks)
    arrivals = [(at, request) for at, request in arrivals if len(request.prompt) < limit]
    target = paged(target_table, blocks, prefix_cache=prefix_cache)
    engine = make(target, drafter, max_batch, max_rows)
    engine.scheduler._max_scored = max_scored
    outcomes = serve(engine, arrivals, cancels)
    for _, request in arrivals:
        got, expected = outcomes[request.number], alone(request, drafter, limit)
        if request.number in {number for _, number in cancels} and got.finish is None:
            assert got.tokens == expected.tokens[: len(got.tokens)]
            continue
        assert got.finish
        assert replace(got, cached_tokens=0) == expected
        assert len(got.logprobs) == (len(got.tokens) if request.logprobs is not None else 0)
        assert len(got.prompt_logprobs) == (len(request.prompt) if request.prompt_logprobs is not None else 0)


def crowd(params: SamplingParams = GREEDY, count: int = 6) -> list[Request]:
    """Requests whose texts together are more than a cache of 7 blocks holds."""
    sampling = replace(params, ignore_eos=True, max_tokens=40)
    return [Request(n, (*SYSTEM[:20], n % 5, n // 5), replace(sampling, seed=n)) for n in range(count)]


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["none", "n-gram", "model"])
def test_a_request_that_gave_its_place_up_goes_on_where_it_was(
    drafter: str, params: SamplingParams, prefix_cache: bool
) -> None:
    engine = make(paged(target_table, 7, prefix_cache=prefix_cache), drafter)
    for request in crowd(params):
        engine.submit(request)
    outcomes = {n: Outcome() for n in range(6)}
    while engine.scheduler.running or engine.scheduler.waiting:
        for emission in engine.step():
            outcomes[emission.request].add(emission)
        came = [s.request.number for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
        assert came == sorted(came), "somebody was overtaken"
    assert engine.load().preemptions > 0
    assert all(outcomes[r.number].tokens == alone(r, drafter).tokens for r in crowd(params))


def test_a_cancelled_request_is_gone_in_every_state() -> None:
    """Waiting, filling, running, and thrown out."""
    engine = make(paged(target_table, 9, prefix_cache=False), "model", max_batch=3, max_rows=30)
    for request in crowd():
        engine.submit(request)
    engine.step()
    assert [s.missing > 1 for s in engine.scheduler.running] == [False, True, True]
    engine.cancel(5)  # waiting
    while not engine.load().preemptions:
        assert engine.scheduler.running, "nobody was thrown out"
        engine.step()
    thrown_out = engine.scheduler.waiting[0]
    assert thrown_out.origins
    assert thrown_out.request.number == 2
    engine.cancel(2)
    engine.cancel(0)  # running
    assert {e.request for e in engine.run()} == {1, 3, 4}
    engine.submit(Request(7, SYSTEM, GREEDY))
    engine.step()
    assert engine.scheduler.running[0].missing == 34
    engine.cancel(7)  # filling
    blocks = engine.target.blocks()
    assert blocks.available == blocks.total
    assert engine.drafter._model.blocks().available == 200  # type: ignore[union-attr]


def test_a_prompt_that_the_cache_cannot_hold_is_refused() -> None:
    engine = make(paged(target_table, 2), "none")
    with pytest.raises(UsageError, match="the KV cache holds 32 and"):
        engine.submit(Request(0, (1,) * 32, GREEDY))
    outcome = serve(engine, [(0, Request(0, (1,) * 30, replace(GREEDY, ignore_eos=True)))])[0]
    assert (len(outcome.tokens), outcome.finish) == (2, "length")


@pytest.mark.parametrize("left", range(13))
def test_near_the_end_of_the_context(left: int) -> None:
    """Users-pain U62: four at once, drafts of up to 8, a prompt that leaves `left` places."""
    target = paged(target_table, 64, context_length=64)
    engine = Engine(target, model_drafter(8, 64), eos_ids=(), max_draft=8, max_batch=4)
    prompts = [(*SYSTEM[: 63 - left], n) for n in range(4)]
    if not left:
        with pytest.raises(UsageError, match="Expected 1 to 63"):
            engine.submit(Request(0, prompts[0], GREEDY))
        return
    outcomes = serve(engine, [(0, Request(n, p, replace(GREEDY, max_tokens=64))) for n, p in enumerate(prompts)])
    assert {(len(o.tokens), o.finish) for o in outcomes.values()} == {(left, "length")}


@pytest.mark.parametrize("k", range(1, 9))
def test_a_stop_id_inside_a_block_ends_there(k: int) -> None:
    """Users-pain U57: drafts that are all right, and the 18th token made a stop id."""
    prompt = SYSTEM[:30]
    engine = make(paged(target_table, 20, 160), "none")
    plain = serve(engine, [(0, Request(0, prompt, replace(GREEDY, ignore_eos=True, max_tokens=64)))])[0].tokens
    stop = plain[17]
    same = model_drafter(k, 20)
    same._model = paged(target_table, 20, 160)
    engine = Engine(paged(target_table, 20, 160), same, eos_ids=(), max_draft=k, max_batch=1)
    request = Request(0, prompt, replace(GREEDY, max_tokens=64, stop_ids=(stop,)), logprobs=1)
    outcome = serve(engine, [(0, request)])[0]
    assert outcome.tokens == plain[: plain.index(stop) + 1]
    assert outcome.finish == "stop"
    assert len(outcome.logprobs) == len(outcome.tokens)


def test_one_greedy_request_among_seeds() -> None:
    """Users-pain U41: eight prompts alike, with seeds; the greedy one and every seed say what they say alone."""
    prompt = SYSTEM[:40]
    asked = [Request(n, prompt, replace(SAMPLED, seed=n)) for n in range(1, 8)] + [Request(0, prompt, GREEDY)]
    outcomes = serve(make(paged(target_table, 40), "model", max_batch=8), [(0, r) for r in asked])
    assert all(outcomes[r.number].tokens == alone(r, "model").tokens for r in asked)
    assert len({tuple(o.tokens) for o in outcomes.values()}) > 4


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_sixteen_at_once(params: SamplingParams) -> None:
    """Users-pain U85: outputs and acceptance of each as alone, one long prompt among them, drafts of every length."""
    records: list[StepRecord] = []
    asked = [Request(n, (*SYSTEM[: 4 * (n % 5)], n % 5), replace(params, seed=n), max_draft=n % 4) for n in range(15)]
    asked.append(Request(15, SYSTEM + SYSTEM[:10], params))
    engine = make(paged(target_table, 120), "model", max_batch=16, max_rows=64, on_record=records.append)
    outcomes = serve(engine, [(0, r) for r in asked])
    for request in asked:
        solo: list[StepRecord] = []
        one = make(paged(target_table, 60, prefix_cache=False), "model", on_record=solo.append)
        assert serve(one, [(0, request)])[request.number].tokens == outcomes[request.number].tokens
        mine = [(r.proposed, r.accepted, r.overlap) for r in records if r.request == request.number]
        assert mine == [(r.proposed, r.accepted, r.overlap) for r in solo]


# Prefixes


@pytest.mark.parametrize("drafter", ["none", "n-gram", "model"])
def test_a_warm_prefix_changes_no_token(drafter: str) -> None:
    """Users-pain U68 and U69: five questions twice after one system prompt, in one engine, one after the other."""
    engine = make(paged(target_table, 60), drafter)
    questions = [(*SYSTEM[:50], *SYSTEM[n : n + 4]) for n in range(5)]
    cold = [alone(Request(0, prompt, GREEDY), drafter) for prompt in questions]
    for round_number in (0, 1):
        for n, prompt in enumerate(questions):
            outcome = serve(engine, [(0, Request(10 * round_number + n, prompt, GREEDY))])[10 * round_number + n]
            assert outcome.tokens == cold[n].tokens
            assert outcome.cached_tokens == (48 if round_number or n else 0)
    assert serve(engine, [(0, Request(50, SYSTEM[:48], GREEDY))])[50].cached_tokens == 32, "one token is always fed"


def test_prefixes_are_shared_while_both_run_and_one_is_cancelled() -> None:
    engine = make(paged(target_table, 10), "model")
    prompt = SYSTEM[:60]
    engine.submit(Request(0, prompt, GREEDY))
    engine.step()
    engine.submit(Request(1, (*prompt, 1), GREEDY))
    engine.step()
    assert engine.load().kv_blocks_used <= 6, "three blocks are shared"
    engine.cancel(0)
    outcome = Outcome()
    for emission in engine.run():
        outcome.add(emission)
    assert outcome.tokens[-1:] == alone(Request(1, (*prompt, 1), GREEDY), "model").tokens[-1:]


@pytest.mark.parametrize(("k", "steps"), [(0, 2), (3, 6)])
def test_a_prompt_is_read_beside_many_that_draft(k: int, steps: int) -> None:
    """What drafts counts as what it drafts, not as what it may; and a quarter of a step's rows is left for prompts."""
    engine = make(paged(target_table, 200), "model", max_batch=16, max_rows=64, lengths=FixedLengths(k))
    for number in range(15):
        engine.submit(Request(number, SYSTEM[:4], replace(GREEDY, max_tokens=60, ignore_eos=True)))
    for _ in range(4):
        engine.step()
    engine.submit(Request(15, SYSTEM[:30] * 3, GREEDY))
    for _ in range(steps - 1):
        assert all(emission.request != 15 for emission in engine.step())
    assert any(emission.request == 15 for emission in engine.step())


def test_what_was_used_longest_ago_is_given_up_first() -> None:
    model = paged(target_table, 4)
    for number, text in enumerate(([0] * 16, [1] * 16, [0] * 16 + [2] * 16)):
        model.adopt(number, [*text, 3])
        said(model, number, text[model.length(number) :])
        model.truncate(number, len(text))
        model.release(number)
    assert (model.blocks().free, model.blocks().cached) == (1, 3)
    said(model, 9, [4] * 32)  # wants two blocks: [1] goes
    model.release(9)
    assert [model.adopt(n, [*text, 3]) for n, text in ((11, [1] * 16), (12, [0] * 16 + [2] * 16))] == [0, 32]


def test_a_format_with_codes_has_no_prefix_cache() -> None:
    decoder = paged(target_table, 4).decoder
    model = CachedModel(decoder, kv_tokens=64, vocab_size=V, kv=KV_FORMATS["int4"], prefix_cache=True)
    assert model.adopt(0, SYSTEM) == 0
    assert model.blocks().cached == 0


actions = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
        st.tuples(st.just("feed"), st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=3)),
        st.tuples(st.just("cut"), st.integers(0, 3), st.integers(0, 40)),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(4, 5)),
        st.tuples(st.just("release"), st.integers(0, 5), st.none()),
    ),
    max_size=40,
)


def play(steps: Sequence[tuple[str, int, object]]) -> None:
    """Everything that may be done to a cache with prefixes: each row says what the whole text says.

    Tokens come in runs of nine that are all alike, so that prefixes of whole blocks are met again.
    """
    model, texts = paged(target_table, 8, context_length=512), {}
    for action, who, what in steps:
        try:
            if action == "start" and who not in texts:
                text = [token for token in what for _ in range(9)]  # type: ignore[attr-defined]
                held = model.adopt(who, text)
                assert held % 16 == 0
                assert held < len(text)
                texts[who] = text[:held]
                action, what = "feed", ()
                fed = text[held:]
            elif action == "feed" and who in texts:
                fed = [token for token in what for _ in range(9)]  # type: ignore[attr-defined]
            if action == "feed" and who in texts:
                rows = said(model, who, fed)
                for i, row in enumerate(rows):
                    assert torch.equal(row, target_table((*texts[who], *fed[: i + 1])))
                texts[who] += fed
        except UsageError:
            assert sum(-(-len(text) // 16) for text in texts.values()) + 5 > 8, "blocks are lost"
        if action == "cut" and who in texts:
            del texts[who][what:]  # type: ignore[misc]
            model.truncate(who, len(texts[who]))
        elif action == "fork" and who in texts and what not in texts:
            model.fork(who, what)  # type: ignore[arg-type]
            texts[what] = list(texts[who])
        elif action == "release" and who in texts:
            model.release(who)
            del texts[who]
    for number in texts:
        model.release(number)
    blocks = model.blocks()
    assert blocks.available == blocks.total
    said(model, 99, SYSTEM * 2)  # all blocks can be had again
    assert model.blocks().cached == 0


@settings(max_examples=150)
@given(actions)
@example([("start", 2, [0, 0]), ("fork", 2, 4), ("start", 0, [0]), ("cut", 2, 16)])
@example([("start", 0, [0, 1]), ("fork", 0, 4), ("release", 0, None), ("start", 0, [0, 1, 1]), ("cut", 4, 7)])
def test_prefixes_hold_what_they_say(steps: list[tuple[str, int, object]]) -> None:
    play(steps)


# Log-probabilities


@pytest.mark.parametrize("drafter", ["none", "n-gram", "model"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logprobs_are_the_target_s_own(drafter: str, params: SamplingParams) -> None:
    """Users-pain U42 and U44: of every token, out of blocks or not; of the raw logits, whatever the sampling does."""
    records: list[StepRecord] = []
    sampling = replace(params, frequency_penalty=1.0, top_k=3, ignore_eos=True)
    request = Request(0, SYSTEM[:40], sampling, logprobs=3, prompt_logprobs=2)
    engine = make(paged(target_table, 20), drafter, max_rows=16, on_record=records.append)
    outcome = serve(engine, [(0, request), (0, replace(request, number=1))])[0]
    text = (*request.prompt, *outcome.tokens)
    for i, entry in enumerate((*outcome.prompt_logprobs, *outcome.logprobs)):
        if i == 0:
            assert entry is None
            continue
        expected = torch.log_softmax(target_table(text[:i]), 0)
        assert (entry.token, entry.logprob) == (text[i], float(expected[text[i]]))
        count = 2 if i < 40 else 3
        best = sorted(((-float(x), token) for token, x in enumerate(expected)))[:count]
        assert entry.top == tuple((token, -x) for x, token in best)
        assert entry.logprob == dict(entry.top).get(entry.token, entry.logprob), "compared with == by clients"
    assert len(outcome.logprobs) == len(outcome.tokens) == 20
    assert drafter == "none" or sum(r.proposed for r in records) > 0


def test_equal_logits_are_named_by_lower_ids() -> None:
    model = paged(lambda text: torch.tensor([0.0, 1.0, 1.0, 1.0, -torch.inf, 0.0]), 4)
    request = Request(0, (1, 2), replace(GREEDY, max_tokens=1), logprobs=2, prompt_logprobs=9)
    outcome = serve(make(model, "none"), [(0, request)])[0]
    assert [token for token, _ in outcome.logprobs[0].top] == [1, 2]
    assert [token for token, _ in outcome.prompt_logprobs[1].top] == [1, 2, 3, 0, 5], "what cannot come is not named"


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("length", [1, 2, 33])
def test_a_prompt_is_scored_with_no_output_or_one_token(length: int, max_tokens: int) -> None:
    """Users-pain U88: lm-eval's requests; few rows of logits at a time, and nothing is computed twice."""
    target = paged(target_table, 8)
    fed: list[Feed] = []
    real = target.forward
    target.forward = lambda feeds: (fed.extend(feeds), real(feeds))[1]  # type: ignore[method-assign]
    engine = make(target, "model")
    engine.scheduler._max_scored = 5
    request = Request(0, SYSTEM[:length], replace(GREEDY, max_tokens=max_tokens), prompt_logprobs=1, logprobs=1)
    outcome = serve(engine, [(0, request)])[0]
    assert (len(outcome.tokens), outcome.finish) == (max_tokens, "length")
    assert len(outcome.prompt_logprobs) == length
    assert sum(len(feed.tokens) for feed in fed) == length - 1 + max_tokens
    assert max((len(feed.tokens) - feed.logits_from for feed in fed), default=0) <= 6


# What goes wrong with one request


def test_logits_that_are_no_numbers_end_their_request_alone() -> None:
    """Users-pain U78: within a step, with a reason, and never as a token."""

    def broken(text: tuple[int, ...]) -> torch.Tensor:
        logits = target_table(text)
        return logits * torch.nan if text[0] == 4 and len(text) > 12 else logits

    asked = [Request(n, (4 if n == 1 else 3, n, *SYSTEM[:5]), replace(GREEDY, ignore_eos=True)) for n in range(3)]
    asked.append(Request(3, (4, *SYSTEM[:20]), GREEDY, prompt_logprobs=0))
    for drafter in ("none", "model"):
        engine = make(paged(broken, 20), drafter, max_rows=16)
        outcomes, errors = {n: Outcome() for n in range(4)}, {}
        for request in asked:
            engine.submit(request)
        while engine.scheduler.running or engine.scheduler.waiting:
            for emission in engine.step():
                outcomes[emission.request].add(emission)
                if emission.error:
                    errors[emission.request] = emission.error
        assert {n: o.finish for n, o in outcomes.items()} == {0: "length", 1: "error", 2: "length", 3: "error"}
        assert set(errors) == {1, 3}
        assert "NaN" in errors[1]
        told = outcomes[1].tokens
        assert told
        assert told == alone(asked[1], drafter).tokens[: len(told)]
        assert len(told) <= 6
        assert all(outcomes[n].tokens == alone(asked[n], drafter).tokens for n in (0, 2))
        assert outcomes[3].tokens == []
        assert engine.target.blocks().available == 20


def test_a_broken_draft_ends_nothing() -> None:
    drafter = model_drafter(3, 20)
    drafter._model = paged(lambda text: draft_table(text) * (torch.nan if len(text) > 12 else 1), 20)
    engine = Engine(paged(target_table, 20), drafter, eos_ids=(EOS,), max_draft=3, max_batch=2)
    asked = [Request(n, SYSTEM[n : n + 9], replace(SAMPLED, seed=n, ignore_eos=True)) for n in range(2)]
    with pytest.warns(RuntimeWarning, match="nothing is drafted where the draft is broken: .*NaN"):
        outcomes = serve(engine, [(0, r) for r in asked])
    assert all(len(o.tokens) == 20 for o in outcomes.values())


class BrokenStream:
    """A detokeniser that does not know token 3."""

    def push(self, token: int) -> str:
        if token == 3:
            raise KeyError(token)
        return chr(97 + token)

    def flush(self) -> str:
        return ""


def test_a_detokeniser_that_fails_ends_its_request_alone() -> None:
    asked = [Request(n, SYSTEM[:9], replace(GREEDY, ignore_eos=True), BrokenStream() if n else None) for n in range(2)]
    outcomes = serve(make(paged(target_table, 20), "model"), [(0, r) for r in asked])
    assert (outcomes[0].finish, outcomes[1].finish) == ("length", "error")
    assert outcomes[1].tokens == outcomes[0].tokens[: outcomes[0].tokens.index(3) + 1]


def test_an_error_of_a_whole_step_takes_nothing_back() -> None:
    """Users-pain U49, with prefixes: the step fails once between drafting and verifying."""
    target = paged(target_table, 20)
    engine = make(target, "model")
    asked = [Request(n, (*SYSTEM[:20], n), GREEDY) for n in range(3)]
    for request in asked:
        engine.submit(request)
    outcomes = {n: Outcome() for n in range(3)}
    real, calls = target.forward, iter(range(100))

    def flaky(feeds: Sequence[Feed]) -> torch.Tensor:
        logits = real(feeds)
        if next(calls) in (0, 2):
            raise RuntimeError("power cut")
        return logits

    target.forward = flaky  # type: ignore[method-assign]
    while engine.scheduler.running or engine.scheduler.waiting:
        try:
            emissions = engine.step()
        except RuntimeError:
            continue
        for emission in emissions:
            outcomes[emission.request].add(emission)
    assert all(outcomes[r.number].tokens == alone(r, "model").tokens for r in asked)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    engine = make(paged(target_table, 4), "none")
    for named in ({"logit_bias": {V: 1.0}}, {"bad_words": ((0, V),)}, {"allowed_ids": frozenset({V})}):
        with pytest.raises(UsageError, match="Expected ids from 0 to 5"):
            engine.submit(Request(0, (1,), replace(GREEDY, **named)))  # type: ignore[arg-type]


# Bugs that these tests have to notice


def rejected_drafts_enter_the_prefix_cache(patch: pytest.MonkeyPatch) -> None:
    """What a request held before its drafts were taken back is kept for others."""
    honest = CachedModel.truncate

    def truncate(self: CachedModel, request: int, length: int) -> None:
        if self._prefix and request in self._paths:
            self._prefix.keep(self._paths[request], self._tables[request])
        honest(self, request, length)

    patch.setattr(CachedModel, "truncate", truncate)


def rejected_drafts_stay_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """The cache goes back, what is remembered of the text does not."""
    honest = PrefixCache.keep

    def keep(self: PrefixCache, path: Path, table: BlockTable) -> None:
        before = list(path.tokens)
        honest(self, path, table)
        path.tokens[:] = before

    patch.setattr(PrefixCache, "keep", keep)


def output_is_lost_with_the_place(patch: pytest.MonkeyPatch) -> None:
    honest = Scheduler._preempt

    def preempt(self: Scheduler, s: object) -> None:
        honest(self, s)  # type: ignore[arg-type]
        del s.tokens[len(s.request.prompt) :]  # type: ignore[attr-defined]

    patch.setattr(Scheduler, "_preempt", preempt)


def shared_blocks_are_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "_last_is_shared", lambda self: False)


def drafts_and_prefixes() -> None:
    """Wrong drafts over the border of a block, then a prompt that says what they said."""
    target = paged(target_table, 20)
    prompt = SYSTEM[:14]
    plain = alone(Request(0, prompt, GREEDY), "none").tokens
    engine = Engine(target, always_wrong({0: plain, 1: (), 2: ()}, V), eos_ids=(EOS,), max_draft=3, max_batch=1)
    assert serve(engine, [(0, Request(0, prompt, GREEDY))])[0].tokens == plain
    wrong = [(token + 1) % V for token in plain]
    for n, said_so in enumerate((plain, wrong)):
        second = Request(n + 1, (*prompt, *said_so[:8]), replace(GREEDY, max_tokens=8))
        outcome = serve(engine, [(0, second)])[n + 1]
        assert outcome.tokens == alone(second, "none").tokens
        assert outcome.cached_tokens == (0 if said_so is wrong else 16)


def places_given_up() -> None:
    outcomes = serve(make(paged(target_table, 7), "none"), [(0, r) for r in crowd()])
    assert all(outcomes[r.number].tokens == alone(r, "none").tokens for r in crowd())


def written_on() -> None:
    """A text goes on in another way after a cut inside a block that the tree keeps; then somebody adopts that."""
    play([("start", 0, [0, 0, 1, 1]), ("cut", 0, 36), ("cut", 0, 20), ("feed", 0, [1, 0]), ("start", 1, [0, 0, 1, 1])])


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (rejected_drafts_enter_the_prefix_cache, drafts_and_prefixes),
        (rejected_drafts_stay_in_the_key, drafts_and_prefixes),
        (output_is_lost_with_the_place, places_given_up),
        (shared_blocks_are_written, written_on),
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
