"""The report as one HTML file: no network, no script, light and dark, readable on paper.

Everything that comes from a trace is escaped: model names and command lines are other people's words.
"""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files

from ..figures import Cell, Confirmed
from ..numbers import UNKNOWN, count, milliseconds, nats, percent, size, small_span, times
from ..predict import loss
from ..stats import Estimate, Interval
from . import charts
from .summary import NO_DRAFT, Row, Summary, lengths

Write = Callable[[float], str]
MOST_ACCEPTANCE_COLUMNS = 3


def render_html(summary: Summary) -> str:
    """The whole page."""
    run = summary.figures.run
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    title = f"{run.draft.name} as a draft for {run.target.name}"
    body = [
        _header(summary),
        _warnings(summary),
        _matrix(summary),
        _charts(summary),
        _reasons(summary),
        _confirmations(summary),
        _distances(summary),
        _notes(summary),
        _footer(summary),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)} · bitdraft measure</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _header(summary: Summary) -> str:
    run, advice = summary.figures.run, summary.recommendation
    best = next((row for row in summary.rows if row.best and row.name != NO_DRAFT), None)
    tiles = []
    if advice.speedup:
        how = "end to end" if advice.evidence == "confirmed" else "predicted"
        tiles.append(_tile("Speedup", times(advice.speedup.value), f"{small_span(advice.speedup, times)} · {how}"))
    if best and best.mean_acceptance and best.tokens_per_step:
        shown = small_span(best.mean_acceptance, percent)
        tiles.append(_tile("Conditional acceptance", percent(best.mean_acceptance.value), shown))
        tiles.append(_tile("Tokens a step", count(best.tokens_per_step.value), small_span(best.tokens_per_step, count)))
    costs = summary.figures.costs
    if best and costs and best.name in costs.draft and 1 in costs.target:
        draft, plain = costs.draft[best.name].value, costs.target[1].value
        tiles.append(
            _tile("c = T_draft / T_target", count(draft / plain), f"{milliseconds(draft)} of {milliseconds(plain)}")
        )
    if best and best.packed is not None and best.memory is not None:
        tiles.append(_tile("Draft, packed", size(best.packed), f"{size(best.memory)} in memory here"))
    first, *_ = advice.reasons or ("",)
    kind = advice.verdict.replace(" ", "-")
    return (
        f'<header class="{kind}">\n<p class="eyebrow">bitdraft measure <span>{escape(run.draft.name)} drafting for '
        f"{escape(run.target.name)}</span></p>\n<h1>{_words(advice.headline)}</h1>\n"
        f'<p class="lead">{_words(first)}</p>\n<dl class="tiles">{"".join(tiles)}</dl>\n</header>'
    )


def _tile(name: str, value: str, below: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(below)}</small></dd></div>"


def _warnings(summary: Summary) -> str:
    if not summary.recommendation.warnings:
        return ""
    items = "".join(f"<li>{_words(sentence)}</li>" for sentence in summary.recommendation.warnings)
    return f'<section class="warnings">\n<h2>What to distrust</h2>\n<ul>{items}</ul>\n</section>'


def _matrix(summary: Summary) -> str:
    workloads, confirmed = _acceptance_columns(summary), any(row.confirmed for row in summary.rows)
    acceptance = [f"{w} acceptance %" for w in workloads] or ["Mean acceptance %"]
    head = ["Draft", "Bits", "Packed", "ms a token", *acceptance, "K", "Tokens a step"]
    head += ["Predicted", *(["Confirmed"] if confirmed else []), "Speedup"]
    rows = "".join(_matrix_row(summary, row, confirmed) for row in summary.rows)
    columns = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    return _section(
        "The decay matrix",
        f'<table class="matrix"><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>{_by_workload(summary)}',
        "Each draft format beside decoding without speculation; 95% intervals in small print."
        + (" In the last column, filled marks are predictions and open ones end-to-end runs." if confirmed else ""),
    )


