"""Mixed precision from a draft, a probe and a budget: price, fit the response, choose; and the choice as a file.

What `bitdraft quantize DRAFT --budget 4.25bits --target T -o DIR` does before it quantises.
"""

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import UsageError
from ..formats import Format, Recipe, get_format
from ..formats.recipe import Method
from ..models.tokenizer import check_pair
from .allocate import HEAD, Allocation, Choice, allocate, candidates, mixed_recipe
from .load import Progress, Source
from .objective import Budget, Response, Speed
from .probe import AcceptanceProbe
from .sensitivity import Sensitivities, least_squares, sensitivities
from .teacher_forced import Outcome, TeacherForced

TEXTS, TOKENS = 3, 32
"""Texts of each workload, and tokens of each, that prices are taken on: enough for the order of tensors."""

Row = tuple[str, ...]


def allocate_for(
    draft: Source,
    target: Source,
    probe: AcceptanceProbe,
    budget: str,
    *,
    rng: np.random.Generator,
    activation: str = "16",
    with_head: bool = True,
    speed: Speed | None = None,
    journal: Path | None = None,
    progress: Progress | None = None,
) -> Allocation:
    """Choose a format for every tensor of a draft.

    Args:
        draft, target: the pair, opened.
        probe: texts of the target; the first `TEXTS` of each workload are read, `TOKENS` tokens each.
        budget: '4.25bits', '350MB', '0.35GB', or '12ms' a drafted token with a `speed`.
        rng: draws the samples that prices are taken by.
        activation: of the inputs, as names of formats say it: '16', '8' or '8-ag32'.
        with_head: whether the head counts in the budget and is chosen, too. It stays at 8 bits if not.
        speed: measured step costs; with them, what is maximised is tokens a second, without them acceptance.
        journal: a .jsonl file that prices are kept in; an interrupted run goes on from it.
        progress: called with (done, total, what).

    Raises:
        UsageError: a budget that cannot be read or met, or a journal of another question.
        PairError: the vocabularies of draft and target differ in meaning.
    """
    limit = Budget.parse(budget, with_head)
    if limit.unit == "ms":
        limit.bytes_of(0, speed)  # refuses before the long part
    usable = check_pair(target.tokenizer, draft.tokenizer)
    formats = candidates(activation)
    reference = TeacherForced(draft.checkpoint, probe.short(TEXTS, TOKENS), usable, progress)
    prices = sensitivities(reference, formats, rng=rng, path=journal, progress=progress)
    head = f"w8a{activation}"
    points = [
        (uniform_kl(prices, form, head), uniform_outcome(reference, form, head, progress).acceptance)
        for form in _anchors(prices, activation)
    ]
    response = Response.fit(reference.acceptance, points)
    config = draft.checkpoint.config
    return allocate(config, prices, formats, limit, response, speed, None if with_head else head)


def _anchors(prices: Sensitivities, activation: str) -> list[Format]:
    """Uniform formats that the response is fitted through: 3 and 4 bits in the larger group that fits every tensor."""
    tensors = {tensor for tensor, _ in prices.kl}
    for group in (64, 32):
        forms = [get_format(f"w{bits}a{activation}-g{group}-asym") for bits in (3, 4)]
        if all((tensor, form.name) in prices.kl for tensor in tensors for form in forms):
            return forms
    return [get_format(f"w8a{activation}")]


def uniform_kl(prices: Sensitivities, form: Format, head: str) -> float:
    """The KL that all tensors in one format, the head in another, are expected to have.

    Raises:
        UsageError: a tensor was not priced in it.
    """
    tensors = {tensor for tensor, _ in prices.kl}
    try:
        return sum(prices.kl[tensor, head if tensor == HEAD else form.name] for tensor in tensors)
    except KeyError as missing:
        raise UsageError(f"{missing}: not priced. Expected a format that fits every tensor.") from None


def uniform_outcome(reference: TeacherForced, form: Format, head: str, progress: Progress | None = None) -> Outcome:
    """What becomes of the draft with all layers in one format and the head in another, run in FP32."""

    def change(name: str, weight_NK: Tensor) -> Tensor:
        return least_squares(weight_NK, get_format(head) if name == HEAD else form)

    return reference.changed(change, progress=progress)


