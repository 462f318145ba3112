"""`bitdraft bench step`: the step-cost curve of one model in one format, on a larger grid than a load has time for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..engine.curve import Grid, backend, measure_curve
from ..formats import Recipe
from ..models.kv import BLOCK_SIZE
from ..quantize.load import Progress, load_model, open_source

GRID = Grid(rows=(*range(1, 9), 16), contexts=(256, 1024, 4096), batches=(1, 2, 4), repeats=7)


def bench_step(
    model: str,
    format: str,
    calibration: Sequence[str],
    clock: Callable[[], float],
    seconds: float,
    progress: Progress,
    use_cache: bool = True,
    grid: Grid = GRID,
    kv: str | None = None,
) -> dict[str, Any]:
    """Load a model and time its steps.

    Args:
        model: name, folder, .gguf or hub id.
        format: a recipe, such as 'w4a16-awq'.
        calibration: texts for recipes that need them.
        clock: seconds.
        seconds: time to spend on timing, at most; steps for which there is no time are left out.
        progress: called while files are fetched, weights quantised and steps timed.
        use_cache: read repacked weights from disk where they were kept, and keep them.
        grid: what to time, as far as the model's context reaches.
        kv: format of keys and values; None for bf16, or f32 beside the format f32.

    Returns:
        what `--json` prints: isa, threads, model, format, kv, and steps with rows, context, batch and ms.

    Raises:
        UsageError: a model or a format that cannot be used, or a context that is too short for a step.
    """
    recipe, source = Recipe.parse(format), open_source(model, progress, use_cache)
    longest = min(source.checkpoint.config.context_length, max(grid.contexts) + max(grid.rows))
    loaded = load_model(
        source,
        recipe,
        kv_tokens=max(grid.batches) * (longest + BLOCK_SIZE),
        rng=np.random.default_rng(0),
        calibration=[source.tokenizer.encode(text) for text in calibration],
        kv=kv,
        progress=progress,
    )
    curve = measure_curve(loaded, clock, seconds, grid, progress)
    isa, threads = backend()
    steps = [asdict(step) for step in curve.steps]
    about = {"isa": isa, "threads": threads, "model": model, "format": recipe.name, "kv": loaded.pool.format.name}
    return {**about, "steps": steps}


def render_steps(result: Mapping[str, Any], console: Console) -> None:
    """Print what `bench_step` returned: milliseconds, and beside them how often the step of one row they are."""
    console.print(
        f"{result['model']} in {result['format']}, keys and values in {result['kv']}, {result['isa']}, "
        f"{result['threads']} threads. "
        "Milliseconds of a step, and in brackets how many times a step of one row.\n",
        highlight=False,
        soft_wrap=True,
    )
    ms = {(step["batch"], step["context"], step["rows"]): step["ms"] for step in result["steps"]}
    lines = sorted({key[:2] for key in ms})
    table = Table(box=None, header_style="bold")
    table.add_column("rows", justify="right")
    for batch, context in lines:
        table.add_column(f"{batch} x {context} tokens", justify="right")
    for rows in sorted({key[2] for key in ms}):
        cells = [_cell(ms.get((*line, rows)), ms.get((*line, 1))) for line in lines]
        table.add_row(str(rows), *cells)
    console.print(table)


def _cell(ms: float | None, one_row: float | None) -> str:
    if ms is None:
        return ""
    return f"{ms:.2f}" if one_row is None else f"{ms:.2f} ({ms / one_row:.2f})"
