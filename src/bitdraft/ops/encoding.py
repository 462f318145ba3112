"""How weights and activations are encoded, in plain PyTorch: the specification of the encodings.

Shape suffixes: N outputs, K inputs, G groups along K, R rows.
"""

import torch
from torch import Tensor

from ..errors import ShapeError
from .packed import Activation, Packed

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def pack_bits(codes_NK: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes below 8 bits along K: a dense little-endian bit stream per row, [N, K * bits / 8] uint8."""
    N, K = codes_NK.shape
    if K * bits % 8:
        raise ShapeError(f"pack_bits: {K} codes of {bits} bits a row. Expected whole bytes.")
    stream = ((codes_NK.to(torch.uint8)[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1).view(N, -1, 8)
    return (stream << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`: [N, K] uint8."""
    N = packed.shape[0]
    stream = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(N, -1, bits)
    return (stream << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def dequantize(packed: Packed) -> Tensor:
    """The values that a packed weight stands for, [N, K] float32."""
    N, K = packed.shape
    if packed.scales is None:
        return packed.codes.float()
    if packed.codes.dtype == torch.uint8:
        code = unpack_bits(packed.codes, packed.bits).float()
        G = packed.scales.shape[1]
        zero = packed.zeros.float()[..., None] if packed.zeros is not None else float(2 ** (packed.bits - 1))
        return ((code.view(N, G, K // G) - zero) * packed.scales[..., None]).view(N, K)
    G = packed.scales.shape[1]
    return (packed.codes.float().view(N, G, K // G) * packed.scales[..., None]).view(N, K)


def round_activations(x_RK: Tensor, activation: Activation) -> Tensor:
    """Round rows as a format says; each row by itself."""
    if activation == "f32":
        return x_RK
    if activation == "bf16":
        return x_RK.bfloat16().float()
    peak = x_RK.abs().amax(-1, keepdim=True)
    if activation == "int8":
        scale = torch.where(peak > 0, peak / 127, 1.0)
        return (x_RK / scale).round().clamp(-127, 127) * scale
    limit = torch.finfo(FLOAT8[activation]).max
    scale = torch.where(peak > 0, peak / limit, 1.0)
    return (x_RK / scale).clamp(-limit, limit).to(FLOAT8[activation]).float() * scale
