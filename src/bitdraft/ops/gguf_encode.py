"""Weights into the block formats of GGUF files: rounded to nearest as ggml does, or moved code by code.

The arithmetic of rounding is that of ggml's `quantize_row_*_ref`: Q4_0 maps the value of largest magnitude to code 0,
Q4_1 the smallest to 0 and the largest to 15, Q8_0 the largest magnitude to 127.

Shape suffixes: N outputs, K inputs, B blocks.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import FormatError
from .encoding import unpack_bits
from .gguf_blocks import BLOCK_FORMATS, BlockFormat, Bytes, Floats
from .packed import Packed

WRITTEN = {
    form.name: form for form in BLOCK_FORMATS.values() if form.name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
}
"""The tensor types that are written, by name."""

_VALUES = 32


def moved(packed: Packed, form: BlockFormat) -> tuple[Bytes, bool] | None:
    """The blocks of a weight whose codes a block format holds as they are; None if it does not.

    Integers of 4 bits in groups of 32 become Q4_0, with zero points Q4_1; of 8 bits, Q8_0. A scale for each output
    stands in each of its blocks.

    Args:
        packed: the weight.
        form: the block format.

    Returns:
        the bytes of each row, [N, bytes] uint8; whether they stand for the very same values: Q4_1's minimum, and a
        scale of an output, are rounded to float16.
    """
    if packed.blocks is not None:
        return (packed.codes.numpy(), True) if packed.blocks == form else None
    integers = packed.scales is not None and packed.codes.dtype in (torch.uint8, torch.int8)
    known = {"element", "channel", "rotation", "outliers"}
    if not integers or any(getattr(packed, name, None) is not None for name in known):
        return None
    assert packed.scales is not None
    (N, K), G = packed.shape, packed.scales.shape[1]
    kind = (packed.bits, packed.zeros is not None)
    if kind != {"Q4_0": (4, False), "Q4_1": (4, True), "Q8_0": (8, False)}.get(form.name) or (
        G > 1 and K // G % _VALUES
    ):
        return None
    scale_B = packed.scales.repeat_interleave(K // _VALUES // G, dim=1).reshape(-1, 1).numpy()
    half_B = scale_B.astype(np.float16)
    exact = bool((half_B == scale_B).all())
    if form.name == "Q8_0":
        codes = packed.codes.reshape(-1, _VALUES).numpy().view(np.uint8)
        return _rows(N, half_B, codes), exact
    codes = unpack_bits(packed.codes, 4).reshape(-1, _VALUES).numpy()
    if packed.zeros is None:
        return _rows(N, half_B, _nibbles(codes)), exact
    zero_B = packed.zeros.repeat_interleave(K // _VALUES // G, dim=1).reshape(-1, 1).numpy().astype(np.float32)
    minimum_B = -zero_B * scale_B
    half_minimum_B = minimum_B.astype(np.float16)
    return _rows(N, half_B, half_minimum_B, _nibbles(codes)), exact and bool((half_minimum_B == minimum_B).all())


def rounded(values_NK: Tensor, form: BlockFormat) -> Bytes:
    """A weight in a block format, each value rounded to nearest.

    Args:
        values_NK: [N, K] float32, or [K].
        form: one of `WRITTEN`.

    Returns:
        the bytes of each row, [N, bytes] uint8.

    Raises:
        FormatError: rows that are no whole blocks, or values beyond the reach of float16.
    """
    if values_NK.shape[-1] % form.values:
        raise FormatError(f"{form.name}: rows of {values_NK.shape[-1]} values. Expected whole blocks of {form.values}.")
    rows = values_NK.reshape(-1, values_NK.shape[-1]).contiguous()
    if form.values == 1:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[form.name]
        stored = rows.to(dtype)
        if dtype == torch.float16 and not bool(stored.isfinite().all()):
            raise FormatError("F16: a value beyond 65504. Expected values that float16 holds; use BF16.")
        return stored.contiguous().view(torch.uint8).numpy()
    blocks = rows.numpy().reshape(-1, _VALUES)
    made: Bytes = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1}[form.name](blocks)
    return made.reshape(len(rows), -1)


def _rows(outputs: int, *parts: NDArray[np.generic]) -> Bytes:
    """Blocks of several parts, [B, ...] each, as the rows of a weight."""
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1).reshape(outputs, -1)


def _nibbles(codes: Bytes) -> Bytes:
    """[B, 32] codes of 4 bits -> [B, 16]: the first half of a block low, the second high."""
    return codes[:, :16] | codes[:, 16:] << np.uint8(4)


def _inverse(scale: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(scale != 0, np.float32(1) / scale, np.float32(0)).astype(np.float32)


def _q8_0(blocks: Floats) -> Bytes:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # halves away from zero
    return _rows(len(blocks), scale.astype(np.float16), codes)


def _q4_0(blocks: Floats) -> Bytes:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum(np.trunc(blocks * _inverse(scale) + np.float32(8.5)), 15).astype(np.uint8)
    return _rows(len(blocks), scale.astype(np.float16), _nibbles(codes))


def _q4_1(blocks: Floats) -> Bytes:
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = (high - low) / np.float32(15)
    codes = np.minimum(np.trunc((blocks - low) * _inverse(scale) + np.float32(0.5)), 15).astype(np.uint8)
    return _rows(len(blocks), scale.astype(np.float16), low.astype(np.float16), _nibbles(codes))
