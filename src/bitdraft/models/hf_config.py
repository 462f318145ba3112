"""A Hugging Face config.json as sizes and switches: the one place that knows how each family's is spelt.

Defaults are those of the model's own class in transformers, for files that leave fields out.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ModelFileError
from .config import FAMILIES, ModelConfig, every_so_many

_FAMILY_OF = {"gemma3_text": "gemma3"}
"""Families by model_type where it is spelt otherwise."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
}
"""What a family's config.json may leave out."""

_GATES: dict[str, Any] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def config_from_hf(raw: Mapping[str, Any], origin: str) -> ModelConfig:
    """Read the contents of a Hugging Face config.json.

    Args:
        raw: the file's object; of a model that also sees images, the text's part is read.
        origin: names the file in errors.

    Raises:
        ModelFileError: an unknown model type, a missing field, or a switch that the decoder does not know.
    """
    if isinstance(raw.get("text_config"), Mapping):
        raw = {"tie_word_embeddings": raw.get("tie_word_embeddings", True)} | dict(raw["text_config"])
    kind = raw.get("model_type")
    family = _FAMILY_OF.get(str(kind), kind)
    if family not in FAMILIES:
        raise ModelFileError(
            f"{origin}: model_type is {kind!r}. bitdraft decodes {', '.join(sorted(FAMILIES))}. "
            "Choose a model of one of these families."
        )
    given = {name: value for name, value in raw.items() if value is not None}
    if "hidden_activation" in given:
        given["hidden_act"] = given["hidden_activation"]
    try:
        return _read(family, _DEFAULTS.get(family, {}) | given, origin)
    except KeyError as missing:
        raise ModelFileError(f"{origin}: the field {missing} is missing. Is this a whole config.json?") from None


def _read(family: str, raw: Mapping[str, Any], origin: str) -> ModelConfig:
    _refuse(raw, origin)
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or hidden // heads
    ropes = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    local = ropes.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise ModelFileError(
            f"{origin}: rotary scaling of kind {local['rope_type']!r} in layers with a window. Expected none: choose "
            "another model."
        )
    rope = dict(raw) | (ropes.get("full_attention") or ({} if local else ropes))
    theta = float(rope.get("rope_theta", 1e6 if family == "gemma3" else 1e4))
    turned = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    windowed = raw.get("use_sliding_window", family in ("gemma3", "mistral", "phi3"))
    gemma = family == "gemma3"
    return ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_size=raw["intermediate_size"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        context_length=raw.get("max_position_embeddings", 2048),
        **_scaling(rope, theta, turned, origin),
        rotary_dim=None if turned == head_dim else turned,
        sliding_window=raw.get("sliding_window") if windowed else None,
        full_layers=_full_layers(raw) if gemma else (),
        local_rope_theta=float(local.get("rope_theta", raw.get("rope_local_base_freq", 1e4))) if gemma else None,
        attention_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
        qk_norm=family in ("gemma3", "qwen3"),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        post_norms=gemma,
        gate=_GATES[raw.get("hidden_act", "silu")],
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        query_scale=raw["query_pre_attn_scalar"] ** -0.5 if gemma else None,
        logit_cap=raw.get("final_logit_softcapping"),
    )


def _refuse(raw: Mapping[str, Any], origin: str) -> None:
    """Switches that would make another model of it."""
    if raw.get("hidden_act", "silu") not in _GATES:
        raise ModelFileError(
            f"{origin}: an activation called {raw['hidden_act']!r}. bitdraft decodes models whose MLP is gated by SiLU "
            "or by GELU in its tanh form: choose another model."
        )
    for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ModelFileError(
                f"{origin}: {name} is {raw[name]!r}, which bitdraft does not decode. Expected none: choose another "
                "model."
            )


def _full_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without the window: as they are listed, or every so many-th."""
    count = raw["num_hidden_layers"]
    kinds = raw.get("layer_types")
    if kinds is None:
        return every_so_many(count, raw.get("sliding_window_pattern", 6))
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _scaling(rope: Mapping[str, Any], theta: float, turned: int, origin: str) -> dict[str, Any]:
    """How the rotary frequencies are scaled, as fields of a `ModelConfig`."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope_factors": (float(rope["factor"]),) * (turned // 2)}
    if kind == "llama3":
        return {"rope_factors": _llama3(rope, theta, turned)}
    if kind in ("longrope", "su") or "long_factor" in rope:  # Phi-3's first files call it su or yarn
        original = int(rope["original_max_position_embeddings"])
        growth = float(rope.get("factor") or rope["max_position_embeddings"] / original)
        grown = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
        return {
            "rope_factors": tuple(map(float, rope["short_factor"])),
            "rope_long_factors": tuple(map(float, rope["long_factor"])),
            "rope_original_context": original,
            "rope_scale": float(rope.get("attention_factor") or grown),
        }
    raise ModelFileError(
        f"{origin}: rotary scaling of kind {kind!r}. bitdraft reads default, linear, llama3 and longrope; "
        "use a checkpoint without this scaling."
    )


def _llama3(rope: Mapping[str, Any], theta: float, turned: int) -> tuple[float, ...]:
    """Divisors of the rotary frequencies (Llama 3.1 model card, `apply_scaling`)."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(turned // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / turned)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
