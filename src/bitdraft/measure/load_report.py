"""What a load test found: a table in the terminal, report.md, report.html and report.json.

The page is of the same kind as the report of `bitdraft measure`: one file, no network, no script, light and dark. What
servers said is escaped.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .files import writable, write_atomically
from .load_config import LoadConfig
from .load_figures import Line, lines, warnings
from .load_run import Answer
from .numbers import UNKNOWN, count, milliseconds, percent, small_span, times, with_span
from .records import to_json
from .report.svg import Scale, chart, element, frame, line, mark, path, spread_out, text, ticks, tip
from .stats import Interval

DEFINITIONS = (
    "TTFT: from when a request was due until its first piece of text.",
    "TPOT: (last piece - first piece) / (output tokens - 1), one figure a request.",
    "ITL by token: the time between pieces, shared out to the tokens of the piece that ends it. ITL by chunk: the time "
    "between pieces itself, which speculation makes longer because pieces hold more tokens.",
    "Throughput: output tokens of answers that came whole, over the time from the first request to the last answer.",
    "Goodput: whole answers a second whose first piece came within the bound.",
    "Accepted / drafted: of the tokens that the server drafted; answers that repeat themselves are left out.",
    "Intervals are at 95%: of latencies over requests, of throughput and speedup over rounds (three or more).",
)


@dataclass(frozen=True)
class LoadSummary:
    """What was asked and what was found."""

    config: LoadConfig
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]


def summarize_load(config: LoadConfig, answers: Sequence[Answer]) -> LoadSummary:
    """Compute all figures. Resamples are drawn from a fixed seed: the same answers give the same figures."""
    found = lines(config, answers, np.random.default_rng(0))
    return LoadSummary(config, tuple(found), tuple(warnings(config, found)))


def load_json(summary: LoadSummary) -> dict[str, Any]:
    """What `--json` prints: `config`, `lines` with every figure, `warnings`, `definitions`. Times are seconds."""
    found: dict[str, Any] = to_json(summary)
    return found | {"definitions": list(DEFINITIONS)}


Column = tuple[str, Callable[[Line], Interval | None], Callable[[float], str]]


def _ms(value: float) -> str:
    return milliseconds(1000 * value).removesuffix(" ms")


def _rate(value: float) -> str:
    return f"{value:.3g}"


COLUMNS: tuple[Column, ...] = (
    ("tokens/s", lambda line: line.throughput, _rate),
    ("speed", lambda line: line.speedup, times),
    ("TTFT p50 ms", lambda line: line.ttft.get("p50"), _ms),
    ("TTFT p95 ms", lambda line: line.ttft.get("p95"), _ms),
    ("TPOT p50 ms", lambda line: line.tpot.get("p50"), _ms),
    ("ITL by token p99 ms", lambda line: line.itl_token.get("p99"), _ms),
    ("ITL by chunk p99 ms", lambda line: line.itl_chunk.get("p99"), _ms),
    ("good requests/s", lambda line: line.goodput, _rate),
)


def _facts(line: Line) -> tuple[str, str, str]:
    """Tokens a chunk, accepted over drafted, and failures of requests."""
    accepted = UNKNOWN if line.accepted_per_drafted is None else percent(line.accepted_per_drafted, 0)
    chunk = UNKNOWN if line.tokens_a_chunk is None else count(line.tokens_a_chunk)
    return chunk, accepted, f"{line.failed} of {line.requests}"


def render_load(summary: LoadSummary, console: Console) -> None:
    """Print a table for each load, and below it what to distrust and how figures are defined."""
    console.print(f"\n[bold]{headline(summary)}[/] {_lead(summary)}", highlight=False)
    for name, group in _groups(summary.lines):
        console.print(f"\n[bold]{name}[/]", highlight=False)
        table = Table(box=None, header_style="dim", pad_edge=False)
        table.add_column("")
        for heading in (*(heading for heading, _, _ in COLUMNS), "tokens a chunk", "accepted / drafted", "failed"):
            table.add_column(heading, justify="right")
        for each in group:
            cells = [_figure(pick(each), write, "\n") for _, pick, write in COLUMNS]
            table.add_row(f"{each.server} {each.arm}", *cells, *_facts(each))
        console.print(table)
    for sentence in summary.warnings:
        console.print(f"[yellow]![/] {sentence}", highlight=False, soft_wrap=True)
    console.print()
    for sentence in DEFINITIONS:
        console.print(f"[dim]{sentence}[/]", highlight=False, soft_wrap=True)


def _groups(found: Sequence[Line]) -> list[tuple[str, list[Line]]]:
    groups: dict[str, list[Line]] = {}
    for each in found:
        groups.setdefault(f"{each.load}, {each.lengths} tokens".replace("trace tokens", "its lengths"), []).append(each)
    return list(groups.items())


def _figure(interval: Interval | None, write: Callable[[float], str], between: str) -> str:
    if interval is None or not np.isfinite(interval.value):
        return UNKNOWN
    bounds = small_span(interval, write)
    return f"{write(interval.value)}{between}{bounds}" if bounds else write(interval.value)


def headline(summary: LoadSummary) -> str:
    """The most telling sentence: the best of drafts against none, or of a server against another."""
    compared = _compared(summary)
    if compared:
        return _said(compared[-1])
    best = max(summary.lines, key=lambda each: each.throughput.value, default=None)
    if best is None:
        return "Nothing was measured yet."
    return f"{_rate(best.throughput.value)} output tokens/s at most, at {best.load} with {best.lengths} tokens."


def _lead(summary: LoadSummary) -> str:
    """The other end of it, if there is one."""
    compared = _compared(summary)
    return f"At the other end: {_said(compared[0])}" if len(compared) > 1 else ""


def _compared(summary: LoadSummary) -> list[Line]:
    """Lines that have something to be held against, the slowest by that first."""
    found = [each for each in summary.lines if each.speedup and np.isfinite(each.speedup.value)]
    return sorted(found, key=lambda each: each.speedup.value if each.speedup else 0.0)


def _said(each: Line) -> str:
    assert each.speedup
    same = each.against.startswith(f"{each.server} ")
    ours, theirs = (each.arm, each.against[len(each.server) + 1 :]) if same else (each.server, each.against)
    return (
        f"{ours.capitalize() if same else ours} has {with_span(each.speedup, times)} the throughput of {theirs} at "
        f"{each.load}, {each.lengths} tokens."
    )


def render_load_markdown(summary: LoadSummary) -> str:
    """The whole report for an issue or a log."""
    parts = [f"# {_safe(headline(summary))}", *([_safe(_lead(summary))] if _lead(summary) else [])]
    for name, group in _groups(summary.lines):
        head = ["", *(heading for heading, _, _ in COLUMNS), "tokens a chunk", "accepted / drafted", "failed"]
        rows = [
            [_safe(f"{each.server} {each.arm}")]
            + [_figure(pick(each), write, " (") + (")" if _has_span(pick(each)) else "") for _, pick, write in COLUMNS]
            + list(_facts(each))
            for each in group
        ]
        table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        parts += [f"## {_safe(name)}", "\n".join(f"| {' | '.join(row)} |" for row in table)]
    if summary.warnings:
        parts += ["## What to distrust", "\n".join(f"- {_safe(sentence)}" for sentence in summary.warnings)]
    parts += ["## What the figures mean", "\n".join(f"- {_safe(sentence)}" for sentence in DEFINITIONS)]
    return "\n\n".join(parts) + "\n"


def _has_span(interval: Interval | None) -> bool:
    return interval is not None and interval.low is not None and bool(np.isfinite(interval.value))


def _safe(words: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in words).replace("\n", " ")


def render_load_html(summary: LoadSummary) -> str:
    """The page."""
    style = files(f"{__package__}.report").joinpath("style.css").read_text(encoding="utf-8")
    servers = ", ".join(f"{server.name} ({server.url})" for server in summary.config.servers)
    body = [
        f'<header>\n<p class="eyebrow">bitdraft bench serve <span>{escape(servers)}</span></p>\n'
        f'<h1>{escape(headline(summary))}</h1>\n<p class="lead">{escape(_lead(summary))}</p>\n</header>'
    ]
    if summary.warnings:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in summary.warnings)
        body.append(f'<section class="warnings">\n<h2>What to distrust</h2>\n<ul>{items}</ul>\n</section>')
    drawings = "".join(f"<figure>{drawing}</figure>" for drawing in charts(summary))
    if drawings:
        body.append(f'<section>\n<h2>By load</h2>\n<div class="figures">{drawings}</div>\n</section>')
    body += [_section(name, group) for name, group in _groups(summary.lines)]
    notes = "".join(f"<li>{escape(sentence)}</li>" for sentence in DEFINITIONS)
    body.append(f'<section>\n<h2>What the figures mean</h2>\n<ol class="notes">{notes}</ol>\n</section>')
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(servers)} · bitdraft bench serve</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(name: str, group: Sequence[Line]) -> str:
    head = ["", *(heading for heading, _, _ in COLUMNS), "tokens a chunk", "accepted / drafted", "failed"]
    columns = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in head)
    rows = ""
    for each in group:
        cells = ""
        for _, pick, write in COLUMNS:
            value, _, bounds = _figure(pick(each), write, "\n").partition("\n")
            cells += f"<td>{escape(value)}{f'<small>{escape(bounds)}</small>' if bounds else ''}</td>"
        cells += "".join(f"<td>{escape(fact)}</td>" for fact in _facts(each))
        rows += f"<tr><th scope=row>{escape(f'{each.server} {each.arm}')}</th>{cells}</tr>"
    table = f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section>\n<h2>{escape(name)}</h2>\n<div class="scroll">{table}</div>\n</section>'


def publish_load(folder: Path, summary: LoadSummary) -> list[Path]:
    """Write every form of the report beside its results.

    Raises:
        UsageError: the folder cannot be written.
    """
    texts = {
        "report.html": render_load_html(summary),
        "report.md": render_load_markdown(summary),
        "report.json": json.dumps(load_json(summary), indent=2, ensure_ascii=False) + "\n",
    }
    with writable(folder):
        for name, content in texts.items():
            write_atomically(folder / name, content)
    return [folder / name for name in texts]


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 56, 130, 18, 46


def charts(summary: LoadSummary) -> list[str]:
    """Throughput and TTFT against the load, one drawing for each of them, lengths and kind of load."""
    drawn: list[str] = []
    kinds: dict[tuple[str, str], list[Line]] = {}
    for each in summary.lines:
        if each.level and each.ttft:
            kind = "concurrency" if each.load.startswith("concurrency") else "requests/s"
            kinds.setdefault((kind, each.lengths), []).append(each)
    for (kind, lengths), group in kinds.items():
        for what, pick in (
            ("output tokens/s", lambda each: each.throughput),
            ("TTFT p95, s", lambda each: each.ttft["p95"]),
        ):
            drawn.append(_chart(f"chart{len(drawn)}", what, kind, lengths, group, pick))
    return drawn


def _chart(
    name: str, what: str, kind: str, lengths: str, group: Sequence[Line], pick: Callable[[Line], Interval]
) -> str:
    arms = list(dict.fromkeys(f"{each.server} {each.arm}" for each in group))
    levels = sorted({each.level for each in group})
    marks = ticks(0.0, max(max(pick(each).value, pick(each).high or 0.0) for each in group))
    x = Scale(levels[0] - 0.5, levels[-1] + 0.5, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, marks[-1], HEIGHT - BOTTOM, TOP)
    content = frame(x, y, marks, lambda value: f"{value:g}")
    content += "".join(text(x(v), HEIGHT - BOTTOM + 18, f"{v:g}", "tick", "middle") for v in levels)
    content += text(LEFT, HEIGHT - 6, kind, "axis")
    ends, words = [], []
    for i, arm in enumerate(arms):
        its = sorted((each for each in group if f"{each.server} {each.arm}" == arm), key=lambda each: each.level)
        drawing = path([(x(each.level), y(pick(each).value)) for each in its], "curve")
        for each in its:
            figure = pick(each)
            bar = ""
            if figure.low is not None and figure.high is not None:
                bar = line(x(each.level), y(figure.low), x(each.level), y(figure.high), "whisker")
            said = f"{arm}, {each.load}: {with_span(figure, _rate)} {what}"
            drawing += tip(said, bar + mark(i, x(each.level), y(figure.value), 4.2))
            words.append(said)
        content += element("g", drawing, class_=f"s{i % 8}")
        ends.append(y(pick(its[-1]).value))
    for i, (arm, at) in enumerate(zip(arms, spread_out(ends, 15, TOP, HEIGHT - BOTTOM), strict=True)):
        content += element("g", text(x.end + 8, at + 4, arm, "label series"), class_=f"s{i % 8}")
    title = f"{what} by {kind}, {lengths} tokens"
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return caption + chart(name, WIDTH, HEIGHT, title, "; ".join(words), content)
