"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.responses import JSONResponse

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A request that gets an error for an answer.

    Attributes:
        status: of the response.
        message: what was given, what was expected, what to do.
        param: the field at fault, such as 'messages[0].role'; None for no single one.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """The error as an object."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as a response."""
        return JSONResponse(self.body(), self.status, dict(self.headers or {}))


def read_model(kind: type[Model], body: bytes, *, lenient: bool) -> Model:
    """A request body as an object, checked field by field.

    Args:
        kind: what it has to be.
        body: JSON.
        lenient: drop fields that are not known in place of refusing them.

    Raises:
        ApiError: it is no JSON, or a field is unknown, missing or not of its type; the first one is named.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        unknown = [fault["loc"] for fault in faults if fault["type"] == "extra_forbidden"]
        if lenient and unknown:
            return read_model(kind, json.dumps(_without(json.loads(body), unknown)).encode(), lenient=False)
        raise _explained(faults[0]) from None


def _explained(fault: Mapping[str, Any]) -> ApiError:
    place = ""
    for part in fault["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
    kind, message = fault["type"], fault["msg"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON ({message}). Expected a JSON object.", code="invalid_json")
    if kind == "extra_forbidden":
        return ApiError(
            400,
            f"unknown field {place!r}. Leave it out, or start the server with --lenient to have such fields ignored.",
            param=place,
            code="unknown_field",
        )
    if kind == "missing":
        return ApiError(400, f"the field {place!r} is missing.", param=place, code="missing_field")
    return ApiError(400, f"{place or 'the body'}: {message}.", param=place or None, code="invalid_value")


def _without(value: Any, places: list[tuple[int | str, ...]]) -> Any:
    """A JSON value without what lies at some places; a place may lead through names that are of types, not fields."""
    for place in places:
        inner = value
        for part in place[:-1]:
            known = part in inner if isinstance(inner, dict) else isinstance(inner, list) and isinstance(part, int)
            inner = inner[part] if known else inner
        if isinstance(inner, dict):
            inner.pop(place[-1], None)
    return value
