"""The grammar of tool calls: what `tool_choice` "required", or a named tool, lets a model write.

The calls are written as the model's dialect has them, with each tool's own JSON schema for its arguments, so whatever
comes out is read back by `tool_calls`. A Lark grammar as llguidance reads it, with schemas inline (`%json`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .tool_calls import Dialect


@dataclass(frozen=True)
class Tool:
    """A tool that a model may call.

    Attributes:
        name: what calls name.
        parameters: JSON schema of the arguments.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})


def tool_grammar(
    dialect: Dialect,
    tools: Sequence[Tool],
    *,
    named: str | None = None,
    parallel: bool = True,
    special_id: Callable[[str], int | None] = lambda text: None,
) -> str:
    """The grammar of at least one call.

    Args:
        dialect: how the model writes calls.
        tools: what may be called.
        named: the one tool that must be called; None for any of them.
        parallel: whether several calls may follow one another. Llama 3 writes one.
        special_id: the id of a special token by its text, None for what is ordinary text.

    Returns:
        A Lark grammar, for `Grammars.lark`.

    Raises:
        UsageError: no tools, two of one name, or no tool of the name asked for.
    """
    names = [tool.name for tool in tools]
    if not tools or len(set(names)) < len(names):
        raise UsageError(f"the tools are named {names}. Expected at least one tool, and every name once.")
    if named is not None and named not in names:
        raise UsageError(f"tool_choice names {named!r}. Expected one of {', '.join(names)}.")
    chosen = [tool for tool in tools if named in (None, tool.name)]
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(chosen)))}"]
    for i, tool in enumerate(chosen):
        head, tail = _around_arguments(dialect, tool.name, special_id)
        rules.append(f"call_{i}: {head} %json {json.dumps(tool.parameters)} {tail}")
    return "\n".join([_start(dialect, parallel, special_id), *rules]) + "\n"


def _start(dialect: Dialect, parallel: bool, special_id: Callable[[str], int | None]) -> str:
    opens = _literal(dialect.opens, special_id)
    if dialect.closes:
        return f'start: call ("\\n" call){{0,{_MOST_CALLS}}}' if parallel else "start: call"
    if dialect.bare:
        return "start: call"
    if dialect.arguments_marker:
        return f"start: call{{1,{_MOST_CALLS}}}" if parallel else "start: call"
    more = f' (", " call){{0,{_MOST_CALLS}}}' if parallel else ""
    return f'start: {opens} "[" call{more} "]"'


_MOST_CALLS = 64
"""Calls in one answer: an end for models that would go on."""


def _around_arguments(dialect: Dialect, name: str, special_id: Callable[[str], int | None]) -> tuple[str, str]:
    """What stands before and after the arguments of a call, as parts of a Lark rule."""
    key = "parameters" if dialect.bare else "arguments"
    head, tail = json.dumps(f'{{"name": {json.dumps(name)}, "{key}": '), '"}"'
    if dialect.closes:
        opens, closes = _literal(dialect.opens, special_id), _literal(dialect.closes, special_id)
        return f'{opens} "\\n" {head}', f'{tail} "\\n" {closes}'
    if dialect.arguments_marker:
        marker = _literal(dialect.arguments_marker, special_id)
        return f"{_literal(dialect.opens, special_id)} {json.dumps(name)} {marker}", ""
    return head, tail


def _literal(text: str, special_id: Callable[[str], int | None]) -> str:
    """A text in a Lark rule: a string, or the special token that stands for it."""
    token = special_id(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
