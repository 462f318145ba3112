"""OpenVINO GenAI as a peer: see protocol.py. Runs in the environment 'openvino'."""

from typing import Any

import numpy as np
import openvino
import openvino_genai
from files import ir_folder
from openvino_genai import GenerationConfig, LLMPipeline, SchedulerConfig, StreamerBase, StreamingStatus
from protocol import Job, Recording, serve

CACHE_GB = 1


class Listener(StreamerBase):
    """Notes the tokens of an output as they come."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def write(self, token: int | list[int]) -> StreamingStatus:
        """Called with each token, or with the tokens of a block."""
        self._recording.add(token if isinstance(token, list) else [token])
        return StreamingStatus.RUNNING

    def end(self) -> None:
        """Called at the end of an output."""


class OpenVINO:
    """The system; see `Peer`. It does not say what a step of several rows costs."""

    def __init__(self, job: Job) -> None:
        scheduler = SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False  # a prompt that comes again must be computed again
        scheduler.max_num_batched_tokens = job.context
        settings: dict[str, Any] = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": job.threads}
        if job.draft and job.draft_format:
            folder = ir_folder(job.draft, job.draft_format)
            settings["draft_model"] = openvino_genai.draft_model(folder, "CPU", INFERENCE_NUM_THREADS=job.threads)
        self._pipeline = LLMPipeline(ir_folder(job.model, job.format), "CPU", **settings)

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """See `Peer.decode`."""
        return self._generate(prompt, tokens)[1].answer()

    def prefill(self, prompt: list[int]) -> dict:
        """See `Peer.prefill`."""
        return {"seconds": self._generate(prompt, 1)[1].answer()["seconds"]}

    def speculate(self, prompt: list[int], tokens: int, draft_tokens: int | None) -> dict:
        """See `Peer.speculate`."""
        drafting = {} if draft_tokens is None else {"num_assistant_tokens": draft_tokens}
        result, recording = self._generate(prompt, tokens, **drafting)
        told = result.extended_perf_metrics
        return recording.answer(drafted=told.get_num_draft_tokens(), accepted=told.get_num_accepted_tokens())

    def _generate(self, prompt: list[int], tokens: int, **drafting: int) -> tuple[Any, Recording]:
        config = GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False, **drafting)
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        recording = Recording()
        result = self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config, Listener(recording))
        recording.ids = list(result.tokens[0])
        return result, recording


if __name__ == "__main__":
    serve(OpenVINO, {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__})
