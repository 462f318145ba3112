"""From a model's text to tool calls, character by character, so that it never matters how a stream was cut.

Three ways of writing calls are read, and which one a model uses is told by its chat template:

* Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them;
* Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`;
* Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`.

A call's arguments are passed on as the model wrote them. What begins like a call and is none is text again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

_ARGUMENTS = ("arguments", "parameters")
_LONGEST_NAME = 256


@dataclass(frozen=True)
class Dialect:
    """How a model writes tool calls.

    Attributes:
        name: for messages.
        opens: what stands before a call; the detokeniser has to keep it where it is a special token.
        closes: what stands after it; empty for nothing.
        bare: an answer that begins with '{' may be a call.
        array: a list of calls may follow `opens`, or a name and its arguments.
        arguments_marker: what stands between a name and its arguments; empty where calls are JSON objects.
    """

    name: str
    opens: str
    closes: str = ""
    bare: bool = False
    array: bool = False
    arguments_marker: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a detokeniser must not leave out, special tokens though they may be."""
        return tuple(text for text in (self.opens, self.closes, self.arguments_marker) if text)


HERMES = Dialect("hermes", "<tool_call>", closes="</tool_call>")
LLAMA3 = Dialect("llama3", "<|python_tag|>", bare=True)
MISTRAL = Dialect("mistral", "[TOOL_CALLS]", array=True)


def dialect_of(chat_template: str | None) -> Dialect | None:
    """How the model of a chat template writes tool calls; None where it knows no tools, or in a way not read here."""
    if not chat_template or "tools" not in chat_template:
        return None
    if "[TOOL_CALLS]" in chat_template:
        return replace(MISTRAL, arguments_marker="[ARGS]" if "[ARGS]" in chat_template else "")
    if "<tool_call>" in chat_template and "<function=" not in chat_template and "<arg_key>" not in chat_template:
        return HERMES
    if "<|python_tag|>" in chat_template or "Environment: ipython" in chat_template:
        return LLAMA3
    return None


@dataclass(frozen=True)
class ToolCall:
    """One call: the tool's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallDelta:
    """What became certain about one call. The first delta of a call has its name and no arguments."""

    index: int
    name: str | None
    arguments: str = ""


@dataclass(frozen=True)
class Parsed:
    """What a piece of text added: text for the user, and parts of calls."""

    content: str
    deltas: tuple[CallDelta, ...]


class ToolCallParser:
    """Splits a model's text into content and calls.

    The content, the calls and the order of both are the same however the text is cut into pushes. White space beside
    a call is left out.

    Attributes:
        calls: the calls so far, the last one perhaps unfinished.
    """

    def __init__(self, dialect: Dialect) -> None:
        """Begin a text in this dialect."""
        self.calls: list[ToolCall] = []
        self._dialect = dialect
        self._read: Callable[[str], None] = self._text
        self._reader = _CallReader()
        self._content, self._deltas = "", list[CallDelta]()
        self._blank = True  # no content but white space so far
        self._space = ""  # white space that is content if content follows
        self._held = ""  # the beginning of a marker, or what is content if no call comes of it
        self._listed = False  # inside a list of calls
        self._open = False  # the last call of `calls` is being read

    def push(self, text: str) -> Parsed:
        """Take more text in."""
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> Parsed:
        """The text has ended: whatever was held back is content; a call that was cut short stays as it is."""
        if self._read not in (self._close, self._skip) and not self._open:
            self._say(self._held)
        if not self.calls:
            self._content += self._space
        self._held = self._space = ""
        return self._take()

    def _take(self) -> Parsed:
        parsed = Parsed(self._content, tuple(self._deltas))
        self._content, self._deltas = "", []
        return parsed

    def _say(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._space += char
            else:
                self._content += self._space + char
                self._space, self._blank = "", False

    # Each of these takes one character; `_read` is the one that takes the next.

    def _text(self, char: str) -> None:
        self._held += char
        while self._held and not self._dialect.opens.startswith(self._held):
            if self._held == "{" and self._dialect.bare and self._blank:
                self._begin_object()
                return
            first, self._held = self._held[0], self._held[1:]
            self._say(first)
        if self._held == self._dialect.opens:
            self._read = self._opened

    def _opened(self, char: str) -> None:
        if char.isspace():
            self._held += char
        elif char == "{" or not self._dialect.array:
            self._held += char
            self._begin_object()
        elif char == "[":
            self._held += char
            self._listed, self._read = True, self._between
        else:
            self._read = self._name
            self._name(char)

    def _begin_object(self) -> None:
        """An object starts with the last character of `_held`, which is content if no call comes of it."""
        self._reader, self._read = _CallReader(), self._object
        self._advance(self._held[-1])

    def _object(self, char: str) -> None:
        self._held += char
        self._advance(char)

    def _name(self, char: str) -> None:
        """A name, then its arguments, as Mistral's newer models write them."""
        self._held += char
        if char == "{":
            name = self._held.removeprefix(self._dialect.opens)[:-1].split("[")[0].strip()
            self._reader, self._read = _CallReader(), self._arguments
            for known in f'{{"name": {json.dumps(name)}, "arguments": ' if name else "?":
                self._reader.push(known)
            self._advance(char)
        elif char == "\n" or len(self._held) > _LONGEST_NAME:
            self._give_up()

    def _arguments(self, char: str) -> None:
        self._held += char
        self._advance(char)
        if self._reader.value_ended and self._open:
            self._advance("}")

    def _advance(self, char: str) -> None:
        reader = self._reader
        reader.push(char)
        if not self._open and reader.name is not None and (reader.arguments or not self._dialect.bare or reader.done):
            if reader.done and self._dialect.bare and not reader.arguments:
                reader.failed = True  # any object with a "name"
            elif not reader.failed:
                self.calls.append(ToolCall(reader.name, ""))
                self._deltas.append(CallDelta(len(self.calls) - 1, reader.name))
                self._open, self._space, self._held = True, "", ""
        if self._open:
            self._pass_on(reader.arguments or ("{}" if reader.done else ""))
        if reader.failed:
            self._give_up()
        elif reader.done:
            self._open, self._held = False, ""
            self._read = self._close if self._dialect.closes else self._between

    def _pass_on(self, arguments: str) -> None:
        index, call = len(self.calls) - 1, self.calls[-1]
        new = arguments[len(call.arguments) :]
        if not new:
            return
        self.calls[-1] = replace(call, arguments=arguments)
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.index == index and last.name is None:
            self._deltas[-1] = replace(last, arguments=last.arguments + new)
        else:
            self._deltas.append(CallDelta(index, None, new))

    def _give_up(self) -> None:
        """No call after all; or one that broke off, whose rest is no text for the user."""
        if self._open:
            self._open, self._read = False, self._skip
        else:
            self._say(self._held)
            self._read = self._text
        self._held, self._listed = "", False

    def _close(self, char: str) -> None:
        if not self._held and char.isspace():
            return
        self._held += char
        if self._held == self._dialect.closes:
            self._held, self._read = "", self._text
        elif not self._dialect.closes.startswith(self._held):
            self._again()

    def _skip(self, char: str) -> None:
        """Drop everything up to the end of the broken call."""
        self._held = (self._held + char)[-len(self._dialect.closes) :]
        if self._dialect.closes and self._held == self._dialect.closes:
            self._held, self._read = "", self._text

    def _between(self, char: str) -> None:
        """After a call, or after the '[' that begins a list of them and is held until the first has come."""
        first = bool(self._held)
        separators = "" if first else "," if self._listed else ",;" if self._dialect.bare else ""
        if first or not (char.isspace() or char in separators):
            self._held += char
        if char.isspace() or char in separators:
            return
        if char == "{" and (self._listed or self._dialect.bare):
            self._begin_object()
        elif first:
            self._give_up()
        elif char == "]" and self._listed:
            self._listed, self._held, self._read = False, "", self._text
        else:
            self._listed = False
            self._again()

    def _again(self) -> None:
        """What is held is text like any other."""
        held, self._held, self._read = self._held, "", self._text
        for char in held:
            self._read(char)


