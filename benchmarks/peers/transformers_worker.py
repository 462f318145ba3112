"""transformers in eager PyTorch as a peer: see protocol.py. Runs in the environment 'transformers'."""

from typing import Any

import torch
import transformers
from files import hf_folder
from protocol import Job, Recording, serve
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Listener(BaseStreamer):
    """Notes the tokens of an output as they come; the first call brings the prompt."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._prompt_came = False

    def put(self, value: Tensor) -> None:
        """Called with the prompt, then with the tokens of each step."""
        if self._prompt_came:
            self._recording.add(value.flatten().tolist())
        self._prompt_came = True

    def end(self) -> None:
        """Called at the end of an output."""


class Transformers:
    """The system; see `Peer`. It does not say what a step of several rows costs, nor what was drafted."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        self._target = _load(job.model, job.format)
        self._draft = _load(job.draft, job.draft_format) if job.draft and job.draft_format else None

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """See `Peer.decode`."""
        return self._generate(prompt, tokens).answer()

    def prefill(self, prompt: list[int]) -> dict:
        """See `Peer.prefill`."""
        return {"seconds": self._generate(prompt, 1).answer()["seconds"]}

    def speculate(self, prompt: list[int], tokens: int, draft_tokens: int | None) -> dict:
        """See `Peer.speculate`."""
        assert self._draft is not None
        if draft_tokens is not None:
            drafting = self._draft.generation_config
            drafting.num_assistant_tokens, drafting.num_assistant_tokens_schedule = draft_tokens, "constant"
            drafting.assistant_confidence_threshold = 0.0
        return self._generate(prompt, tokens, assistant_model=self._draft).answer()

    def _generate(self, prompt: list[int], tokens: int, **more: Any) -> Recording:
        ids = torch.tensor([prompt])
        recording = Recording()
        output = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            streamer=Listener(recording),
            **more,
        )
        recording.ids = output[0, len(prompt) :].tolist()
        return recording


def _load(name: str, form: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(hf_folder(name), dtype=DTYPES[form])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


if __name__ == "__main__":
    serve(Transformers, {"transformers": transformers.__version__, "torch": torch.__version__})
