"""Frozen dataclasses to and from JSON, strictly: an unknown, missing or ill-typed field is an error that is named."""

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import UsageError

R = TypeVar("R")


def to_json(record: object) -> Any:
    """Plain JSON values of a dataclass, field by field.

    Floats are written with 6 significant digits, far finer than any measured figure is known; NaN becomes null.
    """
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(value) for value in record]
    if isinstance(record, float):
        return float(f"{record:.6g}") if math.isfinite(record) else None
    return record


def from_json(kind: type[R], raw: object, origin: str) -> R:
    """Build the dataclass `kind` from parsed JSON; `origin` names the file and line in errors.

    Raises:
        UsageError: not an object, an unknown or missing field, or a value of the wrong type or range.
    """
    if not isinstance(raw, dict):
        raise UsageError(f"{origin}: found {_shown(raw)}. Expected a JSON object, {{...}}, of a {kind.__name__}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise UsageError(
            f"{origin}: unknown field {unknown[0]!r}. A {kind.__name__} has {', '.join(fields)}. "
            "Was it written by another version of bitdraft, or edited?"
        )
    missing = sorted(name for name in set(fields) - set(raw) if fields[name].default is dataclasses.MISSING)
    if missing:
        raise UsageError(f"{origin}: the field {missing[0]!r} is missing. Is the file whole?")
    hints = get_type_hints(kind)
    values = {name: _value(hints[name], value, f"{origin}: {name}") for name, value in raw.items()}
    try:
        return kind(**values)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def parse(text: str | bytes, origin: str) -> object:
    """Parse one JSON text. NaN and infinity are refused: they are not JSON, and no figure of ours.

    Raises:
        UsageError: the text is not JSON.
    """

    def refuse(constant: str) -> object:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise UsageError(
            f"{origin}: this is not JSON ({error}). It starts with {text[:60]!r}. Restore the file or measure again."
        ) from None


def _value(hint: Any, raw: object, origin: str) -> Any:
    """One field's value, checked against its annotation."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        if raw is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), raw, origin)
    if kind is Literal:
        if raw not in arguments:
            raise UsageError(f"{origin} is {_shown(raw)}. Expected one of {', '.join(map(repr, arguments))}.")
        return raw
    if kind is tuple and isinstance(raw, list):
        if arguments[0] is float and all(type(item) is float for item in raw):
            return tuple(raw)  # long lists of figures: most of a trace
        return tuple(_value(arguments[0], item, origin) for item in raw)
    if kind is not None and issubclass(kind, Mapping) and isinstance(raw, dict):
        return {key: _value(arguments[1], item, f"{origin}.{key}") for key, item in raw.items()}
    if kind is None and dataclasses.is_dataclass(hint):
        return from_json(hint, raw, origin)  # type: ignore[arg-type]
    if hint is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw)
    if kind is None and type(raw) is hint:
        return raw
    raise UsageError(f"{origin} is {_shown(raw)}. Expected {_EXPECTED.get(kind or hint, 'another type')}.")


_EXPECTED = {float: "a number", int: "a whole number", str: "a string", bool: "true or false", tuple: "a list"}


def _shown(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
