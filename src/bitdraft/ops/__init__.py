"""The operations that a decoder is made of: one checked, documented function each.

`reference.py` says what an operation means. A compiled version may take its place (`native.py`); it may change the
speed and, within a tolerance written beside its test, the rounding, never the meaning.

Shape suffixes: R rows (tokens of all sequences of the call), D hidden size, N outputs, K inputs, H query heads,
J KV heads, C head dimension, M inner size of the MLP, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import native, reference
from .batch import AttentionKind, CodedBlocks, KVCache, KVLayer, Ragged, Rotary
from .checks import (
    check,
    check_angles,
    check_arrays,
    check_batch,
    check_kv,
    check_outliers,
    check_rotary,
    check_rows,
    check_vector,
)
from .coded import encode_blocks
from .packed import Gate, Layer, Packed, Prepared, Stack

__all__ = [
    "AttentionKind",
    "CodedBlocks",
    "Gate",
    "KVCache",
    "KVLayer",
    "Layer",
    "Packed",
    "Prepared",
    "Ragged",
    "Rotary",
    "Stack",
    "attention",
    "embed",
    "encode_blocks",
    "gated_inputs",
    "gated_mlp",
    "linear_add",
    "logits",
    "norm_linear",
    "prepare",
    "rms_norm",
    "rope_append",
    "run_layers",
    "top",
]


def _version(operation: str) -> Callable[..., Any]:
    return native.find(operation) or getattr(reference, operation)


def prepare(*parts: Packed) -> Prepared:
    """Bring a weight into the backend's own layout; done once, at load.

    Args:
        parts: the weight, or up to three that are fused: their rows in order, [N, K] each with one K, one
            activation, one rotation, and the same outliers.

    Raises:
        ShapeError: parts that do not read the same inputs.
    """
    kinds = {(part.shape[1], part.activation, part.rotation or 0, part.columns) for part in parts}
    check(len(kinds) == 1, "prepare", f"parts of (inputs, activation, rotation, outliers) {sorted(kinds)}", "one each")
    for part in parts:
        check_outliers("prepare", part)
    check(len(parts) <= 3, "prepare", f"{len(parts)} parts", "3 at most")
    return _version("prepare")(*parts)  # type: ignore[no-any-return]


def embed(ids_R: Tensor | Sequence[int], table: Prepared) -> Tensor:
    """Look token ids up in the embedding table.

    Args:
        ids_R: int64, [R], or as many of Python's numbers; each from 0 to V - 1.
        table: weight of shape [V, D].

    Returns:
        [R, D] float32.
    """
    check(table.rotation is None, "embed", "a table with a rotation, which is for inputs that are multiplied", "none")
    check(table.columns is None, "embed", "a table with outliers, which are inputs that are multiplied", "none")
    if isinstance(ids_R, Tensor):
        given = f"ids {ids_R.dtype} {list(ids_R.shape)}"
        check(ids_R.ndim == 1 and ids_R.dtype == torch.int64, "embed", given, "int64 [R]")
    ids = ids_R.tolist() if isinstance(ids_R, Tensor) else ids_R
    if ids and not 0 <= min(ids) <= max(ids) < table.shape[0]:
        check(False, "embed", f"ids from {min(ids)} to {max(ids)}", f"ids from 0 to {table.shape[0] - 1}")
    return _version("embed")(ids, table)  # type: ignore[no-any-return]


def rms_norm(x_RD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and scale it: [R, D] float32 -> the same (1910.07467)."""
    check_rows("rms_norm", "x", x_RD, norm_D.shape[0])
    return reference.rms_norm(x_RD, norm_D, eps)


def norm_linear(x_RD: Tensor, norm_D: Tensor, eps: float, weight: Prepared, bias_N: Tensor | None = None) -> Tensor:
    """RMSNorm, rounding of the inputs as the weight's format says, low-bit matmul, bias.

    Args:
        x_RD: residual rows, [R, D] float32.
        norm_D: scale of the norm, [D] float32.
        eps: added to the mean square.
        weight: shape [N, D].
        bias_N: [N] float32 or None.

    Returns:
        [R, N] float32.
    """
    N, D = weight.shape
    check_rows("norm_linear", "x", x_RD, D)
    check_vector("norm_linear", "norm", norm_D, D)
    check_vector("norm_linear", "bias", bias_N, N)
    return _version("norm_linear")(x_RD, norm_D, eps, weight, bias_N)  # type: ignore[no-any-return]


