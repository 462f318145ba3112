"""Rows of users' reports that nothing else shows, each by its name. What the letters mean: `tests/test_reports.py`."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from model_files import TEMPLATE
from running import Running
from tiny_pair import CONTEXT, start_tiny

from bitdraft.types import Feed

TEXT = "hello world 1 2 hello wor"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def copy(folders: Path) -> Iterator[Running]:
    """The tiny target with a low-bit copy of itself, which it accepts now and then."""
    with start_tiny(folders, str(folders / "target"), draft_format="w4a16", max_batch=8) as running:
        yield running


def ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def drafted(answer: dict[str, Any]) -> int:
    return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]


def scored(running: Running, texts: list[list[int]], top: int) -> list[list[dict[str, Any]]]:
    """What the target says of each token of a text but the first, in a pass over the whole of it."""
    answer = running.complete(texts, max_tokens=0, prompt_logprobs=top)
    return [choice["prompt_logprobs"][1:] for choice in answer["choices"]]


def test_a_threshold_of_confidence_shortens_blocks_and_changes_no_text_u08(folders: Path) -> None:
    """Fewer tokens are drafted and more of them accepted; and how many were drafted is told beside the rate."""
    told = []
    for confidence in (0.0, 0.6, 0.99):
        with start_tiny(folders, str(folders / "target"), draft_format="w4a16", confidence=confidence) as running:
            told.append(running.complete(TEXT, max_tokens=80, ignore_eos=True, return_token_ids=True))
    assert len({tuple(ids(answer)) for answer in told}) == 1
    steps = [answer["metrics"]["speculative_decoding"] for answer in told]
    assert drafted(told[0]) > drafted(told[1]) > drafted(told[2]) > 0
    assert steps[0]["draft_acceptance_rate"] < steps[2]["draft_acceptance_rate"]
    assert steps[2]["mean_acceptance_length"] < 2, "nearly nothing is drafted, and it shows"


@pytest.mark.parametrize("target", ["bf16", "w4a16"])
@pytest.mark.parametrize("draft", ["bf16", "w4a16"])
def test_target_and_draft_have_formats_of_their_own_u16(folders: Path, target: str, draft: str) -> None:
    with start_tiny(folders, str(folders / "target"), target_format=target, draft_format=draft) as running:
        info = httpx.get(f"{running.url}/info").json()
        answer = running.complete(TEXT, max_tokens=40, ignore_eos=True)
    for side, format in (("target", target), ("draft", draft)):
        assert info[side]["format"] == format
        assert (info[side]["bits"] == 16) == (format == "bf16")
    heavier = {"bf16": info["target"]["weight_bytes"], "w4a16": info["draft"]["weight_bytes"]}
    assert target == draft or (heavier["bf16"] > heavier["w4a16"]) == (target == "bf16")
    if target == draft:
        assert answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 1.0


def test_no_token_is_sampled_that_the_filters_exclude_u34(copy: Running) -> None:
    """Twelve texts: each, scored by the target in one pass, has only tokens among its two likeliest."""
    answer = copy.complete(TEXT, temperature=1.5, top_k=2, seed=1, n=12, max_tokens=8, return_token_ids=True)
    prompt = copy.service.model.tokenizer.encode(TEXT)
    assert drafted(answer) > 0
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 6
    texts = [choice["token_ids"] for choice in answer["choices"]]
    for text, entries in zip(texts, scored(copy, [prompt + text for text in texts], 2), strict=True):
        ranks = [entry[str(token)]["rank"] for entry, token in zip(entries[-len(text) :], text, strict=True)]
        assert max(ranks) <= 2


def test_prompts_are_scored_alike_beside_a_draft_u44(copy: Running, plain: Running) -> None:
    """Long prompts, which come in chunks, four at a time, while others draft."""
    prompts = [f"{n} " + "hello world 12 " * 30 for n in range(4)]
    busy = {"max_tokens": 80, "ignore_eos": True}
    body = {"echo": True, "logprobs": 1, "max_tokens": 1}
    with ThreadPoolExecutor(5) as pool:
        beside = [pool.submit(copy.complete, TEXT, **busy) for _ in range(2)]
        found = list(pool.map(lambda prompt: copy.complete(prompt, **body), prompts))
        assert all(drafted(one.result()) > 0 for one in beside)
    for prompt, answer in zip(prompts, found, strict=True):
        wanted = plain.complete(prompt, **body)["choices"][0]["logprobs"]["token_logprobs"]
        assert answer["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted[1:], abs=1e-3)


def test_thirty_at_once_in_json_mode_u45(copy: Running) -> None:
    """Each is valid JSON, or the beginning of it that its limit left."""

    def ask(n: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"Say hello world {n} times"}]
        return copy.post(CHAT, messages=messages, response_format={"type": "json_object"}, max_tokens=16, seed=n)

    with ThreadPoolExecutor(30) as pool:
        choices = [answer["choices"][0] for answer in pool.map(ask, range(30))]
    for choice in choices:
        content = choice["message"]["content"]
        assert content.lstrip().startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(content, strict=False), dict)
    assert copy.idle()


def test_target_and_draft_are_fed_the_same_ids_with_one_beginning_u54(folders: Path, tmp_path: Path) -> None:
    """A chat whose template writes the beginning of the text, in a model that has one written before every text."""
    folder = tmp_path / "target"
    shutil.copytree(folders / "target", folder)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + TEMPLATE)
    settings = {"bos_token": "<|endoftext|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    fed: dict[str, list[int]] = {"target": [], "draft": []}
    messages = [{"role": "system", "content": "hello"}, {"role": "user", "content": "world"}]
    with start_tiny(tmp_path, str(folders / "draft")) as running:
        engine = running.service.worker._engine
        for name, model in (("target", engine.target), ("draft", running.drafter._model)):
            _watch(model, fed[name])
        answer = running.post(CHAT, messages=messages, max_tokens=4, temperature=0, return_token_ids=True)
        shown = running.post("/tokenize", messages=messages)["tokens"]
    prompt = answer["choices"][0].get("prompt_token_ids") or answer["prompt_token_ids"]
    assert prompt == shown
    assert fed["target"][: len(prompt)] == fed["draft"][: len(prompt)] == prompt
    assert prompt.count(0) == 1
    assert prompt[0] == 0


def _watch(model: Any, fed: list[int]) -> None:
    forward = model.forward

    def watched(feeds: list[Feed]) -> Any:
        for feed in feeds:
            fed[feed.start :] = feed.tokens
        return forward(feeds)

    model.forward = watched


def test_a_block_longer_than_what_is_left_u64(folders: Path) -> None:
    """A context of 64, 57 of them a prompt, and blocks of up to 16."""
    with start_tiny(folders, str(folders / "draft"), draft_length=16, max_model_len=64) as running:
        prompt = running.service.model.tokenizer.encode("hello " * 60)[:57]
        for max_tokens in (1, 7, 64):
            answer = running.complete(prompt, top_k=1, max_tokens=max_tokens, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == min(7, max_tokens)
            assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_draft_s_keys_and_values_change_no_token_u19_u71(folders: Path, kv: str) -> None:
    """Their format is a choice of its own, shown in `/info`."""
    told = []
    for draft_kv in ("bf16", "int4"):
        formats = {"kv": kv, "draft_kv": draft_kv, "draft_format": "w4a16"}
        with start_tiny(folders, str(folders / "target"), calibration=["hello world 12 " * 20], **formats) as running:
            info = httpx.get(f"{running.url}/info").json()
            assert (info["target"]["kv_format"], info["draft"]["kv_format"]) == (kv, draft_kv)
            told.append(running.complete(TEXT * 6, max_tokens=30, ignore_eos=True, return_token_ids=True))
            assert drafted(told[-1]) > 0
    assert len({tuple(ids(answer)) for answer in told}) == 1


def test_temperature_zero_is_one_text_under_any_load_u86(copy: Running) -> None:
    """Twenty times the same beside others that come and go; there is no mode for it, it is always so."""
    body = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}

    def ask(n: int) -> list[int] | None:
        if n % 2:
            copy.complete("12 " * (n % 7 + 1), temperature=1.0, max_tokens=3 + n % 30, speculative={"k": n % 4})
            return None
        return ids(copy.complete(TEXT, **body))

    with ThreadPoolExecutor(8) as pool:
        answers = [answer for answer in pool.map(ask, range(40)) if answer]
    assert len(answers) == 20
    assert len({tuple(answer) for answer in answers}) == 1


def test_a_batch_drafts_u87(copy: Running) -> None:
    """Two at once, and in the batch of both each is drafted for."""
    body = {"max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda prompt: copy.complete(prompt, **body), (TEXT, "12 12 hello")))
    assert all(drafted(answer) > 0 for answer in answers)
    assert httpx.get(f"{copy.url}/info").json()["speculative"]["max_draft"] == 3


def test_every_origin_can_be_audited_u92(copy: Running, plain: Running) -> None:
    """As many tokens are marked as accepted as are counted, and each is what the target says at its place."""
    answer = copy.complete(TEXT, max_tokens=60, ignore_eos=True, return_origins=True, return_token_ids=True)
    steps, origins = answer["metrics"]["speculative_decoding"], answer["choices"][0]["origins"]
    assert len(origins) == 60
    assert origins.count("draft") == steps["num_accepted_draft_tokens"] > 0
    assert len(origins) - origins.count("draft") == len(steps["per_step_drafted"]), "and one of the target's a step"
    prompt = plain.service.model.tokenizer.encode(TEXT)
    (entries,) = scored(plain, [prompt + ids(answer)], 1)
    for entry, token in zip(entries[len(prompt) - 1 :], ids(answer), strict=True):
        assert entry[str(token)]["rank"] == 1


def test_what_repeats_is_drafted_u92(folders: Path) -> None:
    """A text of three copies whose first is new: n-grams draft the others, not the first."""
    with start_tiny(folders, "ngram", max_model_len=CONTEXT) as running:
        tokens = running.service.model.tokenizer.encode("abcdefghijklmnopqrstuvwxyz")
        bodies = [{"guided_regex": "(abcdefghijklmnopqrstuvwxyz){3}", "max_tokens": 3 * len(tokens)}]
        answer = running.complete("!", return_origins=True, **bodies[0])
    origins = answer["choices"][0]["origins"]
    first, rest = origins[: len(tokens)], origins[len(tokens) :]
    assert rest.count("draft") > 0.6 * len(rest)
    assert first.count("draft") < 0.2 * len(first)
