"""A server under all that clients do at once: nothing is lost or leaks, and no answer depends on the others.

The pair is tiny and real, its cache so small that requests are preempted all the time.
"""

import gc
import resource
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import soak
from model_files import config, write_folder
from parrot import HERMES
from running import Running
from tiny_pair import serve_config

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


def service_of(folder: Path, draft: str | None, **changes: object) -> Service:
    wanted = serve_config(folder, draft, draft_format="w4a16", max_model_len=CONTEXT, **changes)
    opened, plan = open_and_plan(wanted)
    return load_service(wanted, opened, plan, [])


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Running]:
    """A server that is asked one thing at a time, without drafts, with room and with nothing of what came before."""
    with Running(service_of(folder, None, max_batch=1, prefix_cache=False)) as running:
        yield running


def crowded(folder: Path) -> Running:
    """Eight at once in a cache that holds 336 tokens for all; and a second way in, where time is up at once."""
    tokens = 336
    service = service_of(folder, str(folder), max_batch=8, kv_memory=tokens * 2 * 128, max_queue=200)
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
    for model in (engine.target, running.drafter._model):
        assert isinstance(model, CachedModel)
        blocks = model.blocks()
        assert blocks.free + blocks.cached == blocks.total
        assert not model._tables
        assert not model._paths
    assert not running.drafter._cached
    assert not engine.drafter._places
    assert not running.service.worker._tickets
    assert not running.service.worker._records


def finished(running: Running) -> dict[str, float]:
    lines = httpx.get(f"{running.url}/metrics").text.splitlines()
    found = [line.removeprefix("bitdraft_requests_total{finish=") for line in lines if "requests_total{" in line]
    return {name.strip('"}'): float(count) for name, _, count in (line.partition(" ") for line in found)}


def objects() -> Counter[type]:
    """How many objects of bitdraft's own types there are; not the tree of prefixes, whose size the cache limits."""
    gc.collect()
    types = [type(one) for one in gc.get_objects()]
    return Counter(t for t in types if str(t.__module__).startswith("bitdraft.") and t.__name__ != "_Node")


def assert_as_many(before: Counter[type]) -> None:
    """No type has more objects than then, but for those of the last call, which idle threads hold on to."""
    more = {kind: count for kind, count in (objects() - before).items() if count > AT_ONCE}
    assert not more, "one for each request would be a hundred or more"


def ask(running: Running, asked: Sequence[soak.Asked], known: Mapping[str, soak.Told]) -> list[soak.Outcome]:
    """The outcomes, and nothing is held afterwards."""
    outcomes = soak.ask_all(running, asked, known, AT_ONCE)
    assert_nothing_is_held(running)
    return outcomes


def check(running: Running, outcomes: Sequence[soak.Outcome]) -> None:
    """Everything ended as it should, and was told what it is told alone."""
    ended = soak.counted(outcomes)
    assert {name.split(" ", 1)[1] for name in ended} == {"answered", "refused", "left", "timed out"}, ended
    assert [outcome for outcome in outcomes if outcome.unlike] == []
    assert running.service.worker.load.preemptions > len(outcomes) // 100, "the cache was no limit"
    finishes = finished(running)
    assert set(finishes) == {"stop", "length", "abort"}
    assert finishes["stop"] + finishes["length"] >= sum(outcome.choices for outcome in outcomes)
    assert running.complete("hello")["choices"]


def test_150_mixed_requests_lose_nothing_and_are_told_what_they_are_told_alone(folder: Path, alone: Running) -> None:
    asked = soak.requests(150, 36, seed=1)
    known = soak.answers(asked, alone)
    with crowded(folder) as running:
        outcomes = ask(running, asked[:50], known)
        before = objects()
        outcomes += ask(running, asked[50:], known)
        assert_as_many(before)
        check(running, outcomes)


@pytest.mark.soak
def test_1000_mixed_requests_leave_memory_as_it_was(folder: Path, alone: Running) -> None:
    """What Python holds, and what the process does.

    A request that is kept is its prompt and text alone 2 kB. What grows lawfully has grown after the first 300: figures
    by domain, the tree of prefixes, compiled grammars.
    """
    asked = soak.requests(1000, 180, seed=2)
    known = soak.answers(asked, alone)
    with crowded(folder) as running:
        outcomes = ask(running, asked[:300], known)
        tracemalloc.start()
        try:
            ask(running, asked[:50], known)
            before, resident = objects(), resident_bytes()
            traced = tracemalloc.get_traced_memory()[0]
            outcomes += ask(running, asked[300:], known)
            assert_as_many(before)
            grown = tracemalloc.get_traced_memory()[0] - traced
        finally:
            tracemalloc.stop()
        print(grown, resident_bytes() - resident, soak.counted(outcomes), running.service.worker.load)
        check(running, outcomes)
    assert grown < 700 * 500, f"{grown} bytes for 700 requests"
    assert resident_bytes() - resident < 32 << 20, "the system's allocators keep some of what they are given back"


def resident_bytes() -> int:
    """What of the process lies in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
