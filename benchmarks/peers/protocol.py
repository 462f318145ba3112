"""What a driver and a worker say to one another: one JSON object a line. Imported in every environment: standard
library only.

A worker is one model, and perhaps a draft, loaded once in one system. It is started with a `Job` as JSON on its
command line, says {"ready": {versions}} when it is loaded, and then answers requests one by one. A request names one
of the methods of `Peer` under "do"; the rest of it are the method's arguments. An answer is what the method returned,
or {"error": traceback}.
"""

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a worker loads.

    Attributes:
        model: a name that `bitdraft pull` knows. format: one of the system's own formats.
        draft, draft_format: the same for a draft; None for none.
        context: tokens that a cache must hold.
        threads: compute threads.
    """

    model: str
    format: str
    draft: str | None
    draft_format: str | None
    context: int
    threads: int


class Peer(Protocol):
    """What a system can be asked. Prompts are token ids; all decoding is greedy and goes on after an end of text."""

    def decode(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Decode `tokens` tokens without a draft: see `Recording.answer`."""
        ...

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """{"seconds"}: from nothing to the logits of the last token of the prompt."""
        ...

    def speculate(self, prompt: list[int], tokens: int, draft_tokens: int | None) -> dict[str, Any]:
        """Decode with the draft, `draft_tokens` a step or as many as the system itself chooses.

        See `Recording.answer`; with the counts "drafted" and "accepted" where the system tells them.
        """
        ...

    def step(self, prompt: list[int], block: list[int], repeats: int) -> dict[str, Any]:
        """{"ms": [repeats]}: append `block` to a cache that holds `prompt`, and compute the logits of every row.

        One more repeat comes first and is thrown away. The prompt is computed only if the last call had another one.
        """
        ...


@dataclass
class Recording:
    """The tokens of one output as they come, and when the first and the last of them came.

    Attributes:
        ids: the tokens so far.
        first: seconds until the first of them, and how many came at once.
    """

    ids: list[int] = field(default_factory=list)
    first: tuple[float, int] | None = None
    _started: float = field(default_factory=perf_counter)
    _last: float = 0.0

    def add(self, ids: Sequence[int]) -> None:
        """Note tokens that are true from now on."""
        self.ids += ids
        self._last = perf_counter() - self._started
        self.first = self.first or (self._last, len(self.ids))

    def answer(self, **more: Any) -> dict[str, Any]:
        """{"ids", "seconds", "first_seconds", "first_tokens"}, times counted from when this was made."""
        assert self.first is not None
        first_seconds, first_tokens = self.first
        times = {"seconds": self._last, "first_seconds": first_seconds, "first_tokens": first_tokens}
        return {"ids": self.ids, **times, **more}


def serve(load: Callable[[Job], Peer], versions: dict[str, str]) -> None:
    """Load what the command line asks for and answer requests until there are no more."""
    _die_with_the_driver()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    peer = load(Job(**json.loads(sys.argv[1])))
    _say(answers, {"ready": versions})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(peer, request.pop("do"))(**request)
        except Exception:
            answer = {"error": traceback.format_exc()}
        _say(answers, answer)


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def _die_with_the_driver() -> None:
    """A stopped process does not see that its input was closed: without this it would outlive a killed driver."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
