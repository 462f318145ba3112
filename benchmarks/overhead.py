"""How much of a step of `bitdraft generate` is spent outside the compiled kernels?

Runs one greedy request step by step and counts the processor time of the calling thread inside and outside the library:
other programs then change it little. With several threads the share is of what the caller's thread does.

    BITDRAFT_THREADS=1 python benchmarks/overhead.py smollm2-135m w4a8
    BITDRAFT_THREADS=1 python benchmarks/overhead.py smollm2-135m w4a8 ngram
"""

import sys
from collections.abc import Callable
from statistics import median
from time import thread_time

from bitdraft.engine.sequence import Request
from bitdraft.ops import native
from bitdraft.serve.generate import GenerateConfig, load
from bitdraft.types import SamplingParams

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
WARM, STEPS = 20, 200


class Watched:
    """The library, with the time that its functions take added up in `inside`."""

    def __init__(self, library: object) -> None:
        self._library, self.inside = library, 0.0

    def __getattr__(self, name: str) -> Callable[..., object]:
        function = getattr(self._library, name)

        def watched(*arguments: object) -> object:
            started = thread_time()
            result = function(*arguments)
            self.inside += thread_time() - started
            return result

        setattr(self, name, watched)
        return watched


def main(model: str, recipe: str, draft: str | None = None) -> None:
    generator = load(GenerateConfig(model, draft, recipe, recipe, 4, 0.0, 1024), [])
    kernels = native.default()
    assert kernels, native.why_none()
    library = kernels._library = Watched(kernels._library)  # type: ignore[assignment]
    engine, ids = generator.engine, tuple(generator.prompt_ids(PROMPT, raw=True))
    sampling = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
    engine.submit(Request(0, ids, sampling, generator.tokenizer.stream()))
    steps = []
    while engine.scheduler.waiting or engine.scheduler.running:
        library.inside, started = 0.0, thread_time()
        engine.step()
        steps.append((thread_time() - started, library.inside))
    kept = steps[WARM : WARM + STEPS]
    whole, outside = median(a for a, _ in kept), median(a - b for a, b in kept)
    share = median((a - b) / a for a, b in kept)
    print(f"{model} {recipe}, draft {draft}: {len(kept)} steps of {whole * 1e3:.2f} ms, {outside * 1e6:.0f} us outside")
    print(f"share outside the kernels: {share:.1%}")


if __name__ == "__main__":
    main(*sys.argv[1:])