def _acceptance_columns(summary: Summary) -> tuple[str, ...]:
    """The workloads, unless there are so many that the matrix would have to be scrolled."""
    workloads = summary.figures.workloads
    return workloads if len(workloads) <= MOST_ACCEPTANCE_COLUMNS else ()


def _by_workload(summary: Summary) -> str:
    """The best evidence for the speedup on each workload."""
    found = summary.figures
    if len(found.workloads) < 2:
        return ""
    rows = ""
    for name in found.formats:
        cells = [found.cells[name, workload] for workload in found.workloads]
        shown = [_figure(_interval(cell.speedup), times, f"K {cell.k}, {_evidence(cell)}") for cell in cells]
        rows += f"<tr><th scope=row>{charts.key_mark(summary, name)}{escape(name)}</th>{''.join(shown)}</tr>"
    return f"<h3>Speedup by workload</h3>{_table(['Draft', *found.workloads], rows)}"


def _evidence(cell: Cell) -> str:
    return "confirmed" if cell.confirmation else "predicted"


def _interval(estimate: Estimate | None) -> Interval | None:
    return estimate.interval() if estimate else None


def _matrix_row(summary: Summary, row: Row, confirmed: bool) -> str:
    plain, workloads = row.name == NO_DRAFT, _acceptance_columns(summary)
    key = "" if plain else charts.key_mark(summary, row.name)
    badge = ' <span class="badge">recommended</span>' if row.best else ""
    cells = [
        _plain(None if row.bits is None else f"{row.bits:.2f}"),
        _plain(None if row.packed is None else size(row.packed)),
        _figure(row.draft_ms, lambda v: milliseconds(v).removesuffix(" ms")),
        *(_figure(row.acceptance.get(w), _percent) for w in workloads),
        *([] if workloads else [_figure(row.mean_acceptance, _percent)]),
        _plain(lengths(row) or None),
        _figure(row.tokens_per_step, count),
        _figure(row.predicted, times),
    ]
    if confirmed:
        cells.append(_figure(row.confirmed, times))
    picture = charts.forest(summary, row) if not plain and (row.predicted or row.confirmed) else ""
    chosen = ' class="best"' if row.best else ""
    name = f"{key}{escape(row.name)}{badge}"
    return f'<tr{chosen}><th scope=row>{name}</th>{"".join(cells)}<td class="forest">{picture}</td></tr>'


def _charts(summary: Summary) -> str:
    workloads = summary.figures.workloads
    formats = summary.figures.formats
    legend = "".join(f"<li>{charts.key_mark(summary, name)}{escape(name)}</li>" for name in formats)
    parts = "".join(f'<li><i class="swatch part-{key}"></i>{word}</li>' for key, word in charts.PARTS)
    return "\n".join(
        [
            _figures(
                "Acceptance against bits",
                "Each mark is one format on one workload, with its interval. Dashed lines: where the "
                "widest draft stands.",
                [charts.acceptance_by_bits(summary)],
                legend,
            ),
            _figures(
                "Speedup by draft length",
                "Lines are predictions, bands their intervals, a filled mark the best K. Open marks are end-to-end "
                "runs, reading the prompt included.",
                [charts.speedup_curves(summary, w) for w in workloads],
                legend,
                workloads,
            ),
            _figures(
                "Acceptance by position in the block",
                "The chance that a drafted token is accepted, given that every earlier one of its block was. Blocks "
                "have the longest K; they start behind rejections, where text is hard, so position 1 is often lowest.",
                [charts.hazard_curves(summary, w) for w in workloads],
                legend,
                workloads,
            ),
            _figures(
                "Where the time goes",
                "Milliseconds an output token at the best K. Left of the vertical rule is faster than no speculation.",
                [charts.time_bars(summary, w) for w in workloads],
                parts,
                workloads,
            ),
        ]
    )


