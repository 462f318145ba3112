"""Tool calls and reasoning are read from a text the same however it is cut (users-pain U82, U61)."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.errors import UsageError
from bitdraft.serve.reasoning import ReasoningMarkers, ReasoningSplitter, count_reasoning, reasoning_of
from bitdraft.serve.tool_calls import HERMES, LLAMA3, MISTRAL, CallDelta, Dialect, ToolCall, ToolCallParser, dialect_of
from bitdraft.serve.tool_grammar import Tool, tool_grammar

CALLS = [
    [("song.play", {"artist": "Björk", "minutes": 20}), ("song.play", {"artist": "Maroon 5", "minutes": 15})],
    [("force", {"field": 5, "area": 2.5, "times": [4, 10]})],
    [
        (
            "search",
            {"query": 'braces } ] and "quotes" \\ </tool_call> <tool_call> [TOOL_CALLS]', "deep": {"a": {"b": []}}},
        )
    ],
    [("noop", {}), ("clock", {"zone": "Asia/東京", "exact": None})],
    [("book", {"guests": [{"name": "Ann", "arguments": {}}, {"name": "Bo"}], "note": "line\nbreak\t{"})] * 3,
]
"""Parallel calls of several tools, with everything in them that looks like the end of a call."""


def body(dialect: Dialect, name: str, arguments: dict[str, object]) -> str:
    key = "parameters" if dialect.bare else "arguments"
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def written(dialect: Dialect, calls: list[tuple[str, dict[str, object]]]) -> str:
    """The calls as a model of this dialect writes them."""
    bodies = [body(dialect, *call) for call in calls]
    if dialect.closes:
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in bodies)
    if dialect.bare:
        return "; ".join(bodies)
    if dialect.arguments_marker:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    return f"[TOOL_CALLS][{', '.join(bodies)}]"


MISTRAL_NEW = replace(MISTRAL, arguments_marker="[ARGS]")
DIALECTS = {"hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "mistral, new": MISTRAL_NEW}


def pieces(text: str, size: int) -> Iterator[str]:
    return (text[at : at + size] for at in range(0, len(text), size))


def read(dialect: Dialect, parts: Iterator[str] | list[str]) -> tuple[str, list[ToolCall], list[CallDelta]]:
    """Content, calls and deltas of a stream; the deltas of a call, joined, are the call."""
    parser, content, deltas = ToolCallParser(dialect), "", list[CallDelta]()
    for parsed in [*map(parser.push, parts), parser.finish()]:
        content += parsed.content
        deltas += parsed.deltas
    for index, call in enumerate(parser.calls):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.name, first.arguments) == (call.name, "")
        assert [delta.name for delta in rest] == [None] * len(rest)
        assert "".join(delta.arguments for delta in rest) == call.arguments
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    return content, parser.calls, deltas


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls[0][0])
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_calls_are_the_same_however_the_text_is_cut(dialect: Dialect, calls: list, size: int) -> None:
    """Users-pain U82."""
    content, found, _ = read(dialect, pieces(written(dialect, calls), size))
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_arguments_are_passed_on_before_they_are_complete(dialect: Dialect) -> None:
    text = written(dialect, [("search", {"query": "a long text"})])
    first, second = ToolCallParser(dialect).push(text[: text.index(" text")]).deltas
    assert first == CallDelta(0, "search")
    assert second == CallDelta(0, None, '{"query": "a long')


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        (HERMES, "I look it up.\n\n<tool_call>\n{}\n</tool_call>", "I look it up.", 1),
        (HERMES, "a <tool_call>{}</tool_call> b <tool_call>{}</tool_call>\n", "a b", 2),
        (HERMES, "2 < 3 and <tool_box> stay \n", "2 < 3 and <tool_box> stay \n", 0),
        (HERMES, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", 0),
        (HERMES, '<tool_call>\n{"name": 3}', '<tool_call>\n{"name": 3}', 0),
        (HERMES, "<tool_call>{} and more", "and more", 1),
        (HERMES, "the end <tool_ca", "the end <tool_ca", 0),
        (LLAMA3, "<|python_tag|>{}", "", 1),
        (LLAMA3, " \n{}", "", 1),
        (LLAMA3, 'Say {"name": "Ann"}', 'Say {"name": "Ann"}', 0),
        (LLAMA3, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', 0),
        (LLAMA3, ' {"no": [1, 2]} ', ' {"no": [1, 2]} ', 0),
        (MISTRAL, "Yes. [TOOL_CALLS] [{}, {}]", "Yes.", 2),
        (MISTRAL, "[TOOL_CALLS]\n", "[TOOL_CALLS]\n", 0),
        (MISTRAL_NEW, "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{args}", "", 1),
        (MISTRAL_NEW, "[TOOL_CALLS]f{args}[TOOL_CALLS]f{args}", "", 2),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_text_beside_calls_and_what_only_looks_like_one(
    dialect: Dialect, text: str, content: str, calls: int, size: int
) -> None:
    text = text.replace("{}", body(dialect, "f", {"x": 1})).replace("{args}", '{"x": 1}')
    found = read(dialect, pieces(text, size))
    assert found[:2] == (content, [ToolCall("f", '{"x": 1}')] * calls)


@pytest.mark.parametrize(
    ("inside", "arguments"),
    [
        ('"arguments": {"a": 1}, "name": "f"', '{"a": 1}'),
        ('"id": 7, "name": "f", "extra": {"name": "g"}, "arguments": {"a": 1}', '{"a": 1}'),
        ('"name": "f", "arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"name": "f", "arguments" : \n{ "a" : 1 } \n', '{ "a" : 1 }'),
        ('"name": "f"', "{}"),
        ('"name": "f", "arguments": null', "{}"),
        ('"name": "f", "arguments": {"a": 1}, "arguments": {"b": 2}', '{"a": 1}'),
    ],
)
def test_objects_of_other_shapes(inside: str, arguments: str) -> None:
    for size in (1, 4, 10**6):
        assert read(HERMES, pieces(f"<tool_call>{{{inside}}}</tool_call>", size))[:2] == (
            "",
            [ToolCall("f", arguments)],
        )


def test_a_call_that_is_cut_short_keeps_what_it_has() -> None:
    assert read(HERMES, ['<tool_call>{"name": "f", "arguments": {"a": "long'])[:2] == (
        "",
        [ToolCall("f", '{"a": "long')],
    )
    assert read(HERMES, ['x <tool_call>{"name": "f'])[:2] == ('x <tool_call>{"name": "f', [])


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    '{"name": "f", ',
    '"arguments": ',
]
FRAGMENTS += ['"parameters": {"a": [1, "}"]}', "{", "}", "[", "]", '"', "\\", ",", ";", " ", "\n", "f", "<", "x y", "é"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(DIALECTS.values())), st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_any_text_is_read_the_same_however_it_is_cut(
    dialect: Dialect, fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    whole = read(dialect, [text])
    assert read(dialect, list(text))[:2] == whole[:2]
    cut = data.draw(st.integers(0, len(text)))
    assert read(dialect, [text[:cut], text[cut:]])[:2] == whole[:2]
    if not whole[1] and not any(marker in text for marker in dialect.markers):
        assert whole[0] == text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %}<tool_call>\n{{ tools }}", HERMES),
        ("{% if tools %}<tool_call>\n<function=example>", None),
        ("{% if tools %}[TOOL_CALLS]", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_NEW),
        ("{% if tools %}Environment: ipython", LLAMA3),
        ("{% if tools %}something else", None),
    ],
)
def test_the_chat_template_tells_the_dialect(template: str | None, expected: Dialect | None) -> None:
    assert dialect_of(template) == expected


def test_impossible_choices_are_refused() -> None:
    with pytest.raises(UsageError, match="every name once"):
        tool_grammar(HERMES, [Tool("f"), Tool("f")])
    with pytest.raises(UsageError, match=r"names 'g'\. Expected one of f"):
        tool_grammar(HERMES, [Tool("f")], named="g")


THINK = ReasoningMarkers()


def split(parts: Iterator[str] | list[str], prompt: str = "") -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, prompt)
    both = [*map(splitter.push, parts), splitter.finish()]
    return "".join(r for r, _ in both), "".join(c for _, c in both)


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("", "<think>\nso </th be it\n</think>\n\nYes </think> no", "so </th be it", "Yes </think> no"),
        ("", "No <think>reasoning</think>", "", "No <think>reasoning</think>"),
        ("", " \n<think></think>Yes", "", "Yes"),
        ("", "<think>cut short </thi", "cut short </thi", ""),
        ("", "<thi", "", "<thi"),
        ("<think>\n", "so\n</think>\nYes", "so", "Yes"),
        ("<think>\n\n</think>\n\n", " Yes", "", "Yes"),
        ("<think>a</think> b", "<think>c</think>d", "c", "d"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10**6])
def test_reasoning_is_split_off(prompt: str, text: str, reasoning: str, content: str, size: int) -> None:
    assert split(pieces(text, size), prompt) == (reasoning, content)


def test_which_templates_reason() -> None:
    assert reasoning_of("...</think>...") == THINK
    assert reasoning_of("...") is None
    assert reasoning_of(None) is None


class Letters:
    """A detokeniser of a vocabulary of short texts."""

    texts = ("<think>", "</think>", "a", " b", "\n", "<", "think", ">")

    def push(self, token: int) -> str:
        return self.texts[token]

    def flush(self) -> str:
        return ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=12))
def test_reasoning_tokens_are_counted_exactly(tokens: list[int]) -> None:
    """Users-pain U61: never more than the output has, and all of them up to the one that ends the reasoning."""
    count = count_reasoning(tokens, Letters(), ReasoningSplitter(THINK))
    assert count <= len(tokens)
    texts = [Letters.texts[token] for token in tokens]
    if texts[:1] == ["<think>"]:
        assert count == (texts.index("</think>") + 1 if "</think>" in texts else len(texts))
    if not "".join(texts).lstrip().startswith("<think>"):
        assert count == 0
