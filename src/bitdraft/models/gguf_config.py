"""The metadata of a GGUF file as sizes and switches: the one place that knows its keys.

What a file leaves unsaid is what llama.cpp takes for that architecture.
"""

import math
from typing import Any

from ..errors import ModelFileError
from .config import FAMILIES, ModelConfig, every_so_many
from .gguf import GGUFFile

ARCHITECTURES = ("gemma3", "llama", "phi3", "qwen2", "qwen3")
"""Values of general.architecture that are read. Mistral's files call themselves llama, and are decoded as such."""

_ROPE, _SHORT, _LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = frozenset({_ROPE, _SHORT, _LONG})
"""Tensors that are a part of the settings."""

_GEMMA_LAYERS_OF_27B = 62
"""The one size of Gemma 3 whose scores are scaled by another size than that of a head; the metadata do not say so."""


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's sizes, from metadata and tensor table.

    Raises:
        ModelFileError: a family that is not decoded, a missing key, or sizes that make no model.
    """
    arch = file.number("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"{file.path}: a model of family {arch!r}, which bitdraft does not decode yet. It decodes "
            f"{', '.join(FAMILIES.values())}: choose a model of one of these families."
        )
    vocab_size = _rows(file, "token_embd.weight")
    heads = _positive(file, f"{arch}.attention.head_count")
    kv_heads = _positive(file, f"{arch}.attention.head_count_kv", heads)
    hidden = _positive(file, f"{arch}.embedding_length")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden // heads)
    _check_queries(file, heads, kv_heads, head_dim)
    turned = _positive(file, f"{arch}.rope.dimension_count", head_dim)
    _refuse(file, arch, head_dim, turned)
    layers = _positive(file, f"{arch}.block_count")
    return ModelConfig(
        family=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=_positive(file, f"{arch}.feed_forward_length"),
        norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.number(f"{arch}.rope.freq_base", float, 10000.0),
        context_length=_positive(file, f"{arch}.context_length"),
        **_scaling(file, arch, turned),
        rotary_dim=None if turned == head_dim else turned,
        sliding_window=file.number(f"{arch}.attention.sliding_window", int, 0) or None,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        **(_gemma(file, arch, layers, hidden, heads, head_dim) if arch == "gemma3" else {}),
    )


def _gemma(file: GGUFFile, arch: str, layers: int, hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What is Gemma 3's alone, as fields of a `ModelConfig`."""
    scaled = hidden // heads if layers == _GEMMA_LAYERS_OF_27B else head_dim
    return {
        "full_layers": every_so_many(layers, _positive(file, f"{arch}.attention.sliding_window_pattern", 6)),
        "local_rope_theta": file.number(f"{arch}.rope.freq_base_swa", float, 10000.0),
        "post_norms": True,
        "gate": "gelu_tanh",
        "embedding_scale": math.sqrt(hidden),
        "query_scale": file.number(f"{arch}.attention.scale", float, scaled**-0.5),
        "logit_cap": file.number(f"{arch}.final_logit_softcapping", float, 0.0) or None,
    }


def _check_queries(file: GGUFFile, heads: int, kv_heads: int, head_dim: int) -> None:
    """Before anything is made for every channel of a head: whether there are so many of them."""
    fused = "blk.0.attn_qkv.weight" in file.tensors
    name = "blk.0.attn_qkv.weight" if fused else "blk.0.attn_q.weight"
    rows = _rows(file, name)
    if (heads + 2 * kv_heads * fused) * head_dim != rows:
        raise ModelFileError(
            f"{file.path}: the metadata call for {heads} heads of {head_dim} channels, but {name!r} has {rows} rows. "
            "The file is damaged: fetch it again."
        )


def _refuse(file: GGUFFile, arch: str, head_dim: int, turned: int) -> None:
    """Kinds of model that the decoder does not know."""
    if file.number(f"{arch}.expert_count", int, 0):
        raise ModelFileError(
            f"{file.path}: a mixture of experts, which bitdraft does not decode: choose a dense model."
        )
    value_dim = file.number(f"{arch}.attention.value_length", int, head_dim)
    cap = file.number(f"{arch}.attn_logit_softcapping", float, 0.0)
    partly = arch == "llama" and turned != head_dim  # its rows are in an order that takes whole heads
    for fault, given in (
        (partly or turned > head_dim, f"rotary positions on {turned} of {head_dim} channels"),
        (value_dim != head_dim, f"values of {value_dim} channels beside keys of {head_dim}"),
        (cap != 0, f"a cap of {cap} on the scores of attention"),
    ):
        if fault:
            raise ModelFileError(
                f"{file.path}: the metadata call for {given}, which bitdraft does not decode. Choose another model."
            )


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors or not file.tensors[name].shape:
        raise ModelFileError(f"{file.path}: there is no matrix {name!r}. Expected a whole model: fetch it again.")
    return file.tensors[name].shape[0]


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.number(key, int, default)
    if value < 1:
        raise ModelFileError(
            f"{file.path}: the metadata key {key!r} is {value}. Expected at least 1: fetch the file again."
        )
    return value


def _scaling(file: GGUFFile, arch: str, turned: int) -> dict[str, Any]:
    """How the rotary frequencies are scaled, as fields of a `ModelConfig`.

    Llama 3's factors are a tensor, and so are LongRoPE's two; linear scaling multiplies whatever there is.
    """
    kind = file.number(f"{arch}.rope.scaling.type", str, "none")
    long = _SHORT in file.tensors and _LONG in file.tensors
    if kind not in ("none", "linear") and not long:
        raise ModelFileError(
            f"{file.path}: rotary scaling of kind {kind!r}. bitdraft reads none, linear, Llama 3's factors and "
            "LongRoPE's; use a file without this scaling."
        )
    if long:
        return {
            "rope_factors": _factors(file, _SHORT, turned, 1.0),
            "rope_long_factors": _factors(file, _LONG, turned, 1.0),
            "rope_original_context": _positive(file, f"{arch}.rope.scaling.original_context_length"),
            "rope_scale": file.number(f"{arch}.rope.scaling.attn_factor", float, 1.0),
        }
    scale = file.number(f"{arch}.rope.scaling.factor", float, 1.0) if kind == "linear" else 1.0
    if scale == 1.0 and _ROPE not in file.tensors:
        return {}
    return {"rope_factors": _factors(file, _ROPE, turned, scale)}


def _factors(file: GGUFFile, name: str, turned: int, scale: float) -> tuple[float, ...]:
    factors = file.tensor(name).flatten().tolist() if name in file.tensors else [1.0] * (turned // 2)
    if len(factors) != turned // 2 or not all(math.isfinite(f * scale) and f * scale > 0 for f in factors):
        raise ModelFileError(
            f"{file.path}: {len(factors)} rotary factors. Expected {turned // 2} positive numbers, one for each pair "
            "of channels: the file is damaged; fetch it again."
        )
    return tuple(f * scale for f in factors)
