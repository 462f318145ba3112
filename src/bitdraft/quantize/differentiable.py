"""A decoder as plain differentiable PyTorch, a layer at a time, over whole texts: what sensitivities are taken from.

Everything is FP32 and nothing is rounded. The weights of one layer are in memory at a time; what the layers read is
kept for all of them. Agrees with `models.decoder` in format f32 (tests/agreement/test_differentiable.py).

Shape suffixes: T rows (tokens of all texts, one text behind the other), D hidden size, N outputs, K inputs, H query
heads, J KV heads, L tokens of one text, C head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..models.checkpoint import Checkpoint
from ..models.config import ModelConfig
from ..models.tensor_names import tensor_shapes
from ..ops import Rotary
from ..ops.reference import rms_norm
from .pipeline import LINEAR

Change = Callable[[str, Tensor], Tensor]
"""From a linear layer's full name and its weight [N, K] float32 to the weight to compute with."""


@dataclass(frozen=True)
class Taps:
    """What the linear layers of one layer read and say, by name: [T, K] and [T, N], part of the graph."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class Rows:
    """Several texts as the rows of one batch.

    Attributes:
        ids: all token ids, [T] int64. lengths: tokens of each text. owners: [T] int64, the text of each row.
        scored: [T] bool, rows whose logits are judged.
    """

    def __init__(self, texts: Sequence[Sequence[int]], scored_from: Sequence[int]) -> None:
        """Lay out texts.

        Args:
            texts: token ids of each.
            scored_from: of each text, the first row whose logits are judged.
        """
        self.ids = torch.tensor([token for text in texts for token in text])
        self.lengths = [len(text) for text in texts]
        self.owners = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(self.lengths))
        parts = zip(texts, scored_from, strict=True)
        self.scored = torch.tensor([i >= start for text, start in parts for i in range(len(text))])


def layer_weights(source: Checkpoint, layer: int, change: Change | None = None) -> dict[str, Tensor]:
    """Everything that one layer holds, by name within the layer; linear layers as `change` makes them."""
    prefix = f"model.layers.{layer}."
    names = [name for name in tensor_shapes(source.config) if name.startswith(prefix)]
    found = {name.removeprefix(prefix): source.tensor(name) for name in names}
    if change:
        for name in LINEAR:
            found[f"{name}.weight"] = change(prefix + name, found[f"{name}.weight"])
    return found


def run_layer(
    x_TD: Tensor, weights: Mapping[str, Tensor], config: ModelConfig, rotary: Rotary, rows: Rows
) -> tuple[Tensor, Taps]:
    """One layer over all rows: its output [T, D], and what its linear layers read and said."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def linear(name: str, x_TK: Tensor) -> Tensor:
        inputs[name] = x_TK
        outputs[name] = functional.linear(x_TK, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        return outputs[name]

    n_TD = rms_norm(x_TD, weights["input_layernorm.weight"], config.norm_eps)
    q, k, v = (linear(f"self_attn.{name}_proj", n_TD) for name in "qkv")
    x_TD = x_TD + linear("self_attn.o_proj", _attend(q, k, v, weights, config, rotary, rows))
    n_TD = rms_norm(x_TD, weights["post_attention_layernorm.weight"], config.norm_eps)
    gate, up = (linear(f"mlp.{name}_proj", n_TD) for name in ("gate", "up"))
    return x_TD + linear("mlp.down_proj", functional.silu(gate) * up), Taps(inputs, outputs)


def _attend(
    q_TN: Tensor,
    k_TN: Tensor,
    v_TN: Tensor,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    rotary: Rotary,
    rows: Rows,
) -> Tensor:
    """Causal attention within each text: [T, H C]."""
    mixed = []
    parts = zip(*(torch.split(part, rows.lengths) for part in (q_TN, k_TN, v_TN)), strict=True)
    for q, k, v in parts:
        q_HLC, k_JLC, v_JLC = (part.view(len(part), -1, config.head_dim).transpose(0, 1) for part in (q, k, v))
        if config.qk_norm:
            q_HLC = rms_norm(q_HLC, weights["self_attn.q_norm.weight"], config.norm_eps)
            k_JLC = rms_norm(k_JLC, weights["self_attn.k_norm.weight"], config.norm_eps)
        q_HLC, k_JLC = _rotate(q_HLC, rotary), _rotate(k_JLC, rotary)
        shared = config.num_heads // config.num_kv_heads
        k_HLC, v_HLC = k_JLC.repeat_interleave(shared, 0), v_JLC.repeat_interleave(shared, 0)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen = distance >= 0
        if config.sliding_window is not None:
            seen &= distance < config.sliding_window
        scores = (q_HLC @ k_HLC.transpose(1, 2) * config.head_dim**-0.5).masked_fill(~seen, -torch.inf)
        mixed.append((scores.softmax(-1) @ v_HLC).transpose(0, 1).flatten(1))
    return torch.cat(mixed)


def _rotate(x_HLC: Tensor, rotary: Rotary) -> Tensor:
    first, second = x_HLC.chunk(2, dim=-1)
    cos, sin = rotary.cos[: x_HLC.shape[1]], rotary.sin[: x_HLC.shape[1]]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_for(config: ModelConfig, rows: Rows) -> Rotary:
    """Angles for the longest text."""
    return Rotary.make(max(rows.lengths), config.head_dim, config.rope_theta, config.rope_factors)


def embedding_name(source: Checkpoint) -> str:
    """The tensor that token ids are looked up in: the head's own where it is tied."""
    return "lm_head.weight" if source.config.tied_head else "model.embed_tokens.weight"


def final_rows(x_TD: Tensor, norm_D: Tensor, config: ModelConfig, rows: Rows) -> Tensor:
    """What the head reads, of the judged rows only."""
    return rms_norm(x_TD[rows.scored], norm_D, config.norm_eps)