def linear_add(
    x_RK: Tensor, weight: Prepared, residual_RN: Tensor, norm_N: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """`residual + x @ weight.T`, or `residual + norm(x @ weight.T)`, inputs rounded as the weight's format says.

    Args:
        x_RK: [R, K] float32.
        weight: shape [N, K].
        residual_RN: [R, N] float32.
        norm_N: scale of an RMSNorm of the product (Gemma), [N] float32, or None for no norm.
        eps: of that norm.

    Returns:
        [R, N] float32.
    """
    N, K = weight.shape
    check_vector("linear_add", "norm", norm_N, N)
    check_rows("linear_add", "x", x_RK, K)
    check_rows("linear_add", "residual", residual_RN, N)
    check(
        len(x_RK) == len(residual_RN), "linear_add", f"{len(x_RK)} rows of x, {len(residual_RN)} of residual", "as many"
    )
    return _version("linear_add")(x_RK, weight, residual_RN, norm_N, eps)  # type: ignore[no-any-return]


def _check_mlp(operation: str, x_RD: Tensor, norm_D: Tensor, gate_up: Prepared) -> None:
    check_rows(operation, "x", x_RD, gate_up.shape[1])
    check_vector(operation, "norm", norm_D, gate_up.shape[1])
    check(
        gate_up.shape[0] % 2 == 0,
        operation,
        f"gate_up of {gate_up.shape[0]} outputs",
        "gate rows, then as many up rows",
    )


def gated_inputs(x_RD: Tensor, norm_D: Tensor, eps: float, gate_up: Prepared, gate: Gate = "silu") -> Tensor:
    """The rows that the down projection of `gated_mlp` reads, [R, M] float32, for calibration."""
    _check_mlp("gated_inputs", x_RD, norm_D, gate_up)
    return _version("gated_inputs")(x_RD, norm_D, eps, gate_up, gate)  # type: ignore[no-any-return]


def gated_mlp(
    x_RD: Tensor,
    norm_D: Tensor,
    eps: float,
    gate_up: Prepared,
    down: Prepared,
    gate: Gate = "silu",
    down_norm_D: Tensor | None = None,
) -> Tensor:
    """`x + down(act(gate) * up)` with RMSNorm before and the inputs rounded as the formats say.

    Args:
        x_RD: residual rows, [R, D] float32.
        norm_D: scale of the norm, [D] float32.
        eps: added to the mean square in every norm.
        gate_up: shape [2 M, D], the gate's rows before the up projection's.
        down: shape [D, M].
        gate: what the gate goes through.
        down_norm_D: scale of an RMSNorm of what `down` makes (Gemma), [D] float32, or None for no norm.

    Returns:
        [R, D] float32.
    """
    _check_mlp("gated_mlp", x_RD, norm_D, gate_up)
    expected = (gate_up.shape[1], gate_up.shape[0] // 2)
    check(down.shape == expected, "gated_mlp", f"down of shape {list(down.shape)}", f"{list(expected)}")
    check_vector("gated_mlp", "down_norm", down_norm_D, down.shape[0])
    return _version("gated_mlp")(x_RD, norm_D, eps, gate_up, down, gate, down_norm_D)  # type: ignore[no-any-return]


def logits(x_RD: Tensor, norm_D: Tensor, eps: float, head: Prepared, cap: float | None = None) -> Tensor:
    """Final RMSNorm and output head: [R, D] float32 -> [R, V] float32, y or `cap * tanh(y / cap)`."""
    check(cap is None or cap > 0, "logits", f"a cap of {cap}", "a positive one, or none")
    check_rows("logits", "x", x_RD, head.shape[1])
    check_vector("logits", "norm", norm_D, head.shape[1])
    return _version("logits")(x_RD, norm_D, eps, head, cap)  # type: ignore[no-any-return]


def top(logits_RV: Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Where the largest logit of each row is, the first of equals, and how large.

    Args:
        logits_RV: [R, V] of at least one logit; the compiled version takes float32 rows that are contiguous each.

    Returns:
        R ids, and R numbers: NaN for a row that holds one, whose id then means nothing.
    """
    if logits_RV.ndim != 2 or not logits_RV.shape[1]:
        check(False, "top", f"logits {list(logits_RV.shape)}", "[R, at least 1]")
    compiled = logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and logits_RV.is_cpu
    return _version("top")(logits_RV) if compiled else reference.top(logits_RV)


def rope_append(
    qkv_RN: Tensor,
    batch: Ragged,
    rotary: Rotary,
    kv: KVLayer,
    q_norm_C: Tensor | None = None,
    k_norm_C: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotate q and k by their absolute positions in FP32 and write k and v into the paged cache.

    Args:
        qkv_RN: [R, (H + 2 J) C] float32: the query heads, then the key heads, then the value heads.
        batch: positions and slots of the rows.
        rotary: angles for at least every position of the batch.
        kv: the layer's blocks; changed in place at `batch.slots`.
        q_norm_C, k_norm_C: per-head RMSNorm scales, [C] float32, both or neither (Qwen3).
        eps: of that norm.

    Returns:
        rotated queries, [R, H, C] float32.
    """
    check_kv("rope_append", kv)
    J, C = kv.kv_heads, kv.head_dim
    heads, odd = divmod(qkv_RN.shape[-1], C)
    check(
        odd == 0 and heads > 2 * J and (heads - 2 * J) % J == 0,
        "rope_append",
        f"qkv of width {qkv_RN.shape[-1]}",
        f"(H + 2 * {J}) * {C} with H a multiple of {J}",
    )
    check_rows("rope_append", "qkv", qkv_RN, heads * C)
    check(
        (q_norm_C is None) == (k_norm_C is None), "rope_append", "a norm for one of q and k", "norms for both or none"
    )
    check_vector("rope_append", "q_norm", q_norm_C, C)
    check_vector("rope_append", "k_norm", k_norm_C, C)
    check_batch("rope_append", batch, kv, len(qkv_RN))
    check_rotary("rope_append", batch, rotary, C)
    return _version("rope_append")(qkv_RN, batch, rotary, kv, q_norm_C, k_norm_C, eps)  # type: ignore[no-any-return]


def attention(
    q_RHC: Tensor, batch: Ragged, kv: KVLayer, window: int | None = None, scale: float | None = None
) -> Tensor:
    """Causal attention of ragged rows to a paged cache; grouped heads share a KV head.

    A row at position i sees positions 0 to i of its own sequence, or the last `window` of them. What it sees depends
    on absolute positions only, never on the other rows of the call.

    Args:
        q_RHC: rotated queries, [R, H, C] float32.
        batch: row counts, positions, block tables and lengths.
        kv: the layer's blocks, J heads; H is a multiple of J.
        window: positions that a row sees, itself included; None for all.
        scale: what scores are multiplied by; None for 1 / sqrt(C).

    Returns:
        [R, H * C] float32.
    """
    check_kv("attention", kv)
    J, C = kv.kv_heads, kv.head_dim
    check(
        q_RHC.ndim == 3 and q_RHC.shape[2] == C and q_RHC.shape[1] > 0 and q_RHC.shape[1] % J == 0,
        "attention",
        f"q of shape {list(q_RHC.shape)}",
        f"[R, a multiple of {J}, {C}]",
    )
    check(
        q_RHC.dtype == torch.float32 and q_RHC.is_contiguous(),
        "attention",
        f"q {q_RHC.dtype}{'' if q_RHC.is_contiguous() else ', not contiguous'}",
        "contiguous float32",
    )
    check(window is None or window > 0, "attention", f"a window of {window}", "one of at least a position, or none")
    check(scale is None or scale > 0, "attention", f"a scale of {scale}", "a positive one, or none")
    check_batch("attention", batch, kv, len(q_RHC))
    return _version("attention")(q_RHC, batch, kv, window, scale)  # type: ignore[no-any-return]


def run_layers(
    x_RD: Tensor,
    layers: Stack,
    batch: Ragged,
    kinds: Sequence[AttentionKind],
    cache: KVCache,
    eps: float,
) -> Tensor | None:
    """All layers of a decoder in one call, where a backend has that: the same operations, and the same bits.

    Args:
        x_RD: embedded rows, [R, D] float32; overwritten.
        layers: their weights.
        batch: the rows' places.
        kinds: how layers attend, by `Layer.attention`; with angles for at least every position of the batch.
        cache: a `KVLayer` for each layer, all of one shape; changed in place at `batch.slots`.
        eps: of every norm.

    Returns:
        residual rows after the last layer, [R, D] float32; None if the backend runs operation by operation only.
    """
    run = native.find("run_layers")
    if run is None:
        return None
    check(len(layers) == len(cache) > 0, "run_layers", f"{len(layers)} layers and {len(cache)} of the cache", "as many")
    check_rows("run_layers", "x", x_RD, layers[0].qkv.shape[1])
    check_arrays("run_layers", batch, len(x_RD))  # the compiled code itself looks at what they hold
    if cache.angles is not kinds:
        for kind in kinds:
            check_angles("run_layers", kind.rotary, cache[0].head_dim)
        cache.angles = kinds
    return run(x_RD, layers, batch, kinds, cache, eps)  # type: ignore[no-any-return]
