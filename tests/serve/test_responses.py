"""`/v1/responses`: OpenAI's client is served, its events are complete, and nothing is kept."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from parrot import HERMES, THINKING, parrot_service
from running import Running, start

from bitdraft.serve.responses_request import ResponsesRequest, as_chat

PATH = "/v1/responses"
TEXT = "hello world 1 2 漢字 hello wor"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses")


@pytest.fixture(scope="module", params=[0, 4])
def parrot(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    with start(parrot_service(folder / "plain", request.param)[0]) as running:
        yield running


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def events_of(running: Running, **body: object) -> list[dict]:
    """The events of a stream, whose names and numbers must be right."""
    with httpx.stream("POST", running.url + PATH, json=body | {"stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        blocks = "".join(answer.iter_text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def comparable(response: dict) -> dict:
    """A response without its names and times."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    kept = ("status", "incomplete_details", "usage", "error", "text", "tools", "tool_choice", "instructions")
    return {"output": items} | {name: response[name] for name in kept}


def test_openai_s_client_gets_a_response(parrot: Running) -> None:
    client = client_of(parrot)
    response = client.responses.create(model="parrot", input=TEXT, temperature=0, store=False)
    assert response.output_text == TEXT
    assert (response.status, response.object, response.model) == ("completed", "response", "parrot")
    tokens = parrot.service.model.tokenizer.encode(TEXT, add_bos=False)
    assert response.usage.output_tokens == len(tokens) + 1
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    chat = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}],
        temperature=0,
    )
    messages = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]
    answer = client.responses.create(model="parrot", input=messages, instructions="be brief", temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage.input_tokens == chat.usage.prompt_tokens


def test_openai_s_client_gets_a_stream(parrot: Running) -> None:
    client = client_of(parrot)
    whole = client.responses.create(model="parrot", input=TEXT, temperature=0)
    events = list(client.responses.create(model="parrot", input=TEXT, temperature=0, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == TEXT
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert comparable(events[-1].response.to_dict()) == comparable(whole.to_dict())
    with client.responses.stream(model="parrot", input=TEXT, temperature=0) as stream:
        assert stream.get_final_response().output_text == TEXT


def test_an_answer_that_is_cut_is_incomplete(parrot: Running) -> None:
    body = {"input": TEXT, "temperature": 0, "max_output_tokens": 3}
    whole = parrot.post(PATH, **body)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 3
    assert whole["output"][0]["status"] == "incomplete"
    events = events_of(parrot, **body)
    assert events[-1]["type"] == "response.incomplete"
    assert comparable(events[-1]["response"]) == comparable(whole)
    nothing = parrot.post(PATH, **body | {"max_output_tokens": 0})
    assert [item["type"] for item in nothing["output"]] == ["message"]


def test_a_call_and_its_output(folder: Path) -> None:
    with start(parrot_service(folder / "hermes", 4, template=HERMES)[0]) as running:
        client = client_of(running)
        asked = {"model": "parrot", "input": f"See: {CALL}", "tools": [WEATHER], "temperature": 0}
        response = client.responses.create(**asked)
        message, call = response.output
        assert message.content[0].text.strip() == "See:"
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Köln"})
        events = events_of(running, **asked)
        assert comparable(events[-1]["response"]) == comparable(response.to_dict())
        pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
        done = next(e for e in events if e["type"] == "response.function_call_arguments.done")
        assert "".join(pieces) == done["arguments"] == call.arguments
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        more = [{"role": "user", "content": asked["input"]}, *[item.to_dict() for item in response.output], output]
        again = client.responses.create(**asked | {"input": [*more, {"role": "user", "content": "thanks"}]})
        assert again.output_text == "thanks"


def test_calls_and_outputs_are_a_chat_s() -> None:
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(2)]
    output = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "well"}]}
    body = ResponsesRequest(input=[{"role": "user", "content": "a"}, said, *calls, output])
    first, second, third = [message.model_dump(exclude_none=True) for message in as_chat(body).messages]
    assert first == {"role": "user", "content": "a"}
    assert (second["content"], [call["id"] for call in second["tool_calls"]]) == ("well", ["c0", "c1"])
    assert third == {"role": "tool", "content": "x", "tool_call_id": "c1"}


def test_reasoning_is_an_item_of_its_own(folder: Path) -> None:
    with start(parrot_service(folder / "thinking", 4, template=THINKING)[0]) as running:
        body = {"input": "<think>1 2 hello</think>world", "temperature": 0}
        whole = running.post(PATH, **body)
        assert [(i["type"], i["content"][0]["text"].strip()) for i in whole["output"]] == [
            ("reasoning", "1 2 hello"),
            ("message", "world"),
        ]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        events = events_of(running, **body)
        assert comparable(events[-1]["response"]) == comparable(whole)
        assert "response.reasoning_text.delta" in [event["type"] for event in events]


def test_a_schema_is_followed(drafted: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}}
    answer = client_of(drafted).responses.create(
        model="tiny", input="hi", text=text, max_output_tokens=200, extra_body={"seed": 1}
    )
    if answer.status == "completed":
        assert json.loads(answer.output_text) == {"a": "x"}
    assert answer.text.format.schema_ == schema


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": "a" * 9000}, "input"),
    ],
)
def test_what_cannot_be_is_refused_by_name(parrot: Running, body: dict, param: str) -> None:
    answer = httpx.post(parrot.url + PATH, json={"input": "hello"} | body, timeout=30)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(param)
    assert "response_format" not in error["message"]


def test_a_failure_is_told(folder: Path) -> None:
    service, model = parrot_service(folder / "plain", 0)
    with start(service) as running:
        model.broken = RuntimeError("out of luck")
        events = events_of(running, input=TEXT, temperature=0)
        assert events[-1]["type"] == "response.failed"
        assert "out of luck" in events[-1]["response"]["error"]["message"]
        assert running.idle()
