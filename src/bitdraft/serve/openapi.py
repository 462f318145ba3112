"""The description of the HTTP interface that `/openapi.json` gives, made from the very classes that check requests."""

from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .. import __version__
from .responses_request import ResponsesRequest
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, DraftRequest, TokenizeRequest

_REFS = "#/components/schemas/{model}"
_NUMBER = {"type": ["number", "null"]}
_STRING = {"type": ["string", "null"]}
_ANSWERED = (408, 429, 500, 503)  # errors of what is answered in text, at once or as a stream
_POSTS: dict[str, tuple[type[BaseModel], str, str, tuple[int, ...]]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts.", "Completion", _ANSWERED),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation.", "ChatCompletion", _ANSWERED),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, as items.", "Response", _ANSWERED),
    "/tokenize": (TokenizeRequest, "Ids of a text or a conversation.", "Tokens", ()),
    "/detokenize": (DetokenizeRequest, "Text of ids.", "DetokenizedText", ()),
    "/admin/draft": (DraftRequest, "Let another model draft from now on.", "Draft", (403, 503)),
}
_GETS = {
    "/v1/models": ("The served model under each of its names.", "ModelList"),
    "/tokenizer_info": ("What clients ask of a tokenizer.", "TokenizerInfo"),
    "/version": ("The version of bitdraft.", "Version"),
    "/info": ("The effective configuration.", "Info"),
    "/openapi.json": ("This description.", "OpenAPI"),
}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "properties": properties}


def _responses() -> dict[str, Any]:
    """Schemas of what is answered."""
    count = {"type": "integer", "minimum": 0}
    usage = _object(
        "prompt_tokens completion_tokens total_tokens",
        prompt_tokens=count,
        completion_tokens=count,
        total_tokens=count,
        prompt_tokens_details={"type": "object"},
        completion_tokens_details={"type": "object"},
    )
    finish = {"enum": ["stop", "length", "tool_calls", None]}
    text_choice = _object(
        "index text finish_reason",
        index=count,
        text={"type": "string"},
        finish_reason=finish,
        logprobs={"type": ["object", "null"]},
    )
    message = _object("role content", role={"const": "assistant"}, content=_STRING)
    chat_choice = _object("index message finish_reason", index=count, message=message, finish_reason=finish)

    def answer(choice: dict[str, Any], kind: str) -> dict[str, Any]:
        return _object(
            "id object created model choices usage",
            id={"type": "string"},
            object={"const": kind},
            created=count,
            model={"type": "string"},
            choices={"type": "array", "items": choice},
            usage=usage,
            metrics={"type": "object"},
        )

    error = _object("message type", message={"type": "string"}, type={"type": "string"}, param=_STRING, code=_STRING)
    ids = {"type": "array", "items": count}
    return {
        "Error": _object("error", error=error),
        "Completion": answer(text_choice, "text_completion"),
        "ChatCompletion": answer(chat_choice, "chat.completion"),
        "Response": _object(
            "id object status model output usage",
            id={"type": "string"},
            object={"const": "response"},
            status={"enum": ["completed", "incomplete"]},
            model={"type": "string"},
            output={"type": "array", "items": {"type": "object", "required": ["id", "type", "status"]}},
            usage={"type": "object"},
        ),
        "Tokens": _object("tokens count max_model_len", tokens=ids, count=count, max_model_len=count),
        "DetokenizedText": _object("prompt", prompt={"type": "string"}),
        "Draft": _object("draft", draft={"type": ["object", "null"]}),
        "ModelList": _object("object data", object={"const": "list"}, data={"type": "array"}),
        "TokenizerInfo": _object("eos_token", eos_token=_STRING, bos_token=_STRING, vocab_size=count),
        "Version": _object("version", version={"type": "string"}),
        "Info": _object("version models target draft", models={"type": "array"}, target={"type": "object"}),
        "OpenAPI": _object("openapi paths"),
        "Health": _object("status", status={"enum": ["ok", "stopping"]}),
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _errors(*codes: int) -> dict[str, Any]:
    return {str(code): {"description": "An error.", "content": _json("Error")} for code in codes}


@cache
def description() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    kinds = [(model, "validation") for model, *_ in _POSTS.values()]
    _, requests = models_json_schema(kinds, ref_template=_REFS)  # type: ignore[arg-type]
    paths: dict[str, Any] = {}
    for path, (model, what, answer, more) in _POSTS.items():
        content = _json(answer) | ({"text/event-stream": {}} if more is _ANSWERED else {})
        codes = (400, 401, 404, 413, 415, *more)
        paths[path] = {
            "post": {
                "summary": what,
                "requestBody": {"required": True, "content": _json(model.__name__)},
                "responses": {"200": {"description": "Done.", "content": content}, **_errors(*codes)},
            }
        }
    for path, (what, answer) in _GETS.items():
        responses = {"200": {"description": "Done.", "content": _json(answer)}, **_errors(401)}
        paths[path] = {"get": {"summary": what, "responses": responses}}
    text = {"text/plain": {"schema": {"type": "string"}}}
    paths["/metrics"] = {
        "get": {
            "summary": "Figures for Prometheus.",
            "responses": {"200": {"description": "Done.", "content": text}, **_errors(401)},
        }
    }
    health = {code: {"description": "State.", "content": _json("Health")} for code in ("200", "503")}
    paths["/health"] = {"get": {"summary": "Whether requests are taken.", "responses": health}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "bitdraft", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": requests["$defs"] | _responses(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
