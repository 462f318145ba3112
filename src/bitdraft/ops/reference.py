"""What each operation means, in plain PyTorch: the specification that every faster backend is tested against.

Everything is computed in FP32, whatever the weights are: a format decides which *values* the weights and the rounded
inputs take, and the products and sums of those values are FP32. Sizes are not checked here; `ops/__init__.py` does.

Shape suffixes: R rows (tokens of all sequences of the call), S sequences, D hidden size, N outputs, K inputs,
H query heads, J KV heads, C head dimension, T turned channels / 2, L tokens in a sequence's KV, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .batch import KVLayer, Ragged, Rotary
from .coded import read_blocks
from .encoding import dequantize, rotate, round_activations
from .packed import Activation, Gate, Packed


@dataclass(frozen=True)
class DecodedWeight:
    """A weight in the reference's layout: the very values that its format stands for.

    Attributes:
        values: [N, K] float32.
        activation: how inputs are rounded before they meet this weight.
        packed_bytes: what the weight takes in its packed form.
        rotation: inputs of a block that a Hadamard matrix mixes before they are rounded; None without rotation.
        columns: inputs that are kept apart, in bfloat16, [k] int32; None without such.
    """

    values: Tensor
    activation: Activation
    packed_bytes: int
    rotation: int | None = None
    columns: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def resident_bytes(self) -> int:
        """Bytes that the values take."""
        return 4 * self.values.numel()


def prepare(*parts: Packed) -> DecodedWeight:
    """Decode a weight once, at load, into the FP32 values it stands for."""
    values = [dequantize(part) for part in parts]
    whole = values[0] if len(values) == 1 else torch.cat(values)
    first, nbytes = parts[0], sum(part.nbytes for part in parts)
    columns = None if first.outliers is None else first.outliers.columns
    return DecodedWeight(whole, first.activation, nbytes, first.rotation, columns)


def _matmul(x_RK: Tensor, weight: DecodedWeight) -> Tensor:
    if weight.rotation is not None:
        x_RK = rotate(x_RK, weight.rotation)
    x_RK = round_activations(x_RK, weight.activation, weight.columns)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # torch sends FP32 products to MKL, which is 1.5 to 2.8 times slower than oneDNN for 1 to 256 rows on processors
        # of the other make (docs/log.md, 2026-11-29). The result is the same FP32 product, summed in another order.
        return torch.ops.mkldnn._linear_pointwise(x_RK, weight.values, None, "none", [], "")  # type: ignore[no-any-return]
    return functional.linear(x_RK, weight.values)


def embed(ids_R: Tensor, table: DecodedWeight) -> Tensor:
    """Rows of the embedding table."""
    return table.values[ids_R]


def _activate(gate: Tensor, kind: Gate) -> Tensor:
    return functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")


def rms_norm(x_RD: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * norm` (Zhang and Sennrich, 1910.07467)."""
    return x_RD * torch.rsqrt(x_RD.square().mean(-1, keepdim=True) + eps) * norm_D


def norm_linear(x_RD: Tensor, norm_D: Tensor, eps: float, weight: DecodedWeight, bias_N: Tensor | None) -> Tensor:
    """RMSNorm, rounding of the inputs, matmul, bias."""
    y_RN = _matmul(rms_norm(x_RD, norm_D, eps), weight)
    return y_RN if bias_N is None else y_RN + bias_N


