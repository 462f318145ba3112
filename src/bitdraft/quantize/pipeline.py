"""From a checkpoint and a recipe to the weights of a model in a format, layer by layer.

Of the model, one layer is in memory as float32; whoever takes the finished layers decides what becomes of them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import FormatError, ModelFileError, UsageError
from ..formats import Format, Recipe
from ..models.checkpoint import Checkpoint, Weights
from ..models.tensor_names import EMBEDDING, FINAL_NORM, HEAD, tensor_shapes
from ..ops.encoding import dequantize, is_finite
from ..ops.packed import Packed
from .calibrate import TOKENS, Calibration, LayerInputs, count_tokens, values_of, windows
from .fold import READERS
from .layer import product_sizes, round_layer
from .outliers import KeptColumns
from .rounding import clipped, nearest

Progress = Callable[[int, int | None, str], None]

KEPT_ROWS = 256
"""Rows of inputs that AWQ's scales are chosen on, for each linear layer."""

LINEAR = tuple(reader for readers in READERS.values() for reader in readers)
"""The linear layers of a layer, by name within it."""


@dataclass(frozen=True)
class FinishedLayer:
    """One layer of a model in its format.

    Attributes:
        number: from 0.
        packed, tensors: as in `Weights`, of this layer.
        errors: by linear layer within the layer, sqrt of the sum of squared errors over the sum of squares: of the
            outputs on the calibration set, or of the weights where the method reads none.
        outliers: by linear layer within the layer, what it keeps in 16 bits; empty where the recipe keeps nothing.
    """

    number: int
    packed: Mapping[str, Packed]
    tensors: Mapping[str, Tensor]
    errors: Mapping[str, float]
    outliers: Mapping[str, KeptColumns] = field(default_factory=dict)


def check_layers(source: Checkpoint, recipe: Recipe) -> None:
    """See whether a recipe fits every linear layer, before any work.

    Raises:
        FormatError: naming every layer that it does not fit, or that it has a format for and the model has not.
    """
    shapes = source.config.linear_shapes()
    unknown = [name for name in recipe.formats if name not in shapes]
    if unknown:
        raise FormatError(
            f"{source.origin}: {recipe.name} has a format for {', '.join(map(repr, unknown[:4]))}"
            f"{f' and {len(unknown) - 4} more' if len(unknown) > 4 else ''}, and the model has no such linear layer. "
            f"Expected 'lm_head', or names such as {next(iter(shapes))!r}, of {source.config.num_layers} layers."
        )
    linear = [f"{name}.weight" for name in shapes if name != "lm_head"]
    integers = recipe.format.kind == "stored" and recipe.format.activation in ("int8", "int8_g32")
    if integers and all(source.holds_floats(name) for name in linear):
        raise FormatError(
            f"{source.origin}: {recipe.name} multiplies 8-bit inputs by the integers that a file stores, and this one "
            f"stores its layers as floats ({source.stored_as}). Use stored-a16, which keeps them, or w8a8, which "
            "rounds them to 8 bits."
        )
    alike: dict[tuple[str, tuple[int, int], Format], list[str]] = {}
    for name, shape in shapes.items():
        alike.setdefault((name.split(".", 3)[-1], shape, recipe.format_of(name)), []).append(name)
    problems = []
    for (_, shape, form), names in alike.items():
        if recipe.outliers >= shape[1] and names[0] != "lm_head":
            problems.append(f"{names[0]} has {shape[1]} inputs, and {recipe.name} keeps {recipe.outliers} in 16 bits.")
        label = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} layers)"
        try:
            form.check(label, shape)
        except FormatError as error:
            problems.append(f"{source.origin}: {error}")
    if problems:
        raise FormatError("\n".join(problems))


