"""Scales of inputs folded into one layer of a decoder: exact before rounding, better rounded after it.

    qkv      reads the input norm          its scale is divided out of the norm
    o        reads the mixed values        its scale is divided out of v's rows; query heads that share v share it
    gate_up  reads the MLP's norm          its scale is divided out of the norm
    down     reads act(gate) * up          its scale is divided out of up's rows, in which the product is linear

Which scale is the method's affair: `awq.py`, `smooth.py`.

Shape suffixes: N outputs, K inputs, T rows.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..formats import Format
from ..models.config import ModelConfig
from ..ops.encoding import round_activations

READERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Linear layers by the inputs that they share."""

MAKERS = {"qkv": None, "o": "self_attn.v_proj", "gate_up": None, "down": "mlp.up_proj"}
"""The linear layer whose rows make these inputs; None where a norm does."""

ORDER = ("o", "down", "qkv", "gate_up")
"""In which inputs are scaled: o and down change the rows of v and up, whose readers then look at them."""

COARSE = (0.0, 0.25, 0.5, 0.75, 1.0)
FINE = 0.125
"""Exponents are tried in steps of 0.25 and then 0.125 to both sides of the best: the error is smooth in them."""

SEARCH_OUTPUTS = 512
"""Outputs of each weight, evenly spread over its rows, that exponents are judged by: one number for thousands of
outputs needs no more, and the search takes a third of the time."""


def best_scale(
    scale_of: Callable[[float], Tensor], readers: Sequence[tuple[Tensor, Format]], rows_TK: Tensor
) -> Tensor:
    """The scale, [K], under which rounding weights and inputs changes the outputs least; ones if no scale helps.

    Args:
        scale_of: the scale for an exponent from 0 to 1, positive.
        readers: one or more weights [N, K] float32 that read these inputs, each with its format.
        rows_TK: a sample of the inputs.

    Returns:
        factors for the weights' columns, to be divided out where the inputs are made.
    """
    samples = [(weight[:: -(-len(weight) // SEARCH_OUTPUTS)], form) for weight, form in readers]
    exact = [rows_TK @ sample_NK.T for sample_NK, _ in samples]
    ones = torch.ones(rows_TK.shape[1])

    def error(scale_K: Tensor) -> float:
        total = 0.0
        for (sample_NK, form), exact_TN in zip(samples, exact, strict=True):
            x_TK = round_activations(rows_TK / scale_K, form.activation)
            total += float((x_TK @ form.round(sample_NK * scale_K).T - exact_TN).square().sum())
        return total

    scales = {alpha: centred(scale_of(alpha)) for alpha in COARSE}
    errors = {alpha: error(scale_K) for alpha, scale_K in scales.items()}
    middle = min(errors, key=lambda alpha: errors[alpha])
    for alpha in (middle - FINE, middle + FINE):
        if 0 <= alpha <= 1:
            scales[alpha] = centred(scale_of(alpha))
            errors[alpha] = error(scales[alpha])
    best = min(errors, key=lambda alpha: errors[alpha])
    return scales[best] if errors[best] < error(ones) else ones


def centred(scale_K: Tensor) -> Tensor:
    """The same scale with its largest and smallest factors each other's inverse."""
    return scale_K / (scale_K.max() * scale_K.min()).sqrt()


def by_value_head(per_input_K: Tensor, config: ModelConfig, *, largest: bool) -> Tensor:
    """The mean, or the largest, over the query heads that read one value head, repeated for each of them, [K]."""
    by_head = per_input_K.view(config.num_kv_heads, -1, config.head_dim)
    shared = by_head.amax(1, keepdim=True) if largest else by_head.mean(1, keepdim=True)
    return shared.expand_as(by_head).flatten()


def divide_out(tensors: dict[str, Tensor], name: str, scale_K: Tensor, config: ModelConfig) -> None:
    """Divide a scale out of what makes the inputs `name`, among a layer's tensors by name within the layer."""
    if MAKERS[name] is None:
        norm = _norm_of(name, tensors)
        tensors[norm] = tensors[norm] / scale_K
    elif name == "down":
        tensors["mlp.up_proj.weight"] = tensors["mlp.up_proj.weight"] / scale_K[:, None]
    else:
        per_v = scale_K.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
        tensors["self_attn.v_proj.weight"] = tensors["self_attn.v_proj.weight"] / per_v[:, None]
        if "self_attn.v_proj.bias" in tensors:
            tensors["self_attn.v_proj.bias"] = tensors["self_attn.v_proj.bias"] / per_v


def _norm_of(name: str, tensors: dict[str, Tensor]) -> str:
    if name == "qkv":
        return "input_layernorm.weight"
    # Where attention's output has a norm of its own, that one has the name which is the MLP's elsewhere.
    before_mlp = "pre_feedforward_layernorm.weight"
    return before_mlp if before_mlp in tensors else "post_attention_layernorm.weight"
