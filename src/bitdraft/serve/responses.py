"""`/v1/responses`: an answer as a list of items (reasoning, message, calls), whole or as typed events.

The events are OpenAI's. An item is open until another one begins or the answer ends; its parts come as deltas.
"""

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from time import time
from typing import Any

from .faults import ApiError
from .pieces import joined
from .respond import Call, Choice, refuse_errors, taken
from .responses_request import ResponsesRequest
from .worker import Ticket

Event = dict[str, Any]


@dataclass
class _Item:
    """An item of the output that is being written.

    Attributes:
        kind: 'reasoning', 'message' or 'function_call'.
        place: index in the output.
        shown: the item as it is shown, without its text.
        text: reasoning, text, or the arguments of a call.
    """

    kind: str
    place: int
    shown: dict[str, Any]
    text: str = ""
    status: str = "in_progress"

    def part(self) -> dict[str, Any]:
        """The text as a part of the item's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def whole(self) -> dict[str, Any]:
        """The item as far as it is written."""
        shown = self.shown | {"status": self.status}
        if self.kind == "function_call":
            return shown | {"arguments": self.text}
        return shown | {"content": [self.part()] if self.text or self.status != "in_progress" else []}


_DELTAS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


@dataclass
class ResponsesShape:
    """Writes one answer, from what a chat's form makes of it. A `respond.Shape`."""

    body: ResponsesRequest
    _items: list[_Item] = field(default_factory=list)
    _finish: str | None = None
    _number: int = 0

    async def whole(self, call: Call, ticket: Ticket) -> dict[str, Any]:
        """Wait for the answer, and give it as one response."""
        while updates := await taken(call, ticket):
            for update in updates:
                refuse_errors(update)
                for choice in call.form.chunks(0, joined([update.emission], include_stop=call.include_stop)):
                    list(self._add(choice))
        list(self._end())
        return self._response(call, ticket) | {"metrics": call.metrics(ticket)}

    async def events(self, call: Call, ticket: Ticket) -> AsyncIterator[bytes]:
        """The answer as it comes, as events."""
        for name in ("response.created", "response.in_progress"):
            yield self._sent({"type": name, "response": self._response(call, ticket)})
        try:
            while updates := await taken(call, ticket):
                piece = joined([update.emission for update in updates], include_stop=call.include_stop)
                for choice in call.form.chunks(0, piece):
                    for event in self._add(choice):
                        yield self._sent(event)
                refuse_errors(updates[-1])
            for event in self._end():
                yield self._sent(event)
            response = self._response(call, ticket) | {"metrics": call.metrics(ticket)}
            yield self._sent({"type": f"response.{response['status']}", "response": response})
        except ApiError as error:
            failed = {"code": "server_error", "message": error.message}
            response = self._response(call, ticket) | {"status": "failed", "error": failed}
            yield self._sent({"type": "response.failed", "response": response})

    def _sent(self, event: Event) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        data = json.dumps(numbered, ensure_ascii=False, separators=(",", ":")).encode()
        return f"event: {event['type']}\n".encode() + b"data: " + data + b"\n\n"

    def _add(self, choice: Choice) -> Iterator[Event]:
        """Take a chunk of a chat in."""
        self._finish = choice["finish_reason"] or self._finish
        delta = choice["delta"]
        if delta.get("reasoning_content"):
            yield from self._write("reasoning", delta["reasoning_content"])
        content = delta.get("content")
        if content and (content.strip() or not self._called or self._open == "message"):
            yield from self._write("message", content)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin("function_call", call_id=call["id"], name=function["name"], arguments="")
            yield from self._write("function_call", function["arguments"])

    @property
    def _called(self) -> bool:
        return any(item.kind == "function_call" for item in self._items)

    @property
    def _open(self) -> str | None:
        """The kind of the item that is being written."""
        return self._items[-1].kind if self._items and self._items[-1].status == "in_progress" else None

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        if self._open != kind:
            more: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            yield from self._begin(kind, **more, content=[])
        if text:
            item = self._items[-1]
            item.text += text
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._event(f"{_DELTAS[kind]}.delta", delta=text, **logprobs)

    def _begin(self, kind: str, **shown: Any) -> Iterator[Event]:
        yield from self._close("completed")
        name = f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
        item = _Item(kind, len(self._items), {"id": name, "type": kind, **shown})
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": item.place, "item": item.whole()}
        if kind != "function_call":
            yield self._event("response.content_part.added", part=item.part())

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item = self._items[-1]
        item.status = status
        if item.kind == "function_call":
            yield self._event(f"{_DELTAS[item.kind]}.done", arguments=item.text, name=item.shown["name"])
        else:
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield self._event(f"{_DELTAS[item.kind]}.done", text=item.text, **logprobs)
            yield self._event("response.content_part.done", part=item.part())
        yield {"type": "response.output_item.done", "output_index": item.place, "item": item.whole()}

    def _end(self) -> Iterator[Event]:
        """The end of the answer, which has a message if it has no calls."""
        if not self._called and self._open != "message":
            yield from self._write("message", "")
        yield from self._close("incomplete" if self._finish == "length" else "completed")

    def _event(self, kind: str, **more: Any) -> Event:
        item = self._items[-1]
        place = {} if item.kind == "function_call" else {"content_index": 0}
        return {"type": kind, "item_id": item.shown["id"], "output_index": item.place, **place, **more}

    def _response(self, call: Call, ticket: Ticket) -> dict[str, Any]:
        """The response as far as it has come."""
        body, cut = self.body, self._finish == "length"
        sampling = call.groups.requests[0][0][0].sampling
        shown = body.model_dump(by_alias=True, exclude_none=True)
        status = "in_progress" if self._finish is None else "incomplete" if cut else "completed"
        return {
            "id": f"resp_{call.id}",
            "object": "response",
            "created_at": call.created,
            "completed_at": int(time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.model,
            "output": [item.whole() for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None} | shown.get("reasoning", {}),
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | shown.get("text", {}),
            "tool_choice": shown.get("tool_choice", "auto"),
            "tools": shown.get("tools", []),
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if self._finish is None else _usage(call, ticket),
            "user": body.user,
        }


def _usage(call: Call, ticket: Ticket) -> dict[str, Any]:
    usage = call.usage(ticket)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }
