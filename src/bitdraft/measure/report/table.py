"""The report in the terminal, as wide as that allows. Nothing is told by colour alone."""

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..numbers import UNKNOWN, count, milliseconds, percent, size, small_span, times
from ..stats import Interval
from .summary import Row, Summary, lengths

ASCII = str.maketrans({"×": "x", "–": "-", "±": "~", "▸": ">", "•": "*"})
"""For terminals that cannot show more."""
STYLES = {"speculate": "bold green", "undecided": "bold yellow", "do not speculate": "bold red"}
MOST_ACCEPTANCE_COLUMNS = 2
"""With more workloads, the matrix holds the mean and a second table the workloads."""
COLUMNS_A_TABLE = 6

Show = Callable[[str, str], Text]
"""Makes text of a string and a style, in characters that the terminal has."""
Column = tuple[str, Callable[[Row], Text]]


def render_terminal(summary: Summary, console: Console) -> None:
    """Print advice, decay matrix, reasons, warnings and footnotes.

    Each figure has its interval below it. A table that is wider than the terminal becomes a list.
    """
    run, advice = summary.figures.run, summary.recommendation
    unicode = console.encoding.lower().startswith("utf")

    def show(text: str, style: str = "") -> Text:
        return Text(text if unicode else text.translate(ASCII).encode("ascii", "replace").decode(), style)

    console.print()
    console.print(show(advice.headline, STYLES[advice.verdict]))
    console.print(show(f"target {run.target.name}, draft {run.draft.name}, {run.backend}", "dim"))
    console.print()
    for columns in _tables(summary, show):
        table = _table(summary, columns, show)
        fits = console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width
        console.print(table if fits else _as_list(summary, columns, show))
    if _some_only_predicted(summary):
        console.print(show("* predicted, not run from end to end", "dim"))
        console.print()
    console.print(_bullets(advice.reasons, show, "•", ""))
    if advice.warnings:
        console.print()
        console.print(_bullets(advice.warnings, show, "!", "yellow"))
    console.print()
    for number, note in enumerate(summary.notes, start=1):
        console.print(_bullets([note], show, str(number), "dim"))


def _tables(summary: Summary, show: Show) -> list[list[Column]]:
    """The columns of each table; the first column, the format's name, is left out."""
    workloads = summary.figures.workloads
    wide = len(workloads) <= MOST_ACCEPTANCE_COLUMNS
    matrix = [
        ("packed", _value(lambda row: None if row.packed is None else size(row.packed), show)),
        ("ms a\ntoken", _spread(lambda row: row.draft_ms, lambda v: milliseconds(v).removesuffix(" ms"), show)),
    ]
    if wide:
        matrix += [_acceptance(workload, show) for workload in workloads]
    else:
        matrix.append(("acceptance\n%", _spread(lambda row: row.mean_acceptance, _percent, show)))
    matrix += [
        ("K", _value(lambda row: lengths(row) or None, show)),
        ("tokens\na step", _spread(lambda row: row.tokens_per_step, count, show)),
        ("speedup\npredicted", _spread(lambda row: row.predicted, times, show)),
    ]
    if any(row.confirmed for row in summary.rows):
        matrix.append(("speedup\nconfirmed", _spread(lambda row: row.confirmed, times, show)))
    tables = [matrix]
    if len(workloads) > 1:
        speedups = [(f"{workload}\nspeedup", _speedup(summary, workload, show)) for workload in workloads]
        details = speedups if wide else [_acceptance(workload, show) for workload in workloads] + speedups
        tables += [details[i : i + COLUMNS_A_TABLE] for i in range(0, len(details), COLUMNS_A_TABLE)]
    return tables


def _acceptance(workload: str, show: Show) -> Column:
    return f"{workload}\naccept %", _spread(lambda row: row.acceptance.get(workload), _percent, show)


def _speedup(summary: Summary, workload: str, show: Show) -> Callable[[Row], Text]:
    """The best evidence on one workload, with its K; an asterisk marks what is only predicted beside confirmed ones."""
    marked = _some_only_predicted(summary)

    def cell_text(row: Row) -> Text:
        cell = summary.figures.cells.get((row.name, workload))
        if cell is None or cell.speedup is None:
            return _figure(Interval(1.0, None, None) if cell is None else None, times, show)
        mark = "*" if marked and not cell.confirmation else ""
        return _figure(cell.speedup.interval(), lambda v: times(v) + mark, show, before=f"K {cell.k}  ")

    return cell_text


def _some_only_predicted(summary: Summary) -> bool:
    found = summary.figures
    confirmed = [
        bool(found.cells[name, workload].confirmation) for name in found.formats for workload in found.workloads
    ]
    return len(found.workloads) > 1 and any(confirmed) and not all(confirmed)


def _percent(value: float) -> str:
    return percent(value).removesuffix("%")


def _value(pick: Callable[[Row], str | None], show: Show) -> Callable[[Row], Text]:
    return lambda row: show(pick(row) or UNKNOWN, "")


def _spread(pick: Callable[[Row], Interval | None], write: Callable[[float], str], show: Show) -> Callable[[Row], Text]:
    return lambda row: _figure(pick(row), write, show)


def _figure(interval: Interval | None, write: Callable[[float], str], show: Show, before: str = "") -> Text:
    """A figure and, on a second line, its interval."""
    if interval is None:
        return show(UNKNOWN, "")
    bounds = small_span(interval, lambda value: write(value).removesuffix("*"))
    parts = [show(before, "dim"), show(write(interval.value), "")]
    return Text.assemble(*parts, show(f"\n{bounds}", "dim")) if bounds else Text.assemble(*parts)


def _table(summary: Summary, columns: list[Column], show: Show) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
    table.add_column("draft", no_wrap=True)
    for header, _ in columns:
        table.add_column(show(header, ""), justify="right", no_wrap=True)
    for row in summary.rows:
        name = show(("▸ " if row.best else "  ") + row.name, "")
        table.add_row(name, *(cell(row) for _, cell in columns), style="bold" if row.best else "")
    table.add_row()
    return table


def _as_list(summary: Summary, columns: list[Column], show: Show) -> RenderableType:
    """The same figures, one a line."""
    text = Text()
    for row in summary.rows:
        text += show(("▸ " if row.best else "  ") + row.name + "\n", "bold" if row.best else "")
        for header, cell in columns:
            value, *bounds = (part.strip() for part in cell(row).plain.split("\n"))
            detail = f" ({bounds[0]})" if bounds else ""
            text += show(f"    {' '.join(header.split())}: {value}{detail}\n", "")
    return text


def _bullets(sentences: Iterable[str], show: Show, bullet: str, style: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for sentence in sentences:
        grid.add_row(show(bullet, style), show(sentence, style))
    return Padding(grid, (0, 0, 0, 1))
