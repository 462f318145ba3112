"""An answer of a chat taken apart as it comes: reasoning, text for the user, and tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..engine.sequence import TextStream
from .reasoning import ReasoningMarkers, ReasoningSplitter
from .tool_calls import CallDelta, Dialect, ToolCallParser


@dataclass(frozen=True)
class Reads:
    """What has to be read in the answers to one call.

    Attributes:
        dialect: how tool calls are written; None where none are expected.
        reasoning: the markers of reasoning; None where there is none.
        prompt_end: the end of the prompt's text, which may open the reasoning.
        parallel: whether an answer may have several calls; only the first is shown otherwise.
    """

    dialect: Dialect | None = None
    reasoning: ReasoningMarkers | None = None
    prompt_end: str = ""
    parallel: bool = True

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that the detokeniser must not leave out."""
        thought = (self.reasoning.opens, self.reasoning.closes) if self.reasoning else ()
        return (*(self.dialect.markers if self.dialect else ()), *thought)

    def splitter(self) -> ReasoningSplitter | None:
        """What splits one answer's reasoning off."""
        return ReasoningSplitter(self.reasoning, self.prompt_end) if self.reasoning else None


@dataclass(frozen=True)
class Parts:
    """What a piece of an answer added."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class AnswerReader:
    """Reads one answer. However it is cut into pieces, the parts are the same.

    Attributes:
        reasoning_tokens: tokens so far that are reasoning, its markers included.
        called: whether there is a tool call.
    """

    def __init__(self, reads: Reads, stream: TextStream) -> None:
        """Begin an answer; `stream` is a detokeniser that keeps the markers."""
        self._splitter, self._counting, self._stream = reads.splitter(), reads.splitter(), stream
        self._parser = ToolCallParser(reads.dialect) if reads.dialect else None
        self._parallel = reads.parallel
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether there is a tool call."""
        return bool(self._parser and self._parser.calls)

    def push(self, text: str, tokens: Iterable[int], *, last: bool) -> Parts:
        """Take in what came; `last` says that nothing follows."""
        self._count(tokens)
        reasoning, content = self._splitter.push(text) if self._splitter else ("", text)
        if last and self._splitter:
            rest = self._splitter.finish()
            reasoning, content = reasoning + rest[0], content + rest[1]
        if self._parser is None:
            return Parts(reasoning, content)
        parsed = self._parser.push(content)
        content, calls = parsed.content, parsed.deltas
        if last:
            rest_parsed = self._parser.finish()
            content, calls = content + rest_parsed.content, calls + rest_parsed.deltas
        return Parts(reasoning, content, tuple(d for d in calls if self._parallel or d.index == 0))

    def _count(self, tokens: Iterable[int]) -> None:
        if self._counting is None:
            return
        for token in tokens:
            before = self._counting.inside
            self._counting.push(self._stream.push(token))
            self.reasoning_tokens += before or self._counting.inside


def call_deltas(deltas: Iterable[CallDelta], ids: dict[int, str]) -> list[dict[str, Any]]:
    """Parts of tool calls as a stream shows them: id and name first, then pieces of the arguments.

    Args:
        deltas: the parts.
        ids: of the calls by index.
    """
    found = []
    for delta in deltas:
        shown: dict[str, Any] = {"index": delta.index}
        function: dict[str, Any] = {"arguments": delta.arguments}
        if delta.name is not None:
            shown |= {"id": ids[delta.index], "type": "function"}
            function = {"name": delta.name} | function
        found.append(shown | {"function": function})
    return found


def whole_calls(deltas: Iterable[CallDelta], ids: dict[int, str]) -> list[dict[str, Any]]:
    """Parts of tool calls put together, as a whole answer shows them."""
    calls: dict[int, dict[str, str]] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, {"name": "", "arguments": ""})
        call["name"] += delta.name or ""
        call["arguments"] += delta.arguments
    return [{"id": ids[index], "type": "function", "function": call} for index, call in calls.items()]
