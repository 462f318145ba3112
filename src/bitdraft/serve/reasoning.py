"""Reasoning beside the answer: `<think>...</think>` is split off however the text is cut, its tokens are counted."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..engine.sequence import TextStream


@dataclass(frozen=True)
class ReasoningMarkers:
    """What stands before and after a model's reasoning."""

    opens: str = "<think>"
    closes: str = "</think>"


def reasoning_of(chat_template: str | None) -> ReasoningMarkers | None:
    """The markers of a chat template's model; None where it does not reason, or in a way not read here."""
    markers = ReasoningMarkers()
    return markers if chat_template and markers.closes in chat_template else None


class ReasoningSplitter:
    """Splits text into reasoning and answer.

    Reasoning is read at the beginning of an answer only, and white space around it is left out. Where the prompt has
    opened the reasoning, the answer begins inside.
    """

    def __init__(self, markers: ReasoningMarkers, prompt: str = "") -> None:
        """Begin an answer.

        Args:
            markers: of the model.
            prompt: the rendered prompt; if it ends inside the reasoning, or right after it, so does the answer begin.
        """
        ending = prompt.rstrip()
        self._read = self._before
        if ending.endswith(markers.opens):
            self._read = self._opened
        elif ending.endswith(markers.closes):
            self._read = self._after
        self._markers = markers
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._read in (self._opened, self._within)

    def push(self, text: str) -> tuple[str, str]:
        """What more text adds to reasoning and to content."""
        parts: tuple[list[str], list[str]] = [], []
        for char in text:
            inside = self.inside
            said = self._read(char)
            parts[not inside].append(said)
        return "".join(parts[0]), "".join(parts[1])

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back, but for white space at the end of reasoning."""
        held, self._held = self._held, ""
        return (held.rstrip(), "") if self.inside else ("", held)

    # Each of these takes one character and returns what became certain; `_read` is the one that takes the next.

    def _before(self, char: str) -> str:
        self._held += char
        beginning = self._held.lstrip()
        if beginning == self._markers.opens:
            self._held, self._read = "", self._opened
            return ""
        if self._markers.opens.startswith(beginning):
            return ""
        self._read = self._answer
        held, self._held = self._held, ""
        return held

    def _opened(self, char: str) -> str:
        if char.isspace():
            return ""
        self._read = self._within
        return self._within(char)

    def _within(self, char: str) -> str:
        self._held += char
        closes = self._markers.closes
        if self._held.endswith(closes):
            said = self._held.removesuffix(closes).rstrip()
            self._held, self._read = "", self._after
            return said
        # White space and the beginning of a marker wait for what follows them.
        begun = next(n for n in range(len(closes), -1, -1) if self._held.endswith(closes[:n]))
        keep = len(self._held[: len(self._held) - begun].rstrip())
        said, self._held = self._held[:keep], self._held[keep:]
        return said

    def _after(self, char: str) -> str:
        if char.isspace():
            return ""
        self._read = self._answer
        return char

    def _answer(self, char: str) -> str:
        return char


def count_reasoning(tokens: Iterable[int], stream: TextStream, splitter: ReasoningSplitter) -> int:
    """How many of an output's tokens are reasoning: those after which it is open, and the one that closes it.

    Args:
        tokens: the output, after everything that cut it, so the count never exceeds what was written.
        stream: a new detokeniser that keeps the markers.
        splitter: a new splitter.
    """
    count = 0
    for token in tokens:
        before = splitter.inside
        splitter.push(stream.push(token))
        count += before or splitter.inside
    return count