def _figures(
    title: str, words: str, drawings: Sequence[str | None], legend: str, captions: Sequence[str] = ("",)
) -> str:
    drawn = [
        f"<figure>{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}{drawing}</figure>"
        for caption, drawing in zip(captions, drawings, strict=True)
        if drawing
    ]
    if not drawn:
        return ""
    wide = " wide" if len(captions) == 1 else ""
    return _section(title, f'<ul class="legend">{legend}</ul><div class="figures{wide}">{"".join(drawn)}</div>', words)


def _reasons(summary: Summary) -> str:
    items = "".join(f"<li>{_words(sentence)}</li>" for sentence in summary.recommendation.reasons[1:])
    rows = "".join(
        _what_if(cell) for workload in summary.figures.workloads if (cell := _shown_cell(summary, workload)) is not None
    )
    table = ""
    if rows:
        head = ("Workload", "K", "As it is", "Ideal", "Every draft accepted", "Drafting free", "Extra rows free")
        table = "<h3>What if?</h3><p>The predicted speedup if one cost alone vanished.</p>" + _table(head, rows)
    return _section("Why", f'<ul class="reasons">{items}</ul>{table}') if items or table else ""


def _shown_cell(summary: Summary, workload: str) -> Cell | None:
    """The recommended format's cell or, without one, that of the format with the best predicted speedup."""
    found = summary.figures
    name = summary.recommendation.draft_format
    ranked = sorted(found.formats, key=lambda n: -(p.value if (p := found.overall[n].predicted) else 0.0))
    return found.cells.get((name or next(iter(ranked), ""), workload))


def _what_if(cell: Cell) -> str:
    if cell.best.cost is None or cell.best.speedup is None:
        return ""
    without = loss(cell.best.tokens_per_step.value, cell.k, cell.best.cost).without
    cells = [_plain(str(cell.k)), _figure(cell.best.speedup.interval(), times), _plain(f"{cell.k + 1}×")]
    cells += [_plain(times(without[cause])) for cause in ("acceptance", "drafting", "extra rows")]
    return f"<tr><th scope=row>{escape(cell.workload)}, {escape(cell.format)}</th>{''.join(cells)}</tr>"


def _confirmations(summary: Summary) -> str:
    rows = "".join(
        _confirmation(summary, cell, run) for cell in summary.figures.cells.values() for run in cell.confirmed
    )
    if not rows:
        return ""
    head = ["Draft", "Workload", "K", "Whole request", "Decoding", "predicted", "Tokens a step", "predicted"]
    head += ["Accepted / drafted %", "Time: draft, verify, rest", "Outputs that differ"]
    return _section(
        "Confirmed end to end",
        _table(head, rows),
        "Run beside plain decoding. 'Decoding' leaves out each run's first step, which reads the prompt; its "
        "prediction is for just these texts.",
    )


def _confirmation(summary: Summary, cell: Cell, run: Confirmed) -> str:
    point = next(point for point in cell.curve if point.k == run.k)
    shares = " · ".join(percent(share, 0) for share in run.time_shares)
    greedy = summary.figures.run.sampling.temperature == 0
    cells = [
        _word(cell.workload),
        _plain(str(run.k)),
        _figure(run.speedup.interval(), times),
        _figure(run.decode_speedup.interval(), times),
        _plain(times(run.predicted) if run.predicted is not None else None),
        _figure(run.tokens_per_step.interval(), count),
        _plain(count(point.tokens_per_step.value)),
        _plain(_percent(run.counts.accepted_per_drafted)),
        _plain(shares),
        _plain(f"{run.differing} of {run.pairs}" if greedy else "sampled"),
    ]
    return f"<tr><th scope=row>{charts.key_mark(summary, cell.format)}{escape(cell.format)}</th>{''.join(cells)}</tr>"


def _distances(summary: Summary) -> str:
    head = ["Draft", "Workload", "Conditional acceptance %", "of 16 bit %", "Accepted / drafted %", "K"]
    head += [
        "KL(p‖q) nats",
        "median",
        "99th percentile",
        "KL(q‖p) nats",
        "Total variation",
        "Same top token %",
        "Tokens",
    ]
    rows = "".join(_distance(summary, cell) for cell in summary.figures.cells.values())
    return _section(
        "How near the draft is to the target",
        f"<details open><summary>Divergences by format and workload</summary>{_table(head, rows)}</details>",
        "KL, total variation and top token compare the raw distributions at temperature 1.",
    )


