"""One request on its way: what was asked, what is true so far, and why it ended."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..decoding.constraint import Constraint
from ..decoding.protocols import DraftRow, Randomness
from ..decoding.sampling import History
from ..types import Origin, SamplingParams, TokenLogprob

Finish = Literal["stop", "length", "error"]
"""Why an output ended: an end-of-sequence token, stop id, stop string or the end of its grammar; max_tokens or the
context; or something that went wrong with this request alone."""


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
        prediction: token ids that the output is likely to repeat, for `drafters.predicted`.
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
    prediction: tuple[int, ...] = ()


@dataclass(eq=False)
class Sequence:
    """The state of a request. Only `Engine.commit` changes what is true of it, and the scheduler its place.

    Attributes:
        request: what was asked.
        randomness: its random decisions.
        history: token counts for penalties.
        tokens: prompt and output.
        ending_ids: end-of-sequence and stop ids, which end the output.
        origins: where each output token came from.
        cached: tokens that the target's KV holds, all of them true.
        adopted: tokens of the prompt that the prefix cache held; None until the request is admitted.
        scores: log-probabilities of the prompt's tokens as far as they are known, where they are asked for.
        text: the output's text, cut before a stop string; empty without a detokeniser.
        finish: why it ended; None while it runs.
        stop_reason: the stop id or string that ended it, if one did.
        error: what went wrong, with the finish "error".
    """

    request: Request
    randomness: Randomness
    history: History
    tokens: list[int]
    ending_ids: frozenset[int]
    origins: list[Origin] = field(default_factory=list)
    cached: int = 0
    adopted: int | None = None
    scores: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    text: str = ""
    finish: Finish | None = None
    stop_reason: int | str | None = None
    error: str = ""

    @property
    def output(self) -> list[int]:
        """Output tokens so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def decides(self) -> bool:
        """Whether an output is asked for, or only what the prompt is like."""
        return self.request.sampling.max_tokens > 0

    @property
    def missing(self) -> int:
        """How many true tokens the target's KV does not hold yet and has to: the last one only if something follows."""
        if self.decides:
            return len(self.tokens) - self.cached
        return 0 if self.scored else len(self.tokens) - 1 - self.cached

    @property
    def pending(self) -> Tokens[int]:
        """The missing tokens."""
        return self.tokens[self.cached : self.cached + self.missing]

    @property
    def scored(self) -> bool:
        """Whether all that is asked about the prompt is known."""
        return self.request.prompt_logprobs is None or len(self.scores) == len(self.request.prompt)

    def scoring_rows(self, count: int) -> int:
        """How many of the next `count` missing tokens tell the log-probability of the prompt token after them.

        They are the last ones, but for the prompt's own last token.
        """
        if self.scored:
            return 0
        end = min(self.cached + count, len(self.request.prompt) - 1)
        return max(0, end - max(self.cached, len(self.scores) - 1))

    @property
    def visible(self) -> str:
        """The text that is sure to stay: all of it but a tail that may yet turn out to begin a stop string."""
        if self.finish:
            return self.text
        stops = self.request.sampling.stop
        held = max((n for s in stops for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        return self.text[: len(self.text) - held]

    def draft_row(self, budget: int, room: int) -> DraftRow:
        """This sequence as a drafter sees it, with the budget that was decided of the room that there is."""
        return DraftRow(
            request=self.request.number,
            tokens=self.tokens,
            prompt_length=len(self.request.prompt),
            budget=budget,
            sampling=self.request.sampling,
            history=self.history,
            randomness=self.randomness,
            prediction=self.request.prediction,
            room=room,
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
        if self._reaches_stop_string(token):
            self.finish = "stop"
        elif token in self.ending_ids or self.history.ended:
            self.finish, self.stop_reason = "stop", token if token in sampling.stop_ids else None
        elif len(self.origins) >= sampling.max_tokens or len(self.tokens) >= context_length:
            self.finish = "length"
        if self.finish == "length" and self.request.text:
            self.text += self.request.text.flush()

    def _reaches_stop_string(self, token: int) -> bool:
        if self.request.text is None:
            return False
        before = len(self.text)
        self.text += self.request.text.push(token)
        stops = self.request.sampling.stop
        starts = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops]
        found = min(((at, stop) for at, stop in starts if at >= 0), default=None)
        if found:
            self.text, self.stop_reason = self.text[: found[0]], found[1]
        return found is not None
