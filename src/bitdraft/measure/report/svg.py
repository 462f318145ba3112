"""The few pieces of SVG that the charts are drawn with. Colours and fonts are the page's style sheet's business."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

MARKS = ("circle", "square", "triangle", "diamond", "down", "plus", "bar", "cross")
"""One shape a series, so that no series is told by its colour alone."""


@dataclass(frozen=True)
class Scale:
    """Maps figures from `low` .. `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a figure; figures outside are held at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round figures that cover low .. high: multiples of 1, 2 or 5 times a power of ten, about `most` of them."""
    spread = max(high - low, 1e-9)
    raw = spread / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones, at least `gap` apart and, if there is room, within low .. high."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    at = low - gap
    for i in order:
        at = max(wanted[i], at + gap)
        placed[i] = at
    ceiling = high + gap
    for i in reversed(order):
        ceiling = min(placed[i], ceiling - gap)
        placed[i] = ceiling
    return placed


def number(value: float) -> str:
    """A coordinate with a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, content: str = "", **attributes: str | float) -> str:
    """An element; `class_` stands for class, and underscores for hyphens. `content` must be escaped already."""
    parts = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value if isinstance(value, str) else number(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{parts}>{content}</{name}>" if content else f"<{name}{parts}/>"


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start") -> str:
    """A line of words."""
    return element("text", escape(words), x=x, y=y, class_=f"t {class_}".strip(), text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Iterable[tuple[float, float]], class_: str, close: bool = False) -> str:
    """A line through points, or the area that they enclose."""
    steps = " L".join(f"{number(x)} {number(y)}" for x, y in points)
    return element("path", d=f"M{steps}{' Z' if close else ''}", class_=class_)


def mark(series: int, x: float, y: float, size: float, class_: str = "mark") -> str:
    """The shape of a series."""
    shape, s = MARKS[series % len(MARKS)], size
    if shape == "circle":
        return element("circle", cx=x, cy=y, r=s, class_=class_)
    if shape == "square":
        return element("rect", x=x - s * 0.9, y=y - s * 0.9, width=s * 1.8, height=s * 1.8, class_=class_)
    if shape in ("plus", "bar", "cross"):
        return path(_strokes(shape, x, y, s), f"{class_} stroke")
    corners = {
        "triangle": [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
        "down": [(0, 1.2), (1.1, -0.8), (-1.1, -0.8)],
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
    }[shape]
    return path([(x + dx * s, y + dy * s) for dx, dy in corners], class_, close=True)


def _strokes(shape: str, x: float, y: float, s: float) -> list[tuple[float, float]]:
    centre = (x, y)
    if shape == "plus":
        return [(x - s, y), (x + s, y), centre, (x, y - s), (x, y + s)]
    if shape == "bar":
        return [(x - 1.2 * s, y), (x + 1.2 * s, y)]
    return [(x - s, y - s), (x + s, y + s), centre, (x - s, y + s), (x + s, y - s)]


def tip(words: str, content: str, class_: str = "") -> str:
    """A group that shows words when the pointer rests on it."""
    return element("g", element("title", escape(words)) + content, **({"class_": class_} if class_ else {}))


def chart(name: str, width: float, height: float, title: str, description: str, content: str) -> str:
    """A whole drawing, with words for those who do not see it. `name` must be unique on the page."""
    label = element("title", escape(title), id=f"{name}-title") + element(
        "desc", escape(description), id=f"{name}-desc"
    )
    return element(
        "svg",
        label + content,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )


def frame(x: Scale, y: Scale, y_ticks: Sequence[float], write: Callable[[float], str]) -> str:
    """Horizontal rules with their figures, and a base line."""
    rules = [
        line(x.start, y(tick), x.end, y(tick), "rule") + text(x.start - 8, y(tick) + 4, write(tick), "tick", "end")
        for tick in y_ticks
    ]
    return "".join(rules)
