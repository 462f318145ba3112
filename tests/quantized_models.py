"""Quantised model folders for tests: a tiny model in a format, written as `bitdraft quantize` writes it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import model_files
import torch

from bitdraft.formats import Format, Recipe
from bitdraft.models.checkpoint import Checkpoint, open_checkpoint
from bitdraft.models.config import ModelConfig
from bitdraft.models.export import FolderWriter
from bitdraft.models.tensor_names import tensor_shapes
from bitdraft.ops.packed import Packed


def config(family: str = "llama", **changes: object) -> ModelConfig:
    """A model whose layers have room for two groups of 32 inputs at least."""
    return model_files.config(family, **{"hidden_size": 64, "mlp_size": 128, "head_dim": 16} | changes)


def layer_parts(source: Checkpoint, recipe: Recipe, i: int) -> tuple[dict[str, Packed], dict[str, torch.Tensor]]:
    """A decoder layer, rounded to nearest: linear layers without '.weight', and the other tensors."""
    prefix = f"model.layers.{i}."
    linear = [name for name in source.config.linear_shapes() if name.startswith(prefix)]
    packed = {name: recipe.format_of(name).encode(source.tensor(f"{name}.weight")) for name in linear}
    others = {name for name in tensor_shapes(source.config) if name.startswith(prefix)} - {
        f"{n}.weight" for n in linear
    }
    return packed, {name: source.tensor(name) for name in others}


def outer_parts(source: Checkpoint, form: Format) -> tuple[Packed, Packed, torch.Tensor]:
    """Head, embedding and final norm."""
    embedding = form.encode(source.tensor("model.embed_tokens.weight"))
    head = embedding if source.config.tied_head else form.encode(source.tensor("lm_head.weight"))
    return head, embedding, source.tensor("model.norm.weight")


def write(
    folder: Path, source: Checkpoint, recipe: Recipe, change: Callable[[Packed], Packed] = lambda packed: packed
) -> dict[str, Packed]:
    """Write a folder; what it was written from, by name without '.weight'."""
    writer = FolderWriter(folder, source, recipe.name)
    made: dict[str, Packed] = {}
    for i in range(source.config.num_layers):
        packed, tensors = layer_parts(source, recipe, i)
        packed = {name: change(weight) for name, weight in packed.items()}
        writer.write_layer(i, packed, tensors)
        made |= packed
    head, embedding, norm = outer_parts(source, recipe.format_of("lm_head"))
    writer.finish(head, embedding, norm)
    return made | {"lm_head": head, "model.embed_tokens": embedding}


def small_source(folder: Path, of: ModelConfig) -> Checkpoint:
    """A plain folder whose weights are small enough for rounding errors to stay what they are, layer after layer."""
    path = model_files.write_folder(folder, of, shards=1)
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    save_file({n: t * 0.1 if t.dim() == 2 else t for n, t in tensors.items()}, path / "model.safetensors")
    return open_checkpoint(path)


def same(a: Packed, b: Packed) -> bool:
    """Whether two weights are the same, bit for bit, names included."""
    if (a.format, a.shape, a.bits, a.activation, a.element) != (b.format, b.shape, b.bits, b.activation, b.element):
        return False
    pairs = ((a.codes, b.codes), (a.scales, b.scales), (a.zeros, b.zeros), (a.channel, b.channel))
    return all(
        (x is None and y is None)
        or (
            x is not None
            and y is not None
            and x.dtype == y.dtype
            and x.shape == y.shape
            and torch.equal(_raw(x), _raw(y))
        )
        for x, y in pairs
    )


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def all_same(a: Mapping[str, Packed], b: Mapping[str, Packed]) -> bool:
    """Whether two models have the same weights, bit for bit."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
