"""llama.cpp as a peer: see protocol.py. Runs in the environment 'llama-cpp', on the low-level interface.

Everything that can be chosen is chosen for speed, as `llama-server` would: weights repacked at load where llama.cpp has
kernels for it, flash attention where it picks it, and the greatest logit found by NumPy instead of by a sampler that
first copies all of them. Speculation is llama.cpp's own loop without what it computes twice: the draft keeps the cache
of what it drafted.
"""

import ctypes
import os
import sys

import llama_cpp
import numpy as np
from files import gguf_file
from llama_cpp import llama_cpp as api
from protocol import Job, Recording, serve

BATCH = 512
INFO = 2  # of ggml_log_level; below it are debugging messages, above it warnings and errors


@llama_cpp.llama_log_callback
def log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    """Leave out the debugging messages: there is one for every layer of every graph that is planned."""
    if level >= INFO:
        sys.stderr.write(text.decode("utf-8", "replace"))


class Model:
    """A model with one sequence in its cache.

    Attributes:
        length: tokens that the cache holds.
    """

    def __init__(self, name: str, form: str, job: Job) -> None:
        path = gguf_file(name, form)
        settings = api.llama_model_default_params()
        self._model = api.llama_model_load_from_file(os.fsencode(path), settings)
        if not self._model:
            raise FileNotFoundError(f"{path} cannot be loaded. Make it with: setup_peers.py llama-cpp --models {name}")
        context = api.llama_context_default_params()
        context.n_ctx = job.context
        context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = job.threads
        self._context = api.llama_init_from_model(self._model, context)
        self._memory = api.llama_get_memory(self._context)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self.length = 0

    def feed(self, tokens: list[int], logits_from: int) -> None:
        """Append tokens and compute the logits of those from index `logits_from` on, which fit one batch."""
        for begin in range(0, len(tokens), BATCH):
            part = tokens[begin : begin + BATCH]
            self._batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self._batch.token[i] = token
                self._batch.pos[i] = self.length + i
                self._batch.n_seq_id[i] = 1
                self._batch.seq_id[i][0] = 0
                self._batch.logits[i] = begin + i >= logits_from
            status = api.llama_decode(self._context, self._batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            self.length += len(part)
        api.llama_synchronize(self._context)

    def best(self, row: int) -> int:
        """The likeliest token after row `row` of the last batch, counted from its end if negative."""
        logits = api.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def truncate(self, length: int) -> None:
        """Forget what the cache holds past `length` tokens."""
        if length < self.length:
            api.llama_memory_seq_rm(self._memory, 0, length, -1)
            self.length = length


class LlamaCpp:
    """The system; see `Peer`."""

    def __init__(self, job: Job) -> None:
        self._target = Model(job.model, job.format, job)
        self._draft = Model(job.draft, job.draft_format, job) if job.draft and job.draft_format else None
        self._filled: list[int] = []

    def decode(self, prompt: list[int], tokens: int) -> dict:
        """See `Peer.decode`."""
        self._clear()
        recording = Recording()
        new = prompt
        while len(recording.ids) < tokens:
            self._target.feed(new, len(new) - 1)
            new = [self._target.best(-1)]
            recording.add(new)
        return recording.answer()

    def prefill(self, prompt: list[int]) -> dict:
        """See `Peer.prefill`."""
        self._clear()
        recording = Recording()
        self._target.feed(prompt, len(prompt) - 1)
        recording.add([self._target.best(-1)])
        return {"seconds": recording.answer()["seconds"]}

    def speculate(self, prompt: list[int], tokens: int, draft_tokens: int | None) -> dict:
        """See `Peer.speculate`."""
        assert self._draft is not None
        assert draft_tokens is not None, "llama.cpp drafts as many tokens as it is told to"
        self._clear()
        recording = Recording()
        self._target.feed(prompt, len(prompt) - 1)
        self._draft.feed(prompt, len(prompt))
        known = [*prompt, self._target.best(-1)]
        recording.add(known[-1:])
        drafted = accepted = 0
        while len(recording.ids) < tokens:
            block = self._propose(known, min(draft_tokens, tokens - len(recording.ids) - 1))
            new = self._verified(known[-1], block)
            known += new
            recording.add(new)
            drafted += len(block)
            accepted += len(new) - 1
            self._target.truncate(len(known) - 1)
            self._draft.truncate(len(known) - 1)
        return recording.answer(drafted=drafted, accepted=accepted)

    def step(self, prompt: list[int], block: list[int], repeats: int) -> dict:
        """See `Peer.step`."""
        if prompt != self._filled:
            self._clear()
            self._target.feed(prompt, len(prompt))
            self._filled = prompt
        times = []
        for _ in range(repeats + 1):
            recording = Recording()
            self._target.feed(block, 0)
            recording.add(block)
            times.append(recording.answer()["seconds"] * 1e3)
            self._target.truncate(len(prompt))
        return {"ms": times[1:]}

    def _propose(self, known: list[int], count: int) -> list[int]:
        """`count` tokens after `known`, of which the draft's cache holds all but the last one or two."""
        block: list[int] = []
        while len(block) < count:
            new = block[-1:] or known[self._draft.length :]
            self._draft.feed(new, len(new) - 1)
            block.append(self._draft.best(-1))
        return block

    def _verified(self, last: int, block: list[int]) -> list[int]:
        """The tokens of `block` that the target would have chosen itself, and its own next one."""
        self._target.feed([last, *block], 0)
        new = []
        for row, drafted in enumerate(block):
            new.append(self._target.best(row))
            if new[-1] != drafted:
                return new
        return [*new, self._target.best(len(block))]

    def _clear(self) -> None:
        self._filled = []
        self._target.truncate(0)
        if self._draft:
            self._draft.truncate(0)


if __name__ == "__main__":
    api.llama_log_set(log, ctypes.c_void_p(0))
    api.llama_backend_init()
    system = api.llama_print_system_info().decode().strip(" |")
    serve(LlamaCpp, {"llama-cpp-python": llama_cpp.__version__, "system": system})
