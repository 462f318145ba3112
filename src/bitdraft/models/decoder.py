"""One decoder-only transformer for Llama, Mistral, Qwen2 and Qwen3: a readable loop over a few fused operations.

The families differ in data, not in code: a bias on q, k, v (Qwen2), a norm on q and k (Qwen3), a window (Mistral),
scaled rotary frequencies (Llama 3). No cache policy here and no sampling: rows in, rows out.

Shape suffixes: R rows (tokens of all sequences of the call), D hidden size, K inputs of a layer, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..ops import KVCache, Layer, Prepared, Ragged, Rotary, Stack
from ..ops.packed import fuse
from .checkpoint import Weights
from .config import ModelConfig

Observer = Callable[[int, str, Tensor], None]
"""Called with a layer's number, 'qkv', 'o', 'gate_up' or 'down', and the rows [R, K] that this linear layer reads,
before any rounding: how calibration sees true activations."""


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
        layers=Stack(_layer(weights, i) for i in range(weights.config.num_layers)),
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

    def __init__(self, model: PreparedModel) -> None:
        self.config = model.config
        self.packed_bytes = model.packed_bytes
        self.layers = model.layers
        self.final_norm, self.head, self.embedding = model.final_norm, model.head, model.embedding
        self._rotary = Rotary.make(0, self.config.head_dim, self.config.rope_theta)
        tables = [self.head] if self.head is self.embedding else [self.head, self.embedding]
        linear = [w for layer in self.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.resident_bytes = sum(w.resident_bytes for w in (*tables, *linear))

    def hidden(self, batch: Ragged, kv: KVCache, observe: Observer | None = None) -> Tensor:
        """Run all layers over a ragged batch; its keys and values are written into the cache.

        Args:
            batch: the rows; `batch.slots` must be this call's alone.
            kv: the cache, with as many layers.
            observe: sees the inputs of every linear layer.

        Returns:
            residual rows before the final norm, [R, D] float32: what `logits` reads.
        """
        config, eps = self.config, self.config.norm_eps
        rotary = self._rotary_for(max(batch.lengths))
        x_RD = ops.embed(batch.numbers[0], self.embedding)
        if observe is None:
            whole = ops.run_layers(x_RD, self.layers, batch, rotary, kv, eps, config.sliding_window)
            if whole is not None:
                return whole
        for i, (layer, cache) in enumerate(zip(self.layers, kv, strict=True)):
            qkv = ops.norm_linear(x_RD, layer.input_norm, eps, layer.qkv, layer.qkv_bias)
            q_RHC = ops.rope_append(qkv, batch, rotary, cache, layer.q_norm, layer.k_norm, eps)
            mixed = ops.attention(q_RHC, batch, cache, config.sliding_window)
            if observe:
                observe(i, "qkv", ops.rms_norm(x_RD, layer.input_norm, eps))
                observe(i, "o", mixed)
            x_RD = ops.linear_add(mixed, layer.o, x_RD)
            if observe:
                observe(i, "gate_up", ops.rms_norm(x_RD, layer.mlp_norm, eps))
                inner = ops.gated_inputs(x_RD, layer.mlp_norm, eps, layer.gate_up)
                observe(i, "down", inner)
                x_RD = ops.linear_add(inner, layer.down, x_RD)
            else:
                x_RD = ops.gated_mlp(x_RD, layer.mlp_norm, eps, layer.gate_up, layer.down)
        return x_RD

    def logits(self, x_RD: Tensor) -> Tensor:
        """Final norm and output head: [R, D] float32 -> [R, V] float32."""
        return ops.logits(x_RD, self.final_norm, self.config.norm_eps, self.head)

    def _rotary_for(self, positions: int) -> Rotary:
        if len(self._rotary.cos) < positions:
            size = max(positions, 2 * len(self._rotary.cos), 512)
            config = self.config
            self._rotary = Rotary.make(size, config.head_dim, config.rope_theta, config.rope_factors)
        return self._rotary


def _layer(weights: Weights, i: int) -> Layer:
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
        mlp_norm=weights.tensors[prefix + "post_attention_layernorm.weight"],
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
