"""Which grammar a request asks for, whichever of the fields says so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..decoding.constraint import Constraint
from .faults import ApiError
from .schemas import Sampling

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Grammar:
    """A grammar as it was asked for.

    Attributes:
        kind: what `value` is: a JSON schema (an object, or its text), nothing (any JSON object), a regular expression,
            a list of texts, or a Lark grammar.
        value: see `kind`.
        field: the field that asked.
    """

    kind: Kind
    value: Any
    field: str


Compile = Callable[[Grammar], Constraint]
"""Makes a constraint, or raises UsageError with the reason why not."""


def wanted_grammar(body: Sampling) -> Grammar | None:
    """The one grammar that a request asks for; None if it takes any text.

    Raises:
        ApiError: it asks for several, or for a schema without giving one.
    """
    guided: tuple[tuple[str, Kind, Any], ...] = (
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
    )
    found = [Grammar(kind, value, field) for field, kind, value in guided if value is not None]
    found += _structured(body) + _response_format(body)
    if len(found) > 1:
        names = " and ".join(grammar.field for grammar in found)
        raise ApiError(400, f"{names} each ask for a grammar. Expected one.", param=found[1].field)
    return found[0] if found else None


def _structured(body: Sampling) -> list[Grammar]:
    asked = body.structured_outputs
    if asked is None:
        return []
    fields: tuple[tuple[str, Kind, Any], ...] = (
        ("json", "json_schema", asked.json_),
        ("regex", "regex", asked.regex),
        ("choice", "choice", asked.choice),
        ("grammar", "grammar", asked.grammar),
        ("json_object", "json_object", asked.json_object or None),
    )
    found = [Grammar(kind, value, f"structured_outputs.{field}") for field, kind, value in fields if value is not None]
    if not found:
        raise ApiError(
            400,
            "structured_outputs asks for nothing. Expected one of json, regex, choice, grammar, json_object.",
            param="structured_outputs",
        )
    return found


def _response_format(body: Sampling) -> list[Grammar]:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar("json_object", None, "response_format")]
    if asked.json_schema is None or asked.json_schema.schema_ is None:
        raise ApiError(
            400,
            "response_format of type json_schema has no schema. Expected json_schema.schema.",
            param="response_format.json_schema",
        )
    return [Grammar("json_schema", asked.json_schema.schema_, "response_format.json_schema.schema")]


def no_grammar(grammar: Grammar) -> Constraint:
    """Refuse every grammar."""
    raise ApiError(400, f"{grammar.field}: this server has no structured output.", param=grammar.field)
