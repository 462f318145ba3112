"""What a server refuses, how it says so, and that nothing a client sends brings it down."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parrot import parrot_service
from running import Running, start
from schemathesis.specs.openapi.checks import positive_data_acceptance
from tiny_pair import start_tiny

from bitdraft.serve.openapi import description
from bitdraft.serve.schemas import ChatRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A parrot with a key, a short queue and short bodies."""
    folder = tmp_path_factory.mktemp("small") / "model"
    service, _ = parrot_service(folder, 2, api_key="secret", max_queue=2, max_body=4000, origins=("https://a.example",))
    with start(service) as running:
        yield running


KEY = {"authorization": "Bearer secret"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": "a", "top_p_typo": 1}, "top_p_typo", "unknown field 'top_p_typo'"),
        ({"prompt": "a", "stream_options": {"usage": True}, "stream": True}, "stream_options.usage", "unknown field"),
        ({"max_tokens": 3}, "prompt", "missing"),
        ({"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "number"),
        ({"prompt": "a", "temperature": True}, "temperature", "number"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"prompt": "a", "stop_token_ids": [99999]}, "stop_token_ids", "99999"),
        ({"prompt": [1, 99999]}, "prompt", "99999"),
        ({"prompt": ""}, "prompt", "0 tokens"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "Expected the same"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "null"),
        ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "0 to max_tokens"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema", "no schema"),
        ({"prompt": "a", "guided_regex": "("}, "guided_regex", "regular expression"),
        ({"prompt": "a", "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "Expected one"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"prompt": "a", "model": "gpt-5"}, "model", "tiny"),
        ({"prompt": "a", "domain": "a b"}, "domain", "pattern"),
    ],
)
def test_what_cannot_be_used_is_named(drafted: Running, body: dict, param: str, words: str) -> None:
    error = error_of(httpx.post(drafted.url + COMPLETIONS, json=body), 404 if "model" in body else 400)
    assert error["param"].startswith(param)
    assert words in error["message"]
    assert error["type"] == ("not_found_error" if "model" in body else "invalid_request_error")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 1}}, "chat_template"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
            },
            "tools",
        ),
    ],
)
def test_what_cannot_be_used_in_a_chat_is_named(drafted: Running, body: dict, param: str) -> None:
    assert error_of(httpx.post(drafted.url + CHAT, json=body), 400)["param"].startswith(param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"a"',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
    ],
)
def test_bodies_that_are_no_json_object_are_refused(drafted: Running, raw: bytes) -> None:
    answer = httpx.post(drafted.url + COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    error_of(answer, 400)


def test_a_lenient_server_drops_unknown_fields(folders: Path) -> None:
    body = {"prompt": "a", "temperature": 0, "frobnicate": {"a": [1]}, "stream_options": {"x": 1}, "stream": True}
    with start_tiny(folders, None, lenient=True) as running:
        assert httpx.post(running.url + COMPLETIONS, json=body).status_code == 200
        error_of(httpx.post(running.url + COMPLETIONS, json=body | {"temperature": "x"}), 400)


def test_the_key_is_wanted_everywhere_but_for_health(small: Running) -> None:
    for path in ("/v1/models", "/metrics", "/info", "/version", "/openapi.json"):
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            error = error_of(httpx.get(small.url + path, headers=headers), 401)
            assert error["code"] == "invalid_api_key"
        assert httpx.get(small.url + path, headers=KEY).status_code == 200
    assert httpx.get(f"{small.url}/health").status_code == 200


def test_pages_of_other_origins_are_kept_out(small: Running, drafted: Running) -> None:
    """No CORS headers by default; and no body that a browser would send without asking."""
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in httpx.get(f"{drafted.url}/health", headers=origin).headers
    assert httpx.get(f"{small.url}/health", headers=origin).headers["access-control-allow-origin"] == origin["origin"]
    other = httpx.get(f"{small.url}/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    plain = httpx.post(drafted.url + COMPLETIONS, content=b'{"prompt": "a"}', headers={"content-type": "text/plain"})
    error_of(plain, 415)


def test_long_bodies_are_refused(small: Running) -> None:
    long = json.dumps({"prompt": "a" * 5000}).encode()
    headers = KEY | {"content-type": "application/json"}
    error_of(httpx.post(small.url + COMPLETIONS, content=long, headers=headers), 413)
    chunks = iter([long[:3000], long[3000:]])  # without a length
    error_of(httpx.post(small.url + COMPLETIONS, content=chunks, headers=headers), 413)


def test_a_full_queue_says_when_to_come_again(tmp_path: Path) -> None:
    service, model = parrot_service(tmp_path / "m", 0, max_queue=2)
    model.pause = 0.05
    body = {"messages": [{"role": "user", "content": "hello world" * 4}], "temperature": 0, "n": 2}
    with start(service) as running:
        threads = [threading.Thread(target=running.post, args=(CHAT,), kwargs=body) for _ in range(3)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10
        while service.worker.open < 6 and time.monotonic() < end:
            time.sleep(0.01)
        refused = httpx.post(running.url + CHAT, json=body)
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        model.pause = 0.0
        for thread in threads:
            thread.join(30)
        assert running.idle()
        assert error_of(httpx.post(running.url + CHAT, json=body | {"n": 7}), 400)["param"] == "n"
        assert running.post(CHAT, **body)["choices"]


def test_request_ids_are_honoured_and_made(drafted: Running) -> None:
    given_id = httpx.get(f"{drafted.url}/health", headers={"x-request-id": "abc-1"})
    assert given_id.headers["x-request-id"] == "abc-1"
    made = [httpx.get(f"{drafted.url}/health", headers={"x-request-id": bad}) for bad in ("a b", "x" * 200)]
    assert len({answer.headers["x-request-id"] for answer in made}) == 2


def test_unknown_paths_and_methods_have_the_shape_of_errors(drafted: Running) -> None:
    error_of(httpx.get(f"{drafted.url}/v1/nothing"), 404)
    answer = httpx.get(drafted.url + COMPLETIONS)
    error_of(answer, 405)
    assert "POST" in answer.headers["allow"]


# Nothing brings it down


@pytest.fixture(scope="module")
def short(folders: Path) -> Iterator[Running]:
    """Answers quickly whatever it is asked for: a short context, and few answers at once."""
    with start_tiny(folders, None, max_model_len=48, max_queue=2) as running:
        yield running


values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 400) | st.floats(-3, 3) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def bodies(model: type[CompletionRequest] | type[ChatRequest], required: dict[str, Any]) -> st.SearchStrategy[dict]:
    names = sorted(set(model.model_fields) - set(required))
    some = st.dictionaries(st.sampled_from(names), values, max_size=4)
    return some.map(lambda fields: {"max_tokens": 4} | required | fields)


@given(
    st.one_of(
        st.tuples(st.just(COMPLETIONS), bodies(CompletionRequest, {"prompt": "hello"})),
        st.tuples(st.just(CHAT), bodies(ChatRequest, {"messages": [{"role": "user", "content": "hello"}]})),
        st.tuples(st.sampled_from(["/tokenize", "/detokenize"]), values),
    )
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_no_body_is_an_error_of_the_server(short: Running, case: tuple[str, Any]) -> None:
    answer = httpx.post(short.url + case[0], json=case[1], timeout=60)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error_of(answer, answer.status_code)


SCHEMA = schemathesis.openapi.from_dict(description())


@SCHEMA.parametrize()
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
def test_the_description_tells_the_truth(case: schemathesis.Case, short: Running) -> None:
    """What the description forbids is refused; whatever is answered is answered as it says.

    Not all that it allows is accepted: a schema knows nothing of vocabularies and contexts.
    """
    case.call_and_validate(base_url=short.url, excluded_checks=[positive_data_acceptance])


def test_the_server_is_well_after_all_that(short: Running) -> None:
    assert short.idle()
    assert short.complete("hello")["choices"]
