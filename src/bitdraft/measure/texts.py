"""Let the target write, once, and keep what scoring needs of it: token ids and last hidden rows.

Letters: T tokens of an output, D hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.sequence import Request
from ..errors import NumericsError, UsageError
from ..models.cached import CachedModel
from ..models.tokenizer import Tokenizer
from ..types import Feed, SamplingParams, StepRecord
from .files import writable
from .trace import Text
from .workload import Body, Prompt, plain_text

Key = tuple[str, int]
"""Workload and index of a prompt."""


def tokenise(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, room: int, context_length: int
) -> dict[Key, tuple[int, ...]]:
    """Token ids of every prompt by workload and index: chats through the model's template, texts as they stand.

    Raises:
        UsageError: a prompt that leaves less than `room` tokens of the context for the output, or is empty.
    """
    ids = {}
    for prompt in prompts:
        key = (prompt.workload, prompt.index)
        tokens = (
            tokenizer.encode(prompt.text) if prompt.text is not None else tokenizer.chat(list(prompt.messages or ()))
        )
        if not 0 < len(tokens) <= context_length - room:
            raise UsageError(
                f"prompt {prompt.index} of workload {prompt.workload!r} has {len(tokens)} tokens. Expected 1 to "
                f"{context_length - room}: the context is {context_length}, {room} of it are for the output. "
                "Shorten the prompt or lower --max-tokens."
            )
        ids[key] = tuple(tokens)
    return ids


def calibration_ids(bodies: Sequence[Body], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids for calibration: conversations through the model's template, answers included, texts as they stand.

    A model without a template reads a conversation as plain text.

    Raises:
        UsageError: the template refuses a conversation.
    """
    if tokenizer.chat_template is None:
        return [tokenizer.encode(plain_text(body)) for body in bodies]
    return [
        tokenizer.encode(body) if isinstance(body, str) else tokenizer.chat(body, add_generation_prompt=False)
        for body in bodies
    ]


class _HiddenKeeper:
    """A `LanguageModel` that remembers the hidden row behind every row of logits it returned."""

    def __init__(self, model: CachedModel) -> None:
        self._model = model
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.truncate, self.release, self.blocks = model.truncate, model.release, model.blocks
        self.rows: dict[int, list[Tensor]] = {}

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        """Nothing: every row is wanted."""
        return 0

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        x_RD = self._model.hidden(feeds)
        owners = [feed.request for feed in feeds for _ in feed.tokens[feed.logits_from :]]
        for request, x_D in zip(owners, x_RD, strict=True):
            self.rows.setdefault(request, []).append(x_D)
        return self._model.logits(x_RD)


def write_texts(
    target: CachedModel,
    prompts: Mapping[Key, Sequence[int]],
    sampling: SamplingParams,
    eos_ids: Sequence[int],
    batch: int,
    clock: Callable[[], float],
) -> Iterator[tuple[Text, Tensor]]:
    """Decode plainly, several prompts side by side, and yield each output as it ends.

    Yields:
        the text, and the target's hidden rows [T, D] float32: row t is what it said before token t.
    """
    keeper = _HiddenKeeper(target)
    seconds: dict[int, float] = {}

    def share(record: StepRecord) -> None:
        spent = (record.draft_seconds + record.verify_seconds + record.other_seconds) / record.batch
        seconds[record.request] = seconds.get(record.request, 0.0) + spent

    engine = Engine(keeper, None, eos_ids=eos_ids, max_draft=0, max_batch=batch, on_record=share, clock=clock)
    keys = list(prompts)
    for number, key in enumerate(keys):
        engine.submit(Request(number, tuple(prompts[key]), sampling))
    outputs: dict[int, list[int]] = {}
    while engine.scheduler.running or engine.scheduler.waiting:
        for emission in engine.step():
            outputs.setdefault(emission.request, []).extend(emission.tokens)
            if emission.finish is None:
                continue
            if emission.finish == "error":
                raise NumericsError(emission.error)
            workload, index = keys[emission.request]
            text = Text(
                workload=workload,
                index=index,
                prompt_tokens=len(prompts[workload, index]),
                ids=tuple(outputs.pop(emission.request)),
                finish=emission.finish,
                seconds=seconds[emission.request],
            )
            yield text, torch.stack(keeper.rows.pop(emission.request))


def save_hidden(folder: Path, key: Key, x_TD: Tensor) -> None:
    """Keep the hidden rows of one text, whole or not at all."""
    path = _hidden_path(folder, key)
    with writable(folder):
        path.parent.mkdir(exist_ok=True)
        half = path.with_suffix(".part")
        with half.open("wb") as file:
            np.save(file, x_TD.numpy())
        half.replace(path)


def load_hidden(folder: Path, key: Key) -> Tensor:
    """The hidden rows of one text, [T, D] float32.

    Raises:
        UsageError: they are gone or broken.
    """
    path = _hidden_path(folder, key)
    try:
        return torch.from_numpy(np.load(path))
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(
            f"{path}: the target's hidden rows of {key[0]} prompt {key[1]} cannot be read ({error}). Measure again in "
            "a new folder."
        ) from None


def _hidden_path(folder: Path, key: Key) -> Path:
    return folder / "hidden" / f"{key[0]}-{key[1]:04}.npy"
