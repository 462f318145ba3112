"""How figures are written, the same in sentences, tables and charts."""

from collections.abc import Callable

from .stats import Interval

UNKNOWN = "–"


def times(value: float) -> str:
    """A speedup: 1.62×."""
    return f"{value:.2f}×"


def percent(value: float, digits: int = 1) -> str:
    """A share: 92.1%."""
    return f"{100 * value:.{digits}f}%"


def count(value: float) -> str:
    """A small average, such as tokens per step: 3.90."""
    return f"{value:.2f}"


def nats(value: float) -> str:
    """A divergence with three digits: 0.157, or 1.2e-05 if it is tiny."""
    return f"{value:.3g}"


def milliseconds(value: float) -> str:
    """A duration with three digits: 3.12 ms, 31.2 ms, 312 ms."""
    return f"{value:.{max(0, 2 - max(0, len(str(int(abs(value)))) - 1))}f} ms"


def size(byte_count: int) -> str:
    """A memory size in decimal units: 353 MB, 1.20 GB."""
    return f"{byte_count / 1e9:.2f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:.0f} MB"


def span(interval: Interval, show: Callable[[float], str]) -> str:
    """The bounds of an interval for a sentence: '1.55× to 1.70×'; empty if they are not known."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{show(interval.low)} to {show(interval.high)}"


def small_span(interval: Interval, show: Callable[[float], str]) -> str:
    """The bounds of an interval for small print, without units: '1.55–1.70'; empty if they are not known."""
    return "–".join(bound.rstrip("×%") for bound in span(interval, show).split(" to "))


def with_span(interval: Interval, show: Callable[[float], str]) -> str:
    """A figure and its interval for a sentence: '1.62× (1.55× to 1.70×)'."""
    bounds = span(interval, show)
    return f"{show(interval.value)} ({bounds})" if bounds else f"{show(interval.value)} (no interval: too few samples)"


def listed(names: list[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
