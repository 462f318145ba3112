"""The HTTP interface: which path does what."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .. import __version__
from ..errors import BitdraftError, UsageError
from .chat import chat
from .completions import completion
from .faults import ApiError, read_model
from .guard import NOTES, Attended, Keyed, read_body
from .metrics import Metrics
from .openapi import description
from .page import page_routes
from .prepare import Groups, Model, chat_prompt, check_ids
from .respond import Call, Choices, EventStream, Form, Shape, unless_gone
from .response_format import Compile
from .responses import ResponsesShape
from .responses_request import ResponsesRequest, as_chat, renamed
from .schemas import ChatRequest, CompletionRequest, DetokenizeRequest, DraftRequest, Sampling, TokenizeRequest
from .settings import Settings
from .tracing import Tracing
from .worker import Ticket, Worker

Redraft = Callable[[str | None, str], Awaitable[None]]
"""Lets another draft, by name and format, take the place of the present one."""

DOMAIN_HEADER = "x-bitdraft-domain"


@dataclass
class Service:
    """A model that is served, and everything that serving it takes.

    Attributes:
        worker: runs the engine.
        model: what requests have to know of it.
        settings: limits and names.
        metrics: what is counted.
        info: the effective configuration, for `/info`.
        compile_grammar: makes constraints.
        max_batch: requests that run at once.
        clock: the worker's clock, seconds.
        draining: whether new requests are refused, for the server is about to stop.
        tracing: makes traces of requests; None for none.
        redraft: lets another draft, by name and format, take the present one's place; None where clients may not.
    """

    worker: Worker
    model: Model
    settings: Settings
    metrics: Metrics
    info: Callable[[], dict[str, Any]]
    compile_grammar: Compile
    max_batch: int
    clock: Callable[[], float] = perf_counter
    created: int = 0
    draining: bool = False
    tracing: Tracing | None = None
    redraft: Redraft | None = None

    def __post_init__(self) -> None:
        self.created = int(time())

    def check_room(self, count: int) -> None:
        """Refuse `count` more requests if the queue cannot take them.

        Raises:
            ApiError: it cannot, now or ever.
        """
        if self.draining:
            raise ApiError(503, "the server is stopping.", code="stopping", headers={"retry-after": "10"})
        places = self.settings.max_queue + self.max_batch
        if count > places:
            raise ApiError(400, f"{count} answers are asked for at once. Expected {places} at most.", param="n")
        if self.worker.open + count > places:
            raise ApiError(
                429,
                f"{self.worker.open} requests are waiting or running.",
                code="overloaded",
                headers={"retry-after": "1"},
            )

    def check_name(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: `name` is not one of the served model's.
        """
        if name is not None and name not in self.settings.names:
            raise ApiError(
                404,
                f"there is no model {name!r}. Expected one of: {', '.join(self.settings.names)}.",
                param="model",
                code="model_not_found",
            )


def _domain(request: Request, body: Sampling) -> str:
    tag = body.domain or request.headers.get(DOMAIN_HEADER, "")
    if len(tag) > 64 or not all(c.isalnum() or c in "_.-" for c in tag):
        raise ApiError(
            400, f"the header {DOMAIN_HEADER} is {tag[:80]!r}. Expected up to 64 letters, digits, '_', '.' and '-'."
        )
    return tag


Prepared = tuple[Sampling, Form, Groups, Shape]
Prepare = Callable[[Service, bytes, Request, float], Prepared]


Body = TypeVar("Body", CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)


def _read(service: Service, kind: type[Body], raw: bytes) -> Body:
    """A body of some kind, for a model that is served."""
    body = read_model(kind, raw, lenient=service.settings.lenient)
    service.check_name(body.model)
    return body


def _completion(service: Service, raw: bytes, request: Request, arrived: float) -> Prepared:
    body = _read(service, CompletionRequest, raw)
    domain = _domain(request, body)
    form, groups = completion(body, service.model, service.settings.defaults, service.compile_grammar, domain, arrived)
    return body, form, groups, Choices()


