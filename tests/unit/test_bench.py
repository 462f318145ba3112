"""The benches on tiny shapes: what they report is complete and consistent. Never how fast it was."""

import math
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from model_files import config, write_folder
from native_kernels import kernels
from rich.console import Console

from bitdraft.engine.curve import Grid
from bitdraft.errors import UsageError
from bitdraft.formats import KV_FORMATS
from bitdraft.measure import kernels as bench
from bitdraft.measure.steps import bench_step, render_steps
from bitdraft.ops import hardware, native

TINY = bench.Sizes(
    outputs=64,
    inputs=128,
    rows=(1, 3),
    few_rows=(1, 2),
    heads=4,
    kv_heads=2,
    head_dim=16,
    contexts=(16, 40),
    vocabulary=300,
    distinct=1 << 16,
    read=1 << 20,
)


def printed(render, result) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        render(result, console)
    return capture.get()


def ticking():
    """A clock on which every reading is 0.5 s after the one before."""
    ticks = count()
    return lambda: next(ticks) * 0.5


@pytest.fixture(scope="module")
def speeds() -> dict:
    kernels("scalar", 1)  # fails with the reason where there is no library
    seen = []
    result = bench.bench_kernels(ticking(), 3.0, lambda *said: seen.append(said), TINY)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    return result


def test_every_operation_format_and_size_is_timed(speeds):
    timed = {(k["operation"], k["data"], k["context"], k["rows"]) for k in speeds["kernels"]}
    products = {("norm_linear", name, None, rows) for name in bench.FORMATS for rows in (1, 3)}
    attention = {("attention", name, context, rows) for name in KV_FORMATS for context in (16, 40) for rows in (1, 2)}
    assert timed == products | attention | {("softmax", "float32", None, rows) for rows in (1, 2)}
    assert len(timed) == len(speeds["kernels"])


def test_rates_and_shares_follow_from_the_times(speeds):
    """By the clock every call takes half a second."""
    limits = speeds["limits"]
    for k in speeds["kernels"]:
        assert all(math.isfinite(k[name]) and k[name] > 0 for name in ("ms", "gb_s", "gop_s", "of_read", "of_fp32"))
        assert k["of_read"] == pytest.approx(k["gb_s"] / limits["read_gb_s"])
        assert k["of_fp32"] == pytest.approx(k["gop_s"] / limits["fp32_gop_s"])
    (one,) = [k for k in speeds["kernels"] if (k["data"], k["rows"]) == ("w4a8", 3)]
    size = 64 * 128 // 2 + 64 * 128 // 32 * 2
    assert one["ms"] == 500
    assert one["gb_s"] == pytest.approx(size / 0.5 / 1e9)
    assert one["gop_s"] == pytest.approx(2 * 3 * 64 * 128 / 0.5 / 1e9)


def test_every_call_is_on_the_memory_that_was_used_longest_ago():
    used = []
    calls = [partial(used.append, copy) for copy in range(4)]
    cases = [bench._Case("softmax", "float32", rows, None, calls, 1, 1) for rows in (1, 6)]
    speeds = list(bench._speeds(cases, 0.0, hardware.Limits(1.0, 1.0), ticking()))
    assert [speed.rows for speed in speeds] == [1, 6]
    assert used == [i % 4 for i in range(2 * (bench.FEWEST + 1))]


def test_the_table_has_a_line_for_each(speeds):
    text = printed(bench.render_kernels, speeds)
    assert "GB/s read from memory" in text
    assert len([line for line in text.splitlines() if "%" in line]) == len(speeds["kernels"])


def test_softmax_and_limits_are_those_of_the_kernels():
    probe = hardware.Probe()
    logits = torch.randn(3, 100)
    # The kernels' exponential is a polynomial with an error of some units in the last place.
    torch.testing.assert_close(probe.softmax(logits), logits.softmax(-1), rtol=1e-5, atol=1e-7)
    limits = probe.limits(1 << 20, 2)
    assert limits.read > 0
    assert limits.operations > 0


def test_without_kernels_there_is_nothing_to_bench(monkeypatch):
    monkeypatch.setattr(native, "default", lambda: None)
    with pytest.raises(UsageError, match="bitdraft doctor"):
        bench.bench_kernels(ticking(), 1.0, lambda *said: None, TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny", config())


def test_a_model_s_steps_are_timed_by_rows_context_and_batch(folder):
    grid = Grid((1, 2, 5), (16, 48), (1, 2), 1)
    result = bench_step(str(folder), "w4a8", [], ticking(), 1e6, lambda *said: None, grid=grid)
    assert set(result) == {"isa", "threads", "model", "format", "kv", "steps"}
    assert (result["model"], result["format"]) == (str(folder), "w4a8")
    assert {(s["rows"], s["context"], s["batch"]) for s in result["steps"]} == {
        (rows, context, batch) for rows in (1, 2, 5) for context in (16, 48) for batch in (1, 2)
    }
    assert all(step["ms"] == 500 for step in result["steps"])
    text = printed(render_steps, result)
    assert "2 x 48 tokens" in text
    assert text.count("500.00 (1.00)") == 12


def test_the_context_of_the_model_is_the_longest(folder):
    result = bench_step(
        str(folder), "bf16", [], ticking(), 1e6, lambda *said: None, grid=Grid((1, 4), (64, 4096), (1,), 1)
    )
    assert {step["context"] for step in result["steps"]} == {64, 124}


def test_the_table_leaves_out_what_there_was_no_time_for():
    steps = [{"rows": 1, "context": 64, "batch": 1, "ms": 2.0}, {"rows": 8, "context": 64, "batch": 1, "ms": 3.0}]
    more = {"rows": 8, "context": 256, "batch": 1, "ms": 4.0}
    result = {"isa": "avx2", "threads": 2, "model": "m", "format": "bf16", "kv": "bf16", "steps": [*steps, more]}
    text = printed(render_steps, result)
    assert "3.00 (1.50)" in text
    assert "4.00" in text
    assert "4.00 (" not in text, "there is no step of one row to compare with"
