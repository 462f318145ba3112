"""The report as Markdown: the same words and figures, for an issue, a log or a pull request."""

from collections.abc import Callable, Sequence

from ..numbers import UNKNOWN, count, milliseconds, percent, size, small_span, times
from ..stats import Interval
from .summary import NO_DRAFT, Row, Summary, lengths


def render_markdown(summary: Summary) -> str:
    """The whole report."""
    run, advice = summary.figures.run, summary.recommendation
    parts = [
        f"# {_safe(advice.headline)}",
        f"Target {_safe(run.target.name)}, draft {_safe(run.draft.name)}. {_safe(run.backend)}. "
        f"{_safe(run.machine.fingerprint)}.",
        _matrix(summary),
    ]
    if len(summary.figures.workloads) > 1:
        parts.append(_by_workload(summary))
    parts += ["## Why", _bullets(advice.reasons)]
    if advice.warnings:
        parts += ["## What to distrust", _bullets(advice.warnings)]
    parts += ["## What the figures mean", _bullets(summary.notes)]
    parts.append(f"`{run.command.replace('`', chr(39))}`, {run.started}, sha256 {summary.figures.digest}")
    return "\n\n".join(parts) + "\n"


def _matrix(summary: Summary) -> str:
    workloads = summary.figures.workloads
    confirmed = any(row.confirmed for row in summary.rows)
    head = [
        "draft",
        "packed",
        "in memory",
        "ms a token",
        *(f"acceptance, {w}" for w in workloads),
        "K",
        "tokens a step",
        "predicted",
    ]
    head += ["confirmed"] if confirmed else []

    def cells(row: Row) -> list[str]:
        found = [
            UNKNOWN if row.packed is None else size(row.packed),
            UNKNOWN if row.memory is None else size(row.memory),
            _figure(row.draft_ms, lambda v: milliseconds(v).removesuffix(" ms")),
            *(_figure(row.acceptance.get(w), percent) for w in workloads),
            lengths(row) or UNKNOWN,
            _figure(row.tokens_per_step, count),
            _figure(row.predicted, times),
        ]
        return found + ([_figure(row.confirmed, times)] if confirmed else [])

    return _table(head, [[_name(row), *cells(row)] for row in summary.rows])


def _by_workload(summary: Summary) -> str:
    """The best evidence for the speedup on each workload."""
    workloads, cells = summary.figures.workloads, summary.figures.cells
    rows = []
    for row in summary.rows:
        found = [_name(row)]
        for workload in workloads:
            cell = cells.get((row.name, workload))
            if cell is None or cell.speedup is None:
                found.append(times(1.0) if row.name == NO_DRAFT else UNKNOWN)
                continue
            how = "confirmed" if cell.confirmation else "predicted"
            found.append(f"{_figure(cell.speedup.interval(), times)}, K = {cell.k}, {how}")
        rows.append(found)
    return _table(["speedup", *workloads], rows)


def _name(row: Row) -> str:
    return f"**{_safe(row.name)}**, recommended" if row.best else _safe(row.name)


def _figure(interval: Interval | None, write: Callable[[float], str]) -> str:
    if interval is None:
        return UNKNOWN
    bounds = small_span(interval, write)
    return f"{write(interval.value)} ({bounds})" if bounds else write(interval.value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [[_safe(name) for name in head], ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bullets(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {_safe(sentence)}" for sentence in sentences)


def _safe(words: str) -> str:
    """Words that Markdown shows as they are: names may hold its signs."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in words).replace("\n", " ")
