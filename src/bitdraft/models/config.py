"""What a decoder is made of, whatever file said so."""

from dataclasses import dataclass

from ..ops import Gate

FAMILIES = {
    "gemma3": "Gemma 3 (text)",
    "llama": "Llama (also SmolLM2)",
    "mistral": "Mistral",
    "phi3": "Phi-3 and Phi-4",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
}
"""Families that the decoder knows, by the name that GGUF uses (config.json: gemma3_text, or gemma3 around it)."""


def every_so_many(count: int, period: int) -> tuple[int, ...]:
    """The last of every `period` layers: those of Gemma 3 that attend to all positions."""
    return tuple(range(period - 1, count, period))


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer with rotary positions, RMSNorm and a gated MLP.

    Attributes:
        family: a key of `FAMILIES`.
        vocab_size: rows of the embedding, padding included.
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim, mlp_size: the usual sizes.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        context_length: positions that the model was made for.
        rope_factors: a divisor for each rotary frequency (Llama 3's and linear scaling); None divides by one.
        rope_long_factors: used in their place by a model that is to hold more than `rope_original_context` positions
            (LongRoPE, 2402.13753); None if there are none.
        rope_original_context: positions before the context was extended so.
        rope_scale: what cosines and sines are multiplied by (LongRoPE).
        rotary_dim: channels of a head that turn, the first ones; None for all.
        sliding_window: a row attends to so many positions, itself included; None attends to all.
        full_layers: layers that attend to all positions whatever the window (Gemma 3: every sixth).
        local_rope_theta: base of the frequencies in the layers with the window, without factors; None for rope_theta,
            and factors, there too.
        attention_bias: q, k and v projections carry a bias (Qwen2).
        qk_norm: q and k are normalised per head before the rotation (Qwen3).
        tied_head: the output head is the embedding.
        post_norms: what attention and MLP make is normalised before it is added to the residual (Gemma).
        gate: what the gate of the MLP goes through.
        embedding_scale: what embedded rows are multiplied by (Gemma: the root of hidden_size).
        query_scale: what scores are multiplied by; None for 1 / sqrt(head_dim).
        logit_cap: logits y become cap * tanh(y / cap); None leaves them.
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
    rope_long_factors: tuple[float, ...] | None = None
    rope_original_context: int | None = None
    rope_scale: float = 1.0
    rotary_dim: int | None = None
    sliding_window: int | None = None
    full_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = True
    post_norms: bool = False
    gate: Gate = "silu"
    embedding_scale: float = 1.0
    query_scale: float | None = None
    logit_cap: float | None = None

    @property
    def turned(self) -> int:
        """Channels of a head that rotary positions turn."""
        return self.rotary_dim or self.head_dim

    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape [outputs, inputs] of every linear layer of one decoder layer, by its name in there."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (q_size, self.hidden_size),
            "self_attn.k_proj": (kv_size, self.hidden_size),
            "self_attn.v_proj": (kv_size, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, q_size),
            "mlp.gate_proj": (self.mlp_size, self.hidden_size),
            "mlp.up_proj": (self.mlp_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.mlp_size),
        }

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape [outputs, inputs] of every linear layer that a format is applied to, by its checkpoint name.

        The names are Hugging Face's, without the trailing `.weight`; the head is last.
        """
        per_layer = self.layer_shapes()
        shapes = {f"model.layers.{i}.{name}": s for i in range(self.num_layers) for name, s in per_layer.items()}
        shapes["lm_head"] = (self.vocab_size, self.hidden_size)
        return shapes
