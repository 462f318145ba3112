"""One decoder-only transformer for all families: a readable loop over a few fused operations.

The families differ in data, not in code: a bias on q, k, v (Qwen2), a norm on q and k (Qwen3, Gemma 3), a window
(Mistral), or one in most layers, with angles of their own (Gemma 3), scaled rotary frequencies (Llama 3), two sets of
them and heads that turn in part (Phi-3). No cache policy here and no sampling: rows in, rows out.

Shape suffixes: R rows (tokens of all sequences of the call), D hidden size, K inputs of a layer, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops import AttentionKind, KVCache, Layer, Prepared, Ragged, Rotary, Stack
from ..ops.packed import fuse
from .checkpoint import Weights
from .config import ModelConfig
from .tensor_names import mlp_norm

Observer = Callable[[int, str, Tensor], bool | None]
"""Called with a layer's number, 'qkv', 'o', 'gate_up' or 'down', and the rows [R, K] that this linear layer reads,
before any rounding: how calibration sees true activations. True for a layer's 'down' says that no more is wanted."""


@dataclass(frozen=True)
class PreparedModel:
    """A model's weights in one format, in the layout that a backend multiplies by.

    Attributes:
        config: the model's sizes.
        layers: layer by layer.
        final_norm: [D] float32.
        head, embedding: [V, D]; the very same object where the head is tied.
        packed_bytes: what the weights take in their packed form, a tied embedding counted once.
    """

    config: ModelConfig
    layers: Stack
    final_norm: Tensor
    head: Prepared
    embedding: Prepared
    packed_bytes: int


def prepare_model(weights: Weights) -> PreparedModel:
    """Bring all weights of a model into the backend's layout."""
    head = ops.prepare(weights.packed["lm_head"])
    tied = weights.packed["model.embed_tokens"] is weights.packed["lm_head"]
    return PreparedModel(
        config=weights.config,
        layers=Stack(prepare_layer(weights, i) for i in range(weights.config.num_layers)),
        final_norm=weights.tensors["model.norm.weight"],
        head=head,
        embedding=head if tied else ops.prepare(weights.packed["model.embed_tokens"]),
        packed_bytes=weights.nbytes,
    )


