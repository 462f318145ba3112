"""What verbs print through: figures on standard output, progress and warnings on standard error."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

out, err = Console(), Console(stderr=True)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Turn Ctrl-C into a message and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(f"interrupted. {message}")
        raise typer.Exit(130) from None


@contextmanager
def progress_bars() -> Iterator[Callable[[int, int | None, str], None]]:
    """Bars on standard error, one for each label that is reported to the function that this yields."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as bars:
        tasks: dict[str, Any] = {}

        def report(done: int, total: int | None, label: str) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield report


def print_table(what: str, headings: tuple[str, ...], rows: Sequence[tuple[str, ...]], as_json: bool) -> None:
    """Print rows under headings, or as JSON: {what: [{heading: cell, ...}, ...]}."""
    if as_json:
        print(json.dumps({what: [dict(zip(headings, row, strict=True)) for row in rows]}, ensure_ascii=False))
        return
    table = Table(*headings, box=None, header_style="bold")
    for row in rows:
        table.add_row(*row)
    out.print(table)
