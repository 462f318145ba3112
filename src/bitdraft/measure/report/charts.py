"""The report's charts, as inline SVG: each a function from a summary to a string.

A format keeps its colour and its mark in every chart, and every line is labelled where it ends.
"""

import math
from collections.abc import Sequence

from ..figures import Cell
from ..numbers import milliseconds, percent, times, with_span
from ..predict import StepCost
from ..stats import Interval
from .summary import NO_DRAFT, Row, Summary
from .svg import Scale, chart, element, frame, line, mark, path, spread_out, text, ticks, tip

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 96, 18, 46
PARTS = (("draft", "drafting"), ("verify", "verifying"), ("other", "overhead"))


def series(summary: Summary, name: str) -> int:
    """The number of a format, which its colour and mark follow from."""
    return summary.figures.run.formats.index(name)


def acceptance_by_bits(summary: Summary) -> str | None:
    """Conditional acceptance against bits a weight, with intervals; a dashed line where the 16-bit draft stands."""
    found = summary.figures
    names = [name for name in found.formats if name in found.sizes]
    if not names:
        return None
    bits = {name: found.sizes[name].bits_per_weight for name in names}
    width, height, bottom = 760, 330, 84
    low_bits, high_bits = min(bits.values()) / 1.25, max(16.0, *bits.values()) * 1.12
    x = Scale(math.log2(low_bits), math.log2(high_bits), LEFT, width - RIGHT)
    cells = {(n, w): found.cells[n, w] for n in names for w in found.workloads}
    y, rules = _percent_axis([c.agreement.conditional_acceptance.interval() for c in cells.values()], height - bottom)
    content = frame(x, y, rules, lambda v: percent(v, 0))
    content += text(LEFT, height - 4, "bits a weight, on a log scale", "axis")
    content += "".join(
        text(x(math.log2(b)), height - bottom + 18, f"{b}", "tick", "middle")
        for b in (2, 3, 4, 6, 8, 16)
        if low_bits <= b
    )
    apart = 5.0 * len(found.workloads) + 7
    at = dict(zip(names, spread_out([x(math.log2(bits[n])) for n in names], apart, LEFT, width - RIGHT), strict=True))
    content += _bit_labels(summary, names, at, height - bottom)
    ends = []
    for i, workload in enumerate(found.workloads):
        shift = (i - (len(found.workloads) - 1) / 2) * 5
        level = cells[found.reference or names[0], workload].agreement.conditional_acceptance.value
        content += line(x.start, y(level), x.end, y(level), "reference")
        ends.append(y(level))
        for name in names:
            figure = cells[name, workload].agreement.conditional_acceptance.interval()
            words = f"{name} on {workload}: {with_span(figure, percent)} at {bits[name]:.2f} bits a weight"
            content += _dot(summary, name, at[name] + shift, y, figure, words)
    for workload, end in zip(found.workloads, spread_out(ends, 15, TOP, height - bottom), strict=True):
        content += text(x.end + 8, end + 4, workload, "label")
    described = "; ".join(
        f"{n} on {w} {percent(c.agreement.conditional_acceptance.value)} at {bits[n]:.1f} bits"
        for (n, w), c in cells.items()
    )
    return chart("bits", width, height, "Conditional acceptance against bits a weight", described, content)


def _bit_labels(summary: Summary, names: Sequence[str], at: dict[str, float], top: float) -> str:
    """Names below the axis, in rows so that neighbours do not touch."""
    content, ends = "", [0.0, 0.0, 0.0]
    for name in sorted(names, key=lambda n: at[n]):
        half = 4.0 * len(name)
        row = next((i for i, end in enumerate(ends) if at[name] - half > end), len(ends) - 1)
        ends[row] = at[name] + half + 6
        y = top + 34 + 13 * row
        label = text(at[name], y, name, "label series", "middle")
        content += element("g", label, class_=f"s{series(summary, name) % 8}")
    return content


