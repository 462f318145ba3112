"""Traces of requests for OpenTelemetry, by its conventions for generative AI. Off unless an endpoint is set.

A call is a span of kind server with its client's context for a parent; below it each answer has a span for waiting, one
for reading the prompt until the first token, and one for writing. All are made when the call has ended, from the times
that were taken anyway: a step never waits for them.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import time_ns
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .progress import Progress
from .respond import Call
from .worker import Ticket

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of OpenTelemetry that say where traces go."""
_OPERATIONS = {"chatcmpl": "chat", "cmpl": "text_completion"}


@dataclass(frozen=True)
class Tracing:
    """Makes spans.

    Attributes:
        tracer: of OpenTelemetry.
        offset: nanoseconds of Unix time at zero of the worker's clock.
    """

    tracer: "Tracer"
    offset: int

    @classmethod
    def starting(cls, tracer: "Tracer", now: float) -> "Tracing":
        """Begin at `now`, in seconds of the worker's clock."""
        return cls(tracer, time_ns() - int(now * 1e9))

    def record(self, call: Call, ticket: Ticket, headers: Mapping[str, str], now: float) -> None:
        """Make the spans of a call that has ended at `now`."""
        from opentelemetry import propagate, trace

        answers = list(ticket.progress.values())
        operation = _OPERATIONS[call.form.prefix]
        span = self.tracer.start_span(
            f"{operation} {call.model}",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            start_time=self._at(min(answer.arrived for answer in answers)),
            attributes=_attributes(call, ticket, operation),
        )
        if any(answer.finish == "error" for answer in answers):
            span.set_attribute("error.type", "engine_error")
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for index, answer in enumerate(answers):
            self._parts(answer, index, inside, now)
        span.end(self._at(now))

    def _parts(self, answer: Progress, index: int, inside: Any, now: float) -> None:
        admitted = now if answer.admitted is None else answer.admitted
        first = now if answer.first is None else answer.first
        last = now if answer.last is None else answer.last
        decode = {"gen_ai.usage.output_tokens": answer.tokens, "bitdraft.steps": len(answer.steps)}
        parts: list[tuple[str, float, float, dict[str, Any]]] = [("queue", answer.arrived, admitted, {})]
        if answer.admitted is not None:
            prefill = {"gen_ai.usage.input_tokens": answer.prompt_tokens, "bitdraft.cached_tokens": answer.cached}
            parts.append(("prefill", admitted, first, prefill))
        if answer.first is not None:
            parts.append(("decode", first, last, decode))
        for name, start, end, more in parts:
            attributes = {"bitdraft.choice": index, **more}
            span = self.tracer.start_span(name, inside, start_time=self._at(start), attributes=attributes)
            span.end(self._at(end))

    def _at(self, seconds: float) -> int:
        return self.offset + int(seconds * 1e9)


def _attributes(call: Call, ticket: Ticket, operation: str) -> dict[str, Any]:
    usage = call.usage(ticket)
    sampling = call.groups.requests[0][0][0].sampling
    speculation = call.metrics(ticket)["speculative_decoding"]
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "bitdraft",
        "gen_ai.request.model": call.model,
        "gen_ai.request.choice.count": len(ticket.progress),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": call.model,
        "gen_ai.response.finish_reasons": [answer.finish or "abort" for answer in ticket.progress.values()],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "bitdraft.drafted_tokens": speculation["num_draft_tokens"],
        "bitdraft.accepted_tokens": speculation["num_accepted_draft_tokens"],
    }


def configured_tracer(environment: Mapping[str, str] = os.environ) -> "Tracer | None":
    """A tracer that sends to the endpoint that the environment names; None where it names none.

    Raises:
        UsageError: there is an endpoint, and OpenTelemetry is not installed.
    """
    if not any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_SDK_DISABLED", "") == "true":
        return None
    if importlib.util.find_spec("opentelemetry") is None:
        raise UsageError(
            f"{ENDPOINTS[1]} asks for traces, and OpenTelemetry is not installed. Install bitdraft[otel], or unset it."
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": environment.get("OTEL_SERVICE_NAME", "bitdraft")})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("bitdraft")
