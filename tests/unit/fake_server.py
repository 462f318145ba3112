"""A server that speaks enough of OpenAI's protocol to be measured, with every rudeness that a test asks for.

It writes its bytes itself, so that it can split characters and events anywhere, stop in the middle and hang up.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeServer:
    """How it behaves, and what it was asked.

    Attributes:
        owner: what /v1/models says. info: what /info says; None answers 404.
        chunk: tokens in a piece. delay: seconds before a piece; plain pieces hold one token each.
        usage: counts tokens, in the end and, where asked, on the way. ids: sends token ids where asked.
        refuse_every, die_every: so many requests are answered 429, or die after two pieces; 0 for none.
        loop: writes the same word again and again.
        bodies: the requests.
    """

    owner: str = "bitdraft"
    info: dict[str, Any] | None = field(default_factory=lambda: {"server": "bitdraft", "draft": "a draft"})
    chunk: int = 3
    delay: float = 0.002
    usage: bool = True
    ids: bool = True
    refuse_every: int = 0
    die_every: int = 0
    loop: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The requests but for those that count tokens."""
        return [body for body in self.bodies if body["max_tokens"] > 1]

    @contextmanager
    def running(self) -> Iterator["FakeServer"]:
        started, loops, stop = threading.Event(), [], asyncio.Event()

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
                with suppress(asyncio.CancelledError, ConnectionError):
                    await task

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        started.wait()
        try:
            yield self
        finally:
            loops[0].call_soon_threadsafe(stop.set)
            thread.join()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._hear(reader, writer)
        except ConnectionError:
            pass  # the other side hung up
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        await (self._answer(path, body, writer) if method == "POST" else self._tell(path, writer))

    async def _tell(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await _send(writer, 200, {"object": "list", "data": [{"id": "toy", "owned_by": self.owner}]})
        elif path == "/info" and self.info is not None:
            await _send(writer, 200, self.info)
        else:
            await _send(writer, 404, {"error": {"message": "no such page"}})

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        number = len(self.measured)
        known = {"model", "temperature", "stream", "stream_options", "max_tokens", "messages", "prompt"}
        if self.owner != "bitdraft" and set(body) - known:
            await _send(writer, 400, {"error": {"message": f"unknown fields: {sorted(set(body) - known)}"}})
            return
        if self.refuse_every and body["max_tokens"] > 1 and number % self.refuse_every == 0:
            await _send(writer, 429, {"error": {"message": "too many requests"}}, "retry-after: 0.01\r\n")
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        dies = self.die_every and body["max_tokens"] > 1 and number % self.die_every == 0
        for i, event in enumerate(self._events(path, body)):
            if dies and i == 3:
                writer.transport.abort()
                return
            data = f"data: {event if isinstance(event, str) else json.dumps(event)}\r\n\r\n".encode()
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                writer.write(part)
                await writer.drain()
            await asyncio.sleep(self.delay)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        speculates = body.get("speculative", {}).get("enabled", True) and self.info is not None
        chat = path.endswith("chat/completions")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        size, total = self.chunk if speculates else 1, body["max_tokens"]
        options = body["stream_options"]
        counts = {"prompt_tokens": 10 + len(prompt) // 4, "prompt_tokens_details": {"cached_tokens": 0}}
        if chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        for start in range(0, total, size):
            ids = list(range(start, min(start + size, total)))
            text = "again " * len(ids) if self.loop else "".join(f"wörd{i} " for i in ids)
            choice: dict[str, Any] = {"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [0] * len(ids) if self.loop else ids
            chunk: dict[str, Any] = {"choices": [choice]}
            if self.usage and options.get("continuous_usage_stats"):
                chunk["usage"] = counts | {"completion_tokens": ids[-1] + 1}
            yield chunk
        yield {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        if self.usage:
            last: dict[str, Any] = {"choices": [], "usage": counts | {"completion_tokens": total}}
            if speculates:
                last["metrics"] = {
                    "speculative_decoding": {"num_draft_tokens": 2 * total, "num_accepted_draft_tokens": total}
                }
            yield last
        yield "[DONE]"


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n{headers}"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + data)
    await writer.drain()
