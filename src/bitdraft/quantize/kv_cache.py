"""Scales of 8-bit float keys and values for a folder that is being written: one for a layer's keys, one for its values.

Others (`kv_cache_scheme` of compressed-tensors, strategy 'tensor') have one scale for all heads of a layer; at load
bitdraft can also find one for each head, see `models.kv_scales`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..formats import Recipe
from ..models.checkpoint import Checkpoint, Weights
from ..models.kv_scales import LARGEST
from ..ops import KVLayer
from ..ops.packed import Packed
from .calibrate import TOKENS, Calibration, count_tokens, windows

SCHEME_FORMATS = ("fp8",)
"""Formats of keys and values that a folder can ask for."""


def check_kv(kv: str | None, calibration: Sequence[Sequence[int]]) -> None:
    """See whether a folder can ask for this format of keys and values, before any work.

    Raises:
        UsageError: it cannot, or there is too little text to find scales from.
    """
    if kv is None:
        return
    if kv not in SCHEME_FORMATS:
        raise UsageError(
            f"--kv {kv}: a folder's kv_cache_scheme has no words for it. Expected {' or '.join(SCHEME_FORMATS)}; other "
            "formats of keys and values are chosen where the model runs."
        )
    count_tokens(calibration)


def folder_kv_scales(
    source: Checkpoint,
    recipe: Recipe,
    read_layer: Callable[[int], tuple[Mapping[str, Packed], Mapping[str, Tensor]]],
    calibration: Sequence[Sequence[int]],
    rng: np.random.Generator,
) -> dict[str, Tensor]:
    """Take texts through the layers that were written, and see how large keys and values get.

    Args:
        source: the model.
        recipe: what its layers were brought into.
        read_layer: gives a written layer.
        calibration: token ids of texts.
        rng: chooses what is read of them.

    Returns:
        by full name ('model.layers.0.self_attn.k_scale'), what `x` is divided by before it becomes E4M3, [1] float32.
    """
    config = source.config
    rows = Calibration(source, windows(calibration, TOKENS, config.context_length, rng), recipe.format_of("lm_head"))
    found: dict[str, Tensor] = {}
    for i in range(config.num_layers):
        packed, tensors = read_layer(i)
        largest = {"k": 0.0, "v": 0.0}

        def see(kv: KVLayer, largest: dict[str, float] = largest) -> None:
            largest["k"] = max(largest["k"], float(kv.keys.abs().max()))
            largest["v"] = max(largest["v"], float(kv.values.abs().max()))

        rows.advance(i, Weights(config, dict(packed), dict(tensors)), see)
        for kind, size in largest.items():
            found[f"model.layers.{i}.self_attn.{kind}_scale"] = torch.tensor([size / LARGEST or 1.0])
    return found