def speedup_curves(summary: Summary, workload: str) -> str | None:
    """S(K) of every format with its band, and what ran from end to end."""
    cells = _cells(summary, workload)
    cells = [cell for cell in cells if any(point.speedup for point in cell.curve)]
    if not cells:
        return None
    figures = [p.speedup.interval() for c in cells for p in c.curve if p.speedup]
    figures += [run.speedup.interval() for c in cells for run in c.confirmed]
    low, high = min([1.0, *map(_low, figures)]), max([1.0, *map(_high, figures)])
    marks = ticks(low, high)
    x = _k_axis(summary)
    y = Scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    content = frame(x, y, marks, lambda v: f"{v:g}×") + _k_ticks(summary, x, "draft length K")
    content += line(x.start, y(1), x.end, y(1), "baseline")
    ends = []
    for cell in cells:
        points = [(p.k, p.speedup.interval()) for p in cell.curve if p.speedup]
        lines = _band([(x(k), y(_low(f)), y(_high(f))) for k, f in points])
        lines += path([(x(k), y(f.value)) for k, f in points], "curve")
        for k, f in points:
            words = f"{cell.format}, K = {k}: predicted {with_span(f, times)}"
            top = mark(series(summary, cell.format), x(k), y(f.value), 4.2) if k == cell.k else ""
            lines += tip(words, element("circle", cx=x(k), cy=y(f.value), r=7, class_="hit") + top)
        content += element("g", lines, class_=f"s{series(summary, cell.format) % 8}")
        ends.append((cell.format, y(points[-1][1].value)))
    ran = [cell.format for cell in cells if cell.confirmed]
    for cell in cells:
        for run in cell.confirmed:
            figure = run.speedup.interval()
            words = f"{cell.format}, K = {run.k}: confirmed {with_span(figure, times)}, {run.pairs} pairs"
            shift = 9.0 * (ran.index(cell.format) - (len(ran) - 1) / 2)
            content += _dot(summary, cell.format, x(run.k) + shift, y, figure, words, "open")
    content += text(x.end - 4, y(1) - 5, "no speculation", "tick over", "end")
    described = "; ".join(f"{cell.format} {times(_speedup(cell))} at K = {cell.k}" for cell in cells)
    content += _end_labels(summary, x.end + 8, ends)
    return chart(f"speedup-{_id(workload)}", WIDTH, HEIGHT, f"Speedup by draft length, {workload}", described, content)


def hazard_curves(summary: Summary, workload: str) -> str | None:
    """Conditional acceptance by position in the block, of every format."""
    cells = _cells(summary, workload)
    if not cells:
        return None
    figures = [hazard.interval() for cell in cells for hazard in cell.hazards]
    y, rules = _percent_axis(figures, HEIGHT - BOTTOM)
    x = _k_axis(summary)
    content = frame(x, y, rules, lambda v: percent(v, 0)) + _k_ticks(summary, x, "position in the block")
    ends = []
    for cell in cells:
        points = [(j, h.interval()) for j, h in enumerate(cell.hazards, start=1) if math.isfinite(h.value)]
        lines = _band([(x(j), y(_low(f)), y(_high(f))) for j, f in points])
        lines += path([(x(j), y(f.value)) for j, f in points], "curve")
        for j, f in points:
            dot = mark(series(summary, cell.format), x(j), y(f.value), 3)
            hit = element("circle", cx=x(j), cy=y(f.value), r=7, class_="hit")
            lines += tip(f"{cell.format}, position {j}: {with_span(f, percent)} accepted if reached", hit + dot)
        content += element("g", lines, class_=f"s{series(summary, cell.format) % 8}")
        ends.append((cell.format, y(points[-1][1].value)))
    described = "; ".join(
        f"{c.format} {percent(c.hazards[0].value)} at position 1, {percent(c.hazards[-1].value)} at {len(c.hazards)}"
        for c in cells
    )
    content += _end_labels(summary, x.end + 8, ends)
    title = f"Conditional acceptance by position, {workload}"
    return chart(f"hazards-{_id(workload)}", WIDTH, HEIGHT, title, described, content)


def time_bars(summary: Summary, workload: str) -> str | None:
    """Where the time of one output token goes: plain, and with every format at its best draft length."""
    timed = [(cell, cell.best.cost) for cell in _cells(summary, workload) if cell.best.cost]
    if not timed:
        return None
    plain = timed[0][1].plain.value
    rows = [(NO_DRAFT, {"verify": plain}, "1.00×")]
    rows += [(f"{c.format}, K {c.k}", _per_token(c, cost), times(_speedup(c))) for c, cost in timed]
    longest = max(sum(parts.values()) for _, parts, _ in rows)
    left, pitch = 128, 32
    height = TOP + pitch * len(rows) + 34
    x = Scale(0, longest, left, WIDTH - 112)
    content = "".join(
        line(x(tick), TOP - 6, x(tick), height - 34, "rule") + text(x(tick), height - 16, f"{tick:g}", "tick", "middle")
        for tick in ticks(0, longest, 5)
        if tick <= longest
    )
    content += text(left, height - 2, "ms an output token", "axis")
    content += line(x(plain), TOP - 6, x(plain), height - 34, "baseline")
    for i, (name, parts, speedup) in enumerate(rows):
        at, top = 0.0, TOP + pitch * i
        content += text(left - 10, top + 15, name, "label", "end")
        for key, word in PARTS:
            share = max(parts.get(key, 0.0), 0.0)
            bar = element("rect", x=x(at), y=top, width=max(x(at + share) - x(at), 0), height=21, class_=f"part-{key}")
            inside = text(x(at + share / 2), top + 15, f"{share:.1f}", "inside", "middle")
            wide = x(at + share) - x(at) > 34
            content += tip(f"{name}: {word} {milliseconds(share)} an output token", bar + (inside if wide else ""))
            at += share
        content += text(x(at) + 8, top + 15, f"{milliseconds(at)} · {speedup}", "label")
    described = "; ".join(f"{name}: {milliseconds(sum(parts.values()))}, {speedup}" for name, parts, speedup in rows)
    return chart(
        f"time-{_id(workload)}", WIDTH, height, f"Where the time of a token goes, {workload}", described, content
    )