class _CallReader:
    """Reads one JSON object and knows its name and its arguments as soon as they can be known.

    Attributes:
        name: once it is read.
        arguments: the text of the arguments so far, without white space around it.
        done: the object is complete.
        failed: this is no JSON object, or none with a name.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.arguments = ""
        self.done = self.failed = False
        self._step: Callable[[str], None] = self._begin
        self._key, self._raw, self._space = "", "", ""
        self._depth, self._quoted, self._escaped = 0, False, False
        self._has_arguments = False

    def push(self, char: str) -> None:
        """Take one character; after `done` or `failed` there must be none."""
        self._step(char)

    @property
    def value_ended(self) -> bool:
        """Whether the value being read is an object or a list that is complete."""
        return self._step == self._value and self._depth == 0 and self._raw[-1:] in ("}", "]")

    def _begin(self, char: str) -> None:
        if char == "{":
            self._step = self._before_key
        elif not char.isspace():
            self.failed = True

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._raw, self._quoted, self._step = char, True, self._in_key
        elif char == "}":
            self._end()
        elif not char.isspace():
            self.failed = True

    def _in_key(self, char: str) -> None:
        self._raw += char
        self._follow_quotes(char)
        if not self._quoted:
            key = self._string(self._raw)
            self._key, self._step = key or "", self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._raw, self._space, self._depth, self._step = "", "", 0, self._value
        elif not char.isspace():
            self.failed = True

    def _value(self, char: str) -> None:
        if not self._quoted and self._depth == 0 and char in ",}":
            self._finish_value()
            self._step = self._before_key
            if char == "}" and not self.failed:
                self._end()
            return
        if not self._quoted and char.isspace():
            self._space += char
            return
        self._raw += (self._space if self._raw else "") + char
        self._space = ""
        if not self._quoted:
            self._depth += (char in "{[") - (char in "}]")
            self.failed = self._depth < 0
        self._follow_quotes(char)
        if self._is_arguments() and self._raw[0] == "{":
            self.arguments = self._raw

    def _is_arguments(self) -> bool:
        """Whether the value is the call's arguments: of several such keys the first one counts."""
        return self._key in _ARGUMENTS and not self._has_arguments

    def _finish_value(self) -> None:
        if not self._raw:
            self.failed = True
        elif self._key == "name" and self.name is None:
            self.name = self._string(self._raw)
        elif self._is_arguments():
            self._has_arguments = True
            if self._raw[0] == '"':
                self.arguments = self._string(self._raw) or ""  # JSON text as a JSON string

    def _string(self, raw: str) -> str | None:
        try:
            value = json.loads(raw, strict=False)
        except ValueError:
            value = None
        self.failed |= not isinstance(value, str)
        return value if isinstance(value, str) else None

    def _follow_quotes(self, char: str) -> None:
        """Keep `_quoted` right over one more character."""
        if self._escaped:
            self._escaped = False
        elif char == "\\" and self._quoted:
            self._escaped = True
        elif char == '"':
            self._quoted = not self._quoted

    def _end(self) -> None:
        self.done, self.failed = True, self.failed or self.name is None


def parse(dialect: Dialect, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole answer as content and calls."""
    parser = ToolCallParser(dialect)
    content = parser.push(text).content + parser.finish().content
    return content, tuple(parser.calls)
