"""`bitdraft quantize --budget`: texts of a target, and a format for every tensor chosen on them."""

from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import UsageError
from .terminal import print_table

if TYPE_CHECKING:
    from ..formats import Recipe
    from ..quantize.allocate import Allocation
    from ..quantize.load import Progress, Source
    from ..quantize.probe import AcceptanceProbe

PROMPTS, TOKENS = 4, 32
"""Texts of each workload that the target writes, and their length."""


def choose_formats(
    draft: "Source",
    budget: str,
    output: Path,
    target: str | None,
    report: Path | None,
    workload: str | None,
    recipe: "Recipe",
    seed: int,
    progress: "Progress",
) -> "tuple[Allocation, Recipe]":
    """Choose a format for every tensor of a draft.

    What was made on the way is kept in OUTPUT.budget: the target's texts, and prices as they come.

    Args:
        draft: the draft.
        budget: such as '4.25bits'.
        output: the folder that will be written.
        target: writes the texts. report: a measurement that has texts and step costs already, in its place.
        workload: what the target writes about, with commas; None for code and chat.
        recipe: says how inputs and weights are rounded.
        seed: names the random choices.
        progress: called with (done, total, what).

    Returns:
        the choice, and the recipe of it.

    Raises:
        UsageError: neither a target nor a report, or both; a budget that cannot be met.
    """
    import numpy as np

    from ..measure.speed import speed_of
    from ..measure.trace import Trace
    from ..quantize.load import open_source
    from ..quantize.mixed import allocate_for
    from ..quantize.objective import Budget

    Budget.parse(budget)  # refuses before the long part
    _check(target, report, recipe)
    kept = output.with_name(f"{output.name}.budget")
    speed = speed_of(Trace.load(report)) if report else None
    probe = _probe(kept, target, report, workload, seed, progress)
    found = allocate_for(
        draft,
        open_source(probe.target.model, progress),
        probe,
        budget,
        rng=np.random.default_rng(seed),
        activation={"int8": "8", "int8_g32": "8-ag32"}.get(recipe.format.activation, "16"),
        speed=speed,
        journal=kept / "prices.jsonl",
        progress=progress,
    )
    return found, found.recipe("clip" if recipe.method == "nearest" else recipe.method)


def _check(target: str | None, report: Path | None, recipe: "Recipe") -> None:
    if recipe.outliers:
        raise UsageError(
            f"--budget with {recipe.name}: formats are chosen by prices without inputs in 16 bits. Expected a format "
            f"without -out{recipe.outliers}, or no --budget."
        )
    if (target is None) == (report is None):
        raise UsageError(
            "a budget without, or with two, yardsticks. Expected --target with the model that the draft is for, or "
            "--report with a measurement of the two."
        )


def _probe(
    kept: Path, target: str | None, report: Path | None, workload: str | None, seed: int, progress: "Progress"
) -> "AcceptanceProbe":
    """The texts of a measurement, those that are kept, or new ones."""
    from ..formats import Recipe
    from ..measure.probe_texts import probe_of_folder, write_probe
    from ..quantize.load import open_source
    from ..quantize.probe import AcceptanceProbe
    from ..types import SamplingParams

    if report:
        return probe_of_folder(report, progress=progress)
    if (kept / "probe.json").exists():
        return AcceptanceProbe.load(kept)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, seed=seed)
    names = [name.strip() for name in (workload or "code,chat").split(",")]
    source = open_source(str(target), progress)
    probe = write_probe(source, Recipe.parse("bf16"), names, PROMPTS, sampling, perf_counter, progress=progress)
    probe.save(kept)
    return probe


def print_allocation(found: "Allocation") -> None:
    """What was chosen: the whole beside uniform formats, classes of tensors, and layer by layer."""
    from ..quantize.mixed import class_rows, layer_rows, summary_rows

    for what, (headings, rows) in (
        ("drafts", summary_rows(found)),
        ("classes", class_rows(found)),
        ("layers", layer_rows(found)),
    ):
        print_table(what, headings, rows, as_json=False)
