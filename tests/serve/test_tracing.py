"""Traces of requests, read back from OpenTelemetry's own exporter in memory."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from parrot import parrot_service
from running import Running, start

from bitdraft.errors import UsageError
from bitdraft.serve import tracing

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_traces_are_off_unless_an_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing.importlib.util, "find_spec", lambda name: None)
    assert tracing.configured_tracer({}) is None
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    assert tracing.configured_tracer(asked | {"OTEL_SDK_DISABLED": "true"}) is None
    with pytest.raises(UsageError, match=r"bitdraft\[otel\]"):
        tracing.configured_tracer(asked)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Running, object]]:
    """A parrot whose spans are kept."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    service, _ = parrot_service(tmp_path / "m", 2)
    service.tracing = tracing.Tracing.starting(provider.get_tracer("test"), service.clock())
    with start(service) as running:
        yield running, kept


def test_a_call_is_a_span_with_its_parts(traced: tuple[Running, object]) -> None:
    running, kept = traced
    body = {"messages": [{"role": "user", "content": "hello world 1 2"}], "temperature": 0, "n": 2, "max_tokens": 9}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = httpx.post(running.url + CHAT, json=body, headers=headers).json()
    *parts, call = kept.get_finished_spans()
    assert call.name == "chat parrot"
    assert (f"{call.context.trace_id:032x}", f"{call.parent.span_id:016x}") == (TRACE, PARENT)
    assert call.attributes["gen_ai.operation.name"] == "chat"
    assert call.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert call.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert call.attributes["gen_ai.request.max_tokens"] == 9
    assert list(call.attributes["gen_ai.response.finish_reasons"]) == [
        choice["finish_reason"] for choice in answer["choices"]
    ]
    assert call.attributes["bitdraft.drafted_tokens"] > 0
    assert [part.name for part in parts] == ["queue", "prefill", "decode"] * 2
    assert {part.parent.span_id for part in parts} == {call.context.span_id}
    for queue, prefill, decode in (parts[:3], parts[3:]):
        assert call.start_time <= queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.start_time < prefill.end_time == decode.start_time <= decode.end_time <= call.end_time
    assert not any("hello" in str(span.attributes) for span in (*parts, call)), "no text of users in traces"


def test_a_stream_and_a_failure_are_traced(traced: tuple[Running, object]) -> None:
    running, kept = traced
    running.stream("/v1/completions", prompt="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", max_tokens=3)
    end = time.monotonic() + 5  # the client sees a stream's end before the server is done with it
    while not kept.get_finished_spans() and time.monotonic() < end:
        time.sleep(0.01)
    assert kept.get_finished_spans()[-1].attributes["gen_ai.operation.name"] == "text_completion"
    running.service.worker._engine.target.broken = RuntimeError("out of luck")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert httpx.post(running.url + CHAT, json=body).status_code == 500
    call = kept.get_finished_spans()[-1]
    assert call.attributes["error.type"] == "engine_error"
    assert not call.status.is_ok