class Decoder:
    """A model in one format, ready to run.

    Attributes:
        config: its sizes.
        layers: prepared weights, layer by layer.
        packed_bytes: what the weights take in their packed form, a tied embedding counted once.
        resident_bytes: what they take in this backend's layout.
    """

    def __init__(self, model: PreparedModel, longest: int | None = None) -> None:
        """Take a model's weights.

        Args:
            model: the weights.
            longest: positions that a sequence may have at most; None for the model's whole context. A model with
                LongRoPE has factors for its first, short context and others for more. They are chosen here, once: a
                position's angle must not change while a text grows, for the keys in the cache are rotated already.
        """
        self.config = model.config
        self.packed_bytes = model.packed_bytes
        self.layers = model.layers
        self.final_norm, self.head, self.embedding = model.final_norm, model.head, model.embedding
        self._longest = longest or self.config.context_length
        self._kinds: tuple[AttentionKind, ...] = ()
        tables = [self.head] if self.head is self.embedding else [self.head, self.embedding]
        linear = [w for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.resident_bytes = sum(w.resident_bytes for w in (*tables, *linear))

    def hidden(
        self,
        batch: Ragged,
        kv: KVCache,
        observe: Observer | None = None,
        rows_RD: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Run all layers over a ragged batch; its keys and values are written into the cache.

        Args:
            batch: the rows; `batch.slots` must be this call's alone.
            kv: the cache, with as many layers.
            observe: sees the inputs of every linear layer.
            rows_RD: residual rows to start from, float32, where the layers are not a model's first; None embeds ids.
            first: number of the first of the layers, in the whole model.

        Returns:
            residual rows before the final norm, [R, D] float32: what `logits` reads.
        """
        eps = self.config.norm_eps
        kinds = self._kinds_for(max(batch.lengths))
        x_RD = self._embedded(batch) if rows_RD is None else rows_RD.clone()  # `run_layers` overwrites its rows
        if observe is None:
            whole = ops.run_layers(x_RD, self.layers, batch, kinds, kv, eps)
            if whole is not None:
                return whole
        for i, (layer, cache) in enumerate(zip(self.layers, kv, strict=True), first):
            kind = kinds[layer.attention]
            qkv = ops.norm_linear(x_RD, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            q_RHC = ops.rope_append(qkv, batch, kind.rotary, cache, layer.q_norm, layer.k_norm, eps)
            mixed = ops.attention(q_RHC, batch, cache, kind.window, kind.scale)
            if observe:
                observe(i, "qkv", ops.rms_norm(x_RD, layer.input_norm, eps))
                observe(i, "o", mixed)
            x_RD = ops.linear_add(mixed, layer.o, x_RD, layer.o_norm, eps)
            if observe:
                observe(i, "gate_up", ops.rms_norm(x_RD, layer.mlp_norm, eps))
                inner = ops.gated_inputs(x_RD, layer.mlp_norm, eps, layer.gate_up, layer.gate)
                if observe(i, "down", inner):
                    return x_RD
                x_RD = ops.linear_add(inner, layer.down, x_RD, layer.down_norm, eps)
            else:
                mlp = layer.gate_up, layer.down, layer.gate, layer.down_norm
                x_RD = ops.gated_mlp(x_RD, layer.mlp_norm, eps, *mlp)
        return x_RD

    def logits(self, x_RD: Tensor) -> Tensor:
        """Final norm and output head: [R, D] float32 -> [R, V] float32."""
        return ops.logits(x_RD, self.final_norm, self.config.norm_eps, self.head, self.config.logit_cap)

    def _embedded(self, batch: Ragged) -> Tensor:
        x_RD = ops.embed(batch.numbers[0], self.embedding)
        return x_RD if self.config.embedding_scale == 1 else x_RD * self.config.embedding_scale

    def _kinds_for(self, positions: int) -> tuple[AttentionKind, ...]:
        known = len(self._kinds[0].rotary.cos) if self._kinds else 0
        if known < positions:
            self._kinds = attention_kinds(self.config, max(positions, 2 * known, 512), self._longest)
        return self._kinds


def attention_kinds(config: ModelConfig, positions: int, longest: int) -> tuple[AttentionKind, ...]:
    """How the layers of a model attend: those with the window, if there is one, and those of `full_layers`, if any.

    Args:
        config: the model's sizes.
        positions: how many the tables of angles are for.
        longest: see `Decoder`.
    """
    extended = config.rope_original_context is not None and longest > config.rope_original_context
    factors = config.rope_long_factors if extended else config.rope_factors
    rotary = Rotary.make(positions, config.turned, config.rope_theta, factors, config.rope_scale)
    full = AttentionKind(rotary, None, config.query_scale)
    if config.sliding_window is None:
        return (full,)
    if config.local_rope_theta is not None:
        rotary = Rotary.make(positions, config.turned, config.local_rope_theta)
    windowed = AttentionKind(rotary, config.sliding_window, config.query_scale)
    return (windowed, full) if config.full_layers else (windowed,)


def layer_switches(config: ModelConfig, i: int) -> dict[str, Any]:
    """What layer i is beside its weights, as fields of a `Layer`."""
    return {"gate": config.gate, "attention": int(config.sliding_window is not None and i in config.full_layers)}


def prepare_layer(weights: Weights, i: int) -> Layer:
    """Bring the weights of one layer into the backend's layout; the others need not be there."""
    config = weights.config
    prefix = f"model.layers.{i}."

    def fused(*names: str) -> Prepared:
        return ops.prepare(*fuse([weights.packed[prefix + name] for name in names]))

    def vector(name: str) -> Tensor | None:
        return weights.tensors.get(prefix + name)

    biases = [weights.tensors.get(f"{prefix}self_attn.{n}_proj.bias") for n in "qkv"]
    return Layer(
        input_norm=weights.tensors[prefix + "input_layernorm.weight"],
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qkv_bias=torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None,
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
        o=fused("self_attn.o_proj"),
        mlp_norm=weights.tensors[f"{prefix}{mlp_norm(config)}.weight"],
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
        o_norm=vector("post_attention_layernorm.weight") if config.post_norms else None,
        down_norm=vector("post_feedforward_layernorm.weight"),
        **layer_switches(config, i),
    )
