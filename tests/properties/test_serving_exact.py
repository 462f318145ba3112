"""Serving a real decoder, to the bit: in a crowd, after a preemption, from a warm prefix, with log-probabilities."""

from dataclasses import replace
from random import Random

import pytest
from native_kernels import instruction_sets, kernels
from test_kv_exact import TEXT, cached, decoder
from test_serving import Outcome, serve

from bitdraft.decoding.lookahead import Fixed
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.scripted import half_wrong
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.formats import KV_FORMATS
from bitdraft.models.cached import CachedModel
from bitdraft.ops import native
from bitdraft.types import SamplingParams


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "default", lambda: kernels(instruction_sets()[-1], 1))


GREEDY = SamplingParams(temperature=0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40)


def model(kind: str, kv_tokens: int, layers: int = 2) -> CachedModel:
    """The decoder of `test_kv_exact`, with prefixes where the format has them."""
    made = decoder(instruction_sets()[-1], layers)
    kv = KV_FORMATS[kind]
    return CachedModel(made, kv_tokens=kv_tokens, vocab_size=made.config.vocab_size, kv=kv, prefix_cache=True)


def engine(kind: str, kv_tokens: int, drafted: bool, max_rows: int = 64) -> Engine:
    drafter = ModelDrafter(model("bf16", 2048, layers=1), Fixed(3), ()) if drafted else None
    return Engine(model(kind, kv_tokens), drafter, eos_ids=(), max_draft=3, max_batch=4, max_rows=max_rows)


def asked(params: SamplingParams, count: int = 4) -> list[Request]:
    """Prompts of 40 tokens and more, 32 of them alike."""
    return [
        Request(n, (*TEXT[:32], *TEXT[50 + n : 60 + 2 * n]), replace(params, seed=n), logprobs=2) for n in range(count)
    ]


def alone(kind: str, request: Request, drafted: bool) -> Outcome:
    return serve(engine(kind, 1024, drafted), [(0, request)])[request.number]


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_who_gave_a_place_up_goes_on_as_if_not(kind: str, params: SamplingParams) -> None:
    """Four requests of up to 6 blocks each in a cache of 12, or of 16 where nothing is shared, with drafts."""
    crowded = engine(kind, 16 * (16 if KV_FORMATS[kind].bits else 12), drafted=True)
    outcomes = serve(crowded, [(0, request) for request in asked(params)])
    assert crowded.load().preemptions > 0
    for request in asked(params):
        assert replace(outcomes[request.number], cached_tokens=0) == alone(kind, request, drafted=True)


def test_a_draft_and_a_warm_prefix_change_no_bit() -> None:
    """Users-pain U42, U44, U68, U69: log-probabilities too, of prompt and output."""
    warm = {drafted: engine("bf16", 1024, drafted) for drafted in (False, True)}
    for request in asked(GREEDY):
        scored = replace(request, prompt_logprobs=1)
        plain = serve(engine("bf16", 1024, False, max_rows=7), [(0, scored)])[request.number]
        assert plain == serve(engine("bf16", 1024, True), [(0, scored)])[request.number]
        assert len(plain.prompt_logprobs) == len(request.prompt)
        for with_draft in (False, True):
            outcome = serve(warm[with_draft], [(0, request)])[request.number]
            assert (outcome.tokens, outcome.logprobs) == (plain.tokens, plain.logprobs)
            assert outcome.cached_tokens == (32 if request.number else 0)


@pytest.mark.parametrize("kind", ["int8", "int8-kc", "int4"])
def test_low_bit_keys_and_values_under_half_wrong_drafts(kind: str) -> None:
    """Users-pain U67: ids are those of plain decoding with the same keys and values, past where codes are read."""
    request = Request(0, TEXT[:130], replace(GREEDY, max_tokens=80))
    plain = alone(kind, request, drafted=False).tokens
    target = cached(kind)
    drafter = half_wrong({0: plain}, target.vocab_size, Random(0))
    one = Engine(target, drafter, eos_ids=(), max_draft=4, max_batch=1)
    assert serve(one, [(0, request)])[0].tokens == plain
