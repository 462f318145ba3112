"""Drafts in which one thing is in low bits and all else in 16, run on a measurement's texts.

Shape suffixes: N outputs, K inputs, G groups, S inputs of a group.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..formats import KVFormat, Recipe, get_format, get_kv_format
from ..models.cached import CachedModel
from ..models.checkpoint import Checkpoint, Weights
from ..models.decoder import Decoder, prepare_model
from ..models.kv_scales import find_scales
from ..models.tokenizer import check_pair
from ..ops.packed import Packed
from ..quantize.load import Progress, Source, open_source
from ..quantize.pipeline import quantize
from ..quantize.probe import AcceptanceProbe
from .attribution import FIELDS, FILE, Kind, Swap
from .files import mend, read_lines, writable
from .probe_texts import probe_of_folder
from .records import to_json
from .trace import Trace
from .workload import calibration_texts

TEXTS, TOKENS = 8, 32
"""Texts of each workload, and tokens of each, that swaps are run on."""

BANDS = 8
"""Parts that the layers are cut into, at most."""

CLASSES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TABLES = ("lm_head", "model.embed_tokens")

MakeWeights = Callable[[], Weights]
Judge = Callable[[Weights, KVFormat], Sequence[Tensor]]
"""From a draft's weights, and the format of its keys and values, to the overlaps of each text of a probe."""


