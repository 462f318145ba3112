"""Streams: what a client sees piece by piece is what it would have got at once, and never a part of more."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from parrot import HERMES, THINKING, parrot_service
from running import Running, start

from bitdraft.engine.engine import Emission
from bitdraft.serve.pieces import joined
from bitdraft.serve.progress import Progress
from bitdraft.serve.worker import Ticket, Update

CHAT = "/v1/chat/completions"
HARD = "👩‍👩‍👧‍👦🇫🇷 漢字 한국어 ไทย e\u0301"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parrots")


@pytest.fixture(scope="module", params=[0, 1, 4])
def parrot(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    """A parrot without drafts, and with blocks of 1 and 4 tokens."""
    service, model = parrot_service(folder / "plain", request.param)
    model.pause = 0.002  # so that this thread reads while it speaks
    with start(service) as running:
        yield running


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Iterator[Running]:
    with start(parrot_service(folder / "plain", 4)[0]) as running:
        yield running


def say(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0}


def contents(events: list[dict], index: int = 0) -> list[str]:
    choices = [c for event in events for c in event["choices"] if c["index"] == index]
    return [c["delta"]["content"] for c in choices if c["delta"].get("content")]


def test_no_character_is_split_u81(parrot: Running) -> None:
    """Every character here takes two to four tokens, so blocks end inside them all the time."""
    answers = [contents(parrot.stream(CHAT, **say(HARD))) for _ in range(4)]
    for pieces in answers:
        assert "".join(pieces) == HARD
        assert not any("\ufffd" in piece for piece in pieces)
    assert max(map(len, answers)) > 5  # a busy machine sends what has gathered as one piece
    assert parrot.post(CHAT, **say(HARD))["choices"][0]["message"]["content"] == HARD


def test_a_character_that_the_limit_cuts_is_marked_only_at_the_end_u81(parrot: Running) -> None:
    whole = parrot.post(CHAT, **say(HARD), max_tokens=6)["choices"][0]
    events = parrot.stream(CHAT, **say(HARD), max_tokens=6)
    assert "".join(contents(events)) == whole["message"]["content"]
    assert "\ufffd" not in "".join(contents(events)[:-1])
    assert whole["finish_reason"] == "length"


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_a_stream_has_openai_s_shape_u83(parrot: Running, options: dict | None) -> None:
    body = say("hello world") | ({} if options is None else {"stream_options": options})
    events = parrot.stream(CHAT, **body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    with_choices = [event for event in events if event["choices"]]
    finishes = [event["choices"][0]["finish_reason"] for event in with_choices]
    assert finishes[-1] == "stop"
    assert set(finishes[:-1]) == {None}
    assert with_choices[-1]["choices"][0]["delta"] == {}
    if options and options["include_usage"]:
        assert events[-1]["choices"] == []
        assert all(event["usage"] is None for event in events[:-1])
        whole = parrot.post(CHAT, **say("hello world"))
        assert events[-1]["usage"] == whole["usage"]
        assert events[-1]["usage"]["completion_tokens"] == len(parrot.service.model.tokenizer.encode("hello world")) + 1
    else:
        assert events == with_choices
        assert all("usage" not in event for event in events)


def test_running_usage_counts_every_token_u89(drafting: Running) -> None:
    """With blocks of several tokens, chunks are no count of tokens; the usage in each chunk is."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = drafting.stream(CHAT, **say("hello world 1 2 3"), stream_options=options, return_token_ids=True)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    ids = [len(c.get("token_ids", [])) for event in events for c in event["choices"]]
    assert sum(ids) == counts[-1] > len(contents(events))
    assert max(ids) > 1


@pytest.mark.parametrize("stop", [["wor"], ["lo w", "never"], "o world", [" 12"]])
def test_no_part_of_a_stop_string_comes_out(parrot: Running, stop: object) -> None:
    text = "hello world 12 and more"
    shortest = min(text.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in text)
    events = parrot.stream(CHAT, **say(text), stop=stop)
    assert "".join(contents(events)) == text[:shortest]
    end = events[-1]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"] in stop) == ("stop", True)
    shown = parrot.post(CHAT, **say(text), stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert shown["message"]["content"] == text[:shortest] + end["stop_reason"]


def test_what_only_begins_a_stop_string_does_come_out(parrot: Running) -> None:
    events = parrot.stream(CHAT, **say("hello wo"), stop=["world"])
    assert "".join(contents(events)) == "hello wo"


def test_logprobs_are_aligned_with_tokens_u42_u81(parrot: Running) -> None:
    """One entry for each token whatever the chunks are, with the very bytes of the text."""
    events = parrot.stream(CHAT, **say(HARD), logprobs=True, top_logprobs=2)
    choices = [event["choices"][0] for event in events]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    raw = bytes(b for entry in entries[:-1] for b in entry["bytes"])
    assert raw.decode() == HARD
    assert entries[-1]["token"] == "<|im_end|>"
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] > -1e-6 for entry in entries)
    whole = parrot.post(CHAT, **say(HARD), logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert whole == entries


def test_answers_of_one_call_are_told_apart(drafting: Running) -> None:
    events = drafting.stream(CHAT, **say("hello world"), n=3)
    assert ["".join(contents(events, index)) for index in range(3)] == ["hello world"] * 3
    assert [e["choices"][0]["index"] for e in events[:3]] == [0, 1, 2]


CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]