def save_allocation(allocation: Allocation, path: Path) -> None:
    """Write a choice as JSON: what was expected, what else there was, and every tensor's format."""
    path.write_text(json.dumps(to_json(allocation), indent=1) + "\n", encoding="utf-8")


def to_json(allocation: Allocation) -> dict[str, Any]:
    """A choice in plain types."""
    return {
        "base": allocation.base,
        "budget": asdict(allocation.budget),
        "response": asdict(allocation.response),
        "expected": asdict(allocation.expected),
        "baselines": [asdict(baseline) for baseline in allocation.baselines],
        "tensors": [{**asdict(choice), "bits": choice.bits} for choice in allocation.choices],
    }


def load_recipe(path: Path, method: Method = "clip") -> Recipe:
    """The recipe of a choice that `save_allocation` wrote.

    Raises:
        UsageError: there is none, or a damaged one.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        formats = {tensor["tensor"]: tensor["format"] for tensor in record["tensors"]}
        return mixed_recipe(formats, record["base"], record["expected"]["bits"], method)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: no allocation can be read there ({error}). Expected the allocation.json that `bitdraft quantize "
            "--budget` wrote."
        ) from None


def summary_rows(allocation: Allocation) -> tuple[Row, list[Row]]:
    """Headings and a row for the choice and each baseline."""
    headings = ("draft", "bits", "bits without head", "MB", "KL", "acceptance", "tokens/s")
    rows: list[Row] = []
    for p in (allocation.expected, *allocation.baselines):
        rate = "" if p.tokens_per_second is None else f"{p.tokens_per_second:.1f}"
        sizes = f"{p.bits:.2f}", f"{p.bits_without_head:.2f}", f"{p.size / 1e6:.0f}"
        rows.append((p.name, *sizes, f"{p.kl:.4f}", f"{p.acceptance:.3f}", rate))
    return headings, rows


def class_rows(allocation: Allocation) -> tuple[Row, list[Row]]:
    """Headings and a row for each class of tensors: bits, what it costs in KL, what another MB would buy there."""
    classes: dict[str, list[Choice]] = defaultdict(list)
    for choice in allocation.choices:
        classes[choice.tensor.rpartition(".")[2]].append(choice)
    rows: list[Row] = []
    for name, its in classes.items():
        bits = 8 * sum(c.size for c in its) / sum(c.weights for c in its)
        gains = [-kl / size * 1e6 for _, size, kl in (c.up for c in its if c.up)]
        next_mb = f"{max(gains):.2e}" if gains else ""
        rows.append((name, f"{bits:.2f}", f"{sum(c.size for c in its) / 1e6:.1f}", f"{_kl(its):.4f}", next_mb))
    return ("class", "bits", "MB", "KL", "KL off by the next MB"), rows


def layer_rows(allocation: Allocation) -> tuple[Row, list[Row]]:
    """Headings and a row for each layer: every tensor's format, the layer's bits and its KL."""
    layers: dict[str, list[Choice]] = defaultdict(list)
    for choice in allocation.choices:
        layers[choice.tensor.split(".")[2] if "." in choice.tensor else "head"].append(choice)
    names = tuple(choice.tensor.rpartition(".")[2].removesuffix("_proj") for choice in layers.get("0", ()))
    rows: list[Row] = []
    for layer, its in layers.items():
        bits = 8 * sum(c.size for c in its) / sum(c.weights for c in its)
        cells = [_short(choice.format) for choice in its]
        cells += [""] * (len(names) - len(cells))
        rows.append((layer, *cells, f"{bits:.2f}", f"{_kl(its):.4f}"))
    return ("layer", *names, "bits", "KL"), rows


def _kl(choices: list[Choice]) -> float:
    return sum(choice.kl for choice in choices)


def _short(name: str) -> str:
    """'w4a16-g64-asym' as '4g64z', 'w8a16' as '8'."""
    form = get_format(name)
    group = f"g{form.group_size}" if form.group_size else ""
    return f"{form.bits}{group}{'' if form.symmetric else 'z'}"