def attribute(
    folder: Path,
    format_name: str,
    *,
    rng: np.random.Generator,
    workloads: Sequence[str] | None = None,
    texts: int = TEXTS,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> None:
    """Run every swap of a format on a measurement's texts, and keep what it did beside the trace.

    Goes on where it was interrupted.

    Args:
        folder: what `bitdraft measure -o` wrote; the target's hidden rows must still be there.
        format_name: the recipe to explain.
        rng: for recipes that calibrate.
        workloads: what was asked for, where files were among it: a trace knows them by name only.
        texts: of each workload. tokens: of each text.
        progress: called with (done, total, what).

    Raises:
        UsageError: no measurement there, or a recipe that changes norms or biases, too.
    """
    recipe = Recipe.parse(format_name)
    probe = probe_of_folder(folder, workloads, progress).short(texts, tokens)
    run = Trace.load(folder).run
    draft, target = open_source(run.draft.name, progress), open_source(probe.target.model, progress)
    usable = check_pair(target.tokenizer, draft.tokenizer)
    calibration = [draft.tokenizer.encode(text) for text in calibration_texts()]
    base = quantize(draft.checkpoint, Recipe.parse("bf16"), rng=rng, progress=progress)
    low = quantize(draft.checkpoint, recipe, rng=rng, calibration=calibration, progress=progress)
    journal = _Journal(folder, recipe.name, probe)
    judge = _judge(probe, target, usable, [token for ids in calibration for token in ids])
    passes = list(with_kv(swaps(draft.checkpoint, base, low), run.kv))
    for done, (kind, name, make, kv) in enumerate(passes):
        what = f"explaining {recipe.name}"
        if progress:
            progress(done, len(passes), what)
        if not journal.has(kind, name):
            journal.add(kind, name, judge(make(), kv))
        if progress:
            progress(done + 1, len(passes), what)


def _judge(probe: AcceptanceProbe, target: Source, usable: int, text: Sequence[int]) -> Judge:
    longest = max(len(text.context) for text in probe.texts)

    def judge(weights: Weights, kv: KVFormat) -> Sequence[Tensor]:
        decoder, width = Decoder(prepare_model(weights)), target.tokenizer.vocab_size
        scales = find_scales(decoder, text) if kv.needs_scales else None
        return probe.judge(
            CachedModel(decoder, kv_tokens=longest, vocab_size=width, usable=usable, kv=kv, kv_scales=scales)
        )

    return judge


def with_kv(
    of_weights: Iterable[tuple[Kind, str, MakeWeights]], kv: str | None
) -> Iterator[tuple[Kind, str, MakeWeights, KVFormat]]:
    """Swaps with formats of keys and values: 16 bits but for the whole; and these alone in `kv`, if that is smaller."""
    plain = get_kv_format("bf16")
    low = get_kv_format(kv or plain.name)
    smaller = low.bits_per_number(64) < 16
    for kind, name, make in of_weights:
        yield kind, name, make, low if smaller and kind == "whole" else plain
        if smaller and kind == "base":
            yield "kv", "", make, low
        if smaller and kind == "whole":
            yield "rest", "", make, plain


def swaps(source: Checkpoint, base: Weights, low: Weights) -> Iterator[tuple[Kind, str, MakeWeights]]:
    """Every swap between a draft in 16 bits and the same in low bits: what it is, and how to make its weights.

    Raises:
        UsageError: the two differ in norms or biases, so that no tensor can be swapped alone.
    """
    if any(packed.outliers for packed in low.packed.values()):
        raise UsageError(
            "this recipe keeps inputs in 16 bits that q, k and v share, and gate and up, so that no tensor can be put "
            "in low bits alone. Expected one without -out."
        )
    if any(not torch.equal(tensor, low.tensors[name]) for name, tensor in base.tensors.items()):
        raise UsageError(
            "this recipe moves scales from weights into norms and biases, so that no tensor can be put in low bits "
            "alone. Expected one that rounds in place: explain the same format without -awq or -smooth."
        )
    layers = source.config.num_layers
    rounded = [name for name in base.packed if low.packed[name].activation != "bf16"]

    def only(chosen: Callable[[str], bool]) -> Callable[[], Weights]:
        return lambda: _mixed(base, low, chosen)

    yield "base", "", lambda: base
    yield "whole", "", lambda: low
    for name in CLASSES:
        yield "class", name, only(partial(_in_class, name))
    yield "class", "head", only(lambda tensor: tensor in TABLES)
    step = -(-layers // BANDS)
    for first in range(0, layers, step):
        band = range(first, min(first + step, layers))
        label = f"layer {first}" if len(band) == 1 else f"layers {first} to {band[-1]}"
        yield "layers", label, only(partial(_in_layers, band))
    if rounded:
        yield "inputs", "", only(lambda _: True)
    clipped = {name: weight for name in base.packed if (weight := _clipped(source, name, low.packed[name])) is not None}
    if clipped:
        yield "clipping", "", lambda: replace(base, packed=_tie({**base.packed, **clipped}, base))


def _in_class(name: str, tensor: str) -> bool:
    return tensor.endswith(name)


def _in_layers(band: range, tensor: str) -> bool:
    return tensor not in TABLES and int(tensor.split(".")[2]) in band


def _mixed(base: Weights, low: Weights, chosen: Callable[[str], bool]) -> Weights:
    """The 16-bit draft with some tensors in low bits, and all inputs in 16."""
    packed = {
        name: replace(low.packed[name], activation="bf16") if chosen(name) else weight
        for name, weight in base.packed.items()
    }
    return replace(base, packed=_tie(packed, base))


def _tie(packed: dict[str, Packed], like: Weights) -> dict[str, Packed]:
    """With one object for head and embedding where there was one: how weights say that they are tied."""
    if like.packed["lm_head"] is like.packed["model.embed_tokens"]:
        packed["model.embed_tokens"] = packed["lm_head"]
    return packed


def _clipped(source: Checkpoint, name: str, packed: Packed) -> Packed | None:
    """A weight in 16 bits, cut to half a step beyond the range of its codes; None if nothing lies outside."""
    if packed.scales is None or packed.blocks is not None or packed.codes.is_floating_point():
        return None
    weight_NK = source.tensor(f"{name}.weight")
    w_NGS = weight_NK.view(len(weight_NK), packed.scales.shape[1], -1)
    scale = packed.scales[..., None]
    if packed.bits == 8:
        low, high = -127.5 * scale, 127.5 * scale
    else:
        zero = 2.0 ** (packed.bits - 1) if packed.zeros is None else packed.zeros.float()[..., None]
        low, high = (-0.5 - zero) * scale, (2**packed.bits - 0.5 - zero) * scale
    # What the reading of a scale from 16 bits moves an edge by is no clipping.
    slack = 1e-3 * scale
    if not bool(((w_NGS < low - slack) | (w_NGS > high + slack)).any()):
        return None
    return get_format("bf16").encode(w_NGS.clamp(low, high).view(weight_NK.shape))


class _Journal:
    """What swaps of one format did, in attribution.jsonl."""

    def __init__(self, folder: Path, name: str, probe: AcceptanceProbe) -> None:
        self._path, self._name, self._probe = folder / FILE, name, probe
        with writable(folder):
            mend(self._path)
        lines = [line for line in read_lines(self._path, Swap, FIELDS) if line.format == name]
        lengths = {(text.workload, text.index): len(text.ids) for text in probe.texts}
        if any(lengths.get((line.workload, line.index)) != len(line.overlap) for line in lines):
            raise UsageError(
                f"{self._path} explains {name} on other texts, or on more or fewer tokens of them. Expected the same; "
                "take its lines of that format away, or ask as before."
            )
        counts: dict[tuple[str, str], int] = {}
        for line in lines:
            counts[line.kind, line.name] = counts.get((line.kind, line.name), 0) + 1
        if any(count < len(lengths) for count in counts.values()):
            raise UsageError(f"{self._path}: a swap of {name} lacks texts. Take the lines of that format away.")
        self._done = set(counts)

    def has(self, kind: str, name: str) -> bool:
        return (kind, name) in self._done

    def add(self, kind: Kind, name: str, overlaps: Sequence[Tensor]) -> None:
        lines = [
            Swap(self._name, kind, name, text.workload, text.index, tuple(overlap.tolist()))
            for text, overlap in zip(self._probe.texts, overlaps, strict=True)
        ]
        # All texts of a swap in one write, so that an interruption leaves all or, but for the last line, none.
        text = "".join(json.dumps(to_json(line), allow_nan=False) + "\n" for line in lines)
        with writable(self._path.parent), self._path.open("a", encoding="utf-8") as file:
            file.write(text)
