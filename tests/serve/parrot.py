"""A model that says the last user's message again, token by token, and drafts of it that are wrong now and then.

So a test knows every answer, in any vocabulary, and what happens at every token of it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from model_files import TEMPLATE, config, write_folder

from bitdraft.decoding.lookahead import Fixed
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.predicted import PredictedDrafter
from bitdraft.engine.engine import Engine
from bitdraft.models.tokenizer import Tokenizer
from bitdraft.quantize.load import open_source
from bitdraft.serve.app import Service
from bitdraft.serve.metrics import Metrics
from bitdraft.serve.prepare import Model
from bitdraft.serve.response_format import Compiler
from bitdraft.serve.settings import Settings
from bitdraft.serve.worker import Worker, streams
from bitdraft.types import Blocks, Feed, StepRecord

START, END = 1, 2
HERMES = TEMPLATE + "{# tools: <tool_call> #}"
THINKING = TEMPLATE + "{# <think> </think> #}"


class Parrot:
    """A `LanguageModel`.

    Attributes:
        pause: seconds that a call takes.
        broken: what the next call raises; None for nothing.
    """

    def __init__(self, tokenizer: Tokenizer, *, wrong_every: int = 0, context_length: int = 4096) -> None:
        """Speak with this vocabulary; every so many tokens say the next id instead, 0 never."""
        self.vocab_size, self.context_length = tokenizer.vocab_size, context_length
        self.pause, self.broken = 0.0, None
        self._wrong_every = wrong_every
        self._user = len(tokenizer.encode("user\n", add_bos=False))
        self._assistant = len(tokenizer.encode("assistant\n", add_bos=False))
        self._texts: dict[int, list[int]] = {}

    def blocks(self) -> Blocks:
        return Blocks(16, 1000, 1000)

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        return 0

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        time.sleep(self.pause)
        if self.broken:
            broken, self.broken = self.broken, None
            raise broken
        rows = []
        for feed in feeds:
            text = self._texts.setdefault(feed.request, [])
            assert len(text) == feed.start
            text += feed.tokens
            rows += [self._logits(text[: feed.start + i + 1]) for i in range(feed.logits_from, len(feed.tokens))]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def truncate(self, request: int, length: int) -> None:
        if request in self._texts:
            del self._texts[request][length:]

    def release(self, request: int) -> None:
        self._texts.pop(request, None)

    def _logits(self, text: list[int]) -> torch.Tensor:
        starts = [i for i, token in enumerate(text) if token == START]
        content = text[starts[-2] + 1 + self._user :]
        content = content[: content.index(END)]
        said = len(text) - starts[-1] - 1 - self._assistant
        token = content[said] if 0 <= said < len(content) else END
        if self._wrong_every and said % self._wrong_every == 0:
            token = (token + 1) % self.vocab_size
        row = torch.zeros(self.vocab_size)
        row[token] = 30.0
        return row


def parrot_service(
    folder: Path, k: int, *, template: str = TEMPLATE, predicted: int = 0, **settings: object
) -> tuple[Service, Parrot]:
    """A service of a parrot, and the parrot.

    Drafts are of up to k tokens, every third of them wrong; without any, clients' predictions of up to `predicted`.
    """
    if not folder.exists():
        write_folder(folder, config())
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = open_source(str(folder)).tokenizer
    target = Parrot(tokenizer)
    draft = Parrot(tokenizer, wrong_every=3)
    records: list[StepRecord] = []
    engine = Engine(
        target,
        PredictedDrafter(ModelDrafter(draft, Fixed(k), tokenizer.eos_ids) if k else None),
        eos_ids=tokenizer.eos_ids,
        max_draft=k or predicted,
        max_batch=4,
        randomness=streams,
        on_record=records.append,
    )
    metrics = Metrics()
    service = Service(
        worker=Worker(engine, records, metrics, perf_counter),
        model=Model(tokenizer, target.vocab_size, target.context_length, k),
        settings=Settings(names=("parrot",), **settings),  # type: ignore[arg-type]
        metrics=metrics,
        info=dict,
        compile_grammar=Compiler(tokenizer, target.vocab_size),
        max_batch=4,
    )
    return service, target
