"""What steps cost, by the bytes of a draft: read off the timings of a measurement, for formats that were not timed."""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import median

from ..errors import UsageError
from ..quantize.objective import Speed
from .trace import Trace


def speed_of(trace: Trace) -> Speed:
    """Lines through the medians of a measurement's timings.

    A drafted token is one pass over the draft's weights, which waits for memory: milliseconds are a line in the packed
    bytes, with what a token takes beside reading where the line meets 0 bytes. With one timed format the line goes
    through the origin.

    Args:
        trace: a measurement in which the target, and drafts of known sizes, were timed.

    Raises:
        UsageError: neither of them was timed.
    """
    by_rows: dict[int, list[float]] = {}
    by_format: dict[str, list[float]] = {}
    overhead = [sample.ms for sample in trace.costs if sample.kind == "overhead"]
    for sample in trace.costs:
        if sample.kind == "target":
            by_rows.setdefault(sample.rows, []).append(sample.ms)
        elif sample.format is not None and sample.format in trace.sizes:
            by_format.setdefault(sample.format, []).append(sample.ms)
    if not by_rows or not by_format:
        raise UsageError(
            "this measurement has no timings of target and draft. Expected a finished one: go on with it by --resume."
        )
    points = [(float(trace.sizes[name].disk_bytes), median(times)) for name, times in by_format.items()]
    fixed, slope = _line(points)
    rows = {count: median(times) for count, times in by_rows.items()}
    beside = median(overhead) if overhead else 0.0
    return Speed(lambda size: fixed + slope * size, lambda count: _between(rows, count) + beside)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Intercept and slope of least squares, neither below 0."""
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((a - x) ** 2 for a, _ in points)
    slope = sum((a - x) * (b - y) for a, b in points) / spread if spread else y / x
    if slope <= 0 or y - slope * x < 0:
        return 0.0, y / x
    return y - slope * x, slope


def _between(known: Mapping[int, float], rows: int) -> float:
    """Straight lines between what was timed; beyond, every row costs as much as on average up to there."""
    places = sorted(known)
    i = bisect_left(places, rows)
    if i == len(places):
        return known[places[-1]] * rows / places[-1]
    if i == 0 or places[i] == rows:
        return known[places[i]]
    low, high = places[i - 1], places[i]
    return known[low] + (known[high] - known[low]) * (rows - low) / (high - low)
