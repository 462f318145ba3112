"""One request to an OpenAI-compatible server, heard as a stream, with the time of every piece.

What a server understands beyond OpenAI's own fields differs, and strict ones refuse what they do not know. So it is
found out once who it is, and nothing is sent that this kind does not know.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ..errors import UsageError

JSON = dict[str, Any]
EXTRAS: Mapping[str, frozenset[str]] = {
    "bitdraft": frozenset({"ignore_eos", "return_token_ids", "continuous_usage_stats", "speculative"}),
    "vllm": frozenset({"ignore_eos", "return_token_ids", "continuous_usage_stats"}),
    "sglang": frozenset({"ignore_eos", "continuous_usage_stats"}),
    "llamacpp": frozenset({"ignore_eos"}),
    "other": frozenset(),
}
"""Kinds of servers, by what /v1/models says of its owner (ours by /info), and the fields that each one knows."""


@dataclass(frozen=True)
class Kind:
    """Who a server is.

    Attributes:
        name: a key of `EXTRAS`. model: the name to ask for. drafts: whether it says that it speculates.
        info: what /info says; empty for servers that are not ours.
    """

    name: str
    model: str
    drafts: bool
    info: JSON

    def knows(self, field: str) -> bool:
        """Whether this kind of server understands a field beyond OpenAI's."""
        return field in EXTRAS[self.name]


def client(url: str, key: str, timeout: float) -> httpx2.AsyncClient:
    """A client for the server at `url`, with as many connections as are wanted and no proxy in between."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx2.Timeout(timeout, connect=min(timeout, 10.0)),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=600),
        trust_env=False,
    )


async def recognise(http: httpx2.AsyncClient, url: str, model: str) -> Kind:
    """Ask a server who it is.

    Raises:
        UsageError: nobody answers, it answers with an error, or it has no model of that name.
    """
    try:
        listed = await http.get("/v1/models")
        info = await http.get("/info")
    except httpx2.HTTPError as error:
        raise UsageError(
            f"no server answers at {url} ({type(error).__name__}: {error}). Expected an OpenAI-compatible server; "
            "start it, or check host and port."
        ) from None
    models = _object(listed).get("data")
    if listed.status_code != 200 or not isinstance(models, list) or not models:
        raise UsageError(
            f"{url}/v1/models answers {listed.status_code} {listed.text[:200]!r}. Expected a list of models. Is the "
            "address the server's root, without /v1, and is an API key wanted?"
        )
    names = [str(entry.get("id")) for entry in models if isinstance(entry, dict)]
    if model and model not in names:
        raise UsageError(f"{url} has no model {model!r}. It has {', '.join(names)}.")
    ours = _object(info) if info.status_code == 200 else {}
    owner = str(models[0].get("owned_by", "")).lower() if isinstance(models[0], dict) else ""
    name = "bitdraft" if ours.get("server") == "bitdraft" else owner if owner in EXTRAS else "other"
    return Kind(name, model or names[0], bool(ours.get("draft")), ours if name == "bitdraft" else {})


def _object(response: httpx2.Response) -> JSON:
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Events:
    """Server-sent events out of bytes that arrive in pieces of any size (HTML standard, section 9.2)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """The data of every event that `data` completes. Other fields and comments are skipped."""
        self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r").decode("utf-8", "replace")
            if text.startswith("data:"):  # servers of this kind put one line of JSON in an event
                yield text[5:].removeprefix(" ")


@dataclass
class Heard:
    """What came back.

    Attributes:
        times: when each piece with text came, seconds by the clock. tokens: in each; 0 where the server did not say.
        text: all of it. ids: token ids, where they were sent.
        prompt_tokens, output_tokens, cached_tokens: what the server counted; None if it did not.
        finish: its reason to end. error: what went wrong; '' for nothing. status: of HTTP; 0 without an answer.
        retry_after: seconds that the server asks to wait. speculation: its statistics of drafts.
        done: whether the stream was ended properly.
    """

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str = ""
    error: str = ""
    status: int = 0
    retry_after: float = 0.0
    speculation: JSON = field(default_factory=dict)
    done: bool = False

    def take(self, event: str, now: float) -> None:
        """Take in one event."""
        if event == "[DONE]":
            self.done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            self.error = self.error or f"an event that is not JSON: {event[:80]!r}"
            return
        if chunk.get("error"):
            self.error = self.error or _message(chunk)
            return
        counted = self._take_usage(chunk.get("usage") or {})
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            more = delta.get("reasoning_content") or delta.get("tool_calls")
            ids = choice.get("token_ids") or ()
            self.text += text
            self.ids += ids
            if text or more or ids:
                self.times.append(now)
                self.tokens.append(len(ids) or counted)
            self.finish = choice.get("finish_reason") or self.finish

    def _take_usage(self, usage: Mapping[str, Any]) -> int:
        """Returns the output tokens that are new since the last count; 0 without counts on the way."""
        if not usage:
            return 0
        before = self.output_tokens or 0
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.output_tokens = usage.get("completion_tokens", self.output_tokens)
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", self.cached_tokens)
        return max((self.output_tokens or 0) - before, 0)


def _message(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]


async def ask(http: httpx2.AsyncClient, path: str, body: JSON, clock: Callable[[], float]) -> Heard:
    """Make a request and listen to the end. Whatever goes wrong is in the answer's `error`."""
    heard, events = Heard(), Events()
    try:
        async with http.stream("POST", path, json=body) as response:
            heard.status = response.status_code
            if response.status_code != 200:
                await response.aread()
                heard.error = f"HTTP {response.status_code}: {_message(_object(response)) or response.text[:200]}"
                wait = response.headers.get("retry-after", "")
                heard.retry_after = float(wait) if wait.replace(".", "", 1).isdigit() else 0.0
                return heard
            async for data in response.aiter_bytes():
                now = clock()
                for event in events.feed(data):
                    heard.take(event, now)
    except httpx2.HTTPError as error:
        heard.error = heard.error or f"{type(error).__name__}: {error}".rstrip(": ")
    if not heard.done and not heard.error:
        heard.error = "the stream ended without [DONE]"
    return heard


def body_of(kind: Kind, endpoint: str, prompt: str, output: int, *, all_of_it: bool, temperature: float) -> JSON:
    """The request for `output` tokens after a prompt, with the fields that this kind of server knows."""
    body: JSON = {"model": kind.model, "temperature": temperature, "stream": True}
    options: JSON = {"include_usage": True}
    if kind.knows("continuous_usage_stats"):
        options["continuous_usage_stats"] = True
    body["stream_options"] = options
    if kind.knows("return_token_ids"):
        body["return_token_ids"] = True
    if all_of_it and kind.knows("ignore_eos"):
        body["ignore_eos"] = True
    if endpoint == "chat":
        return body | {"messages": [{"role": "user", "content": prompt}], "max_tokens": output}
    return body | {"prompt": prompt, "max_tokens": output}
