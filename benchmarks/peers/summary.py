"""From the records of runs to tables. Pure: it can be run again on a file that is there.

A ratio is made within a pair: one round, one prompt (or number of rows), bitdraft's figure over the peer's, which were
measured one after the other. Shown is the median of the pairs with its 95 % percentile bootstrap interval.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from systems import System

RESAMPLES = 2000
NOISY = 0.05
"""Share of the machine that others may use before a table says so."""

Record = Mapping[str, Any]
Case = tuple[int, str]
"""A round and what was measured in it: a prompt, or rows and context. What two systems share is a pair."""


@dataclass(frozen=True)
class Interval:
    """A median with the interval that it lies in at 95 % confidence, and from how many values it is."""

    value: float
    low: float
    high: float
    count: int


def median(values: Sequence[float]) -> Interval:
    """The median of at least one value, and its percentile bootstrap interval."""
    given = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(given), size=(RESAMPLES, len(given)))
    low, high = np.percentile(np.median(given[picks], axis=1), (2.5, 97.5))
    return Interval(float(np.median(given)), float(low), float(high), len(given))


@dataclass(frozen=True)
class Comparison:
    """What one question on one model, for one format of bitdraft beside one peer, gave.

    Attributes:
        question, model, draft, format, peer: what was asked; the draft is empty where nothing was drafted.
        samples: the records by system as it is written, bitdraft's first, and by case.
    """

    question: str
    model: str
    draft: str
    format: str
    peer: str
    samples: Mapping[str, Mapping[Case, Record]]

    @property
    def ours(self) -> list[str]:
        """The systems that are bitdraft."""
        return [name for name in self.samples if System.parse(name).name == "bitdraft"]

    @property
    def peers(self) -> list[str]:
        """The systems that are not."""
        return [name for name in self.samples if name not in self.ours]

    def values(self, system: str, field: str = "value") -> list[float]:
        """A field of all samples of a system."""
        return [record[field] for record in self.samples[system].values()]

    def ratio(self, a: str, b: str, of: Callable[[Case], bool] = lambda _: True) -> Interval:
        """a over b in the pairs whose case is wanted."""
        shared = [case for case in self.samples[a] if case in self.samples[b] and of(case)]
        return median([self.samples[a][case]["value"] / self.samples[b][case]["value"] for case in shared])


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """What the samples say, in their order; a later run of the same question takes the place of an earlier one."""
    found: dict[tuple[str, str, str, str, str], tuple[str, dict[str, dict[Case, Record]]]] = {}
    for record in records:
        if record["kind"] != "sample":
            continue
        key = record["question"], record["model"], record["draft"] or "", record["format"], record["peer"]
        if key not in found or found[key][0] != record["run"]:
            found[key] = record["run"], {}
        found[key][1].setdefault(record["system"], {})[record["round"], record["case"]] = record
    return [Comparison(*key, samples) for key, (_, samples) in found.items()]


def markdown(records: Sequence[Record]) -> str:
    """The whole report."""
    found = comparisons(records)
    shown = {r["run"] for comparison in found for samples in comparison.samples.values() for r in samples.values()}
    runs = [record for record in records if record["kind"] == "run" and record["run"] in shown]
    lines = ["# bitdraft beside its peers", "", f"{' · '.join(dict.fromkeys(run['machine'] for run in runs))}.", ""]
    lines += [
        "A ratio is bitdraft's figure over the peer's, within pairs that were measured one after the other: median of"
    ]
    lines += ["the pairs, with its 95 % bootstrap interval."]
    for comparison in found:
        model = comparison.model + (f" with {comparison.draft}" if comparison.draft else "")
        beside = f" beside {comparison.peer}" if comparison.peer else ""
        lines += ["", f"## {comparison.question}: {model}, {comparison.format}{beside}", ""]
        lines += _TABLES[comparison.question](comparison)
        shares = [record["other_cpu"] for samples in comparison.samples.values() for record in samples.values()]
        if np.median(shares) > NOISY:
            lines += ["", f"**Not quiet**: others used {np.median(shares):.0%} of the machine (median) while this ran."]
    lines += ["", "## How", ""]
    lines += [f"* {run['run']}: `{run['command']}`" for run in runs]
    versions = {r["system"].split(":")[0]: r["versions"] for r in records if r["kind"] == "worker"}
    lines += [f"* {name}: {', '.join(f'{k} {v}' for k, v in v.items())}" for name, v in versions.items()]
    return "\n".join(lines) + "\n"


def _shown(interval: Interval, digits: int = 2) -> str:
    return f"{interval.value:.{digits}f} ({interval.low:.{digits}f}–{interval.high:.{digits}f})"


def _rows(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows)]


def _ratios(comparison: Comparison, unit: str) -> list[str]:
    """Every bitdraft system over every peer, the fastest peer first."""
    peers = sorted(comparison.peers, key=lambda name: -float(np.median(comparison.values(name))))
    rows = []
    for ours in comparison.ours:
        for peer in peers:
            ratio = comparison.ratio(ours, peer)
            speeds = [f"{np.median(comparison.values(name)):.1f}" for name in (ours, peer)]
            rows.append((ours, peer, *speeds, f"**{ratio.value:.2f}** ({ratio.low:.2f}–{ratio.high:.2f})", ratio.count))
    return _rows(("bitdraft", "peer", f"bitdraft {unit}", f"peer {unit}", "ratio", "pairs"), rows)


def _speeds(comparison: Comparison) -> list[str]:
    return _ratios(comparison, "tok/s")


def _speculation(comparison: Comparison) -> list[str]:
    """What each system does by itself, then the ratios."""
    rows = []
    for name, samples in comparison.samples.items():
        records = list(samples.values())
        drafted, accepted = (sum(r[key] or 0 for r in records) for key in ("drafted", "accepted"))
        same = [r["as_plain"] for r in records if r["as_plain"] is not None]
        whole = median([r["whole"] for r in records])
        rows.append(
            (
                name,
                _shown(median(comparison.values(name)), 1),
                f"{whole.value:.1f}",
                f"{accepted / drafted:.2f}" if drafted else "",
                f"{sum(same)} of {len(same)}" if same else "",
            )
        )
    header = ("system", "tok/s", "tok/s with prefill", "accepted/drafted", "outputs equal to its own plain ones")
    return [*_rows(header, rows), "", *_speeds(comparison)]


def _steps(comparison: Comparison) -> list[str]:
    """Milliseconds by rows, what a row more costs, and the ratios: here less is better."""
    lines: list[str] = []
    contexts = list(dict.fromkeys(r["context"] for s in comparison.samples.values() for r in s.values()))
    for context in contexts:
        records = [r for s in comparison.samples.values() for r in s.values() if r["context"] == context]
        widths = sorted({record["rows"] for record in records})
        header = (f"context {context}", *(f"{width} rows" for width in widths))
        rows = []
        for name in comparison.samples:
            rows.append((f"{name}, ms", *(_shown(_width(comparison, name, context, w)) for w in widths)))
        for name in comparison.samples:
            growth = (_shown(_growth(comparison, name, context, w)) for w in widths)
            rows.append((f"{name}, over its {widths[0]} rows", *growth))
        for ours in comparison.ours:
            for peer in comparison.peers:
                ratios = (comparison.ratio(ours, peer, _at(context, w)) for w in widths)
                rows.append((f"{ours} over {peer}, ms", *map(_shown, ratios)))
        lines += [*_rows(header, rows), ""]
    return lines[:-1]


def _at(context: int, rows: int) -> Callable[[Case], bool]:
    return lambda case: case[1] == f"{rows}x{context}"


def _width(comparison: Comparison, name: str, context: int, rows: int) -> Interval:
    return median([r["value"] for case, r in comparison.samples[name].items() if _at(context, rows)(case)])


def _growth(comparison: Comparison, name: str, context: int, rows: int) -> Interval:
    """Time of `rows` rows over that of the fewest, round by round."""
    samples = [r for r in comparison.samples[name].values() if r["context"] == context]
    fewest = min(r["rows"] for r in samples)
    base = {r["round"]: r["value"] for r in samples if r["rows"] == fewest}
    return median([r["value"] / base[r["round"]] for r in samples if r["rows"] == rows])


_TABLES: dict[str, Callable[[Comparison], list[str]]] = {
    "decode": _speeds,
    "prefill": _speeds,
    "speculative": _speculation,
    "step": _steps,
}
