"""AWQ over one layer of a decoder: scales folded into whatever makes the inputs, then clipping.

    qkv      reads the input norm          its scale is divided out of the norm
    o        reads the mixed values        its scale is divided out of v's rows; query heads that share v share it
    gate_up  reads the MLP's norm          its scale is divided out of the norm
    down     reads act(gate) * up          its scale is divided out of up's rows, in which the product is linear

Every fold is exact: before rounding, the layer computes what it did.

Shape suffixes: K inputs, D hidden size.
"""

from collections.abc import Mapping

from torch import Tensor

from ..formats import Format
from ..models.config import ModelConfig
from ..models.tensor_names import mlp_norm
from ..ops.packed import Packed
from .calibrate import ActivationStats
from .rounding import best_scale, clipped, nearest

READERS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Linear layers by the inputs that they share."""

UNCLIPPED = ("self_attn.q_proj", "self_attn.k_proj")
"""Their outputs meet in a product, where an error measured alone misleads (as in the authors' own code)."""


def fold_layer(
    tensors: dict[str, Tensor], stats: ActivationStats, layer: int, config: ModelConfig, form: Format
) -> dict[str, Tensor]:
    """Scale one layer's weights for rounding, exactly undone elsewhere in the layer.

    Args:
        tensors: the layer's tensors by name within the layer ('self_attn.q_proj.weight', ...), float32; replaced.
        stats: what its linear layers read.
        layer: its number.
        config: the model's sizes.
        form: the format that will be rounded to.

    Returns:
        by the keys of `READERS`, the scale that each input was divided by, [K].
    """
    scales: dict[str, Tensor] = {}
    for name in ("o", "down", "qkv", "gate_up"):  # o and down change v and up, which qkv and gate_up then look at
        weights = [tensors[f"{reader}.weight"] for reader in READERS[name]]
        rows, magnitude = stats.rows(layer, name), stats.mean_magnitude(layer, name)
        if name == "o":
            magnitude = _shared_by_query_heads(magnitude, config)
        scale_K = best_scale(weights, rows, magnitude, form)
        for reader in READERS[name]:
            tensors[f"{reader}.weight"] = tensors[f"{reader}.weight"] * scale_K
        _divide_out(tensors, name, scale_K, config)
        scales[name] = scale_K
    return scales


def round_layer(
    tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor], stats: ActivationStats, layer: int, form: Format
) -> dict[str, Packed]:
    """Round the folded weights of one layer, with clipping; by name within the layer, without '.weight'."""
    packed = {}
    for name, readers in READERS.items():
        products_GSS = stats.products(layer, name)
        scale_GS = scales[name].view(products_GSS.shape[:2])
        products_GSS = products_GSS / (scale_GS[:, :, None] * scale_GS[:, None, :])
        for reader in readers:
            weight = tensors[f"{reader}.weight"]
            packed[reader] = nearest(weight, form) if reader in UNCLIPPED else clipped(weight, products_GSS, form)
    return packed


def _divide_out(tensors: dict[str, Tensor], name: str, scale_K: Tensor, config: ModelConfig) -> None:
    if name == "qkv":
        tensors["input_layernorm.weight"] = tensors["input_layernorm.weight"] / scale_K
    elif name == "gate_up":
        norm = f"{mlp_norm(config)}.weight"
        tensors[norm] = tensors[norm] / scale_K
    elif name == "down":
        tensors["mlp.up_proj.weight"] = tensors["mlp.up_proj.weight"] / scale_K[:, None]
    else:
        per_v = scale_K.view(config.num_kv_heads, -1, config.head_dim)[:, 0].flatten()
        tensors["self_attn.v_proj.weight"] = tensors["self_attn.v_proj.weight"] / per_v[:, None]
        if "self_attn.v_proj.bias" in tensors:
            tensors["self_attn.v_proj.bias"] = tensors["self_attn.v_proj.bias"] / per_v


def _shared_by_query_heads(magnitude_K: Tensor, config: ModelConfig) -> Tensor:
    """The mean over the query heads that read one value head, repeated for each of them."""
    by_head = magnitude_K.view(config.num_kv_heads, -1, config.head_dim)
    return by_head.mean(1, keepdim=True).expand_as(by_head).flatten()
