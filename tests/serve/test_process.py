"""`bitdraft serve` as a process: real clients, a real model, its configuration, its errors and its end."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import pytest
from processes import Process

from bitdraft.errors import UsageError
from bitdraft.formats import Recipe
from bitdraft.quantize.load import open_source
from bitdraft.quantize.pipeline import quantize
from bitdraft.serve.load import open_pair
from bitdraft.serve.memory import available_memory, parse_size, plan_memory, weight_bytes


@pytest.fixture(scope="module")
def real() -> Iterator[Process]:
    arguments = ("--target", "smollm2-135m", "--draft", "ngram", "--k", 4, "--max-model-len", 512, "--kv", "int8")
    with Process(*arguments) as process:
        yield process
        code, log = process.end()
    assert code == 0
    assert [line["status"] for line in log if line["event"] == "request" and line["path"].endswith("completions")]


def test_openai_s_client_is_served(real: Process) -> None:
    client = openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0)
    (model,) = client.models.list()
    messages = [{"role": "user", "content": "Repeat after me: red, green, blue, red, green, blue."}]
    asked = {"model": model.id, "messages": messages, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.completion_tokens == len(answer.choices[0].logprobs.content)
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].token
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert chunks[-1].metrics["speculative_decoding"]["num_draft_tokens"] > 0
    plain = client.chat.completions.create(**asked, extra_body={"speculative": {"enabled": False}})
    assert plain.choices[0].message.content == text
    completion = client.completions.create(model=model.id, prompt="2+2=", max_tokens=3, temperature=0, logprobs=1)
    assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="top_kk"):
        client.chat.completions.create(**asked, extra_body={"top_kk": 3})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**asked | {"model": "other"})


def test_a_schema_is_followed(real: Process) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "Who are you? Answer as JSON with name and age."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        "max_tokens": 80,
        "temperature": 0,
    }
    answer = httpx.post(f"{real.url}/v1/chat/completions", json=body, timeout=120).json()
    assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"name", "age"}


def test_the_effective_configuration_is_shown_u20_u55(real: Process) -> None:
    info = httpx.get(f"{real.url}/info").json()
    assert (info["target"]["kv_format"], info["target"]["kv_scales"]) == ("int8", "of each token")
    assert info["draft"]["name"] == "ngram"
    assert info["max_model_len"] == info["target"]["context_length"] == 512
    assert info["speculative"]["max_draft"] == 4
    assert "fixed" in info["speculative"]["draft_length"]
    assert info["sampling_defaults"]["temperature"] == 1.0
    assert info["machine"]["device"] == "cpu"
    assert "target weights" in real.said


def test_running_requests_end_before_the_server_does(folders: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        Process("--target", folders / "target", "--max-model-len", 512, "--drain", 20) as process,
        httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        process.process.send_signal(signal.SIGTERM)
        text = [line for line in lines if line]
        assert text[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in text[-2]
        assert process.process.wait(60) == 0


def test_generation_config_gives_defaults_and_requests_win_u55(folders: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    for file in (folders / "target").iterdir():
        if file.is_file():
            os.symlink(file, target / file.name)
    (target / "generation_config.json").write_text(
        json.dumps(
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [2]}
        )
    )
    with Process("--target", target, "--served-model-name", "a", "--served-model-name", "b") as process:
        defaults = httpx.get(f"{process.url}/info").json()["sampling_defaults"]
        assert (defaults["temperature"], defaults["top_k"], defaults["repetition_penalty"]) == (0.7, 20, 1.05)
        assert defaults["origin"].endswith("generation_config.json")
        assert [m["id"] for m in httpx.get(f"{process.url}/v1/models").json()["data"]] == ["a", "b"]
        body = {"prompt": "hello", "temperature": 0, "repetition_penalty": 1.0}
        first, second = (httpx.post(f"{process.url}/v1/completions", json=body).json() for _ in range(2))
        assert first["choices"] == second["choices"]
        assert process.end()[0] == 0


def test_what_does_not_fit_is_refused_with_the_table_u72(folders: Path) -> None:
    opened = open_pair(str(folders / "target"), str(folders / "draft"), "auto", "auto")
    limits = {"kv": None, "draft_kv": None, "max_batch": 4, "max_rows": 128, "draft_length": 3, "max_model_len": None}
    roomy = plan_memory(opened, **limits, kv_memory=None, available=8 << 30)
    roomy.check()
    assert (roomy.context, roomy.kv_tokens) == (512, 4 * 512)
    assert set(roomy.parts) >= {"target weights", "draft weights", "target keys and values", "logits of a step"}
    tight = plan_memory(opened, **limits, kv_memory=1 << 20, available=200 << 20)
    with pytest.raises(UsageError, match=r"target weights \d+ MB; draft weights"):
        tight.check()
    assert tight.parts["target keys and values"] + tight.parts["draft keys and values"] <= 1 << 20
    with pytest.raises(UsageError, match="one request"):
        plan_memory(opened, **limits | {"max_model_len": 512}, kv_memory=1 << 10, available=8 << 30)
    assert parse_size("1.5GiB") == 3 << 29
    assert (available_memory() or 1) > 0
    assert available_memory(Path("/nowhere")) is None


@pytest.mark.parametrize("name", ["bf16", "w8a8", "w4a16-asym", "w8a8-out8", "w4a16-out8"])
def test_the_planned_weights_are_about_what_the_model_takes(name: str, folders: Path) -> None:
    """Scales of whole outputs are left out of the plan: much beside rows of 32, nothing beside those of real models."""
    source, recipe = open_source(str(folders / "target")), Recipe.parse(name)
    rng = np.random.default_rng(0)
    packed = quantize(source.checkpoint, recipe, rng=rng, calibration=[list(range(3, 131))] * 8).packed.values()
    size = sum({id(weight): weight.nbytes for weight in packed}.values())
    assert weight_bytes(source, recipe) == pytest.approx(size, rel=0.15)
