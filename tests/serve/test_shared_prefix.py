"""Two clients that share what their prompts begin with, where one of them leaves."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from running import Running
from tiny_pair import start_tiny

SHARED = "hello world 12 and more, hello. " * 10
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
SEEDED = GREEDY | {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def copy(folders: Path) -> Iterator[Running]:
    """The tiny target with a low-bit copy of itself as the draft."""
    with start_tiny(folders, str(folders / "target"), draft_format="w4a16") as running:
        yield running


@pytest.fixture(scope="module")
def cold(folders: Path) -> Iterator[Running]:
    """The target without a draft, and every prompt computed from its first token."""
    with start_tiny(folders, None, prefix_cache=False) as running:
        yield running


def ids(answer: dict[str, Any]) -> list[int]:
    return answer["choices"][0]["token_ids"]


def leave_after(running: Running, prompt: str, chunks: int, begun: threading.Event) -> None:
    """Ask for a long answer, and leave after so many chunks of it; 0: before the first."""
    body = {"prompt": prompt, **GREEDY, "max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
        begun.set()
        lines = response.iter_lines()
        for _ in range(2 * chunks):  # after each an empty one
            next(lines)


@pytest.mark.parametrize("chunks", [0, 2, 20])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_who_stays_is_told_what_it_is_told_alone_u68_u84_u85(
    copy: Running, cold: Running, sampling: dict[str, Any], chunks: int
) -> None:
    """Whoever came first, and whenever the other one leaves: while its prompt is read, or in the middle of its text."""
    prompts = [SHARED + f"{chunks} {len(sampling)} {end}" for end in ("abc", "abd")]
    alone = ids(cold.complete(prompts[1], **sampling))
    for first in (0, 1):
        begun = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            if first == 0:
                gone = pool.submit(leave_after, copy, prompts[0], chunks, begun)
                assert begun.wait(30)
                answer = pool.submit(copy.complete, prompts[1], **sampling)
            else:
                answer = pool.submit(copy.complete, prompts[1], **sampling)
                gone = pool.submit(leave_after, copy, prompts[0], chunks, begun)
            gone.result(60)
            assert ids(answer.result(60)) == alone
        assert copy.idle()
    blocks = copy.drafter._model.blocks()
    assert blocks.available == blocks.total
    after = copy.complete(prompts[1], **sampling)
    assert ids(after) == alone
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 * (after["usage"]["prompt_tokens"] // 16 - 1)


def test_as_much_is_cached_with_a_draft_as_without_u69(copy: Running, plain: Running, cold: Running) -> None:
    """The same prompt three times; and every answer is the cold one."""
    prompt = "69 " + SHARED
    hits, told = [], []
    for running in (plain, copy):
        answers = [running.complete(prompt, **GREEDY) for _ in range(3)]
        hits.append([answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers])
        told += [ids(answer) for answer in answers]
        length = answers[0]["usage"]["prompt_tokens"]
    assert length > 150
    assert hits[0] == hits[1]
    assert hits[0] == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]
    assert told == [ids(cold.complete(prompt, **GREEDY))] * 6


def test_five_questions_after_one_system_prompt_cold_and_warm_u68(copy: Running, cold: Running) -> None:
    questions = [{"messages": [{"role": "system", "content": SHARED}, {"role": "user", "content": q}]} for q in "abcde"]
    body = GREEDY | {"max_tokens": 16}
    alone = [ids(cold.post("/v1/chat/completions", **question, **body)) for question in questions]
    for round_number in (0, 1):
        for question, wanted in zip(questions, alone, strict=True):
            answer = copy.post("/v1/chat/completions", **question, **body)
            assert ids(answer) == wanted
            if round_number or question is not questions[0]:
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 150
