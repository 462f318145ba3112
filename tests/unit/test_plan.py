"""plan.json: written whole, read strictly."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_trace import DRAFTS, Draft, Spec, synthetic_trace

from bitdraft.errors import UsageError
from bitdraft.measure.plan import Plan
from bitdraft.measure.report import build_plan, summarize
from bitdraft.measure.report.summary import Summary


def summary(spec: Spec) -> Summary:
    return summarize(synthetic_trace(spec), np.random.default_rng(0), 100)


def test_plan_holds_the_advice_and_survives_the_disk(tmp_path: Path) -> None:
    plan = build_plan(summary(Spec(drafts={"w8a8": DRAFTS["w8a8"]})))
    assert plan.draft_format == "w8a8"
    assert set(plan.k) == {"code", "chat"}
    assert plan.acceptance is not None
    assert all(len(hazards) >= plan.k[workload] for workload, hazards in plan.acceptance.items())
    assert all(0 < chance <= 1 for hazards in plan.acceptance.values() for chance in hazards)
    assert plan.machine == "AMD EPYC 9R14, 2 cores, 24 GiB"
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.speedup.value == pytest.approx(plan.speedup.value, rel=1e-5)
    assert replace(read, speedup=plan.speedup) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_no_interval_is_null(tmp_path: Path) -> None:
    build_plan(summary(Spec(prompts=1))).save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["speedup"]["low"] is None
    assert Plan.load(tmp_path / "plan.json").speedup.low is None


def test_do_not_speculate_is_a_plan_too() -> None:
    plan = build_plan(summary(Spec(acceptance={"code": 0.4}, drafts={"bf16": Draft(1.0, 30.0, 16.0)})))
    assert (plan.verdict, plan.draft_format, plan.default_k, plan.k) == ("do not speculate", None, 0, {"code": 0})


def test_nothing_timed_is_no_plan() -> None:
    trace = replace(synthetic_trace(Spec(prompts=3)), costs=())
    with pytest.raises(UsageError, match="--resume"):
        build_plan(summarize(trace, np.random.default_rng(0), 50))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2. This bitdraft reads version 1"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"default_k": -1}, "Expected counts of at least 0"),
        ({"draft_format": None}, "only 0 without a draft format"),
        ({"k": {"code": "four"}}, "k.code is 'four'. Expected a whole number"),
        ({"sampling": {}}, "sampling: the field 'frequency_penalty' is missing"),
        ({"verdict": "maybe"}, "Expected one of"),
    ],
)
def test_a_plan_is_read_strictly(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "plan.json"
    build_plan(summary(Spec(prompts=3, drafts={"w8a8": DRAFTS["w8a8"]}))).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        Plan.load(path)


def test_what_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"version": 1,')
    with pytest.raises(UsageError, match="not JSON"):
        Plan.load(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(UsageError, match="version is None"):
        Plan.load(tmp_path / "list.json")
    with pytest.raises(UsageError, match="cannot write"):
        build_plan(summary(Spec(prompts=3))).save(tmp_path / "nowhere" / "plan.json")
