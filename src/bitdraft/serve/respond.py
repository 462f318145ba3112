"""From an API call's requests to its response: whole, or as server-sent events while it comes.

The stream is OpenAI's: chunks, then the end of each choice, then usage if asked for, then [DONE]. An error that comes
after the first chunk is an event of its own.
"""

import asyncio
import json
import math
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from .faults import ApiError
from .pieces import Piece, joined
from .prepare import Groups
from .progress import shown_step, speculative_decoding
from .worker import STOPPING, Ticket, Update

Choice = dict[str, Any]
"""An entry of `choices`."""
Result = TypeVar("Result")


class Form(Protocol):
    """How an endpoint shows answers. It may keep state for each choice."""

    @property
    def prefix(self) -> str:
        """What ids of its responses begin with."""
        ...

    @property
    def objects(self) -> tuple[str, str]:
        """`object` of a whole response and of a chunk."""
        ...

    def opening(self) -> list[Choice]:
        """Chunks that come first."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[Choice]:
        """Chunks that show a piece of one choice; none if there is nothing to show."""
        ...

    def whole(self, index: int, piece: Piece) -> Choice:
        """A choice that came in one piece."""
        ...

    def details(self) -> dict[str, int]:
        """What `completion_tokens_details` says of all choices so far."""
        ...


@dataclass
class Call:
    """One API call.

    Attributes:
        form: how it is answered.
        groups: its requests.
        model: the name that the response says.
        include_stop: show stop strings.
        stream: answer with events.
        include_usage: end the stream with usage. every_usage: have usage in every chunk.
        per_step: list what speculation did in each step; in a stream also in the chunk that shows the step.
        max_draft: longest block of the engine.
        deadline: when it is given up, in seconds of the event loop's clock.
        id: names the response.
        created: Unix time in seconds.
    """

    form: Form
    groups: Groups
    model: str
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    every_usage: bool = False
    per_step: bool = False
    max_draft: int = 0
    deadline: float = math.inf
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time()))

    def envelope(self, choices: list[Choice], *, chunk: bool) -> dict[str, Any]:
        """A response or a chunk around some choices."""
        return {
            "id": f"{self.form.prefix}-{self.id}",
            "object": self.form.objects[chunk],
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def usage(self, ticket: Ticket) -> dict[str, Any]:
        """Exact counts of what was read and written so far; each prompt counts once, however many answers it got."""
        first = [group[0][1] for group in self.groups.requests]
        prompt = sum(progress.prompt_tokens for progress in first)
        completion = sum(progress.tokens for progress in ticket.progress.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(progress.cached for progress in first)},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": sum(progress.predicted[0] for progress in ticket.progress.values()),
                "rejected_prediction_tokens": sum(progress.predicted[1] for progress in ticket.progress.values()),
                **self.form.details(),
            },
        }

    def metrics(self, ticket: Ticket) -> dict[str, Any]:
        """What speculation did for the call, and its times in seconds."""
        all_of_it = list(ticket.progress.values())
        firsts = [p.first for p in all_of_it if p.first is not None]
        lasts = [p.last for p in all_of_it if p.last is not None]
        arrived = min(p.arrived for p in all_of_it)
        return {
            "speculative_decoding": speculative_decoding(all_of_it, self.max_draft, per_step=self.per_step),
            "time_to_first_token": min(firsts) - arrived if firsts else None,
            "time_to_last_token": max(lasts) - arrived if lasts else None,
        }


class Shape(Protocol):
    """How an answer is sent: whole, or as events. May raise `ApiError` in `whole`."""

    async def whole(self, call: Call, ticket: Ticket) -> dict[str, Any]:
        """Wait for all of it."""
        ...

    def events(self, call: Call, ticket: Ticket) -> AsyncIterator[bytes]:
        """As it comes."""
        ...


class Choices:
    """The shape of completions and chats: a list of choices."""

    async def whole(self, call: Call, ticket: Ticket) -> dict[str, Any]:
        """Wait for all answers of a call, and give them as one response.

        Raises:
            ApiError: one of them ended with an error.
        """
        by_request: dict[int, list[Update]] = defaultdict(list)
        while updates := await taken(call, ticket):
            for update in updates:
                by_request[update.emission.request].append(update)
                refuse_errors(update)
        choices = []
        for index, number in enumerate(ticket.progress):
            piece = joined([u.emission for u in by_request[number]], include_stop=call.include_stop)
            choices.append(call.form.whole(index, piece))
        answer = call.envelope(choices, chunk=False)
        return answer | {"usage": call.usage(ticket), "metrics": call.metrics(ticket)}

    async def events(self, call: Call, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answers of a call as they come, as events."""
        indexes = {number: index for index, number in enumerate(ticket.progress)}
        try:
            for choice in call.form.opening():
                yield _event(_chunk(call, ticket, [choice]))
            while updates := await taken(call, ticket):
                by_request: dict[int, list[Update]] = defaultdict(list)
                for update in updates:
                    by_request[update.emission.request].append(update)
                for number, its in by_request.items():
                    piece = joined([u.emission for u in its], include_stop=call.include_stop)
                    choices = call.form.chunks(indexes[number], piece)
                    if call.per_step and choices:
                        choices[0]["steps"] = [shown_step(u.record) for u in its if u.record]
                    for choice in choices:
                        yield _event(_chunk(call, ticket, [choice]))
                    refuse_errors(its[-1])
            if call.include_usage:
                last = call.envelope([], chunk=True)
                yield _event(last | {"usage": call.usage(ticket), "metrics": call.metrics(ticket)})
        except ApiError as error:
            yield _event(error.body())
        yield b"data: [DONE]\n\n"


async def taken(call: Call, ticket: Ticket) -> list[Update]:
    """What happened since the last call; [] at the end.

    Raises:
        ApiError: the call's time is up.
    """
    try:
        async with asyncio.timeout_at(None if math.isinf(call.deadline) else call.deadline):
            return await ticket.take()
    except TimeoutError:
        raise ApiError(408, "the request took longer than the server allows (--timeout).", code="timeout") from None


def _chunk(call: Call, ticket: Ticket, choices: list[Choice]) -> dict[str, Any]:
    chunk = call.envelope(choices, chunk=True)
    if call.every_usage:
        chunk["usage"] = call.usage(ticket)
    elif call.include_usage:
        chunk["usage"] = None
    return chunk


def refuse_errors(update: Update) -> None:
    """Raise what a request ended with, if that was an error.

    Raises:
        ApiError: it was.
    """
    if update.emission.error == STOPPING:
        raise ApiError(503, "the server is stopping.", code="stopping", headers={"retry-after": "10"})
    if update.emission.finish == "error":
        raise ApiError(500, f"the request failed: {update.emission.error}", code="engine_error")


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled as soon as the client closes the connection.

    Args:
        receive: of the connection, whose request was read to its end.
        work: what to do.

    Raises:
        ClientGone: the client is.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of events, an ASGI application. Its end, whatever the reason, is told to `on_end`."""

    def __init__(self, source: AsyncIterator[bytes], on_end: Callable[[], None], timeout: float) -> None:
        """Stream `source`; a client that does not read for `timeout` seconds in all is left."""
        self._source, self._on_end, self._timeout = source, on_end, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client is gone."""
        try:
            with suppress(ClientGone, TimeoutError):
                await unless_gone(receive, self._send(send))
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        async with asyncio.timeout(self._timeout):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for event in self._source:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
