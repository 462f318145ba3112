"""Everything that a report says, whatever it is written in: figures, advice, the matrix and its footnotes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..figures import Cell, Confirmed, Figures, Overall, figures
from ..numbers import size
from ..plan import Plan, make_plan
from ..predict import break_even_acceptance, loss
from ..recommend import Recommendation, recommend
from ..records import to_json as plain
from ..stats import RESAMPLES, Estimate, Interval
from ..trace import Trace

VERSION = 1
NO_DRAFT = "none"


@dataclass(frozen=True, eq=False)
class Summary:
    """A measurement, ready to be shown.

    Attributes:
        figures: every figure. recommendation: what follows from them.
        rows: the decay matrix, 'none' first.
        notes: footnotes, on what the figures mean.
    """

    figures: Figures
    recommendation: Recommendation
    rows: tuple["Row", ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One row of the decay matrix; None where there is no such figure.

    Attributes:
        name: draft format, or 'none'. best: whether this is what is recommended.
        bits: per weight. packed: bytes on disk. memory: bytes resident. draft_ms: per drafted token.
        acceptance: conditional, by workload. mean_acceptance: over workloads. k: best draft length by workload.
        tokens_per_step, predicted, confirmed: over all workloads, equal numbers of tokens of each.
    """

    name: str
    best: bool
    bits: float | None
    packed: int | None
    memory: int | None
    draft_ms: Interval | None
    acceptance: Mapping[str, Interval]
    mean_acceptance: Interval | None
    k: Mapping[str, int]
    tokens_per_step: Interval | None
    predicted: Interval | None
    confirmed: Interval | None


def lengths(row: Row) -> str:
    """The draft lengths of a row for a narrow column: '4', '4, 3' in the order of the workloads, or '3–5'."""
    found = list(row.k.values())
    if len(set(found)) <= 1:
        return "".join(map(str, found[:1]))
    return ", ".join(map(str, found)) if len(found) == 2 else f"{min(found)}–{max(found)}"


def summarize(trace: Trace, rng: np.random.Generator, resamples: int = RESAMPLES) -> Summary:
    """Compute all that a report says. `rng` draws the bootstrap resamples: the same one gives the same report."""
    found = figures(trace, rng, resamples)
    advice = recommend(found)
    return Summary(found, advice, _matrix(found, advice), _notes(found))


def build_plan(summary: Summary) -> Plan:
    """The plan that follows from the recommendation.

    Raises:
        UsageError: nothing was timed, so there is nothing to plan with.
    """
    return make_plan(summary.figures, summary.recommendation)


def _matrix(found: Figures, advice: Recommendation) -> tuple[Row, ...]:
    stay = advice.verdict == "do not speculate"
    one = Interval(1.0, None, None)
    rows = [Row(NO_DRAFT, stay, None, None, None, None, {}, None, {}, one, one, one if _any_confirmed(found) else None)]
    for name in found.formats:
        total, held = found.overall[name], found.sizes.get(name)
        draft = found.costs.draft.get(name) if found.costs else None
        rows.append(
            Row(
                name=name,
                best=name == advice.draft_format,
                bits=held.bits_per_weight if held else None,
                packed=held.disk_bytes if held else None,
                memory=held.resident_bytes if held else None,
                draft_ms=_interval(draft),
                acceptance={
                    workload: found.cells[name, workload].agreement.conditional_acceptance.interval()
                    for workload in found.workloads
                },
                mean_acceptance=total.conditional_acceptance.interval(),
                k=total.k,
                tokens_per_step=total.tokens_per_step.interval(),
                predicted=_interval(total.predicted),
                confirmed=_interval(total.confirmed),
            )
        )
    return tuple(rows)


def _any_confirmed(found: Figures) -> bool:
    return any(cell.confirmed for cell in found.cells.values())


def _interval(estimate: Estimate | None) -> Interval | None:
    return estimate.interval() if estimate else None


def _notes(found: Figures) -> tuple[str, ...]:
    run, sampling = found.run, found.run.sampling
    filters = "".join(
        f", {name} {value:g}"
        for name, value, off in (
            ("top-k", sampling.top_k, 0),
            ("top-p", sampling.top_p, 1.0),
            ("min-p", sampling.min_p, 0.0),
            ("repetition penalty", sampling.repetition_penalty, 1.0),
            ("presence penalty", sampling.presence_penalty, 0.0),
            ("frequency penalty", sampling.frequency_penalty, 0.0),
        )
        if value != off
    )
    notes = [
        f"Acceptance is the conditional one: sum min(p, q) at temperature {sampling.temperature:g}{filters}, averaged "
        "over every token of the target's own texts. Accepted/drafted is another, smaller figure.",
        "Tokens per step count the target's own token. They and the predicted speedup follow each text exactly, under "
        "the token rule; blocks that the end of a text cuts are left out.",
        "Figures over all workloads count equal numbers of tokens of each, every workload at its best K.",
        "Intervals are 95% bootstrap intervals over prompts and over rounds of timing; formats are compared on the "
        "same prompts.",
    ]
    if _any_confirmed(found):
        rule = "token" if run.rule == "token" else "block"
        more = "" if rule == "token" else ", which accepts as much as the token rule or more"
        notes.append(
            "Confirmed: whole requests, reading the prompt included, run beside plain decoding; the median of the "
            f"pairs. They verify by the {rule} rule{more}."
        )
        notes += _parity(found)
    if found.sizes:
        largest = max(held.resident_bytes for held in found.sizes.values())
        notes.append(
            "Packed: codes, scales and zero points, on disk and for kernels that read them. On this backend a draft "
            f"takes up to {size(largest)} in memory."
        )
    notes += [
        f"{model.name} is stored as {model.stored_as}. 'bf16' made from it "
        "is a dequantised reference, not the model as it was trained."
        for model in dict.fromkeys((run.target, run.draft))
        if model.dequantised
    ]
    return tuple(notes)


