"""How weights and activations are encoded, in plain PyTorch: the specification of the encodings.

Shape suffixes: N outputs, K inputs, G groups along K, R rows.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ShapeError
from .gguf_blocks import dequantise, finite
from .packed import Activation, Packed

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The 8-bit floats by the name that formats and activations use (Micikevicius et al., 2209.05433)."""


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""The values of the 4-bit float by code: a sign, two bits of exponent, one of fraction (OCP Microscaling Formats
Specification v1.0, section 5.3.3)."""


def pack_bits(codes_NK: Tensor, bits: int) -> Tensor:
    """Pack codes below 8 bits along K: a dense little-endian bit stream per row.

    Args:
        codes_NK: [N, K], integers or whole floats from 0 to 2^bits - 1.
        bits: width of a code, 1 to 7.

    Returns:
        [N, K * bits / 8] uint8, the first code in the lowest bits of the first byte.

    Raises:
        ShapeError: a row does not fill whole bytes.
    """
    N, K = codes_NK.shape
    if K * bits % 8:
        raise ShapeError(
            f"pack_bits: {K} codes of {bits} bits a row. Expected a multiple of {8 // math.gcd(bits, 8)} codes."
        )
    run = 8 // math.gcd(bits, 8)  # the shortest run of codes that fills whole bytes
    code = codes_NK.to(torch.uint8).reshape(N, K // run, run)
    packed = torch.zeros(N, K // run, run * bits // 8, dtype=torch.uint8)
    for i in range(run):
        byte, shift = divmod(i * bits, 8)
        packed[..., byte] |= code[..., i] << shift
        if shift + bits > 8:
            packed[..., byte + 1] |= code[..., i] >> (8 - shift)
    return packed.view(N, K * bits // 8)


def unpack_bits(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_bits`: [N, K * bits / 8] uint8 -> [N, K] uint8.

    Raises:
        ShapeError: a row does not hold whole codes.
    """
    N, size = packed.shape
    if size * 8 % bits:
        raise ShapeError(f"unpack_bits: {size} bytes a row for codes of {bits} bits. Expected whole codes.")
    run = 8 // math.gcd(bits, 8)
    stream = packed.reshape(N, -1, run * bits // 8)
    code = torch.empty(N, stream.shape[1], run, dtype=torch.uint8)
    for i in range(run):
        byte, shift = divmod(i * bits, 8)
        code[..., i] = stream[..., byte] >> shift
        if shift + bits > 8:
            code[..., i] |= stream[..., byte + 1] << (8 - shift)
    return code.bitwise_and_(2**bits - 1).view(N, size * 8 // bits)


def dequantize(packed: Packed) -> Tensor:
    """The values that a packed weight multiplies by, [N, K] float32: of a rotated one, those of W H.

    Those of inputs that are kept apart stand in their columns.
    """
    if packed.outliers is not None:
        whole_NK = dequantize(replace(packed, outliers=None))
        if whole_NK.data_ptr() == packed.codes.data_ptr():
            whole_NK = whole_NK.clone()
        whole_NK[:, packed.outliers.columns.long()] = packed.outliers.side.float()
        return whole_NK
    N, K = packed.shape
    if packed.blocks is not None:
        return torch.from_numpy(dequantise(packed.codes.numpy().reshape(-1), packed.blocks)).view(N, K)
    if packed.scales is None:
        return packed.codes.to(torch.float32)
    code_NK = packed.codes
    zero: Tensor | float = 0.0
    if packed.element == "e2m1":
        code_NK = E2M1[unpack_bits(code_NK, 4).int()]
    elif code_NK.dtype == torch.uint8:
        code_NK = unpack_bits(code_NK, packed.bits)
        zero = 2.0 ** (packed.bits - 1) if packed.zeros is None else packed.zeros.float()[..., None]
    G = packed.scales.shape[1]
    code_NGS = code_NK.to(torch.float32).view(N, G, K // G)
    value_NK = code_NGS.sub_(zero).mul_(packed.scales.float()[..., None]).view(N, K)
    return value_NK if packed.channel is None else value_NK.mul_(packed.channel)


def is_finite(packed: Packed) -> bool:
    """Whether every value that a packed weight stands for is a number; looks at no more than it must."""
    if packed.blocks is not None:
        return finite(packed.codes.numpy(), packed.blocks)
    parts = packed.codes, packed.scales, packed.channel, None if packed.outliers is None else packed.outliers.side
    floats = [t for t in parts if t is not None and t.is_floating_point()]
    # The sum of finite values is finite and costs a tenth of looking at each of them.
    return all(math.isfinite(float(t.float().sum())) or bool(t.float().isfinite().all()) for t in floats)


def rotate(x_RK: Tensor, block: int) -> Tensor:
    """Multiply every block of inputs by the Hadamard matrix of that size over its root: x H with H = H^T = H^-1.

    Mixes an outlier into all inputs of its block, which rounds more evenly (QuaRot, Ashkboos et al., 2404.00456; in
    blocks as small as the scales', Egiazarian et al., 2509.23202). Sylvester's matrix, as a fast Walsh-Hadamard
    transform: sums and differences at distances 1, 2, 4, ..., in that order, then one product, all in FP32.

    Args:
        x_RK: [R, K] float32: inputs, or the rows of a weight.
        block: inputs of a block, a power of two that divides K.

    Returns:
        [R, K] float32.

    Raises:
        ShapeError: the blocks do not fit.
    """
    R, K = x_RK.shape
    if block < 1 or block & (block - 1) or K % block:
        raise ShapeError(f"rotate: {K} inputs in blocks of {block}. Expected a power of two that divides them.")
    distance = 1
    while distance < block:
        pair = x_RK.view(R, -1, 2, distance)
        x_RK = torch.stack((pair[:, :, 0] + pair[:, :, 1], pair[:, :, 0] - pair[:, :, 1]), 2).view(R, K)
        distance *= 2
    share: float = block**-0.5
    return x_RK * share


def round_activations(x_RK: Tensor, activation: Activation, columns_k: Tensor | None = None) -> Tensor:
    """Round rows as a format says; what becomes of a row depends on that row alone.

    Args:
        x_RK: [R, K] float32, finite.
        columns_k: inputs that are kept apart, [k] integers: rounded to bfloat16, and the others as if these were 0.
        activation: `f32` leaves them; `bf16` rounds to bfloat16; `int8` and the FP8 kinds divide each row by its
            largest magnitude over the largest code (127; 448; 57344), round to the nearest code, ties to even, and
            multiply again; `int8_g32` does so with every 32 inputs of a row, and with fewer at its end. Zeros stay
            zeros.

    Returns:
        [R, K] float32: the values that the rounded inputs stand for.
    """
    if columns_k is not None:
        columns_k = columns_k.long()
        rounded_RK = round_activations(x_RK.index_fill(1, columns_k, 0.0), activation)
        return rounded_RK.index_copy(1, columns_k, x_RK[:, columns_k].bfloat16().float())
    if activation == "f32":
        return x_RK
    if activation == "bf16":
        return x_RK.bfloat16().float()
    if activation == "int8_g32":
        R, K = x_RK.shape
        groups = functional.pad(x_RK, (0, -K % 32)).view(-1, 32)
        return round_activations(groups, "int8").view(R, -1)[:, :K]
    limit = 127.0 if activation == "int8" else torch.finfo(FLOAT8[activation]).max
    scale = x_RK.abs().amax(-1, keepdim=True) / limit
    scale = torch.where(scale > 0, scale, 1.0)  # also where the quotient is too small for FP32
    code = (x_RK / scale).clamp_(-limit, limit)
    code = code.round() if activation == "int8" else code.to(FLOAT8[activation]).float()
    return code * scale
