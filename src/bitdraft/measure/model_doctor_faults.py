"""What is wrong with a model's weights, in words: from facts and causes to findings, alike ones together."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .model_doctor_causes import Cause
from .model_doctor_weights import Match, TensorFacts

_AGAIN = "Quantise the original again, or get the file again"


@dataclass(frozen=True)
class Finding:
    """Something about a model that could be better.

    Attributes:
        what: is wrong. where: layer and tensor, or the file. costs: what it costs. remedy: what to do.
        grave: the model is not what it is said to be; everything else is a note.
        size: how much it costs, to put the gravest first.
        tensors: full names of all tensors that it is about.
    """

    what: str
    where: str
    costs: str
    remedy: str
    grave: bool
    size: float = 0.0
    tensors: tuple[str, ...] = ()


_WORDS: Mapping[str, tuple[str, str]] = {
    "constant scales": (
        "every scale is {value:g}, so the file's scales were ignored or lost",
        "Write the file again with the scales it was rounded with, under the names its format wants (weight_scale, "
        "scales), or quantise again",
    ),
    "factor": (
        "{value:.3g} times as large as in the original, so its scales are wrong by that factor",
        "Divide the scales by {value:.3g}, or quantise again; if inputs have a static scale (input_scale), see that it "
        "is applied once, and only once",
    ),
    "scales of": (
        "it has the scales of {other}",
        "Give each tensor its own scales back: the two were exchanged when the file was written",
    ),
    "zero off by one": (
        "its zero points are off by one: every value is {value:+.0f} step from where it should be",
        "Files of GPTQ's first version store zero points less one: see which version wrote the file, and convert it "
        "again as that",
    ),
    "zeros ignored": (
        "its zero points were ignored: every group is shifted by its own constant",
        "Convert the file again with its zero points (qzeros, weight_zero_point), or quantise symmetrically",
    ),
    "zeros": (
        "its zero points, or the minima of its blocks, are wrong: every group is shifted by its own constant",
        _AGAIN,
    ),
    "code order": (
        "its codes are in another order: {other} change places",
        "Convert the file again with the packing its format wants: the first code in the lowest bits",
    ),
    "rows": (
        "its rows are permuted",
        "Convert the file again as this family: converters reorder the rows of q and k for another rotary layout",
    ),
    "columns": (
        "its columns are permuted, as when act-order's g_idx is ignored",
        "Convert the file again and apply g_idx, or quantise without act-order",
    ),
    "row scales": ("the scales of its rows are wrong, each by another factor", _AGAIN),
    "group scales": (
        "the scales of its groups are wrong, each by another factor: another order, or another tensor's",
        _AGAIN,
    ),
    "some rows": ("{value:.0f} of its rows are damaged, row {first} the first", _AGAIN),
    "unrelated": ("it has nothing to do with the original's", f"{_AGAIN}: it is damaged, or another model's"),
}
"""What a cause is in words, and what to do, by its kind."""


def suspicious(match: Match) -> bool:
    """Whether a weight is worth a search for a cause."""
    return broken(match) or match.error > 1.5 * match.expected + 0.01


def broken(match: Match) -> bool:
    """Whether a weight is further from its original than any way of rounding to its format takes it."""
    return (
        match.error > 2.5 * match.expected + 0.03
        or abs(match.gain - 1) > 0.3 + 0.5 * match.expected
        or match.correlation < 0.5 * match.correlation_expected
        or match.rows_off > 0
    )


def weight_findings(tensors: Iterable[TensorFacts], causes: Mapping[str, Cause | None], head: str) -> Iterator[Finding]:
    """All that is wrong with linear layers and embedding.

    Args:
        tensors: the facts.
        causes: of those that are suspicious, by name.
        head: what to add where the head is at fault: how it is tied.
    """
    tensors = list(tensors)
    bad = [t for t in tensors if not t.finite]
    if bad:
        yield Finding(
            "NaN or infinite values, in weights or scales",
            places([t.name for t in bad]),
            "every output of the model is NaN, and a program that does not look writes one token for ever",
            "Get the file again; if the original has them, too, mend it. Where float16 was too narrow, use bfloat16",
            True,
            100.0,
            tuple(t.name for t in bad),
        )
    yield from _foreign(tensors, causes)
    faults: dict[tuple[str, ...], list[TensorFacts]] = defaultdict(list)
    for tensor in tensors:
        cause = causes.get(tensor.name)
        if (
            tensor.match is None
            or (cause is None and not broken(tensor.match))
            or _is_foreign(tensor.name, causes, tensors)
        ):
            continue
        faults[_alike(tensor, cause)].append(tensor)
    for key, found in faults.items():
        yield _finding(key, found, causes[found[0].name], head)


def _alike(tensor: TensorFacts, cause: Cause | None) -> tuple[str, ...]:
    """What findings are merged by."""
    assert tensor.match is not None
    if cause is None:
        return ("coarse", _resolution(tensor))
    if cause.kind == "tensor" and _layer(cause.other) == _layer(tensor.name):
        return ("swapped", *sorted(_part(name) for name in (cause.other, tensor.name)))
    if cause.kind in ("tensor", "scales of"):
        return (cause.kind, *sorted((tensor.name, cause.other)))
    return (cause.kind, cause.other, f"{cause.value:.2g}", str(tensor.match.first_off) * (cause.kind == "some rows"))


def _finding(key: tuple[str, ...], found: list[TensorFacts], cause: Cause | None, head: str) -> Finding:
    names = tuple(t.name for t in found)
    worst = max(found, key=_size)
    match = worst.match
    assert match is not None
    if cause is None:
        what = f"further from the original than its format takes it{key[1]}"
        remedy = "Quantise again: with more or better calibration texts, or to nearest, which would lose less"
    elif key[0] == "swapped":
        what = f"{key[1]} and {key[2]} are swapped" if len(names) > 1 else f"it is {cause.other} of the original"
        remedy = "Exchange the two tensors, and see which names the converter maps to which"
    elif cause.kind == "tensor":
        what = f"it is {cause.other} of the original"
        remedy = "Exchange the tensors: the converter numbered or named them wrongly"
        if len(names) > 1:
            what = f"{key[1]} and {key[2]} are swapped"
    elif cause.kind == "scales of" and len(names) > 1:
        what, remedy = f"{key[1]} and {key[2]} have each other's scales", _WORDS[cause.kind][1]
    else:
        values = {"value": cause.value, "other": cause.other, "first": match.first_off}
        what, remedy = (words.format(**values) for words in _WORDS[cause.kind])
    if head and "lm_head" in names:
        what, remedy = f"{what}. {head}", f"{remedy}, and give the head back what it was"
    return Finding(what, places(names), _costs(match), remedy, cause is not None or broken(match), _size(worst), names)


def _resolution(tensor: TensorFacts) -> str:
    """Of a weight that is coarser than it must be: what its codes say of it."""
    if tensor.codes_used is not None and tensor.codes_used < 0.5:
        return f": {tensor.codes_used:.0%} of its codes are used, so its scales are too large for its weights"
    if tensor.at_limits is not None and tensor.bits >= 4 and tensor.at_limits > 0.1:
        return f": {tensor.at_limits:.0%} of its weights are clipped, so its scales are too small"
    return ""


def _costs(match: Match) -> str:
    if match.output_error is not None and match.output_expected is not None:
        return (
            f"its outputs are off by {_percent(match.output_error)}, where its format costs "
            f"{_percent(match.output_expected)}"
        )
    return f"its weights are off by {_percent(match.error)}, where its format costs {_percent(match.expected)}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _size(tensor: TensorFacts) -> float:
    match = tensor.match
    assert match is not None
    return match.error if match.output_error is None else match.output_error


def _foreign(tensors: list[TensorFacts], causes: Mapping[str, Cause | None]) -> Iterator[Finding]:
    """Layers that are another model's, or the whole model."""
    layers = _foreign_layers(causes, tensors)
    if not layers:
        return
    names = tuple(t.name for t in tensors if _layer(t.name) in layers)
    every = layers == {_layer(t.name) for t in tensors if t.name.startswith("model.layers.")}
    yield Finding(
        "nothing in it is the original's: another model's weights" if every else "a layer of another model",
        "all layers" if every else places(names, whole=True),
        "what the layer adds has nothing to do with what the original adds",
        "Give the original that this model was made from (--against)"
        if every
        else "Get the file again, or quantise the original again: shards of two models were mixed",
        True,
        10.0,
        names,
    )