def _parity(found: Figures) -> list[str]:
    runs = [run for cell in found.cells.values() for run in cell.confirmed]
    if found.run.sampling.temperature > 0 or any(run.differing for run in runs):
        return []
    return [f"All {sum(run.pairs for run in runs)} greedy runs gave the very tokens of plain decoding."]


def to_json(summary: Summary) -> dict[str, Any]:
    """Every figure as plain JSON values; an interval is {"value", "low", "high"}, null where it is not known."""
    found = summary.figures
    document = {
        "version": VERSION,
        "run": found.run,
        "trace_sha256": found.digest,
        "recommendation": summary.recommendation,
        "formats": {
            name: {workload: _cell_json(cell) for (other, workload), cell in found.cells.items() if other == name}
            for name in dict.fromkeys(name for name, _ in found.cells)
        },
        "overall": {name: _overall_json(total) for name, total in found.overall.items()},
        "sizes": found.sizes,
        "costs_ms": found.costs
        and {
            "target": {rows: cost.interval() for rows, cost in sorted(found.costs.target.items())},
            "draft": {name: cost.interval() for name, cost in found.costs.draft.items()},
            "overhead": found.costs.overhead.interval(),
        },
        "looping_texts": found.looping,
        "notes": summary.notes,
    }
    result = plain(document)
    assert isinstance(result, dict)
    return result


def _cell_json(cell: Cell) -> dict[str, Any]:
    near, best = cell.agreement, cell.best
    return {
        "k": cell.k,
        "prompts": cell.prompts,
        "tokens": cell.tokens,
        "conditional_acceptance": near.conditional_acceptance.interval(),
        "accepted_per_drafted": best.accepted_per_drafted.interval(),
        "share_of_16_bit_acceptance": _interval(cell.share),
        "tv": near.tv.interval(),
        "kl": near.kl.interval(),
        "kl_median": near.kl_median.interval(),
        "kl_p99": near.kl_p99.interval(),
        "kl_reverse": near.kl_reverse.interval(),
        "top1_agreement": near.top1.interval(),
        "tokens_per_step": best.tokens_per_step.interval(),
        "speedup": _interval(best.speedup),
        "confirmed_speedup": _interval(cell.confirmation.speedup) if cell.confirmation else None,
        "break_even": _break_even_json(cell),
        "hazards_k": len(cell.hazards),
        "hazards": [hazard.interval() for hazard in cell.hazards],
        "curve": [
            {
                "k": point.k,
                "tokens_per_step": point.tokens_per_step.interval(),
                "accepted_per_drafted": point.accepted_per_drafted.interval(),
                "step_ms": point.cost.total().interval() if point.cost else None,
                "speedup": _interval(point.speedup),
            }
            for point in cell.curve
        ],
        "confirmed": [_confirmed_json(run) for run in cell.confirmed],
    }


def _break_even_json(cell: Cell) -> dict[str, Any] | None:
    """The tokens per step, and the acceptance, at which speculation neither gains nor loses; where the ideal goes."""
    if cell.best.cost is None:
        return None
    tokens = cell.best.cost.break_even()
    parts = loss(cell.best.tokens_per_step.value, cell.k, cell.best.cost)
    return {
        "tokens_per_step": tokens.interval(),
        "acceptance": break_even_acceptance(tokens.value, cell.k),
        "speedup_without": parts.without,
        "loss_shares": parts.shares,
    }


def _confirmed_json(run: Confirmed) -> dict[str, Any]:
    return {
        "k": run.k,
        "speedup": run.speedup.interval(),
        "decode_speedup": run.decode_speedup.interval(),
        "predicted_decode_speedup": run.predicted,
        "tokens_per_step": run.tokens_per_step.interval(),
        "accepted_per_drafted": run.counts.accepted_per_drafted,
        "hazards": list(run.counts.conditional_acceptance),
        "time_shares": dict(zip(("draft", "verify", "other"), run.time_shares, strict=True)),
        "prompts": run.prompts,
        "pairs": run.pairs,
        "differing_outputs": run.differing,
        "margin_nats": run.margin,
    }


def _overall_json(total: Overall) -> dict[str, Any]:
    return {
        "k": total.k,
        "conditional_acceptance": total.conditional_acceptance.interval(),
        "share_of_16_bit_acceptance": _interval(total.share),
        "accepted_per_drafted": total.accepted_per_drafted.interval(),
        "tokens_per_step": total.tokens_per_step.interval(),
        "speedup": _interval(total.predicted),
        "confirmed_speedup": _interval(total.confirmed),
    }
