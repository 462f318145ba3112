"""What a decoder is made of, whatever file said so."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelFileError

FAMILIES = {
    "llama": "Llama (also SmolLM2)",
    "mistral": "Mistral",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
}
"""Model types that the decoder knows, by the name that config.json and GGUF use."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer with rotary positions, RMSNorm and a gated MLP.

    Attributes:
        family: a key of `FAMILIES`.
        vocab_size: rows of the embedding, padding included.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, mlp_size: the usual sizes.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_factors: a divisor for each of the head_dim / 2 frequencies (Llama 3's scaling); None divides by one.
        context_length: positions that the model was made for.
        sliding_window: a row attends to so many positions, itself included; None attends to all.
        attention_bias: q, k and v projections carry a bias (Qwen2).
        qk_norm: q and k are normalised per head before the rotation (Qwen3).
        tied_head: the output head is the embedding.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    rope_theta: float
    context_length: int
    rope_factors: tuple[float, ...] | None = None
    sliding_window: int | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = True

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape [outputs, inputs] of every linear layer that a format is applied to, by its checkpoint name.

        The names are Hugging Face's, without the trailing `.weight`; the head is last.
        """
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        per_layer = {
            "self_attn.q_proj": (q_size, self.hidden_size),
            "self_attn.k_proj": (kv_size, self.hidden_size),
            "self_attn.v_proj": (kv_size, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, q_size),
            "mlp.gate_proj": (self.mlp_size, self.hidden_size),
            "mlp.up_proj": (self.mlp_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.mlp_size),
        }
        shapes = {f"model.layers.{i}.{name}": s for i in range(self.num_layers) for name, s in per_layer.items()}
        shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], origin: str) -> "ModelConfig":
        """Read the contents of a Hugging Face config.json; `origin` names the file in errors.

        Raises:
            ModelFileError: an unknown model type, a missing field, or rotary scaling of an unknown kind.
        """
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ModelFileError(
                f"{origin}: model_type is {family!r}. bitdraft decodes {', '.join(sorted(FAMILIES))}. "
                "Choose a model of one of these families."
            )
        try:
            heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
            head_dim = raw.get("head_dim") or hidden // heads
            rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
            theta = raw.get("rope_theta", rope.get("rope_theta", 10000.0))
            window = raw.get("sliding_window") if raw.get("use_sliding_window", family == "mistral") else None
            return cls(
                family=family,
                vocab_size=raw["vocab_size"],
                hidden_size=hidden,
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                head_dim=head_dim,
                mlp_size=raw["intermediate_size"],
                norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=float(theta),
                rope_factors=_rope_factors(rope, float(theta), head_dim, origin),
                context_length=raw.get("max_position_embeddings", 2048),
                sliding_window=window,
                attention_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
                qk_norm=family == "qwen3",
                tied_head=bool(raw.get("tie_word_embeddings", False)),
            )
        except KeyError as missing:
            raise ModelFileError(f"{origin}: the field {missing} is missing. Is this a whole config.json?") from None


def _rope_factors(rope: Mapping[str, Any], theta: float, head_dim: int, origin: str) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies (Llama 3.1 model card, `apply_scaling`; plain linear scaling)."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind != "llama3":
        raise ModelFileError(
            f"{origin}: rotary scaling of kind {kind!r}. bitdraft reads default, linear and llama3; "
            "use a checkpoint without this scaling."
        )
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = (original / wavelength - low) / (high - low)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