def quantize(
    source: Checkpoint,
    recipe: Recipe,
    *,
    rng: np.random.Generator,
    calibration: Sequence[Sequence[int]] | None = None,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> Weights:
    """Bring a model into a format, all of it in memory: arguments and errors are those of `quantize_layers`."""
    weights = Weights(source.config, {}, {})
    for layer in quantize_layers(source, recipe, rng=rng, calibration=calibration, tokens=tokens, progress=progress):
        weights.packed |= layer.packed
        weights.tensors |= layer.tensors
    head, embedding, weights.tensors[FINAL_NORM] = quantize_ends(source, recipe)
    weights.packed |= {"lm_head": head, "model.embed_tokens": embedding}
    if progress:
        progress(source.config.num_layers + 1, source.config.num_layers + 1, doing(recipe))
    return weights


def quantize_layers(
    source: Checkpoint,
    recipe: Recipe,
    *,
    rng: np.random.Generator,
    calibration: Sequence[Sequence[int]] | None = None,
    tokens: int = TOKENS,
    first: int = 0,
    finished: Callable[[int], tuple[Mapping[str, Packed], Mapping[str, Tensor]]] | None = None,
    progress: Progress | None = None,
) -> Iterator[FinishedLayer]:
    """Bring the layers of a model into a format, one after the other; everything is checked before the first.

    Args:
        source: the checkpoint; read tensor by tensor.
        recipe: format and method.
        rng: chooses what is read of a calibration set, and the rows that scales are chosen on.
        calibration: token ids of texts; needed by calibrated methods, not read otherwise.
        tokens: how many of them are read, at most.
        first: the layer to begin with. The same `rng` gives the same layers as without.
        finished: gives the weights and tensors of a layer below `first`, which the calibration set is taken through;
            needed by calibrated methods with `first` above 0.
        progress: called with (layers done, layers and 1 for head and embedding, what).

    Raises:
        FormatError: a layer that the format does not fit; nothing was done then.
        ModelFileError: a weight with NaN or infinity, named.
        UsageError: a method without a calibration set that it needs, or with too short a one.
        NumericsError: activations on the calibration set that are NaN or infinite.
    """
    check_request(source, recipe, calibration, tokens)
    return _layers(source, recipe, rng, calibration or (), tokens, first, finished, progress)


def check_request(
    source: Checkpoint, recipe: Recipe, calibration: Sequence[Sequence[int]] | None, tokens: int = TOKENS
) -> None:
    """See whether a recipe fits every layer, and a calibration set the recipe; arguments as for `quantize_layers`.

    Raises:
        FormatError: a layer that the format does not fit.
        UsageError: a method without a calibration set that it needs, or with too short a one.
    """
    check_layers(source, recipe)
    if not recipe.calibrated:
        return
    if calibration is None:
        raise UsageError(
            f"{recipe.name} needs a calibration set: texts like your traffic. Give one, or use a method without data: "
            f"{recipe.format.name}, or {recipe.format.name}-clip."
        )
    count_tokens(calibration, tokens)


def _layers(
    source: Checkpoint,
    recipe: Recipe,
    rng: np.random.Generator,
    calibration: Sequence[Sequence[int]],
    tokens: int,
    first: int,
    finished: Callable[[int], tuple[Mapping[str, Packed], Mapping[str, Tensor]]] | None,
    progress: Progress | None,
) -> Iterator[FinishedLayer]:
    config = source.config
    rows: Calibration | None = None
    if recipe.calibrated:
        texts = windows(calibration, tokens, config.context_length, rng)
        rows = Calibration(source, texts, recipe.format_of("lm_head"))
    seeds = rng.integers(2**63, size=config.num_layers)  # so that a layer's rows are the same wherever one begins
    for i in range(config.num_layers):
        if i < first:
            if rows is not None:
                assert finished is not None, "a calibrated method resumes from its finished layers"
                packed, tensors = finished(i)
                rows.advance(i, Weights(config, dict(packed), dict(tensors)))
            continue
        if rows is None:
            layer = _without_data(source, recipe, i)
        else:
            layer = _calibrated(source, recipe, i, rows, np.random.default_rng(seeds[i]))
            if i + 1 < config.num_layers:
                rows.advance(i, Weights(config, dict(layer.packed), dict(layer.tensors)))
        if progress:
            progress(i + 1, config.num_layers + 1, doing(recipe))
        yield layer


def quantize_ends(source: Checkpoint, recipe: Recipe) -> tuple[Packed, Packed, Tensor]:
    """Head and embedding in the head's format, one object where they are tied, and the last norm.

    Raises:
        ModelFileError: a weight with NaN or infinity, named.
    """
    form = recipe.format_of("lm_head")
    head, _ = _rounded(source, HEAD, form, recipe)
    embedding = head if source.config.tied_head else _rounded(source, EMBEDDING, form, recipe)[0]
    return head, embedding, _read(source, FINAL_NORM)


def doing(recipe: Recipe) -> str:
    """What is to be said of progress."""
    return "reading the weights" if recipe.format.kind == "stored" else f"quantising to {recipe.name}"


def _without_data(source: Checkpoint, recipe: Recipe, layer: int) -> FinishedLayer:
    prefix = f"model.layers.{layer}."
    packed, errors = {}, {}
    for name in LINEAR:
        form = recipe.format_of(prefix + name)
        packed[prefix + name], errors[name] = _rounded(source, f"{prefix}{name}.weight", form, recipe)
    return FinishedLayer(layer, packed, {name: _read(source, name) for name in _vectors(source, prefix)}, errors)


def _calibrated(
    source: Checkpoint, recipe: Recipe, layer: int, rows: Calibration, rng: np.random.Generator
) -> FinishedLayer:
    config, prefix = source.config, f"model.layers.{layer}."
    names = [*(f"{prefix}{reader}.weight" for reader in LINEAR), *_vectors(source, prefix)]
    tensors = {name.removeprefix(prefix): _read(source, name) for name in names}
    vectors = {prefix + name: tensor for name, tensor in tensors.items() if prefix + name in names[len(LINEAR) :]}
    exact = {prefix + reader: values_of(tensors[f"{reader}.weight"]) for reader in LINEAR}
    forms = {reader: recipe.format_of(prefix + reader) for reader in LINEAR}
    inputs = {name: exact[prefix + readers[0]].shape[1] for name, readers in READERS.items()}
    chosen = np.sort(rng.permutation(rows.tokens)[:KEPT_ROWS])
    stats = LayerInputs(layer, product_sizes(forms, recipe, inputs), torch.from_numpy(chosen))
    rows.observe(layer, Weights(config, exact, vectors), stats)
    del exact
    packed, errors, outliers = round_layer(
        tensors, forms, recipe, stats, config, lambda reader: source.packed(f"{prefix}{reader}.weight")
    )
    return FinishedLayer(
        layer,
        {prefix + reader: packed[reader] for reader in LINEAR},
        {name: tensors[name.removeprefix(prefix)] for name in vectors},
        errors,
        outliers,
    )


def _vectors(source: Checkpoint, prefix: str) -> list[str]:
    """What a layer has beside its linear layers' weights: norms and biases."""
    linear = {f"{prefix}{name}.weight" for name in LINEAR}
    return [name for name in tensor_shapes(source.config) if name.startswith(prefix) and name not in linear]


def _rounded(source: Checkpoint, name: str, form: Format, recipe: Recipe) -> tuple[Packed, float]:
    """A weight in a format without data, or as it is stored, and its relative error."""
    if form.kind == "stored":
        packed = source.packed(name)
        if not is_finite(packed):
            _read(source, name)  # says how many of its values are no numbers
        return form.keep(packed), 0.0
    weight_NK = _read(source, name)
    # A whole row of 8 bits gains nothing from a smaller range that would show, and the tables are large.
    plain = recipe.method == "nearest" or form.kind != "integer" or (form.bits == 8 and name in (HEAD, EMBEDDING))
    packed = nearest(weight_NK, form) if plain else clipped(weight_NK, form)
    off = float((dequantize(packed) - weight_NK).square().sum())  # not in place: floats are the weight itself
    return packed, (off / max(float(weight_NK.square().sum()), 1e-30)) ** 0.5


def _read(source: Checkpoint, name: str) -> Tensor:
    tensor = source.tensor(name)
    # The sum of finite weights is finite and costs a tenth of looking at each of them.
    if not math.isfinite(float(tensor.sum())) and (bad := int((~torch.isfinite(tensor)).sum())):
        raise ModelFileError(
            f"{source.origin}: {name} holds {bad} values that are NaN or infinite. Expected numbers; the file is "
            "damaged or was saved from a run that diverged. Get it again."
        )
    return tensor
