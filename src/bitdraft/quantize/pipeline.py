"""From a checkpoint and a recipe to the weights of a model in a format, layer by layer."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import FormatError, ModelFileError, UsageError
from ..formats import Format, Recipe
from ..models.checkpoint import Checkpoint, Weights
from ..models.decoder import Decoder, prepare_model
from ..ops.encoding import is_finite
from ..ops.packed import Packed
from .awq import READERS, fold_layer, round_layer
from .calibrate import MAX_TOKENS, ActivationStats, collect, count_tokens
from .rounding import nearest

Progress = Callable[[int, int | None, str], None]

KEPT_ROWS = 256
"""Rows of inputs that AWQ's scales are chosen on, for each linear layer."""

VECTORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
)
"""What a layer may have beside its linear layers' weights."""


def check_layers(source: Checkpoint, recipe: Recipe) -> None:
    """See whether a recipe fits every linear layer, before any work.

    Raises:
        FormatError: naming every layer that it does not fit.
    """
    linear = [f"{name}.weight" for name in source.config.linear_shapes() if name != "lm_head"]
    integers = recipe.format.kind == "stored" and recipe.format.activation == "int8"
    if integers and all(source.holds_floats(name) for name in linear):
        raise FormatError(
            f"{source.origin}: {recipe.name} multiplies 8-bit inputs by the integers that a file stores, and this one "
            f"stores its layers as floats ({source.stored_as}). Use stored-a16, which keeps them, or w8a8, which "
            "rounds them to 8 bits."
        )
    alike: dict[tuple[str, tuple[int, int], Format], list[str]] = {}
    for name, shape in source.config.linear_shapes().items():
        alike.setdefault((name.split(".", 3)[-1], shape, recipe.format_of(name)), []).append(name)
    problems = []
    for (_, shape, form), names in alike.items():
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
    progress: Progress | None = None,
) -> Weights:
    """Bring a model into a format.

    Args:
        source: the checkpoint; read tensor by tensor.
        recipe: format and method.
        rng: chooses the rows that AWQ keeps.
        calibration: token ids of texts; needed by AWQ, not read otherwise.
        progress: called with (layers done, layers, what).

    Raises:
        FormatError: a layer that the format does not fit; nothing was done then.
        ModelFileError: a weight with NaN or infinity, named.
        UsageError: AWQ without a calibration set, or with too short a one.
    """
    check_layers(source, recipe)
    stats = _calibrated(source, recipe, calibration, rng, progress) if recipe.method == "awq" else None
    config = source.config
    head = recipe.format_of("lm_head")
    weights = Weights(config, {}, {"model.norm.weight": _read(source, "model.norm.weight")})
    what = "reading the weights" if recipe.format.kind == "stored" else f"quantising to {recipe.name}"
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        tensors = {name: _read(source, prefix + name) for name in VECTORS if source.has(prefix + name)}
        for name, packed in _layer(source, prefix, tensors, recipe, stats, i).items():
            weights.packed[prefix + name] = packed
        weights.tensors |= {prefix + name: tensor for name, tensor in tensors.items() if name in VECTORS}
        if progress:
            progress(i + 1, config.num_layers + 1, what)
    weights.packed["lm_head"] = _nearest(source, "lm_head.weight", head)
    weights.packed["model.embed_tokens"] = (
        weights.packed["lm_head"] if config.tied_head else _nearest(source, "model.embed_tokens.weight", head)
    )
    if progress:
        progress(config.num_layers + 1, config.num_layers + 1, what)
    return weights


def _layer(
    source: Checkpoint,
    prefix: str,
    tensors: dict[str, Tensor],
    recipe: Recipe,
    stats: ActivationStats | None,
    layer: int,
) -> dict[str, Packed]:
    """The linear layers of a layer, by reader; AWQ changes the norms and biases among `tensors`, and adds weights."""
    linear = [reader for readers in READERS.values() for reader in readers]
    if stats is None:
        return {name: _nearest(source, f"{prefix}{name}.weight", recipe.format_of(prefix + name)) for name in linear}
    tensors |= {f"{name}.weight": _read(source, f"{prefix}{name}.weight") for name in linear}
    scales = fold_layer(tensors, stats, layer, source.config, recipe.format)
    return round_layer(tensors, scales, stats, layer, recipe.format)


def _nearest(source: Checkpoint, name: str, form: Format) -> Packed:
    """A weight in a format, rounded to nearest or as it is stored."""
    if form.kind != "stored":
        return nearest(_read(source, name), form)
    packed = source.packed(name)
    if not is_finite(packed):
        _read(source, name)  # says how many of its values are no numbers
    return form.keep(packed)


def _read(source: Checkpoint, name: str) -> Tensor:
    return _finite(source, name, source.tensor(name))


def _finite(source: Checkpoint, name: str, tensor: Tensor) -> Tensor:
    # The sum of finite weights is finite and costs a tenth of looking at each of them.
    if not math.isfinite(float(tensor.sum())) and (bad := int((~torch.isfinite(tensor)).sum())):
        raise ModelFileError(
            f"{source.origin}: {name} holds {bad} values that are NaN or infinite. Expected numbers; the file is "
            "damaged or was saved from a run that diverged. Get it again."
        )
    return tensor


def _calibrated(
    source: Checkpoint,
    recipe: Recipe,
    calibration: Sequence[Sequence[int]] | None,
    rng: np.random.Generator,
    progress: Progress | None,
) -> ActivationStats:
    group_size = recipe.format.group_size
    assert group_size is not None  # a recipe with AWQ has a format with groups
    if calibration is None:
        raise UsageError(
            f"{recipe.name} needs a calibration set: texts like your traffic. Give one, or round to nearest with "
            f"{recipe.format.name}."
        )
    count_tokens(calibration)  # refuses a short one before the model is read
    decoder = Decoder(prepare_model(quantize(source, Recipe.parse("f32"), rng=rng)), longest=MAX_TOKENS)
    return collect(decoder, calibration, keep=KEPT_ROWS, group_size=group_size, rng=rng, progress=progress)
