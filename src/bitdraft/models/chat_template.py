"""A model's own chat template: from messages to the text that the model was trained on.

Templates come with model files, so they are foreign programs: they run in jinja2's sandbox, over values that they
cannot change.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ModelFileError, UsageError

Clock = Callable[[], datetime]


class ChatTemplate:
    """One chat template, compiled when it is first used.

    Attributes:
        source: the template as the file has it.
    """

    def __init__(self, source: str, *, origin: str, clock: Clock) -> None:
        """Keep a template.

        Args:
            source: the template.
            origin: the file it is from, for errors.
            clock: what `strftime_now` reads.
        """
        self.source = source
        self._origin, self._clock = origin, clock

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The messages as one text.

        Raises:
            ModelFileError: the template is no valid jinja2.
            UsageError: the template refuses these messages, or cannot work with them.
        """
        template = self._compiled
        try:
            return template.render(messages=list(messages), **variables)
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, LookupError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        roles = ", ".join(str(m.get("role")) for m in messages if isinstance(m, Mapping)) or "none"
        raise UsageError(
            f"the chat template of {self._origin} refuses these messages (roles: {roles}): {reason}. Give messages "
            "with the roles and the kind of content that this model's template knows."
        )

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._clock().strftime(form)
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(
                f"{self._origin}: its chat template is no valid jinja2 (line {error.lineno}: {error.message}). Fetch "
                "the file again, or give raw prompts."
            ) from None


def _raise_exception(message: str) -> NoReturn:
    """How a template says that it cannot make a text of these messages."""
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any) -> str:
    """JSON as models were trained on it. Jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words for training; here it is its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
