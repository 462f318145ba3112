"""bitdraft as its peers are asked: see protocol.py. Runs in bitdraft's own environment."""

import numpy as np
import torch
from protocol import Job, Recording, serve

from bitdraft import __version__
from bitdraft.decoding.lookahead import Fixed
from bitdraft.decoding.protocols import Drafter
from bitdraft.drafters.model import ModelDrafter
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.formats import Recipe
from bitdraft.measure.workload import calibration_texts
from bitdraft.models.cached import CachedModel
from bitdraft.ops import native
from bitdraft.quantize.load import Source, load_model, open_source
from bitdraft.types import Feed, SamplingParams, StepRecord

REQUEST = 0
"""Number of the one request that is ever in the cache."""


class Bitdraft:
    """The system; see `Peer`."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        source = open_source(job.model)
        self._target = _load(source, job.format, job)
        self._draft: CachedModel | None = None
        if job.draft and job.draft_format:
            self._draft = _load(open_source(job.draft), job.draft_format, job, target=source)
        self._filled: list[int] = []

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """See `Peer.decode`."""
        return self._run(prompt, tokens, None, 0).answer()

    def prefill(self, prompt: list[int]) -> dict:
        """See `Peer.prefill`."""
        self._clear()
        recording = Recording()
        logits = self._target.forward([Feed(REQUEST, prompt, 0, len(prompt) - 1)])
        recording.add([int(logits[0].argmax())])
        self._target.release(REQUEST)
        return {"seconds": recording.answer()["seconds"]}

    def speculate(self, prompt: list[int], tokens: int, draft_tokens: int | None) -> dict:
        """See `Peer.speculate`."""
        assert self._draft is not None
        assert draft_tokens is not None, "bitdraft drafts as many tokens as it is told to"
        records: list[StepRecord] = []
        drafter = ModelDrafter(self._draft, Fixed(draft_tokens), ())
        recording = self._run(prompt, tokens, drafter, draft_tokens, records)
        return recording.answer(drafted=sum(r.proposed for r in records), accepted=sum(r.accepted for r in records))

    def step(self, prompt: list[int], block: list[int], repeats: int) -> dict:
        """See `Peer.step`."""
        if prompt != self._filled:
            self._clear()
            self._target.forward([Feed(REQUEST, prompt, 0, len(prompt))])
            self._filled = prompt
        times = []
        for _ in range(repeats + 1):
            recording = Recording()
            self._target.forward([Feed(REQUEST, block, len(prompt), 0)])
            recording.add(block)
            times.append(recording.answer()["seconds"] * 1e3)
            self._target.truncate(REQUEST, len(prompt))
        return {"ms": times[1:]}

    def _run(
        self,
        prompt: list[int],
        tokens: int,
        drafter: Drafter | None,
        draft_tokens: int,
        records: list[StepRecord] | None = None,
    ) -> Recording:
        self._clear()
        engine = Engine(
            self._target,
            drafter,
            eos_ids=(),
            max_draft=draft_tokens,
            max_batch=1,
            on_record=None if records is None else records.append,
        )
        recording = Recording()
        engine.submit(Request(REQUEST, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=tokens)))
        for emission in engine.run():
            recording.add(emission.tokens)
        return recording

    def _clear(self) -> None:
        self._filled = []
        self._target.release(REQUEST)


def _load(source: Source, format_name: str, job: Job, target: Source | None = None) -> CachedModel:
    recipe = Recipe.parse(format_name)
    texts = calibration_texts() if recipe.method == "awq" else []
    return load_model(
        source,
        recipe,
        kv_tokens=job.context,
        context_length=job.context,
        rng=np.random.default_rng(0),
        target=target,
        calibration=[source.tokenizer.encode(text) for text in texts] or None,
    )


if __name__ == "__main__":
    kernels = native.why_none() or "native kernels"
    serve(Bitdraft, {"bitdraft": __version__, "torch": torch.__version__, "kernels": kernels})
