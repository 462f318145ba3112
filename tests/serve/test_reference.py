"""The reference page against the code: every field, endpoint and metric, and no other."""

import re
from pathlib import Path

from bitdraft.engine.engine import Load
from bitdraft.serve.metrics import Metrics
from bitdraft.serve.openapi import description
from bitdraft.serve.progress import Progress
from bitdraft.serve.responses_request import ResponsesRequest
from bitdraft.serve.schemas import ChatRequest, CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs/reference/server.md").read_text(encoding="utf-8")


def test_every_field_is_documented() -> None:
    for model in (CompletionRequest, ChatRequest, ResponsesRequest):
        assert [name for name in model.model_fields if f"`{name}`" not in PAGE] == []


def test_every_endpoint_is_documented_and_described() -> None:
    shown = set(re.findall(r"`(GET|POST) (/[\w/.]*)`", PAGE))
    described = {(method.upper(), path) for path, methods in description()["paths"].items() for method in methods}
    assert shown == described | {("GET", "/"), ("GET", "/web/...")}, "the page is none of the programs' business"


def test_every_metric_is_documented() -> None:
    metrics = Metrics()
    metrics.end(Progress(1, "", 0.0, finish="stop"), 1.0)
    names = re.findall(rb"^# TYPE (\S+)", metrics.text(Load(0, 0, 0, 0, 0, 0)), re.MULTILINE)
    missing = []
    for name in (name.decode() for name in names):
        short = re.sub(r"^(bitdraft|vllm:)_?spec_decode", "", name)
        known = name in PAGE or f"`{short}" in PAGE or name.startswith("vllm:") or name.endswith("_created")
        missing += [] if known else [name]
    assert missing == []