@pytest.mark.parametrize("k", [0, 4])
def test_tool_calls_come_whole_and_in_pieces_u82(folder: Path, k: int) -> None:
    with start(parrot_service(folder / "hermes", k, template=HERMES)[0]) as running:
        whole = running.post(CHAT, **say("See: " + CALLS), tools=TOOLS)["choices"][0]
        events = running.stream(CHAT, **say("See: " + CALLS), tools=TOOLS)
        refused = httpx.post(running.url + CHAT, json=say("x") | {"tool_choice": "required"})
    assert refused.status_code == 400
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "See:")
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [call["name"] for call in calls] == ["weather", "clock"]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Zürich", "days": [1, 2]}, {}]
    deltas = [d for e in events for c in e["choices"] for d in c["delta"].get("tool_calls", [])]
    for index, call in enumerate(calls):
        its = [d for d in deltas if d["index"] == index]
        assert its[0]["id"].startswith("call_")
        assert [d["function"].get("name") for d in its] == [call["name"], *[None] * (len(its) - 1)]
        assert "".join(d["function"]["arguments"] for d in its) == call["arguments"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_reasoning_is_split_off_and_counted_u61(folder: Path) -> None:
    with start(parrot_service(folder / "thinking", 4, template=THINKING)[0]) as running:
        whole = running.post(CHAT, **say("<think>so it is</think>yes"))
        events = running.stream(CHAT, **say("<think>so it is</think>yes"))
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so it is", "yes")
    assert "".join(contents(events)) == "yes"
    reasoned = "".join(c["delta"].get("reasoning_content", "") for e in events for c in e["choices"])
    assert reasoned == "so it is"
    usage = whole["usage"]
    inside = len(running.service.model.tokenizer.encode(">so it is</think>"))  # from where the marker is complete
    assert usage["completion_tokens_details"]["reasoning_tokens"] == inside < usage["completion_tokens"]


# What goes wrong


@pytest.mark.parametrize("where", ["streaming", "whole", "queued"])
def test_a_client_that_leaves_stops_its_request_u84(folder: Path, where: str) -> None:
    service, model = parrot_service(folder / "plain", 4)
    model.pause = 0.02
    long = json.dumps(say("hello " * 400) | {"stream": where == "streaming", "ignore_eos": True, "max_tokens": 2000})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(long)}\r\n\r\n"

    def ask() -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), timeout=30)
        connection.sendall((head + long).encode())
        return connection

    with start(service) as running:
        connections = [ask() for _ in range(6 if where == "queued" else 1)]  # four run at once
        if where == "streaming":
            came = b""
            while came.count(b"data:") < 5:
                came += connections[0].recv(4096)
        deadline = time.monotonic() + 10
        while not running.service.worker.load.running and time.monotonic() < deadline:
            time.sleep(0.01)
        for connection in connections:
            connection.close()
        assert running.idle(2.0)
        model.pause = 0.0
        assert running.post(CHAT, **say("hello"))["choices"][0]["message"]["content"] == "hello"


def test_a_step_that_fails_ends_its_requests_and_not_the_server(folder: Path) -> None:
    service, model = parrot_service(folder / "plain", 4)
    with start(service) as running:
        model.broken = RuntimeError("the roof is on fire")
        answer = httpx.post(running.url + CHAT, json=say("hello"))
        assert answer.status_code == 500
        assert "the roof is on fire" in answer.json()["error"]["message"]
        model.broken = RuntimeError("again")
        with httpx.stream("POST", running.url + CHAT, json=say("hello") | {"stream": True}) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
        assert "again" in events[-1]["error"]["message"]
        assert running.idle()
        assert running.post(CHAT, **say("hello"))["choices"][0]["message"]["content"] == "hello"


def test_a_reader_that_does_not_read_gets_one_larger_piece_later() -> None:
    """What waits for a slow reader is put together: it cannot outgrow the output, and comes as one chunk."""
    ticket = Ticket({7: Progress(1, "", 0.0)})

    async def read_late() -> tuple[list[Update], list[Update]]:
        for n in range(1000):
            finish = "stop" if n == 999 else None
            ticket.push(Update(Emission(7, (n,), ("draft",), f"{n} ", finish), None, 0.0))
        return await ticket.take(), await ticket.take()

    taken, after = asyncio.run(read_late())
    piece = joined([update.emission for update in taken], include_stop=False)
    assert piece.tokens == tuple(range(1000))
    assert piece.text.split() == [str(n) for n in range(1000)]
    assert (piece.finish, after) == ("stop", [])


def test_a_request_that_takes_too_long_is_ended(folder: Path) -> None:
    service, model = parrot_service(folder / "plain", 0, timeout=0.3)
    model.pause = 0.05
    body = say("hello world " * 50)
    with start(service) as running:
        assert httpx.post(running.url + CHAT, json=body, timeout=30).status_code == 408
        with httpx.stream("POST", running.url + CHAT, json=body | {"stream": True}, timeout=30) as response:
            lines = [line for line in response.iter_lines() if line]
        assert '"timeout"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert running.idle(2.0)
