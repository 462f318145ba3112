"""How do requests fare on `bitdraft serve` and on llama-server, side by side on this machine?

    python benchmarks/peers/serving.py --llama-server build/bin/llama-server -- --lengths 128/64 --concurrency 1,8

Starts both with one model, waits until they are ready, lets `bitdraft bench serve` ask them in turn, and stops them.
What follows `--` goes to `bitdraft bench serve`. llama-server is built from the sources of the pinned llama-cpp-python:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
      -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF && ninja -C build llama-server
"""

import argparse
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from files import gguf_file

PORTS = {"bitdraft": 18000, "llama-server": 18080}
READY_S = 300


def main() -> None:
    options, asked = _options()
    commands = {"bitdraft": _bitdraft(options), "llama-server": _llama(options)}
    urls = [f"--server={name}=http://127.0.0.1:{PORTS[name]}" for name in commands]
    with _running(commands):
        bench = [_tool("bitdraft"), "bench", "serve", *urls, "--no-compare", *asked]
        print(" ".join(map(str, bench)), flush=True)
        subprocess.run(bench, check=True)


def _options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True, help="the program")
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b", help="of bitdraft; 'none' serves plainly")
    parser.add_argument("--format", default="w4a8-ag32-h6", help="of the target")
    parser.add_argument("--draft-format", default="w4a8-h4")
    parser.add_argument("--peer-format", default="q4_0", help="llama-server's")
    parser.add_argument("--peer-draft-format", help="llama-server's draft; none serves plainly")
    parser.add_argument("--slots", type=int, default=16, help="requests at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each")
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    return parser.parse_args(own[:at]), own[at + 1 :]


def _bitdraft(options: argparse.Namespace) -> list[str | Path]:
    draft = [] if options.draft == "none" else ["--draft", options.draft, "--draft-format", options.draft_format]
    return [
        *(_tool("bitdraft"), "serve", "--target", options.model, "--target-format", options.format, *draft),
        *("--max-batch", str(options.slots), "--max-model-len", str(options.context), "--port", str(PORTS["bitdraft"])),
    ]


def _llama(options: argparse.Namespace) -> list[str | Path]:
    draft: list[str | Path] = []
    if options.peer_draft_format:
        draft = ["-md", gguf_file(options.draft, options.peer_draft_format), "--draft-max", "4"]
    return [
        *(options.llama_server, "-m", gguf_file(options.model, options.peer_format), *draft),
        *("--parallel", str(options.slots), "--ctx-size", str(options.slots * options.context)),
        *("--threads", str(os.cpu_count()), "--port", str(PORTS["llama-server"]), "--no-webui"),
    ]


def _tool(name: str) -> Path:
    return Path(sys.executable).with_name(name)


@contextmanager
def _running(commands: dict[str, list[str | Path]]) -> Iterator[None]:
    """All servers up and ready; what they print goes to NAME-serving.log in the current folder."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for name, command in commands.items():
            print(" ".join(map(str, command)), flush=True)
            with open(f"{name}-serving.log", "wb") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log))
        for name, process in zip(commands, started, strict=True):
            _wait(name, process)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def _wait(name: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"{name} stopped with {process.returncode}: see {name}-serving.log")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[name]}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"{name} was not ready after {READY_S} s: see {name}-serving.log")


if __name__ == "__main__":
    main()
