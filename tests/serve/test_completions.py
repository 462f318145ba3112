"""Completions over HTTP: the same answers with and without a draft, alone and among others, and exact figures."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
import torch
from running import Running, start
from tiny_pair import CONTEXT, serve_config, start_tiny

from bitdraft.quantize.load import load_model, open_source, recipe_for
from bitdraft.serve.completions import completion
from bitdraft.serve.generate import GenerateConfig, load
from bitdraft.serve.schemas import CompletionRequest
from bitdraft.serve.start import load_service, open_and_plan
from bitdraft.types import Feed, SamplingParams

TEXT = "hello world 1 2 hello wor"


@pytest.fixture(scope="module")
def copy(folders: Path) -> Iterator[Running]:
    """The tiny target with a low-bit copy of itself, which it accepts now and then."""
    with start_tiny(folders, str(folders / "target"), draft_format="w4a16") as running:
        yield running


def ids(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def test_a_completion_has_openai_s_shape(drafted: Running) -> None:
    answer = drafted.complete(TEXT)
    assert set(answer) >= {"id", "object", "created", "model", "choices", "usage"}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(drafted.service.model.tokenizer.encode(TEXT))
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == usage["prompt_tokens"] + 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_come_as_text_as_ids_and_as_lists_of_either(drafted: Running) -> None:
    prompt = drafted.service.model.tokenizer.encode(TEXT)
    one = drafted.complete(TEXT)["choices"][0]["text"]
    assert drafted.complete(prompt)["choices"][0]["text"] == one
    other = drafted.complete("12 12")["choices"][0]["text"]
    for both in ([TEXT, "12 12"], [prompt, drafted.service.model.tokenizer.encode("12 12")]):
        answer = drafted.complete(both)
        assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, one), (1, other)]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {"70": 3}},
        {"bad_words": ["e", " w"], "min_tokens": 12},
        {"allowed_token_ids": list(range(60, 120))},
        {"response_format": {"type": "json_object"}, "max_tokens": 24},
        {"guided_choice": ["hello world", "hello you"], "max_tokens": 24},
    ],
)
def test_greedy_ids_are_the_same_with_and_without_a_draft(plain: Running, copy: Running, sampling: dict) -> None:
    body = {"return_token_ids": True, "max_tokens": 32} | sampling
    wanted, found = plain.complete(TEXT, **body), copy.complete(TEXT, **body)
    assert ids(found) == ids(wanted)
    assert found["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert wanted["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_http_and_python_draft_and_accept_the_same_u07(folders: Path, copy: Running) -> None:
    target = str(folders / "target")
    config = GenerateConfig(target, target, "auto", "w4a16", 3, 0.0, CONTEXT)
    for temperature, seed in ((0.0, 0), (1.2, 5)):
        generator = load(config, [])
        sampling = SamplingParams(temperature=temperature, seed=seed, reproducible=True, max_tokens=40)
        emissions = list(generator.run(generator.prompt_ids(TEXT, raw=True), sampling))
        answer = copy.complete(
            TEXT, temperature=temperature, seed=seed, max_tokens=40, return_token_ids=True, return_origins=True
        )
        assert ids(answer) == [[token for e in emissions for token in e.tokens]]
        assert answer["choices"][0]["origins"] == [origin for e in emissions for origin in e.origins]
        steps = answer["metrics"]["speculative_decoding"]
        assert steps["per_step_drafted"] == [r.proposed for r in generator.records]
        assert steps["per_step_accepted"] == [r.accepted for r in generator.records]
        assert steps["num_accepted_draft_tokens"] > 0


def test_every_answer_has_a_grammar_of_its_own(copy: Running) -> None:
    body = CompletionRequest(prompt=[TEXT, "12 12"], n=2, guided_choice=["hello world", "hello you"], seed=1)
    service = copy.service
    _, groups = completion(body, service.model, service.settings.defaults, service.compile_grammar, "", 0.0)
    grammars = [request.constraint for group in groups.requests for request, _ in group]
    assert len({id(grammar._walker) for grammar in grammars}) == 4
    sampled = copy.complete([TEXT, "12 12"], n=2, guided_choice=["hello world", "hello you"], seed=1, max_tokens=24)
    assert {choice["text"] for choice in sampled["choices"]} <= {"hello world", "hello you"}


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_seed_names_the_answer_with_and_without_drafts(plain: Running, copy: Running, k: int) -> None:
    body = {"temperature": 1.1, "top_p": 0.95, "seed": 11, "max_tokens": 40, "return_token_ids": True}
    found = copy.complete(TEXT, speculative={"k": k}, **body)
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert ids(found) == ids(plain.complete(TEXT, **body))


def test_a_seed_names_the_answer_whatever_came_before(copy: Running) -> None:
    sampled = {"temperature": 1.0, "max_tokens": 24, "return_token_ids": True}
    first = copy.complete(TEXT, seed=3, n=3, **sampled)
    assert ids(copy.complete(TEXT, seed=3, n=3, **sampled)) == ids(first)
    assert ids(copy.complete(TEXT, seed=3, **sampled)) == ids(first)[:1]
    assert ids(copy.complete([TEXT, TEXT], seed=3, **sampled)) == ids(first)[:1] * 2
    assert len({tuple(one) for one in ids(first)}) == 3, "answers to one prompt differ"
    assert ids(copy.complete(TEXT, seed=4, **sampled)) != ids(first)[:1]
    assert ids(copy.complete(TEXT, **sampled)) != ids(copy.complete(TEXT, **sampled)), "a seed is drawn"
    assert ids(copy.complete(TEXT, seed=-1, **sampled)) == ids(copy.complete(TEXT, seed=2**64 - 1, **sampled))


def test_requests_side_by_side_get_what_they_get_alone_u85(copy: Running, plain: Running) -> None:
    bodies = [
        {"prompt": f"{n} hello world " * (1 + n % 5), "temperature": (n % 2) * 0.9, "seed": n, "max_tokens": 6 + 2 * n}
        for n in range(16)
    ]
    alone = [ids(copy.complete(**body, return_token_ids=True)) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: ids(copy.complete(**body, return_token_ids=True)), bodies))
    assert together == alone
    assert copy.idle()


def test_speculation_is_switched_off_for_one_request_u13(copy: Running) -> None:
    choices = [{"enabled": False}, {"k": 1}, {"enabled": True}, {"k": 0}]

    def ask(speculative: dict) -> dict:
        return copy.complete(TEXT, max_tokens=30, speculative=speculative, return_origins=True, return_token_ids=True)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, choices))
    drafted = [max(a["metrics"]["speculative_decoding"]["per_step_drafted"]) for a in answers]
    assert drafted == [0, 1, 3, 0]
    assert len({tuple(ids(a)[0]) for a in answers}) == 1
    assert set(answers[0]["choices"][0]["origins"]) == {"free"}


def test_logprobs_are_the_target_s_own_u42(plain: Running, copy: Running) -> None:
    wanted, found = (s.complete(TEXT, logprobs=3)["choices"][0]["logprobs"] for s in (plain, copy))
    assert found["tokens"] == wanted["tokens"]
    assert len(found["tokens"]) == 16
    for mine, other in zip(found["token_logprobs"], wanted["token_logprobs"], strict=True):
        assert mine == pytest.approx(other, abs=1e-4)  # FP32 sums of other batches
        assert mine < 0
    for value, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert max(top.values()) == value, "greedy: the token itself, with the very same number"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_scores_the_prompt_u88(plain: Running, copy: Running, max_tokens: int) -> None:
    """What lm-evaluation-harness sends: ids, echo, one token or none."""
    tokenizer = plain.service.model.tokenizer
    prompts = [tokenizer.encode(text) for text in (TEXT, "12 hello", "w")]
    body = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1234}
    answers = [server.complete(prompts, **body) for server in (plain, copy)]
    for prompt, choice, other in zip(prompts, *(a["choices"] for a in answers), strict=True):
        shown = choice["logprobs"]
        assert {len(values) for values in shown.values()} == {len(prompt) + max_tokens}
        assert shown["token_logprobs"][0] is shown["top_logprobs"][0] is None
        assert shown["token_logprobs"][1:] == pytest.approx(other["logprobs"]["token_logprobs"][1:], abs=1e-4)
        assert choice["text"].startswith(tokenizer.decode(prompt))
        assert shown["text_offset"][0] == 0
        for value, top in zip(shown["token_logprobs"][1:], shown["top_logprobs"][1:], strict=True):
            assert value in top.values()
        assert choice["finish_reason"] == "length"
    assert answers[0]["usage"]["completion_tokens"] == 3 * max_tokens
    text = plain.complete(TEXT, **body)["choices"][0]
    assert text["logprobs"] == answers[0]["choices"][0]["logprobs"]
    assert text["text"].startswith(TEXT)


def test_the_sum_of_scores_is_the_model_s_nll_u88(plain: Running) -> None:
    """Against log-softmax of the decoder's own logits."""
    source = open_source(plain.service.model.tokenizer.origin)
    model = load_model(
        source, recipe_for("auto", source), kv_tokens=CONTEXT, context_length=CONTEXT, rng=np.random.default_rng(0)
    )
    prompt = source.tokenizer.encode(TEXT)
    rows = torch.log_softmax(model.forward([Feed(0, prompt, 0, 0)]), -1)
    wanted = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
    shown = plain.complete(prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert math.fsum(shown["token_logprobs"][1 : len(prompt)]) == pytest.approx(math.fsum(wanted), abs=1e-3)
    scored = plain.complete(prompt, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert [entry[str(t)]["logprob"] for entry, t in zip(scored[1:], prompt[1:], strict=True)] == pytest.approx(
        wanted, abs=1e-4
    )


def test_the_context_ends_the_answer_and_not_the_server_u62(copy: Running) -> None:
    tokenizer = copy.service.model.tokenizer
    filler = (tokenizer.encode("1") * CONTEXT)[:CONTEXT]

    def ask(left: int) -> httpx.Response:
        body = {"prompt": filler[: CONTEXT - left], "max_tokens": 64, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{copy.url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(13)))
    assert answers[0].status_code == 400
    error = answers[0].json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    for left, answer in enumerate(answers[1:], 1):
        assert answer.json()["usage"]["completion_tokens"] == left
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert copy.complete("hello")["choices"]


def test_a_prompt_that_came_before_is_found_again(copy: Running) -> None:
    prompt = "w" * 40 + "hello world" * 10
    cold, warm = (copy.complete(prompt, return_token_ids=True) for _ in range(2))
    tokens = cold["usage"]["prompt_tokens"]
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert tokens - 17 < warm["usage"]["prompt_tokens_details"]["cached_tokens"] < tokens
    assert ids(cold) == ids(warm)


def test_stop_ids_and_their_reasons(drafted: Running) -> None:
    whole = drafted.complete(TEXT, max_tokens=12, return_token_ids=True)
    stop = ids(whole)[0][7]
    cut = drafted.complete(TEXT, max_tokens=12, return_token_ids=True, stop_token_ids=[stop])
    first = ids(whole)[0].index(stop)
    assert ids(cut)[0] == ids(whole)[0][: first + 1]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["stop_reason"]) == ("stop", stop)
    assert cut["usage"]["completion_tokens"] == first + 1


def test_only_the_end_of_a_prompt_is_read_if_asked(drafted: Running) -> None:
    answer = drafted.complete(TEXT, truncate_prompt_tokens=3, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["choices"][0]["prompt_token_ids"] == drafted.service.model.tokenizer.encode(TEXT)[-3:]


def test_text_and_ids_by_request(drafted: Running) -> None:
    """What `/tokenize`, `/detokenize` and `/tokenizer_info` say is what completions do."""
    answer = drafted.post("/tokenize", prompt="test", add_special_tokens=False)
    assert answer["tokens"] == drafted.service.model.tokenizer.encode("test", add_bos=False)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == CONTEXT
    assert drafted.post("/detokenize", tokens=answer["tokens"]) == {"prompt": "test"}
    chat = drafted.post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert drafted.post("/detokenize", tokens=chat["tokens"])["prompt"] == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    info = httpx.get(f"{drafted.url}/tokenizer_info").json()
    assert info["eos_token"] in ("<|im_end|>", "<|endoftext|>")


SYSTEM = "You answer in short words and you never say more than you were asked to say. " * 3


def test_prefixes_are_shared_with_a_draft_as_without_u68_u69(drafted: Running, plain: Running) -> None:
    """Five questions after one system prompt, twice: the same ids as without a draft, and as many tokens from the
    cache; nothing that was drafted and rejected is ever found in it."""
    found = []
    for server in (drafted, plain):
        assert httpx.get(f"{server.url}/info").json()["prefix_cache"] is True
        counts, texts = [], []
        for number in (0, 1, 2, 3, 4) * 2:
            answer = server.complete(f"{SYSTEM}{number}?", return_token_ids=True, max_tokens=12)
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            texts.append(ids(answer))
        assert texts[:5] == texts[5:]
        assert all(count > 0 for count in counts[1:])
        found.append((counts, texts))
    assert found[0] == found[1]


def test_prefixes_are_shared_only_where_that_is_wanted(folders: Path) -> None:
    with start_tiny(folders, str(folders / "draft"), prefix_cache=False) as server:
        assert httpx.get(f"{server.url}/info").json()["prefix_cache"] is False
        for _ in range(2):
            answer = server.complete(SYSTEM)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_8_bit_float_keys_and_values_are_served_u70(folders: Path) -> None:
    """`/info` says where their scales are from."""
    wanted = serve_config(folders / "target", str(folders / "draft"), kv="fp8", draft_kv="fp8")
    opened, plan = open_and_plan(wanted)
    with start(load_service(wanted, opened, plan, [TEXT])) as server:
        info = httpx.get(f"{server.url}/info").json()
        for model in (info["target"], info["draft"]):
            assert (model["kv_format"], model["kv_scales_from"]) == ("fp8", "text")
        assert len(ids(server.complete(TEXT, return_token_ids=True))[0]) > 0