def _distance(summary: Summary, cell: Cell) -> str:
    near = cell.agreement
    figures: list[tuple[Estimate | None, Write]] = [
        (near.conditional_acceptance, _percent),
        (cell.share, _percent),
        (cell.best.accepted_per_drafted, _percent),
    ]
    more: list[tuple[Estimate | None, Write]] = [
        (near.kl, nats),
        (near.kl_median, nats),
        (near.kl_p99, nats),
        (near.kl_reverse, nats),
        (near.tv, lambda v: f"{v:.3f}"),
        (near.top1, _percent),
    ]

    def cells(pairs: list[tuple[Estimate | None, Write]]) -> str:
        return "".join(_figure(_interval(estimate), write) for estimate, write in pairs)

    name = f"<th scope=row>{charts.key_mark(summary, cell.format)}{escape(cell.format)}</th>"
    tokens = _plain(f"{cell.tokens} in {cell.prompts} texts")
    return f"<tr>{name}{_word(cell.workload)}{cells(figures)}{_plain(str(cell.k))}{cells(more)}{tokens}</tr>"


def _notes(summary: Summary) -> str:
    items = "".join(f"<li>{_words(note)}</li>" for note in summary.notes)
    return _section("What the figures mean", f'<ol class="notes">{items}</ol>')


def _footer(summary: Summary) -> str:
    run = summary.figures.run
    machine, sampling = run.machine, run.sampling
    facts = [
        ("Command", f"<code>{escape(run.command)}</code>"),
        ("Machine", escape(f"{machine.fingerprint}, {machine.system}")),
        ("Versions", escape(f"bitdraft {machine.bitdraft}, torch {machine.torch}, Python {machine.python}")),
        ("Backend", escape(run.backend)),
        ("Target", escape(f"{run.target.name}, {run.target.parameters / 1e6:.0f} M weights, {run.target.stored_as}")),
        ("Draft", escape(f"{run.draft.name}, {run.draft.parameters / 1e6:.0f} M weights, {run.draft.stored_as}")),
        ("Sampling", escape(f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}, "
                            f"seed {sampling.seed}, up to {sampling.max_tokens} tokens")),
        ("Started", escape(run.started)),
        ("Evidence", f"<code>sha256 {escape(summary.figures.digest)}</code>"),
    ]  # fmt: skip
    return f"<footer><dl>{''.join(f'<dt>{name}</dt><dd>{value}</dd>' for name, value in facts)}</dl></footer>"


def _section(title: str, content: str, words: str = "") -> str:
    explained = f'<p class="explained">{escape(words)}</p>' if words else ""
    scrolling = content.replace("<table", '<div class="scroll"><table').replace("</table>", "</table></div>")
    return f"<section>\n<h2>{escape(title)}</h2>\n{explained}{scrolling}\n</section>"


def _table(head: Iterable[str], rows: str) -> str:
    columns = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{rows}</tbody></table>"


def _percent(value: float) -> str:
    return percent(value).removesuffix("%")


def _words(sentence: str) -> str:
    """A sentence in which 'K = 4' stays on one line."""
    return escape(sentence).replace("K = ", "K\u00a0=\u00a0")


def _word(value: str) -> str:
    return f'<td class="word">{escape(value)}</td>'


def _plain(value: str | None) -> str:
    return f"<td>{escape(value or UNKNOWN)}</td>"


def _figure(interval: Interval | None, write: Write, more: str = "") -> str:
    """A table cell with a figure, and in small print its bounds and what more there is to say."""
    if interval is None:
        return _plain(None)
    small = "".join(f"<small>{escape(line)}</small>" for line in (small_span(interval, write), more) if line)
    return f"<td>{escape(write(interval.value))}{small}</td>"
