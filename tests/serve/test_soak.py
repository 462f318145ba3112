"""A server under all that clients do at once: nothing is lost, nothing leaks, and nobody's answer depends on the others.

The pair is tiny and real, its cache so small that requests are preempted all the time.
"""

import gc
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import soak
from conftest import serve_config
from model_files import config, write_folder
from parrot import HERMES
from running import Running

from bitdraft.models.cached import CachedModel
from bitdraft.serve.app import Service, create_app
from bitdraft.serve.start import load_service, open_and_plan

CONTEXT = 320
AT_ONCE = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that knows tools; it drafts for itself in four bits."""
    folder = tmp_path_factory.mktemp("soak") / "model"
    write_folder(folder, config(context_length=CONTEXT))
    (folder / "chat_template.jinja").write_text(HERMES)
    return folder


def service_of(folder: Path, **changes: object) -> Service:
    wanted = serve_config(folder, str(folder), draft_format="w4a16", max_model_len=CONTEXT, **changes)
    opened, plan = open_and_plan(wanted)
    return load_service(wanted, opened, plan, [])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Running]:
    """A server that is asked one thing at a time, with room for it and nothing of what came before."""
    with Running(service_of(folder, max_batch=1, prefix_cache=False)) as running:
        yield running


def crowded(folder: Path) -> Running:
    """Eight at once in a cache that holds 512 tokens for all; and a second way in, where time is up at once."""
    tokens = 512
    service = service_of(folder, max_batch=8, kv_memory=tokens * 2 * 128, max_queue=200)
    patient = create_app(service)
    hasty = create_app(replace(service, settings=replace(service.settings, timeout=0.0)))

    async def either(scope: Any, receive: Any, send: Any) -> None:
        short = any(name == soak.PATIENCE.encode() for name, _ in scope.get("headers", ()))
        await (hasty if short else patient)(scope, receive, send)

    return Running(service, either)


def assert_nothing_is_held(running: Running) -> None:
    """No request is open, and every block of both models can be had."""
    assert running.idle(10.0)
    engine = running.service.worker._engine
    load = engine.load()
    assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0)
    draft = engine.drafter._model
    for model in (engine.target, draft):
        assert isinstance(model, CachedModel)
        blocks = model.blocks()
        assert blocks.free + blocks.cached == blocks.total
        assert not model._tables
        assert not model._paths
    assert not engine.drafter._cached
    assert not running.service.worker._tickets
    assert not running.service.worker._records


def finished(running: Running) -> dict[str, float]:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    found = [line.removeprefix("bitdraft_requests_total{finish=") for line in lines if "requests_total{" in line]
    return {name.strip('"}'): float(count) for name, _, count in (line.partition(" ") for line in found)}


def traced() -> int:
    """Bytes that Python holds."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def soak_and_check(folder: Path, alone: Running, count: int, different: int, warm: int) -> None:
    """Ask `count` requests, the first `warm` of them before memory is measured."""
    asked = soak.requests(count, different, seed=count)
    with crowded(folder) as running:
        outcomes = soak.ask_all(running, asked[:warm], AT_ONCE)
        assert_nothing_is_held(running)
        tracemalloc.start()
        try:
            soak.ask_all(running, asked[:8], AT_ONCE)  # what the first calls under tracing keep
            assert_nothing_is_held(running)
            before = traced()
            outcomes += soak.ask_all(running, asked[warm:], AT_ONCE)
            assert_nothing_is_held(running)
            grown = traced() - before
        finally:
            tracemalloc.stop()
        assert len(outcomes) == count
        ended = soak.counted(outcomes)
        assert {name.split(" ", 1)[1] for name in ended} == {"answered", "refused", "left", "timed out"}, ended
        assert running.service.worker.load.preemptions > count // 20, "the cache was no limit"
        finishes = finished(running)
        answers = sum(len(outcome.told) for outcome in outcomes)
        assert finishes["stop"] + finishes["length"] >= answers
        assert finishes["abort"] > 0
        assert finishes["error"] == 0
        assert running.complete("hello")["choices"]
    assert soak.unlike(outcomes, alone) == []
    # A request that is kept is its prompt alone 1 kB; the trees of prefixes and the figures have bounds of their own.
    assert grown < 100_000 + 300 * (count - warm), f"{grown} bytes for {count - warm} requests"


def test_150_mixed_requests_lose_nothing_and_are_told_what_they_are_told_alone(folder: Path, alone: Running) -> None:
    soak_and_check(folder, alone, count=150, different=36, warm=60)


@pytest.mark.soak
def test_1000_mixed_requests_lose_nothing_and_are_told_what_they_are_told_alone(folder: Path, alone: Running) -> None:
    soak_and_check(folder, alone, count=1000, different=180, warm=300)
