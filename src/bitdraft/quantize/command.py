"""What `bitdraft quantize` does: a model brought into a format and written as a folder, layer by layer."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats import Recipe
from ..models.export import FolderWriter
from ..models.hf_folder import write_json
from ..models.tokenizer_folder import read_json
from ..ops.machine import torch_on_all_cores
from .calibrate import TOKENS
from .kv_cache import check_kv, folder_kv_scales
from .load import Source
from .outliers import KeptColumns
from .pipeline import LINEAR, FinishedLayer, Progress, check_request, doing, quantize_ends, quantize_layers

STATE = "bitdraft-quantize.json"
"""In the folder: what the layers were made with, and their errors."""


@dataclass(frozen=True)
class QuantizeReport:
    """What came of a model.

    Attributes:
        folder: where it lies.
        recipe: the recipe's name.
        method: how weights were rounded.
        bits_per_weight: of the linear layers, scales and zero points included, without head and embedding.
        nbytes: of all weights, as they are packed.
        measured: what the errors are of: 'outputs' on the calibration set, or 'weights'.
        errors: by kind of linear layer ('self_attn.q_proj'), the mean over the layers of the relative error.
        outliers: by linear layer ('model.layers.0.self_attn.q_proj'), the inputs that it keeps in 16 bits.
    """

    folder: Path
    recipe: str
    method: str
    bits_per_weight: float
    nbytes: int
    measured: str
    errors: Mapping[str, float]
    outliers: Mapping[str, KeptColumns]

    def as_json(self) -> dict[str, Any]:
        """All of it, for printing."""
        outliers = {name: asdict(kept) for name, kept in self.outliers.items()}
        return {**vars(self), "folder": str(self.folder), "errors": dict(self.errors), "outliers": outliers}


def quantize_folder(
    source: Source,
    recipe: Recipe,
    folder: Path,
    *,
    seed: int,
    calibration: Sequence[Sequence[int]] = (),
    tokens: int = TOKENS,
    kv: str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Bring a model into a format and write it as a folder.

    Until it is whole the folder is called `NAME.partial`; what was written of it is kept whatever happens.

    Args:
        source: the model.
        recipe: format and method.
        folder: to be made.
        seed: names the random choices of calibration.
        calibration: token ids of texts, read by calibrated methods, and to find scales of keys and values.
        tokens: how many of their tokens are read, at most.
        kv: the format of keys and values that the folder asks for, 'fp8', whose scales it then has; None for none.
        resume: go on with what an interrupted run left; without it, that is refused.
        progress: called with (layers done, layers and 1 for head and embedding, what).

    Raises:
        FormatError: the recipe does not fit the model, or the folder's layout has no place for a format.
        ModelFileError: a weight is not a number.
        UsageError: the folder is there; an interrupted run is there, or was made otherwise; the calibration set is too
            short; the disk is full: all that was written is kept then.
    """
    checkpoint, config = source.checkpoint, source.checkpoint.config
    check_request(checkpoint, recipe, calibration, tokens)
    check_kv(kv, calibration)
    notes = _Notes(folder, _made_with(recipe, calibration, tokens, seed, kv), resume)
    writer = FolderWriter(folder, checkpoint, recipe.name)
    layers = quantize_layers(
        checkpoint,
        recipe,
        rng=np.random.default_rng(seed),
        calibration=calibration,
        tokens=tokens,
        first=min(writer.layers_done, notes.layers_done),
        finished=writer.read_layer,
        progress=progress,
    )
    with torch_on_all_cores():
        for layer in layers:
            writer.write_layer(layer.number, layer.packed, layer.tensors)
            notes.add(layer)
        ends = quantize_ends(checkpoint, recipe)
        rng = np.random.default_rng(seed)
        kv_scales = folder_kv_scales(checkpoint, recipe, writer.read_layer, calibration, rng) if kv else None
    writer.finish(*ends, kv_scales)
    if progress:
        progress(config.num_layers + 1, config.num_layers + 1, doing(recipe))
    return _report(source, recipe, folder, notes, {id(p): p.nbytes for p in ends[:2]}.values())


