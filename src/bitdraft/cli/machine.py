"""Verbs about this machine: doctor, bench kernels, bench step."""

import json
import os
from time import perf_counter
from typing import Annotated

import typer

from .app import app, bench
from .options import KV, Json, NoCache
from .terminal import interruptible, out, progress_bars


@app.command(epilog="Example: bitdraft doctor my-draft --draft-of my-target")
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Model to examine: a name, a folder, a .gguf or a hub id; none: the machine.")
    ] = None,
    against: Annotated[str | None, typer.Option(help="The original that MODEL was made from.")] = None,
    draft_of: Annotated[str | None, typer.Option(help="A target that MODEL is to draft for.")] = None,
    format: Annotated[
        str | None, typer.Option("--format", help="Bring MODEL into this format first; its original is MODEL itself.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 1 if a problem of MODEL is found.")] = False,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a quantised model, by layer, and what to do; without MODEL, what this machine offers."""
    if model is not None:
        _examine_model(model, against, draft_of, format, check, as_json)
        return
    from ..errors import UsageError
    from ..measure.doctor import examine, render_checkup

    if against or draft_of or format or check:
        raise UsageError(
            "--against, --draft-of, --format and --check are about a model, and none was given. Expected a model's "
            "name, as in bitdraft doctor my-model --against my-original; without them the machine is examined."
        )
    found = examine(os.environ)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        render_checkup(found, out)
    if not found.well:
        raise typer.Exit(1)


def _examine_model(
    model: str, against: str | None, draft_of: str | None, format: str | None, check: bool, as_json: bool
) -> None:
    from ..measure.model_doctor import examine_by_name
    from ..measure.model_doctor_report import render_model
    from ..measure.workload import calibration_texts

    with interruptible("Nothing is kept."), progress_bars() as bars:
        found = examine_by_name(model, against, draft_of, format, calibration_texts(), bars)
    if as_json:
        print(json.dumps(found.as_json(), ensure_ascii=False))
    else:
        render_model(found, out)
    if check and not found.well:
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