def _chat(service: Service, raw: bytes, request: Request, arrived: float) -> Prepared:
    body = _read(service, ChatRequest, raw)
    domain = _domain(request, body)
    form, groups = chat(body, service.model, service.settings.defaults, service.compile_grammar, domain, arrived)
    return body, form, groups, Choices()


def _response(service: Service, raw: bytes, request: Request, arrived: float) -> Prepared:
    body = _read(service, ResponsesRequest, raw)
    as_asked = as_chat(body)
    domain = _domain(request, as_asked)
    try:
        form, groups = chat(
            as_asked, service.model, service.settings.defaults, service.compile_grammar, domain, arrived
        )
    except ApiError as error:
        raise renamed(error) from None
    return as_asked, form, groups, ResponsesShape(body)


async def generate(service: Service, request: Request, prepare: Prepare) -> Response | EventStream:
    """Answer a request for text."""
    arrived, settings = service.clock(), service.settings
    deadline = asyncio.get_running_loop().time() + settings.timeout
    service.check_room(1)
    raw = await read_body(request, settings.max_body)
    body, form, groups, shape = await asyncio.to_thread(prepare, service, raw, request, arrived)
    service.check_room(sum(map(len, groups.requests)))
    options = body.stream_options
    if options and not body.stream:
        raise ApiError(400, "stream_options needs stream to be true.", param="stream_options")
    call = Call(
        form=form,
        groups=groups,
        model=body.model or settings.names[0],
        include_stop=body.include_stop_str_in_output,
        stream=body.stream,
        include_usage=bool(options and options.include_usage),
        every_usage=bool(options and options.continuous_usage_stats),
        per_step=body.return_origins,
        max_draft=service.model.max_draft,
        deadline=deadline,
    )
    if call.stream:
        ticket = await service.worker.submit(groups.requests)
        return EventStream(
            shape.events(call, ticket), lambda: _ended(service, call, ticket, request), settings.timeout + 5
        )
    return JSONResponse(await unless_gone(request.receive, _whole(service, call, shape, request)))


async def _whole(service: Service, call: Call, shape: Shape, request: Request) -> dict[str, Any]:
    ticket = await service.worker.submit(call.groups.requests)
    try:
        return await shape.whole(call, ticket)
    finally:
        _ended(service, call, ticket, request)


def _ended(service: Service, call: Call, ticket: Ticket, request: Request) -> None:
    """Give up what still runs, and tell the log and the traces what there was."""
    service.worker.cancel(ticket)
    notes = request.scope[NOTES]
    usage = call.usage(ticket)
    notes["prompt_tokens"], notes["completion_tokens"] = usage["prompt_tokens"], usage["completion_tokens"]
    notes["finish"] = [progress.finish for progress in ticket.progress.values()]
    speculation = call.metrics(ticket)["speculative_decoding"]
    notes["drafted"] = speculation["num_draft_tokens"]
    notes["accepted"] = speculation["num_accepted_draft_tokens"]
    if service.tracing:
        service.tracing.record(call, ticket, request.headers, service.clock())


async def tokenize(service: Service, request: Request) -> Response:
    """The ids of a text or a chat."""
    body = _read(service, TokenizeRequest, await read_body(request, service.settings.max_body))
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either prompt or messages.", param="prompt")
    tokenizer = service.model.tokenizer
    if body.messages is not None:
        messages = body.messages
        prompt = await asyncio.to_thread(
            chat_prompt,
            messages,
            service.model,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        ids = list(prompt.ids)
    else:
        text, add_bos = body.prompt or "", body.add_special_tokens
        ids = await asyncio.to_thread(tokenizer.encode, text, add_bos=add_bos, parse_special=True)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.model.context_length, "tokens": ids}
    answer["token_strs"] = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    return JSONResponse(answer)