def _foreign_layers(causes: Mapping[str, Cause | None], tensors: list[TensorFacts]) -> set[str]:
    counts: dict[str, int] = defaultdict(int)
    for tensor in tensors:
        cause = causes.get(tensor.name)
        if cause is not None and cause.kind == "unrelated" and _layer(tensor.name):
            counts[_layer(tensor.name)] += 1
    return {layer for layer, count in counts.items() if count >= 6}


def _is_foreign(name: str, causes: Mapping[str, Cause | None], tensors: list[TensorFacts]) -> bool:
    return _layer(name) in _foreign_layers(causes, tensors)


def _layer(name: str) -> str:
    """'3' of 'model.layers.3.mlp.up_proj'; '' of a tensor outside the layers."""
    return name.split(".")[2] if name.startswith("model.layers.") else ""


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def places(names: Iterable[str], whole: bool = False) -> str:
    """Tensors in a few words: 'layers 0-3: self_attn.k_proj; layer 2: mlp.up_proj'; with `whole`, only the layers."""
    parts: dict[str, list[int]] = defaultdict(list)
    for name in names:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            parts[name] = []
        else:
            parts["" if whole else match[2]].append(int(match[1]))
    by_layers: dict[str, list[str]] = defaultdict(list)
    for part, layers in parts.items():
        by_layers[_ranges(sorted(set(layers)))].append(part)
    return "; ".join(
        ": ".join(filter(None, (layers, ", ".join(p for p in some if p)))) for layers, some in by_layers.items()
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer{'s' if len(numbers) > 1 else ''} {text}" if numbers else ""
