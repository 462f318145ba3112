"""One request on its way: what was asked, what is true so far, and why it ended."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..decoding.constraint import Constraint
from ..decoding.protocols import DraftRow, Randomness
from ..decoding.sampling import History
from ..types import Origin, SamplingParams

Finish = Literal["stop", "length"]
"""Why an output ended: an end-of-sequence token, stop id, stop string or the end of its grammar; or max_tokens or the
context."""


class TextStream(Protocol):
    """Turns token ids into text, one at a time."""

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The text of an incomplete tail."""
        ...


@dataclass(frozen=True)
class Request:
    """What one caller asked for.

    Attributes:
        number: names the request in caches, records and random streams; unique among the engine's open requests.
        prompt: token ids, at least one.
        sampling: how to sample.
        text: detokeniser of the output; needed for stop strings, None otherwise.
        constraint: the grammar that the output follows; None for any text.
        logprobs: report the log-probability of every output token, and of so many likeliest ones; None reports none.
        prompt_logprobs: the same for the tokens of the prompt.
        domain: what kind of traffic the request is, for the draft length and for statistics.
        max_draft: longest block to draft for it; 0 decodes it plainly, None leaves it to the engine.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    text: TextStream | None = None
    constraint: Constraint | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    domain: str = ""
    max_draft: int | None = None


@dataclass
class Sequence:
    """The state of a request. Only `Engine.commit` changes it.

    Attributes:
        request: what was asked.
        randomness: its random decisions.
        history: token counts for penalties.
        tokens: prompt and output.
        ending_ids: end-of-sequence and stop ids, which end the output.
        origins: where each output token came from.
        cached: tokens that the target's KV holds, all of them true.
        text: the output's text, cut before a stop string; empty without a detokeniser.
        finish: why it ended; None while it runs.
    """

    request: Request
    randomness: Randomness
    history: History
    tokens: list[int]
    ending_ids: frozenset[int]
    origins: list[Origin] = field(default_factory=list)
    cached: int = 0
    text: str = ""
    finish: Finish | None = None

    @property
    def output(self) -> list[int]:
        """Output tokens so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def pending(self) -> Tokens[int]:
        """True tokens that the target's KV does not hold yet."""
        return self.tokens[self.cached :]

    @property
    def visible(self) -> str:
        """The text that is sure to stay: all of it but a tail that may yet turn out to begin a stop string."""
        if self.finish:
            return self.text
        stops = self.request.sampling.stop
        held = max((n for s in stops for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        return self.text[: len(self.text) - held]

    def draft_row(self, budget: int) -> DraftRow:
        """This sequence as a drafter sees it."""
        return DraftRow(
            request=self.request.number,
            tokens=self.tokens,
            prompt_length=len(self.request.prompt),
            budget=budget,
            sampling=self.request.sampling,
            history=self.history,
            randomness=self.randomness,
        )

    def append(self, token: int, origin: Origin, context_length: int) -> None:
        """Make one token true and see whether it ends the output.

        Args:
            token: the token.
            origin: where it came from.
            context_length: tokens that prompt and output may hold together.
        """
        assert self.finish is None
        sampling = self.request.sampling
        self.tokens.append(token)
        self.origins.append(origin)
        self.history = self.history.extended(token)
        if self._reaches_stop_string(token) or token in self.ending_ids or self.history.ended:
            self.finish = "stop"
        elif len(self.origins) >= sampling.max_tokens or len(self.tokens) >= context_length:
            self.finish = "length"
        if self.finish == "length" and self.request.text:
            self.text += self.request.text.flush()

    def _reaches_stop_string(self, token: int) -> bool:
        if self.request.text is None:
            return False
        before = len(self.text)
        self.text += self.request.text.push(token)
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.request.sampling.stop]
        starts = [at for at in found if at >= 0]
        if starts:
            self.text = self.text[: min(starts)]
        return bool(starts)