async def detokenize(service: Service, request: Request) -> Response:
    """The text of ids."""
    body = _read(service, DetokenizeRequest, await read_body(request, service.settings.max_body))
    check_ids("tokens", body.tokens, service.model)
    text = service.model.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
    return JSONResponse({"prompt": text})


def tokenizer_info(service: Service) -> dict[str, Any]:
    """What clients such as lm-evaluation-harness ask of a tokenizer."""
    tokenizer = service.model.tokenizer
    eos = tokenizer.eos_ids[0] if tokenizer.eos_ids else None
    return {
        "tokenizer_class": "bitdraft",
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": service.model.context_length,
        "bos_token": None if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "eos_token_ids": list(tokenizer.eos_ids),
        "chat_template": tokenizer.chat_template,
    }


async def admin_draft(service: Service, request: Request) -> Response:
    """Let another draft take the place of the present one; running requests go on."""
    if service.redraft is None:
        raise ApiError(403, "this server's draft cannot be changed. Start it with --admin.", code="admin_off")
    body = read_model(
        DraftRequest, await read_body(request, service.settings.max_body), lenient=service.settings.lenient
    )
    service.check_room(0)
    await service.redraft(body.path, body.format)
    return JSONResponse({"draft": service.info()["draft"]})


def models(service: Service) -> dict[str, Any]:
    """The served model under each of its names."""
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": service.created,
                "owned_by": "bitdraft",
                "root": service.settings.names[0],
                "max_model_len": service.model.context_length,
            }
            for name in service.settings.names
        ],
    }


def _routes(service: Service) -> list[Route]:
    """What is answered beside the page."""

    def fixed(make: Callable[[], Mapping[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(_: Request) -> Response:
            return JSONResponse(make())

        return endpoint

    def posted(handle: Callable[..., Awaitable[Any]], *more: Any) -> Callable[[Request], Awaitable[Any]]:
        async def endpoint(request: Request) -> Any:
            return await handle(service, request, *more)

        return endpoint

    async def health(_: Request) -> Response:
        fine = service.worker.alive and not service.draining
        return JSONResponse({"status": "ok" if fine else "stopping"}, 200 if fine else 503)

    async def metrics(_: Request) -> Response:
        text = service.metrics.text(service.worker.load)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return [
        Route("/v1/completions", posted(generate, _completion), methods=["POST"]),
        Route("/v1/chat/completions", posted(generate, _chat), methods=["POST"]),
        Route("/v1/responses", posted(generate, _response), methods=["POST"]),
        Route("/tokenize", posted(tokenize), methods=["POST"]),
        Route("/detokenize", posted(detokenize), methods=["POST"]),
        Route("/admin/draft", posted(admin_draft), methods=["POST"]),
        Route("/v1/models", fixed(lambda: models(service))),
        Route("/tokenizer_info", fixed(lambda: tokenizer_info(service))),
        Route("/version", fixed(lambda: {"version": __version__})),
        Route("/info", fixed(lambda: service.info())),
        Route("/openapi.json", fixed(description)),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


def create_app(service: Service) -> Starlette:
    """The ASGI application that serves a model; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            await service.worker.stop()

    routes = _routes(service)
    keyed = {route.path for route in routes} - {"/health"}
    routes += page_routes()
    middleware = [Middleware(Attended, clock=service.clock)]
    if service.settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(service.settings.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    if service.settings.api_key:
        middleware.append(Middleware(Keyed, key=service.settings.api_key, paths=keyed))
    return Starlette(routes=routes, middleware=middleware, exception_handlers=_HANDLERS, lifespan=lifespan)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _usage_error(_: Request, error: Exception) -> Response:
    return ApiError(400 if isinstance(error, UsageError) else 500, str(error)).response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}. `/openapi.json` lists what there is."
    return ApiError(error.status_code, message, headers=error.headers).response()


_HANDLERS: dict[Any, Any] = {ApiError: _api_error, BitdraftError: _usage_error, HTTPException: _http_error}
