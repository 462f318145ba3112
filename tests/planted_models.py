"""A small model with weights as large as trained ones have, its quantised copies, and how these go wrong."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_files import config, write_folder
from safetensors.torch import save_file

from bitdraft.formats import Recipe
from bitdraft.measure.model_doctor import Model
from bitdraft.measure.model_doctor_layers import as_stored
from bitdraft.models.checkpoint import Checkpoint, Weights, open_checkpoint
from bitdraft.models.config import ModelConfig
from bitdraft.models.tensor_names import tensor_shapes
from bitdraft.ops.encoding import pack_bits, unpack_bits
from bitdraft.ops.packed import Packed
from bitdraft.quantize.pipeline import quantize

LAYERS = 3
TEXTS = ["The lighthouse keeper wrote down the wind, the tide and the ships, and hello world went by 12 times. " * 3]
PREFIX = "model.layers.1."
K, V = PREFIX + "self_attn.k_proj", PREFIX + "self_attn.v_proj"
Q, OUT = PREFIX + "self_attn.q_proj", PREFIX + "self_attn.o_proj"
GATE, UP, DOWN = PREFIX + "mlp.gate_proj", PREFIX + "mlp.up_proj", PREFIX + "mlp.down_proj"
NORM = PREFIX + "post_attention_layernorm.weight"
LINEAR = (Q, K, V, OUT, GATE, UP, DOWN)


def sizes(family: str = "qwen2", **changes: Any) -> ModelConfig:
    """Three layers, rows of 64 and 128."""
    return config(family, **{"num_layers": LAYERS, "hidden_size": 64, "head_dim": 16, "mlp_size": 128} | changes)


def trained(of: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights of the size that training leaves: outputs as large as inputs, rows and columns of several sizes."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(of).items():
        values = rng.standard_normal(shape)
        if "norm" in name:
            values = 1 + 0.3 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        else:
            spread = rng.lognormal(0, 0.4, (shape[0], 1)) * rng.lognormal(0, 0.4, (1, shape[1]))
            values = values * spread / shape[1] ** 0.5
        tensors[name] = torch.from_numpy(values.astype(np.float32))
    return tensors


def checkpoint(folder: Path, of: ModelConfig, seed: int = 0) -> Checkpoint:
    """Such a model as a folder, opened."""
    write_folder(folder, of)
    save_file(trained(of, seed), folder / "model.safetensors")
    return open_checkpoint(folder)


def quantised(source: Checkpoint, format: str) -> Weights:
    """A copy in a format."""
    ids = [source.tokenizer().encode(text)[:100] for text in TEXTS * 12]
    return quantize(source, Recipe.parse(format), rng=np.random.default_rng(0), calibration=ids)


def original(source: Checkpoint) -> Model:
    """The model itself."""
    return Model("original", as_stored(source), source.tokenizer())


def changed(weights: Weights, name: str, change: Callable[[Packed], Packed]) -> Weights:
    """A copy in which one weight is another."""
    return replace(weights, packed=weights.packed | {name: change(weights.packed[name])})


def swapped(weights: Weights, a: str, b: str) -> Weights:
    """A copy in which two weights changed places."""
    packed = weights.packed | {a: weights.packed[b], b: weights.packed[a]}
    return replace(weights, packed=packed)


def with_scales_of(weights: Weights, a: str, b: str) -> Weights:
    """A copy in which two weights have each other's scales."""
    one, other = weights.packed[a], weights.packed[b]
    packed = {a: replace(one, scales=other.scales), b: replace(other, scales=one.scales)}
    return replace(weights, packed=weights.packed | packed)


def scaled(factor: float) -> Callable[[Packed], Packed]:
    """Scales times a factor."""

    def change(packed: Packed) -> Packed:
        assert packed.scales is not None
        return replace(packed, scales=packed.scales * factor)

    return change


def nibbles_turned(packed: Packed) -> Packed:
    """The high four bits of every byte first."""
    return replace(packed, codes=(packed.codes >> 4) | (packed.codes << 4))


def reordered(packed: Packed, order: torch.Tensor, dim: int) -> Packed:
    """Codes and scales of the rows, or codes of the columns, in another order."""
    if dim == 0:
        some = {f: getattr(packed, f) for f in ("codes", "scales", "zeros")}
        return replace(packed, **{f: t if t is None else t[order] for f, t in some.items()})
    codes = unpack_bits(packed.codes, packed.bits)[:, order]
    return replace(packed, codes=pack_bits(codes, packed.bits))
