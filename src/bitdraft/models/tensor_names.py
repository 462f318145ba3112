"""Which tensors a decoder is made of, by Hugging Face's names and by GGUF's, and their shapes."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from ..errors import ModelFileError
from .config import ModelConfig

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "output_norm.weight": FINAL_NORM}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_OF_FAMILY = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
}
"""What a family's tensors are called otherwise, or beside the others."""

OFFSET_NORMS = frozenset({"gemma3"})
"""Families whose safetensors hold the scales of norms less one. GGUF holds them as they are multiplied by."""


PLAIN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose folders hold the very tensors of `tensor_shapes`: one for each layer, norms as they multiply."""


def hf_name(gguf_name: str, family: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None if a decoder of this family has no such tensor."""
    if gguf_name in _GGUF_TOP:
        return _GGUF_TOP[gguf_name]
    parts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    names = _GGUF_LAYER | _GGUF_OF_FAMILY.get(family, {})
    if parts is None or parts[2] not in names:
        return None
    return f"model.layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"


def mlp_norm(config: ModelConfig) -> str:
    """Name within a layer of the norm before the MLP, without '.weight'."""
    return "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"


def layer_norms(config: ModelConfig) -> list[str]:
    """Names within a layer of the norms over hidden_size, without '.weight'."""
    after = ["post_attention_layernorm", "post_feedforward_layernorm"] if config.post_norms else []
    return ["input_layernorm", mlp_norm(config), *after]


class Place(NamedTuple):
    """Where a tensor lies in a file.

    Attributes:
        stored: the name of the tensor that holds it.
        rows: which of its rows; None for all.
    """

    stored: str
    rows: slice | None = None


_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Linear layers that a file may hold as one, row after row (Phi-3)."""


def places(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Place], dict[str, tuple[int, ...]]]:
    """Where each tensor of a file lies, by Hugging Face name, and its shape; what is stored as one is taken apart.

    Args:
        config: what the file says of itself.
        found: shapes of the tensors in the file.
    """
    where = {name: Place(name) for name in found}
    shapes, linear = dict(found), config.layer_shapes()
    for name, shape in found.items():
        match = re.fullmatch(r"(model\.layers\.\d+\.)(.+)\.weight", name)
        parts = _FUSED.get(match[2], ()) if match else ()
        sizes = [linear[part][0] for part in parts]
        if match is None or not parts or shape[:1] != (sum(sizes),):
            continue
        del where[name], shapes[name]
        for part, first, rows in zip(parts, accumulate(sizes, initial=0), sizes, strict=False):
            where[f"{match[1]}{part}.weight"] = Place(name, slice(first, first + rows))
            shapes[f"{match[1]}{part}.weight"] = (rows, *shape[1:])
    return where, shapes


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor of this Hugging Face name; the inverse of `hf_name`.

    Raises:
        KeyError: there is no such tensor.
    """
    top = {hf: gguf for gguf, hf in _GGUF_TOP.items()}
    if name in top:
        return top[name]
    inner = {hf: gguf for gguf, hf in _GGUF_LAYER.items()}
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{inner[stem]}.{kind}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model, by its Hugging Face name; a tied head is not listed."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    linear = config.linear_shapes()
    shapes |= {f"{name}.weight": shape for name, shape in linear.items()}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (config.hidden_size,) for norm in layer_norms(config)}
        if config.attention_bias:
            for part in ("q_proj", "k_proj", "v_proj"):
                name = f"{layer}.self_attn.{part}"
                shapes[f"{name}.bias"] = linear[name][:1]
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
    shapes[FINAL_NORM] = (config.hidden_size,)
    if config.tied_head:
        del shapes[HEAD]
    return shapes


def check_sizes(origin: str, config: ModelConfig) -> None:
    """Refuse sizes that are no sizes, or that make no model that the decoder can run.

    Args:
        origin: the file or folder, for errors.
        config: what the file says of itself.

    Raises:
        ModelFileError: a size that is no positive integer, heads that do not divide, or a number that is not finite.
    """
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size")
    faults = [
        f"{name} = {getattr(config, name)!r}, where a positive integer is expected"
        for name in (*sizes, "context_length", "sliding_window")
        if not _is_count(getattr(config, name)) and not (name == "sliding_window" and config.sliding_window is None)
    ]
    scales = ("norm_eps", "rope_theta", "rope_scale", "embedding_scale")
    for name in (*scales, "local_rope_theta", "query_scale", "logit_cap"):
        value = getattr(config, name)
        if value is None and name not in scales:
            continue
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            faults.append(f"{name} = {value!r}, where a positive number is expected")
    if not faults and config.num_heads % config.num_kv_heads:
        faults.append(f"{config.num_heads} heads over {config.num_kv_heads} KV heads, which do not divide them")
    if not faults:
        faults += _rotary_faults(config)
    if faults:
        raise ModelFileError(
            f"{origin}: the model's own settings call for {faults[0]}. The file is damaged or of a kind that bitdraft "
            "does not decode: fetch it again or choose another model."
        )


def _rotary_faults(config: ModelConfig) -> list[str]:
    turned, faults = config.turned, []
    if config.head_dim % 2:
        faults.append(f"heads of {config.head_dim} channels, which rotary positions cannot pair")
    elif turned % 2 or not 0 < turned <= config.head_dim:
        faults.append(f"rotary positions on {turned} of {config.head_dim} channels")
    for factors in (config.rope_factors, config.rope_long_factors):
        if factors is not None and (len(factors) != turned // 2 or not all(0 < f < math.inf for f in factors)):
            faults.append(f"{len(factors)} rotary factors, where {turned // 2} positive numbers are expected")
    return faults


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def check_tensors(
    origin: str, config: ModelConfig, found: Mapping[str, tuple[int, ...]], harmless: Iterable[str] = ()
) -> None:
    """Check that a file holds the tensors that its sizes call for, and no other that would change the model.

    Args:
        origin: the file or folder, for errors.
        config: what the file says of itself.
        found: shapes of the tensors in the file, by Hugging Face name.
        harmless: tensors that may be there and are not needed.

    Raises:
        ModelFileError: the sizes make no model, or a tensor is missing, has another shape, or is unknown.
    """
    check_sizes(origin, config)
    if config.num_layers > len(found):  # before a list of names is made for a million layers
        raise ModelFileError(
            f"{origin}: {config.num_layers} layers are announced, but there are {len(found)} tensors in all. The file "
            "is damaged or not whole: fetch it again."
        )
    expected = tensor_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelFileError(
            f"{origin}: {_some(missing)} missing. A {config.family} model of {config.num_layers} layers needs "
            f"{len(expected)} tensors: fetch all files of the model again."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{origin}: tensor {name!r} has shape {list(found[name])}. The model's own settings call for "
                f"{list(shape)}: the settings and the tensors are of different models; fetch both again."
            )
    surplus = [name for name in found if name not in expected and name not in set(harmless)]
    if surplus:
        raise ModelFileError(
            f"{origin}: {_some(surplus)} unknown to a {config.family} decoder. Left out, they would change the model; "
            "choose a plain checkpoint of this family."
        )


def _some(names: list[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:4])
    if len(names) == 1:
        return f"tensor {listed} is"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"tensors {listed}{more} are"
