"""`POST /admin/draft` (users-pain U74): another draft while the server runs, and nobody's answer notices."""

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from model_files import config, write_folder
from running import Running
from tiny_pair import CONTEXT, start_tiny

from bitdraft.drafters.ngram import NGramDrafter

PROMPTS = [f"hello world {n} and more" for n in range(4)]
LONG: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True, "return_token_ids": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": LONG | {"temperature": 0},
    "seeded": LONG | {"temperature": 1.0, "seed": 3},
}


@pytest.fixture
def served(folders: Path) -> Iterator[Running]:
    """The tiny target with the tiny draft, which may be changed."""
    with start_tiny(folders, str(folders / "draft"), admin=True) as running:
        yield running


def change(running: Running, path: Path | str | None, status: int = 200, **more: Any) -> dict[str, Any]:
    body = {"path": None if path is None else str(path)} | more
    answer = httpx.post(f"{running.url}/admin/draft", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    return answer.json()


def ids_while_streaming(running: Running, prompt: str, sampling: dict[str, Any], begun: list[str]) -> list[int]:
    found: list[int] = []
    body = {"prompt": prompt, "stream": True, **sampling}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                begun.append(prompt)
                (choice,) = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"] or [{}]
                found += choice.get("token_ids") or []
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_four_streams_end_as_they_would_have_u74(served: Running, plain: Running, folders: Path, kind: str) -> None:
    """Over four changes, one of them to no draft at all; the last one is what new requests are drafted by."""
    sampling = KINDS[kind]
    alone = [plain.complete(prompt, **sampling)["choices"][0]["token_ids"] for prompt in PROMPTS]
    begun: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ids_while_streaming, served, prompt, sampling, begun) for prompt in PROMPTS]
        while len(set(begun)) < 4:
            time.sleep(0.005)
        for path in (folders / "target", None, "ngram", folders / "target"):
            change(served, path)
        during = any(not answer.done() for answer in answers)
        assert [answer.result() for answer in answers] == alone
    assert during, "the outputs were too short to be met by the changes"
    assert served.idle()
    assert served.complete(PROMPTS[0], **sampling)["choices"][0]["token_ids"] == alone[0]
    draft = httpx.get(f"{served.url}/info").json()["draft"]
    assert draft["path"] == str(folders / "target")
    assert served.drafter._model is not None


def test_the_old_draft_leaves_nothing_behind_u74(served: Running, folders: Path) -> None:
    """Neither its weights and cache, nor what was counted of it."""
    speculation = served.complete("hello world")["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] > 0
    info = httpx.get(f"{served.url}/info").json()
    assert info["speculative"]["conditional_acceptance"]["domain"]
    old, planned = weakref.ref(served.drafter._model), info["memory_bytes"]
    answer = change(served, folders / "target", format="bf16")
    assert (answer["draft"]["path"], answer["draft"]["format"]) == (str(folders / "target"), "bf16")
    gc.collect()
    assert old() is None
    info = httpx.get(f"{served.url}/info").json()
    assert info["speculative"]["conditional_acceptance"]["domain"] == {}
    assert set(info["memory_bytes"]) == set(planned)
    assert info["memory_bytes"] != planned
    served.complete("hello world")
    assert httpx.get(f"{served.url}/info").json()["speculative"]["conditional_acceptance"]["domain"]["none"] > 0.9


def test_to_none_and_to_n_grams_and_back(served: Running, folders: Path) -> None:
    def drafted() -> int:
        answer = served.complete("hello hello hello hello hello hello", max_tokens=40)
        return answer["metrics"]["speculative_decoding"]["num_draft_tokens"]

    assert drafted() > 0
    assert change(served, None)["draft"] is None
    info = httpx.get(f"{served.url}/info").json()
    assert info["speculative"]["max_draft"] == 0
    assert "draft weights" not in info["memory_bytes"]
    assert drafted() == 0
    assert change(served, "ngram")["draft"]["name"] == "ngram"
    assert isinstance(served.service.worker._engine.drafter._otherwise, NGramDrafter)
    change(served, folders / "draft")
    assert drafted() > 0


def test_what_cannot_draft_is_refused_and_the_draft_stays(
    served: Running, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = httpx.get(f"{served.url}/info").json()["draft"]
    other = write_folder(tmp_path / "other", config(num_layers=1, context_length=CONTEXT))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a":', '"@":').replace('"b":', '"a":').replace('"@":', '"b":'))
    assert "token ids mean" in change(served, other, 400)["error"]["message"]
    assert "nothing-here" in change(served, tmp_path / "nothing-here", 400)["error"]["message"]
    assert "w5a5" in change(served, folders / "draft", 400, format="w5a5")["error"]["message"]
    assert "w5a5" in change(served, tmp_path / "nothing-here", 400, format="w5a5")["error"]["message"], "before a fetch"
    assert change(served, folders / "draft", 400, K=3)["error"]["param"] == "K"
    assert httpx.post(f"{served.url}/admin/draft", json={}).json()["error"]["code"] == "missing_field"
    monkeypatch.setattr("bitdraft.serve.drafting.available_memory", lambda: 1000)
    assert "while the present one" in change(served, folders / "target", 400)["error"]["message"]
    assert httpx.get(f"{served.url}/info").json()["draft"] == before
    assert served.complete("hello world")["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_draft_that_breaks_while_it_is_loaded_leaves_the_first(
    served: Running, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("bitdraft.serve.drafting.load_draft", broken)
    assert "its log has more" in change(served, folders / "target", 500)["error"]["message"]
    assert served.complete("hello world")["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_clients_may_not_unless_the_server_lets_them(drafted: Running, folders: Path) -> None:
    assert change(drafted, None, 403)["error"]["code"] == "admin_off"
    with start_tiny(folders, None, admin=True, api_key="secret") as keyed:
        assert change(keyed, "ngram", 401)["error"]["code"] == "invalid_api_key"


def test_the_length_follows_the_new_draft(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--k auto`, costs and acceptance are those of the draft that is there now."""
    monkeypatch.setenv("BITDRAFT_CACHE", str(tmp_path))
    with start_tiny(folders, None, admin=True, draft_length=None) as running:
        assert "no draft" in httpx.get(f"{running.url}/info").json()["speculative"]["draft_length"]
        change(running, folders / "draft")
        running.complete("hello world", max_tokens=30)
        for n in range(40):  # until prefixes fill the target's cache
            running.complete(f"{n} hello " * 60, max_tokens=1)
        load = running.service.worker.load
        assert load.cached_blocks > 0.9 * load.kv_blocks_total
        change(running, folders / "target")
        assert httpx.get(f"{running.url}/info").json()["speculative"]["draft_length"] == "Nothing was decided yet."
        running.complete("hello world", max_tokens=30)
        assert "for 1 sequence" in httpx.get(f"{running.url}/info").json()["speculative"]["draft_length"]
