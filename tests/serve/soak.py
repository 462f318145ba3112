"""Many mixed requests at once against one server, and what each of them is told when it is alone.

A request is drawn from a seed: a body that somebody could send, and a manner of sending it. Bodies come from a
list that is much shorter than the requests are many, so that each has to be asked alone only once.
"""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from running import Running

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PATIENCE = "x-test-patience"
"""A header that sends a request to the application whose time limit is short."""
WORDS = ("hello", "world", "1 2", "12 12", "wor", "ll", "he said hello", "w" * 20, "{", "日本")
SHARED = "hello world 12 hello world, hello. " * 3
"""What many prompts begin with."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
BAD: tuple[tuple[str, bytes, int], ...] = (
    (COMPLETIONS, b"{", 400),
    (COMPLETIONS, b"[1, 2]", 400),
    (COMPLETIONS, b'{"prompt": "a", "temperature": "hot"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "top_pp": 1}', 400),
    (COMPLETIONS, b'{"prompt": [1, 99999]}', 400),
    (COMPLETIONS, b'{"prompt": "a", "guided_regex": "("}', 400),
    (COMPLETIONS, b'{"prompt": "' + b"12 " * 400 + b'"}', 400),
    (COMPLETIONS, b'{"prompt": "a", "model": "other"}', 404),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "n": 9999}', 400),
    ("/v1/nothing", b"{}", 404),
)


@dataclass(frozen=True)
class Asked:
    """A request: where to, what, and how it is sent.

    Attributes:
        body: None for one that cannot be used, whose bytes are `raw`.
        manner: 'whole', 'stream', 'slow', 'late' (it leaves in the stream), 'gone' (before the first byte), 'half' (in
            the middle of its own body), 'impatient' (the server's time for it is short), 'bad'.
        moment: a share of something, from 0 to 1: when the client leaves.
        status: that one has to be answered with which cannot be used.
    """

    path: str
    body: dict[str, Any] | None
    manner: str
    moment: float
    raw: bytes = b""
    status: int = 200


Told = list[dict[str, Any]]
"""An answer: see `told`."""


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        ended: 'answered', 'refused', 'left' or 'timed out'.
        choices: how many answers came whole.
        unlike: what it was told and what it is told alone, if that is not the same.
    """

    asked: Asked
    ended: str
    choices: int = 0
    unlike: tuple[Told, Told] | None = None


def bodies(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """So many different requests that can be answered, of every kind in turn."""
    rng = random.Random(seed)
    made = []
    for n in range(count):
        text = (SHARED if n % 3 else "") + " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        chat = n % 2 == 0
        body: dict[str, Any] = {"max_tokens": rng.randint(1, 32), "temperature": 0, "return_token_ids": True}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        body |= _kind(n, chat, rng)
        if rng.random() < 0.4:
            body |= {"temperature": rng.choice([0.5, 0.9, 1.3]), "seed": n, "top_p": rng.choice([0.9, 1.0])}
        if rng.random() < 0.3:
            body["speculative"] = rng.choice([{"enabled": False}, {"k": 1}, {"k": 2}])
        made.append((CHAT if chat else COMPLETIONS, body))
    return made


def _kind(n: int, chat: bool, rng: random.Random) -> dict[str, Any]:
    tools = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
    kinds: list[dict[str, Any]] = [
        {},
        {"n": rng.randint(2, 3), "temperature": 0.9, "seed": n},
        tools if chat else {"guided_regex": "(hello|12 )+", "max_tokens": 30},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}, "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3, "echo": True, "max_tokens": n % 3},
        {"stop": ["e", "l"], "min_tokens": 2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {"70": 2}, "ignore_eos": True},
        {"bad_words": ["e", " w"], "ignore_eos": True, "max_tokens": rng.randint(50, 80)},
        {} if chat else {"prompt": [SHARED + "1", "12", SHARED], "max_tokens": 9},
    ]
    return kinds[(n // 2) % len(kinds)]


def requests(count: int, different: int, seed: int) -> list[Asked]:
    """So many requests, with so many different bodies."""
    rng = random.Random(seed)
    answerable = bodies(different, seed)
    weights = {"whole": 8, "stream": 8, "slow": 1, "late": 4, "gone": 3, "half": 1, "impatient": 2, "bad": 3}
    made = []
    for n in range(count):
        manner = rng.choices(list(weights), list(weights.values()))[0]
        moment = rng.random()
        if manner == "bad":
            path, raw, status = BAD[n % len(BAD)]
            made.append(Asked(path, None, manner, moment, raw, status))
            continue
        path, body = answerable[n % different]
        if manner in ("late", "gone", "impatient"):  # long enough to be left
            body = body | {"max_tokens": 100, "ignore_eos": True, "n": 1 + n % 2}
        made.append(Asked(path, body, manner, moment))
    rng.shuffle(made)
    return made


def told(choices: Sequence[Mapping[str, Any]]) -> Told:
    """What choices of a whole answer, or the chunks of a stream, say, by index; not how it was cut into chunks."""
    by_index: dict[int, dict[str, Any]] = {}
    for choice in choices:
        mine = by_index.setdefault(
            choice["index"], {"ids": [], "text": "", "calls": "", "finish": None, "stop": None, "logprobs": []}
        )
        message = choice.get("message") or choice.get("delta") or {}
        mine["ids"] += choice.get("token_ids") or []
        mine["text"] += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            mine["calls"] += (call["function"].get("name") or "") + call["function"]["arguments"]
        mine["finish"] = choice["finish_reason"] or mine["finish"]
        mine["stop"] = mine["stop"] if choice.get("stop_reason") is None else choice["stop_reason"]
        shown = choice.get("logprobs") or {}
        mine["logprobs"] += shown.get("token_logprobs") or [e["logprob"] for e in shown.get("content") or ()]
    return [by_index[index] for index in sorted(by_index)]


def same(left: Told, right: Told) -> bool:
    """Whether two answers say the same; log-probabilities within what the order of FP32 sums changes."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if any(a[name] != b[name] for name in a if name != "logprobs") or len(a["logprobs"]) != len(b["logprobs"]):
            return False
        pairs = zip(a["logprobs"], b["logprobs"], strict=True)
        if any((x is None) != (y is None) or (x is not None and abs(x - y) > 1e-3) for x, y in pairs):
            return False
    return True


class Clients:
    """Sends requests to a server in every manner."""

    def __init__(self, running: Running, known: Mapping[str, Told]) -> None:
        """Send to this server, and hold its answers to what is known."""
        self._known = known
        self._url = running.url
        self._port = int(running.url.rpartition(":")[2])
        self._http = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=64))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __call__(self, asked: Asked) -> Outcome:
        """Send one, and see it to its end."""
        send: dict[str, Callable[[Asked], Outcome]] = {
            "whole": self._whole,
            "impatient": self._impatient,
            "bad": self._bad,
            "gone": self._gone,
            "half": self._half,
        }
        return send.get(asked.manner, self._stream)(asked)

    def _whole(self, asked: Asked) -> Outcome:
        answer = self._http.post(self._url + asked.path, json=asked.body)
        assert answer.status_code == 200, answer.text
        return self._answered(asked, answer.json()["choices"])

    def _impatient(self, asked: Asked) -> Outcome:
        assert asked.body
        headers = {PATIENCE: "short"}
        if asked.moment < 0.5:
            answer = self._http.post(self._url + asked.path, json=asked.body, headers=headers)
            assert answer.status_code == 408, answer.text
            return Outcome(asked, "timed out")
        body = asked.body | {"stream": True}
        with self._http.stream("POST", self._url + asked.path, json=body, headers=headers) as answer:
            events = [line for line in answer.iter_lines() if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["error"]["code"] == "timeout"
        return Outcome(asked, "timed out")

    def _bad(self, asked: Asked) -> Outcome:
        headers = {"content-type": "application/json"}
        answer = self._http.post(self._url + asked.path, content=asked.raw, headers=headers)
        assert answer.status_code == asked.status, (asked, answer.text)
        assert answer.json()["error"]["message"]
        return Outcome(asked, "refused")

    def _stream(self, asked: Asked) -> Outcome:
        """All of a stream, at once or slowly; or its first events only."""
        assert asked.body
        leave_after = int(asked.moment * 20) if asked.manner == "late" else None
        choices: list[Mapping[str, Any]] = []
        done = False
        with self._http.stream("POST", self._url + asked.path, json=asked.body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if asked.manner == "slow":
                    time.sleep(0.004)
                if leave_after is not None and len(choices) >= leave_after:
                    return Outcome(asked, "left")
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    choices += event["choices"]
        assert done
        if asked.manner == "late":  # its answer was shorter than that
            return Outcome(asked, "left")
        return self._answered(asked, choices)

    def _answered(self, asked: Asked, choices: Sequence[Mapping[str, Any]]) -> Outcome:
        said, alone = told(choices), self._known[name_of(asked)]
        return Outcome(asked, "answered", len(said), None if same(said, alone) else (said, alone))

    def _gone(self, asked: Asked) -> Outcome:
        """The request, and no look at the answer; half of these clients wait a moment first."""
        with self._connection(asked) as connection:
            time.sleep(max(0.0, asked.moment - 0.5) / 20)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # with a reset, not an end
        return Outcome(asked, "left")

    def _half(self, asked: Asked) -> Outcome:
        with self._connection(asked, missing=5):
            time.sleep(asked.moment / 50)
        return Outcome(asked, "left")

    def _connection(self, asked: Asked, missing: int = 0) -> socket.socket:
        assert asked.body
        content = json.dumps(asked.body | {"stream": asked.moment < 0.75}).encode()
        head = f"POST {asked.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(content)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        connection.sendall(head.encode() + content[: len(content) - missing])
        return connection


def name_of(asked: Asked) -> str:
    """What names the answer to a request, however it is sent."""
    return json.dumps([asked.path, asked.body], sort_keys=True)


def answers(asked: Iterable[Asked], alone: Running) -> dict[str, Told]:
    """What those requests that wait for an answer are told one after the other, by `name_of`."""
    known: dict[str, Told] = {}
    for one in asked:
        if one.manner in ("whole", "stream", "slow") and name_of(one) not in known:
            known[name_of(one)] = told(alone.post(one.path, **one.body or {})["choices"])
    return known


def ask_all(running: Running, asked: Sequence[Asked], known: Mapping[str, Told], at_once: int) -> list[Outcome]:
    """What becomes of requests that so many clients send, each its next when its last has ended."""
    clients = Clients(running, known)
    try:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(clients, asked))
    finally:
        clients.close()


def counted(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many ended in which way, by manner and end."""
    return Counter(f"{o.asked.manner} {o.ended}" for o in outcomes)
