"""Verbs about this machine: doctor, bench kernels, bench step."""

import json
import os
from time import perf_counter
from typing import Annotated

import typer

from .app import app, bench
from .options import KV, Json, NoCache
from .terminal import interruptible, out, progress_bars


@app.command(epilog="Example: bitdraft doctor")
def doctor(as_json: Json = False) -> None:
    """Say what this machine offers, what of it is in use, and what to do about the rest; exit code 1 if it is slow."""
    from ..measure.doctor import examine, render_checkup

    found = examine(os.environ)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        render_checkup(found, out)
    if not found.well:
        raise typer.Exit(1)


@bench.command("kernels", epilog="Example: bitdraft bench kernels")
def bench_kernels(
    seconds: Annotated[float, typer.Option(min=0, help="Time to spend on timing; preparing takes some more.")] = 20.0,
    as_json: Json = False,
) -> None:
    """Time each fused operation, beside the most that this machine reads and computes in a second."""
    from ..measure import kernels

    with interruptible("Nothing is kept."), progress_bars() as bars:
        result = kernels.bench_kernels(perf_counter, seconds, bars)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        kernels.render_kernels(result, out)


@bench.command("step", epilog="Example: bitdraft bench step smollm2-135m --format w4a8")
def bench_step(
    model: Annotated[str, typer.Argument(help="Model to time: a name, a folder, a .gguf or a hub id.")],
    format: Annotated[str, typer.Option("--format", help="Format to time it in.")] = "bf16",
    kv: KV = None,
    seconds: Annotated[float, typer.Option(min=0, help="Time to spend on timing, at most.")] = 60.0,
    no_cache: NoCache = False,
    as_json: Json = False,
) -> None:
    """Time a model's steps by rows, context and sequences: what verifying and drafting cost here."""
    from ..measure import steps
    from ..measure.workload import calibration_texts

    with interruptible("Nothing is kept."), progress_bars() as bars:
        result = steps.bench_step(model, format, calibration_texts(), perf_counter, seconds, bars, not no_cache, kv=kv)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        steps.render_steps(result, out)
