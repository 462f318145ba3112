"""What does `bitdraft serve` add to the bare engine, for one request at a time?

One process holds one model. In turn, the engine is asked directly and by another process over HTTP, for the same
outputs of the same prompts; neither has seen a prompt before. A ratio is of one pair, what the server took over what
the engine took until the whole answer was there.

    python benchmarks/server_overhead.py qwen2.5-coder-1.5b w4a8-ag32-h6
    python benchmarks/server_overhead.py smollm2-135m w4a8 --pairs 40
"""

import argparse
import multiprocessing
import threading
import time

import httpx2 as httpx
import numpy as np
import uvicorn

from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.measure.stats import median, resample
from bitdraft.serve.app import create_app
from bitdraft.serve.server import bind
from bitdraft.serve.settings import Settings
from bitdraft.serve.start import ServeConfig, load_service, open_and_plan
from bitdraft.types import SamplingParams

PROMPT, OUTPUT, LENGTH = 128, 64, 1024


def ask(url: str, prompt: list[int], output: int) -> float:
    """Seconds that a streamed answer takes, read to its end."""
    body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as answer:
        assert answer.status_code == 200, answer.read()
        for _ in answer.iter_bytes():
            pass
    return time.perf_counter() - started


def run(engine: Engine, prompt: list[int], output: int) -> float:
    """Seconds that the engine takes."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    started = time.perf_counter()
    engine.submit(Request(0, tuple(prompt), sampling))
    for _ in engine.run():
        pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("format")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    settings = Settings(names=("model",))
    config = ServeConfig(
        options.model, None, options.format, "auto", None, None, 0, 0.0, 1, 512, LENGTH, None, prefix_cache=False,
        generation_config=False, settings=settings,
    )  # fmt: skip
    opened, plan = open_and_plan(config)
    service = load_service(config, opened, plan, [])
    bare = Engine(service.worker._engine.target, None, eos_ids=(), max_draft=0, max_batch=1)
    listening = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(create_app(service), http="h11", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    rng = np.random.default_rng(0)
    pairs = []
    with multiprocessing.get_context("spawn").Pool(1) as client:
        for number in range(options.pairs + 2):  # two to warm up
            prompt = [int(token) for token in rng.integers(100, 10_000, PROMPT)]
            turns = {
                "bare": lambda p=prompt: run(bare, p, OUTPUT),
                "served": lambda p=prompt: client.apply(ask, (url, p, OUTPUT)),
            }
            order = list(turns) if number % 2 else list(turns)[::-1]
            pairs.append({name: turns[name]() for name in order})
    server.should_exit = True
    thread.join()
    kept = pairs[2:]
    bare_s, served_s = (np.array([pair[name] for pair in kept]) for name in ("bare", "served"))
    ratio = median(served_s / bare_s, np.arange(len(kept)), resample(len(kept), rng)).interval()
    print(f"{options.model} {options.format}, {PROMPT}/{OUTPUT} tokens, {len(kept)} pairs")
    print(f"engine {np.median(bare_s):.3f} s, server {np.median(served_s):.3f} s, in the median")
    print(f"server over engine {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


if __name__ == "__main__":
    main()
