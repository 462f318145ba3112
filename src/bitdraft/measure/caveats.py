"""What to distrust in a measurement, in plain words. Each sentence says what to do about it."""

import math

from .figures import Cell, Confirmed, Figures
from .numbers import listed, milliseconds, percent, times
from .stats import Estimate

DEAD_BELOW = 0.02
"""A draft that is accepted less often than this is broken, not merely poor."""
DISAGREEMENT = 0.15
"""Prediction and end-to-end run may differ by so much."""
WANTED_HALF_WIDTH = 0.05
"""An interval that is wider than this, relative to its figure and to each side, calls for more samples."""
ROUNDING_MARGIN = 0.02
"""A first difference of greedy outputs at a larger top-2 margin, in nats, is not rounding."""


def caveats(figures: Figures) -> tuple[str, ...]:
    """All that a reader of the figures should know before trusting them, the gravest first."""
    cells = [figures.cells[name, workload] for workload in figures.workloads for name in figures.formats]
    found = [sentence for cell in cells for sentence in (_dead(cell), *_differences(cell)) if sentence]
    found += [sentence for cell in cells for c in cell.confirmed if (sentence := _disagreement(cell, c))]
    found += _loops(figures)
    found += _not_faster(figures)
    found += _few_prompts(cells)
    found += _noisy_timings(figures)
    return (*found, *figures.left_out)


def _dead(cell: Cell) -> str | None:
    alpha = cell.agreement.conditional_acceptance.value
    if alpha >= DEAD_BELOW:
        return None
    return (
        f"{cell.format} on {cell.workload}: acceptance is {percent(alpha)}. This draft is dead, not merely poor: look "
        "for a wrong chat template, a wrong tokenizer or weights that were read wrongly."
    )


def _differences(cell: Cell) -> list[str]:
    sentences = []
    for run in cell.confirmed:
        if not run.differing:
            continue
        text = (
            f"{cell.format}, K = {run.k} on {cell.workload}: {run.differing} of {run.pairs} greedy outputs differ from "
            "plain decoding"
        )
        if run.margin is None:
            sentences.append(f"{text}. The margin at the first difference was not recorded.")
        elif run.margin < ROUNDING_MARGIN:
            sentences.append(f"{text}, each at a near tie of the target ({run.margin:.1e} nats at most): rounding.")
        else:
            sentences.append(
                f"{text}, at a margin of {run.margin:.2f} nats. That is not rounding but a bug: report it."
            )
    return sentences


def _disagreement(cell: Cell, run: Confirmed) -> str | None:
    measured = run.decode_speedup.value
    if run.predicted is None or not math.isfinite(measured):
        return None
    off = run.predicted / measured - 1
    if abs(off) <= DISAGREEMENT:
        return None
    return (
        f"{cell.format}, K = {run.k} on {cell.workload}: decoding alone was predicted at {times(run.predicted)} and "
        f"measured at {times(measured)}. They differ by {percent(abs(off))}: trust the measured one, and time the "
        "steps again on a quiet machine."
    )


def _loops(figures: Figures) -> list[str]:
    sentences = []
    for workload, prompts in figures.looping.items():
        if workload in figures.only_loops:
            sentences.append(
                f"{workload}: every text is a loop, so its figures say nothing about real traffic and stay out of the "
                "advice where there is any other. Check the chat template and the prompts."
            )
            continue
        some = listed([str(i) for i in prompts[:5]]) + (" and more" if len(prompts) > 5 else "")
        sentences.append(
            f"{workload}: {len(prompts)} texts are loops (under a tenth of their bigrams differ) and do not count; "
            f"look at prompts {some}."
        )
    return sentences


def _not_faster(figures: Figures) -> list[str]:
    costs, reference = figures.costs, figures.reference
    if costs is None or reference is None or reference not in costs.draft:
        return []
    base = costs.draft[reference].value
    plain = figures.run.backend.startswith("reference")
    why = "No compiled kernel runs here: see `bitdraft doctor`." if plain else "8-bit inputs (a8) need less arithmetic."
    return [
        f"{name} is not faster than {reference} on this machine: {milliseconds(costs.draft[name].value)} a drafted "
        f"token against {milliseconds(base)}. It saves memory only. {why}"
        for name in figures.formats
        if name != reference and name in costs.draft and costs.draft[name].value >= base
    ]


def _few_prompts(cells: list[Cell]) -> list[str]:
    """One sentence a workload: how many prompts would bring the widest interval of tokens per step to ±5%."""
    sentences = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        here = [cell for cell in cells if cell.workload == workload]
        widths = [_half_width(cell.best.tokens_per_step) for cell in here]
        prompts = here[0].prompts
        if any(width is None for width in widths):
            sentences.append(f"{workload}: {prompts} prompt gives no interval at all. Ask for at least 20.")
            continue
        widest = max(width for width in widths if width is not None)
        if widest > WANTED_HALF_WIDTH:
            needed = math.ceil(prompts * (widest / WANTED_HALF_WIDTH) ** 2 / 10) * 10
            sentences.append(
                f"{workload}: {prompts} prompts leave tokens per step open by ±{percent(widest)}. About {needed} would "
                f"bring it to ±{percent(WANTED_HALF_WIDTH)}."
            )
        elif prompts < 10:
            sentences.append(f"{workload}: {prompts} prompts are few; intervals from under 10 tend to be too narrow.")
    return sentences


def _noisy_timings(figures: Figures) -> list[str]:
    if figures.costs is None:
        return []
    parts = {f"the {name} draft": cost for name, cost in figures.costs.draft.items()}
    parts |= {f"the target with {rows} rows": cost for rows, cost in figures.costs.target.items()}
    widths = {name: _half_width(cost) for name, cost in parts.items()}
    noisy = [name for name, width in widths.items() if width is None or width > WANTED_HALF_WIDTH]
    if not noisy:
        return []
    some = listed(noisy[:3]) + (f" and {len(noisy) - 3} more" if len(noisy) > 3 else "")
    return [f"The time of {some} is not known to ±{percent(WANTED_HALF_WIDTH)}. Time more rounds on a quiet machine."]


def _half_width(estimate: Estimate) -> float | None:
    bounds = estimate.interval()
    if bounds.low is None or bounds.high is None or not bounds.value > 0:
        return None
    return (bounds.high - bounds.low) / 2 / bounds.value
