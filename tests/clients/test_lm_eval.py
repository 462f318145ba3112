"""lm-evaluation-harness against `bitdraft serve`: both kinds of tasks, without a network, low bits beside 16.

What the harness is told is what the model says of the same ids in a pass of its own, without any server.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from processes import Process

from bitdraft.models.cached import CachedModel
from bitdraft.quantize.load import Source, load_model, open_source, recipe_for
from bitdraft.types import Feed

pytestmark = pytest.mark.clients
TASKS = Path(__file__).parents[1] / "data" / "eval"
MODEL, CONTEXT = "smollm2-135m", 1024
FORMATS = ("bf16", "w4a8")


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, Process]]:
    """A server of the model in a format, with n-grams as the draft; and the format."""
    limits = ("--max-model-len", CONTEXT, "--kv", "f32", "--max-batch", 4)
    with Process("--target", MODEL, "--target-format", request.param, "--draft", "ngram", "--k", 3, *limits) as process:
        yield request.param, process


def harness(process: Process, task: str, folder: Path, *more: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """What the harness found, and each of its samples."""
    arguments = {
        "model": MODEL,
        "base_url": f"{process.url}/v1/completions",
        "tokenizer_backend": "remote",
        "max_length": CONTEXT,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", task]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", str(TASKS), "--output_path", str(folder), "--log_samples", *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    run = subprocess.run(command, cwd=TASKS, env=os.environ | offline, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stderr[-3000:]
    (results,) = folder.rglob("results_*.json")
    (samples,) = folder.rglob("samples_*.jsonl")
    found = json.loads(results.read_text())["results"][task]
    return found, [json.loads(line) for line in samples.read_text().splitlines()]


def loaded(format: str) -> tuple[Source, CachedModel]:
    source = open_source(MODEL)
    recipe = recipe_for(format, source)
    rng = np.random.default_rng(0)
    return source, load_model(source, recipe, kv_tokens=CONTEXT, context_length=CONTEXT, kv="f32", rng=rng)


def score(model: CachedModel, context: list[int], ending: list[int]) -> tuple[float, bool]:
    """Log-likelihood of an ending in nats, and whether every token of it is the likeliest."""
    rows = torch.log_softmax(model.forward([Feed(0, [*context, *ending], 0, len(context) - 1)])[:-1].double(), -1)
    model.truncate(0, 0)
    model.release(0)
    own = rows[range(len(ending)), ending]
    return float(own.sum()), bool((own == rows.max(-1).values).all())


def test_log_likelihoods_are_the_model_s_own_u88(served: tuple[str, Process], tmp_path: Path) -> None:
    format, process = served
    found, samples = harness(process, "endings", tmp_path)
    source, model = loaded(format)
    assert len(samples) == 20
    greedy = []
    for sample in samples:
        for request, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            told, is_greedy = float(answer[0]), str(answer[1]) == "True"
            context = source.tokenizer.encode(request["arg_0"], add_bos=False)
            whole = source.tokenizer.encode(request["arg_0"] + request["arg_1"], add_bos=False)
            assert whole[: len(context)] == context
            own, own_greedy = score(model, context, whole[len(context) :])
            assert told == pytest.approx(own, abs=2e-3)  # FP32 sums in another order, over up to ten tokens
            assert is_greedy == own_greedy
            greedy.append(is_greedy)
    assert any(greedy)
    assert not all(greedy)
    print(f"{format}: acc {found['acc,none']:.2f}, acc_norm {found['acc_norm,none']:.2f}")
    assert found["acc,none"] > 0.5, "chance is 0.25"


def test_generated_answers_are_what_the_server_says_to_anyone(served: tuple[str, Process], tmp_path: Path) -> None:
    format, process = served
    found, samples = harness(process, "questions", tmp_path)
    assert len(samples) == 20
    for sample in samples[::5]:
        (request,) = sample["arguments"].values()
        assert request["arg_0"].count("Question:") == 4
        body = {"prompt": request["arg_0"], "temperature": 0, "max_tokens": 48, "stop": ["Question:"]}
        answer = httpx.post(f"{process.url}/v1/completions", json=body, timeout=120).json()["choices"][0]
        assert sample["resps"] == [[answer["text"]]]
    assert any("answer is" in sample["resps"][0][0] for sample in samples)
    print(f"{format}: exact_match {found['exact_match,letter']:.2f}")