def _report(
    source: Source, recipe: Recipe, folder: Path, notes: "_Notes", head_and_embedding: Iterable[int]
) -> QuantizeReport:
    config = source.checkpoint.config
    weights = config.num_layers * sum(prod(config.linear_shapes()[f"model.layers.0.{name}"]) for name in LINEAR)
    linear, others = notes.sizes()
    return QuantizeReport(
        folder=folder,
        recipe=recipe.name,
        method=recipe.method,
        bits_per_weight=8 * linear / weights,
        nbytes=linear + others + sum(head_and_embedding) + 4 * config.hidden_size,
        measured="outputs" if recipe.calibrated else "weights",
        errors=notes.mean_errors(),
        outliers=notes.outliers(),
    )


def _made_with(
    recipe: Recipe, calibration: Sequence[Sequence[int]], tokens: int, seed: int, kv: str | None
) -> dict[str, Any]:
    """Everything that the layers of one folder have to have in common."""
    made: dict[str, Any] = {
        "recipe": recipe.name,
        "formats": {name: form.name for name, form in sorted(recipe.formats.items())},
    }
    made |= {"kv": kv} if kv else {}
    if recipe.calibrated or kv:
        digest = hashlib.sha256(json.dumps([list(text) for text in calibration]).encode()).hexdigest()
        made |= {"calibration": digest[:16], "tokens": tokens, "seed": seed}
    return made


class _Notes:
    """What is kept beside the layers of a folder: what they were made with, and the errors and sizes of each."""

    def __init__(self, folder: Path, made_with: Mapping[str, Any], resume: bool) -> None:
        self._path = folder.with_name(f"{folder.name}.partial") / STATE
        self._made_with = dict(made_with)
        self._layers: list[dict[str, Any]] = []
        if not self._path.exists():
            return
        if not resume:
            raise UsageError(
                f"{self._path.parent} is what an interrupted run left. Go on with it by --resume, or remove it."
            )
        found = read_json(self._path)
        if found["made_with"] != self._made_with:
            first = next(
                key for key in (*found["made_with"], *made_with) if found["made_with"].get(key) != made_with.get(key)
            )
            raise UsageError(
                f"{self._path.parent} was begun with {first} {found['made_with'].get(first)!r}, not "
                f"{made_with.get(first)!r}. Resume it as it was begun, choose another folder, or remove it."
            )
        self._layers = found["layers"]

    @property
    def layers_done(self) -> int:
        return len(self._layers)

    def add(self, layer: FinishedLayer) -> None:
        """Note a layer that was written."""
        self._layers.append(
            {
                "errors": dict(layer.errors),
                "linear": sum(packed.nbytes for packed in layer.packed.values()),
                "others": sum(4 * tensor.numel() for tensor in layer.tensors.values()),
                "outliers": {name: asdict(kept) for name, kept in layer.outliers.items()},
            }
        )
        unfinished = self._path.with_suffix(".unfinished")
        try:
            write_json(unfinished, {"made_with": self._made_with, "layers": self._layers})
            os.replace(unfinished, self._path)
        except OSError as error:
            raise UsageError(
                f"{self._path.parent}: cannot be written ({error}). What was written before is kept: free some space, "
                "and go on with --resume."
            ) from None

    def sizes(self) -> tuple[int, int]:
        """Bytes of the linear layers, and of all else in the layers."""
        return sum(layer["linear"] for layer in self._layers), sum(layer["others"] for layer in self._layers)

    def outliers(self) -> dict[str, KeptColumns]:
        """What each linear layer keeps in 16 bits."""
        return {
            f"model.layers.{i}.{name}": KeptColumns(tuple(kept["columns"]), kept["removed"], kept["nbytes"])
            for i, layer in enumerate(self._layers)
            for name, kept in layer["outliers"].items()
        }

    def mean_errors(self) -> dict[str, float]:
        """The mean over the layers, by kind of linear layer."""
        return {name: fmean(layer["errors"][name] for layer in self._layers) for name in LINEAR}
