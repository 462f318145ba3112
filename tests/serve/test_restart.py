"""A server that is killed and started again: clients that ask again are answered, and nothing on disk is damaged."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from model_files import TEMPLATE, config, write_folder
from processes import Process

DIES_BEFORE_IT_REPLACES = """
import os, signal
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from bitdraft.cli import main
main()
"""


@pytest.fixture(name="target")
def checkpoint(tmp_path: Path) -> Path:
    folder = write_folder(tmp_path / "target", config(context_length=512))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def kept(*folders: Path) -> dict[str, bytes]:
    """Every file below these folders but for the model's own."""
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {str(file): file.read_bytes() for file in files if "repacked" in file.parts or "curves" in file.parts}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def die_keeping_weights(target: Path, cache: Path, arguments: Sequence[object]) -> None:
    """Start a server that is killed with its weights half kept; what it leaves is made to look old."""
    command = [sys.executable, "-c", DIES_BEFORE_IT_REPLACES, "serve", *map(str, arguments)]
    died = subprocess.run(command, env=os.environ | {"BITDRAFT_CACHE": str(cache)}, capture_output=True, timeout=120)
    assert died.returncode == -signal.SIGKILL
    (half,) = (target / "repacked").iterdir()
    assert half.is_dir()
    long_ago = time.time() - 7200
    os.utime(half, (long_ago, long_ago))


def test_kill_9_and_a_start_at_the_same_port_lose_nobody_who_asks_again(target: Path, tmp_path: Path) -> None:
    """Twice: while weights are kept on disk, which leaves nothing that is taken for whole; and while it serves.

    Three of OpenAI's clients retry through that, a stream that is cut does not look whole, and no file changes.
    """
    cache, port = tmp_path / "cache", free_port()
    arguments = ("--target", target, "--target-format", "w4a8", "--draft", "ngram", "--port", port, "--max-batch", 2)
    die_keeping_weights(target, cache, arguments)
    url, asked = f"http://127.0.0.1:{port}/v1", {"model": "target", "temperature": 0, "max_tokens": 12}
    prompts = [f"{n} hello world" for n in range(5)]
    killed = threading.Event()

    def ask(client: openai.OpenAI, prompt: str) -> str:
        return client.completions.create(prompt=prompt, **asked).choices[0].text

    def ask_all() -> list[str]:
        texts = []
        with openai.OpenAI(base_url=url, api_key="none", max_retries=12) as client:
            for n in range(len(prompts) * 3):
                texts.append(ask(client, prompts[n % len(prompts)]))
                if n == len(prompts):
                    killed.wait(60)
        return texts

    def cut_stream() -> Exception | None:
        body = {"model": "target", "prompt": "hello", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            first.process.kill()
            try:
                assert "data: [DONE]" not in list(lines)
            except httpx.HTTPError as error:
                return error
        return None

    with Process(*arguments, cache=cache) as first:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            wanted = [ask(client, prompt) for prompt in prompts]
        before = kept(target, cache)
        with ThreadPoolExecutor(3) as pool:
            waiting: Sequence[Future[list[str]]] = [pool.submit(ask_all) for _ in range(3)]
            assert isinstance(cut_stream(), httpx.RemoteProtocolError | httpx.ReadError)
            killed.set()
            with Process(*arguments, cache=cache) as second:
                for one in waiting:
                    assert one.result(120) == wanted * 3
                assert second.end()[0] == 0
        assert first.process.wait(10) == -signal.SIGKILL
    # Step costs, *.json, are kept where the machine was quiet enough, at the first start or the second.
    kinds = sorted({Path(name).suffix for name in before} - {".json"})
    assert kinds == [".safetensors"], "what was half written is gone"
    after = kept(target, cache)
    assert {name: after[name] for name in before} == before
    assert {Path(name).suffix for name in after.keys() - before.keys()} <= {".json"}
