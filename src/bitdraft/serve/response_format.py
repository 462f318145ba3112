"""Which grammar a request asks for, whichever of the fields says so."""

import threading
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..decoding.constraint import Constraint
from ..errors import UsageError
from ..models.tokenizer import Tokenizer
from .faults import ApiError
from .schemas import Sampling
from .structured import Grammars

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


class Compile(Protocol):
    """Makes constraints of grammars."""

    def __call__(self, grammar: Grammar, after: str | None = None) -> Constraint:
        """The constraint of a grammar; one that begins after the text `after`, if that is given.

        Raises:
            UsageError: why not.
        """
        ...


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


class Compiler:
    """Compiles grammars for one vocabulary, which is read when the first one comes. May be used from many threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Keep the vocabulary for later; `vocab_size` is the width of the target's logits."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    def __call__(self, grammar: Grammar, after: str | None = None) -> Constraint:
        """See `Compile`."""
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer, self._vocab_size)
            grammars = self._grammars
        constraint = self._compiled(grammars, grammar)
        return constraint if after is None else grammars.starts_after(constraint, after)

    def _compiled(self, grammars: Grammars, grammar: Grammar) -> Constraint:
        value = grammar.value
        try:
            match grammar.kind:
                case "json_object":
                    return grammars.json_object()
                case "json_schema":
                    return grammars.json_schema(value)
                case "regex":
                    return grammars.regex(value)
                case "choice":
                    return grammars.choice(value)
                case "grammar":
                    return grammars.lark(value)
        except UsageError as error:
            raise ApiError(400, str(error), param=grammar.field) from None