def forest(summary: Summary, row: Row) -> str:
    """A row's speedup as a small picture for the matrix: predicted filled, confirmed open, a rule at 1."""
    every = [f for other in summary.rows for f in (other.predicted, other.confirmed) if f]
    x = Scale(min([0.9, *map(_low, every)]), max([1.1, *map(_high, every)]), 6, 154)
    lines, words = "", []
    for at, figure, word, kind in (
        (11, row.predicted, "predicted", "mark"),
        (23, row.confirmed, "confirmed", "mark open"),
    ):
        if figure:
            lines += line(x(_low(figure)), at, x(_high(figure)), at, "whisker")
            lines += mark(series(summary, row.name), x(figure.value), at, 3.6, kind)
            words.append(f"{word} {with_span(figure, times)}")
    group = tip(f"{row.name}: {', '.join(words)}", lines, f"s{series(summary, row.name) % 8}")
    content = line(x(1), 0, x(1), 34, "baseline") + group
    return chart(f"forest-{_id(row.name)}", 160, 34, f"Speedup of {row.name}", ", ".join(words), content)


def key_mark(summary: Summary, name: str) -> str:
    """A format's mark, for legends and the matrix."""
    shape = element("g", mark(series(summary, name), 8, 8, 4.6), class_=f"s{series(summary, name) % 8}")
    return element("svg", shape, viewBox="0 0 16 16", class_="key", aria_hidden="true")


def _cells(summary: Summary, workload: str) -> list[Cell]:
    found = summary.figures
    return [found.cells[name, workload] for name in found.formats if (name, workload) in found.cells]


def _per_token(cell: Cell, cost: StepCost) -> dict[str, float]:
    tokens = cell.best.tokens_per_step.value
    parts = (cost.draft, cost.verify, cost.overhead)
    return {key: part.value / tokens for (key, _), part in zip(PARTS, parts, strict=True)}


def _speedup(cell: Cell) -> float:
    return cell.best.speedup.value if cell.best.speedup else float("nan")


def _low(figure: Interval) -> float:
    return figure.value if figure.low is None else figure.low


def _high(figure: Interval) -> float:
    return figure.value if figure.high is None else figure.high


def _percent_axis(figures: Sequence[Interval], bottom: float) -> tuple[Scale, list[float]]:
    """An axis of shares that does not waste its height, but ends at 100% where figures come near it."""
    known = [f for f in figures if math.isfinite(f.value)]
    low, high = min(map(_low, known)), max(map(_high, known))
    marks = [m for m in ticks(max(0.0, low - 0.02), min(1.0, high + 0.02)) if m <= 1.0001]
    return Scale(marks[0], marks[-1], bottom, TOP), marks


def _k_axis(summary: Summary) -> Scale:
    return Scale(0.7, max(summary.figures.run.k_values) + 0.3, LEFT, WIDTH - RIGHT)


def _k_ticks(summary: Summary, x: Scale, title: str) -> str:
    last = max(summary.figures.run.k_values)
    step = math.ceil(last / 12)
    shown = range(1, last + 1, step)
    labels = "".join(text(x(k), HEIGHT - BOTTOM + 18, str(k), "tick", "middle") for k in shown)
    return labels + text(x.start, HEIGHT - 6, title, "axis")


def _band(edges: Sequence[tuple[float, float, float]]) -> str:
    around = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in reversed(edges)]
    return path(around, "band", close=True)


def _dot(summary: Summary, name: str, x: float, y: Scale, figure: Interval, words: str, kind: str = "") -> str:
    """A mark with its error bar."""
    bar = line(x, y(_low(figure)), x, y(_high(figure)), "whisker")
    caps = "".join(line(x - 3, y(edge), x + 3, y(edge), "whisker") for edge in (_low(figure), _high(figure)))
    dot = mark(series(summary, name), x, y(figure.value), 4.6, f"mark {kind}".strip())
    return tip(words, bar + caps + dot, f"s{series(summary, name) % 8}")


def _end_labels(summary: Summary, x: float, ends: Sequence[tuple[str, float]]) -> str:
    placed = spread_out([at for _, at in ends], 15, TOP, HEIGHT - BOTTOM)
    return "".join(
        element("g", text(x, at + 4, name, "label series"), class_=f"s{series(summary, name) % 8}")
        for (name, _), at in zip(ends, placed, strict=True)
    )


def _id(name: str) -> str:
    """Letters and digits of a name, and its other characters as numbers: fit for an id, and different for each name."""
    return "".join(c if c.isascii() and c.isalnum() else f"-{ord(c)}" for c in name)