def linear_add(
    x_RK: Tensor, weight: DecodedWeight, residual_RN: Tensor, norm_N: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Rounding of the inputs, matmul, norm where there is one, residual."""
    y_RN = _matmul(x_RK, weight)
    return residual_RN + (y_RN if norm_N is None else rms_norm(y_RN, norm_N, eps))


def gated_inputs(x_RD: Tensor, norm_D: Tensor, eps: float, gate_up: DecodedWeight, gate: Gate = "silu") -> Tensor:
    """`act(gate) * up` of the normalised rows: what the down projection of `gated_mlp` reads."""
    first, up = _matmul(rms_norm(x_RD, norm_D, eps), gate_up).chunk(2, dim=-1)
    return _activate(first, gate) * up


def gated_mlp(
    x_RD: Tensor,
    norm_D: Tensor,
    eps: float,
    gate_up: DecodedWeight,
    down: DecodedWeight,
    gate: Gate = "silu",
    down_norm_D: Tensor | None = None,
) -> Tensor:
    """`x + down(act(gate) * up)` (Shazeer, 2002.05202, SwiGLU and GEGLU), the product normalised where asked."""
    return linear_add(gated_inputs(x_RD, norm_D, eps, gate_up, gate), down, x_RD, down_norm_D, eps)


def logits(x_RD: Tensor, norm_D: Tensor, eps: float, head: DecodedWeight, cap: float | None = None) -> Tensor:
    """Final RMSNorm and the output head; `cap * tanh(y / cap)` of what it gives where there is a cap."""
    y_RV = norm_linear(x_RD, norm_D, eps, head, None)
    return y_RV if cap is None else cap * torch.tanh(y_RV / cap)


def top(logits_RV: Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Place, the first of equals, and size of the largest logit of each row; NaN if the row holds one."""
    return tuple(logits_RV.argmax(-1).tolist()), tuple(logits_RV.amax(-1).tolist())


def _rotate(x_RHC: Tensor, cos_RT: Tensor, sin_RT: Tensor) -> Tensor:
    half = cos_RT.shape[1]
    first, second, rest = torch.split(x_RHC, [half, half, x_RHC.shape[2] - 2 * half], dim=-1)
    cos, sin = cos_RT.unsqueeze(1), sin_RT.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rope_append(
    qkv_RN: Tensor,
    batch: Ragged,
    rotary: Rotary,
    kv: KVLayer,
    q_norm_C: Tensor | None,
    k_norm_C: Tensor | None,
    eps: float,
) -> Tensor:
    """Split q, k, v; normalise q and k per head where asked; rotate them in FP32; write k and v to the cache."""
    heads = qkv_RN.shape[1] // kv.head_dim
    x_RHC = qkv_RN.view(-1, heads, kv.head_dim)
    q, k, v = torch.split(x_RHC, [heads - 2 * kv.kv_heads, kv.kv_heads, kv.kv_heads], dim=1)
    if q_norm_C is not None and k_norm_C is not None:
        q, k = rms_norm(q, q_norm_C, eps), rms_norm(k, k_norm_C, eps)
    cos, sin = rotary.cos[batch.positions], rotary.sin[batch.positions]
    _write(kv, batch.slots, _rotate(k, cos, sin), v)
    return _rotate(q, cos, sin)


def _write(kv: KVLayer, slots_R: Tensor, keys_RJC: Tensor, values_RJC: Tensor) -> None:
    """Keys and values to their slots, or into the full copies of blocks that are kept in codes.

    int8 divides each vector by its largest magnitude over 127 and rounds; E4M3 divides by the head's scale and
    saturates. What is not a number becomes -448 there, since a scale that all tokens share cannot tell.
    """
    block_R, offset_R = slots_R // kv.block_size, slots_R % kv.block_size
    if kv.coded is not None:
        block_R = kv.coded.copies[block_R]
    if kv.key_scales is None or kv.value_scales is None:
        pass
    elif kv.keys.dtype == torch.float8_e4m3fn:
        keys_RJC = (keys_RJC / kv.key_scales[:, None]).clamp(-448, 448).nan_to_num(-448)
        values_RJC = (values_RJC / kv.value_scales[:, None]).clamp(-448, 448).nan_to_num(-448)
    else:
        keys_RJC, kv.key_scales[block_R, :, offset_R] = _int8_codes(keys_RJC)
        values_RJC, kv.value_scales[block_R, :, offset_R] = _int8_codes(values_RJC)
    kv.keys[block_R, :, :, offset_R] = keys_RJC.to(kv.keys.dtype)
    kv.values[block_R, :, offset_R] = values_RJC.to(kv.values.dtype)


def _int8_codes(x_RJC: Tensor) -> tuple[Tensor, Tensor]:
    scale_RJ = x_RJC.abs().amax(-1) / 127
    scale_RJ = torch.where(scale_RJ == 0, 1.0, scale_RJ)  # also where the quotient is too small for FP32
    return (x_RJC / scale_RJ[..., None]).round().clamp(-127, 127), scale_RJ


def _read(kv: KVLayer, table: Tensor, length: int, coded: int) -> tuple[Tensor, Tensor]:
    """Keys and values of the first `length` tokens of a sequence, `coded` of them in codes, [L, J, C] float32 both."""
    keys, values = (kv.keys[table], kv.values[table]) if kv.coded is None else read_blocks(kv, kv.coded, table, coded)
    keys_LJC = keys.permute(0, 3, 1, 2).flatten(0, 1)[:length].float()
    values_LJC = values.permute(0, 2, 1, 3).flatten(0, 1)[:length].float()
    if kv.key_scales is None or kv.value_scales is None:
        return keys_LJC, values_LJC
    if kv.keys.dtype == torch.float8_e4m3fn:
        keys_LJC, values_LJC = keys_LJC * kv.key_scales[:, None], values_LJC * kv.value_scales[:, None]
    else:
        keys_LJC = keys_LJC * kv.key_scales[table].transpose(1, 2).flatten(0, 1)[:length, :, None]
        values_LJC = values_LJC * kv.value_scales[table].transpose(1, 2).flatten(0, 1)[:length, :, None]
    return keys_LJC, values_LJC


def attention(q_RHC: Tensor, batch: Ragged, kv: KVLayer, window: int | None, scale: float | None = None) -> Tensor:
    """Causal attention of every row to its own sequence's paged KV; softmax in FP32."""
    out_RN = torch.empty(q_RHC.shape[0], q_RHC.shape[1] * q_RHC.shape[2])
    q_RHC = q_RHC * (q_RHC.shape[2] ** -0.5 if scale is None else scale)
    row = 0
    for count, table, length in zip(batch.row_counts, batch.tables, batch.lengths, strict=True):
        positions = batch.positions[row : row + count]
        coded_R = torch.tensor([0 if kv.coded is None else kv.coded.coded_tokens(p) for p in positions.tolist()])
        for coded in sorted(set(coded_R.tolist())):
            rows = row + (coded_R == coded).nonzero()[:, 0]
            keys_LJC, values_LJC = _read(kv, table, length, coded)
            out_RN[rows] = _attend(q_RHC[rows], keys_LJC, values_LJC, batch.positions[rows], window)
        row += count
    return out_RN


def _attend(q_RHC: Tensor, keys_LJC: Tensor, values_LJC: Tensor, positions_R: Tensor, window: int | None) -> Tensor:
    (R, H, C), (L, J, _) = q_RHC.shape, keys_LJC.shape
    q_JGC = q_RHC.view(R, J, H // J, C).transpose(0, 1).reshape(J, R * (H // J), C)
    scores = (q_JGC @ keys_LJC.permute(1, 2, 0)).view(J, R, H // J, L)
    at_L = torch.arange(L)
    hidden_RL = at_L > positions_R[:, None]
    if window is not None:
        hidden_RL |= at_L <= positions_R[:, None] - window
    scores.masked_fill_(hidden_RL[None, :, None, :], -torch.inf)
    mixed: Tensor = scores.softmax(-1).view(J, R * (H // J), L) @ values_LJC.transpose(0, 1)
    return mixed.view(J, R, H // J, C).transpose(0, 1).reshape(R, H * C)
