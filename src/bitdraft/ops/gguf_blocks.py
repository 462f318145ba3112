"""The block formats of GGUF files, read into float32.

A GGUF tensor is a row of blocks: 32 values with one scale (Q4_0 ... Q8_0), or 256 values with one scale, 8 or 16
sub-blocks and a small integer scale for each (the K formats). The layouts are ggml's (`block_q4_0` and so on in its
ggml-common.h); the arithmetic is done in float32 in the order of ggml's own reader, so that the values are the same
bit for bit.

Shape suffixes: B blocks, S sub-blocks of a block, V values of a block or sub-block.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ShapeError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

_VALUES_AT_A_TIME = 1 << 16
"""Values that are decoded together: few enough for their intermediate arrays to stay in a core's cache."""


@dataclass(frozen=True)
class BlockFormat:
    """How a GGUF tensor type stores its values.

    Attributes:
        kind: ggml's number of the type.
        name: ggml's name of the type.
        values: values in a block; 1 for plain floats.
        nbytes: bytes of a block.
        code_bits: width of a code.
        scales: bytes of a block at which a float16 scale, or minimum, begins.
        decode: blocks [B, nbytes] uint8 -> their values, [B, values] float32.
    """

    kind: int
    name: str
    values: int
    nbytes: int
    code_bits: int
    scales: tuple[int, ...]
    decode: Callable[[Bytes], Floats]

    @property
    def bits(self) -> float:
        """Bits that one value takes, its share of the scales included."""
        return 8 * self.nbytes / self.values


def dequantise(raw: Bytes, form: BlockFormat) -> Floats:
    """The float32 values of a whole tensor.

    Args:
        raw: the bytes of the tensor, [B * form.nbytes] uint8.
        form: how they are stored.

    Returns:
        [B * form.values] float32, a fresh array.

    Raises:
        ShapeError: if the bytes are no whole number of blocks.
    """
    if raw.size % form.nbytes:
        raise ShapeError(f"{raw.size} bytes of {form.name}. Expected a multiple of {form.nbytes}, the size of a block.")
    blocks = raw.reshape(-1, form.nbytes)
    values = np.empty((len(blocks), form.values), dtype=np.float32)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite or NaN; the engine says so when it meets one
        step = _VALUES_AT_A_TIME // form.values
        for start in range(0, len(blocks), step):
            part = slice(start, start + step)
            values[part] = form.decode(blocks[part])
    return values.reshape(-1)


def finite(raw: Bytes, form: BlockFormat) -> bool:
    """Whether all values of a tensor of blocks are numbers, from its scales alone: codes are small integers.

    Args:
        raw: the bytes of whole blocks, uint8, of any shape.
        form: how they are stored; not plain floats.
    """
    blocks = raw.reshape(-1, form.nbytes)
    return all(bool(np.isfinite(_halves(blocks, start)).all()) for start in form.scales)


def _halves(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte `start` of every block, [B, 1] float32."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """4-bit codes, [B, 2 * bytes] uint8: of each `run` bytes first all low nibbles, then all high ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate([runs & 0x0F, runs >> 4], axis=2).reshape(len(packed), -1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 bits of the word at byte `start`, lowest first, each moved to the place of 16; [B, 32] uint8."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _float32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _float16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bfloat16(blocks: Bytes) -> Floats:
    upper = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
    return (upper << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8)
    return _halves(blocks, 0) * codes


def _q4_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 4:], 16).astype(np.float32)
    return _halves(blocks, 0) * codes + _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    return _halves(blocks, 0) * (codes.astype(np.float32) - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    return _halves(blocks, 0) * codes.astype(np.float32) + _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _halves(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.float32)


def _scales_and_mins(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of a Q4_K or Q5_K block, [B, 8, 1] float32 each.

    Twelve bytes from byte 4 on hold sixteen 6-bit numbers: bytes 0-3 the scales 0-3, bytes 4-7 the minimums 0-3, and
    bytes 8-11 the low nibbles of scales 4-7 and of minimums 4-7, whose top two bits are those of bytes 0-7.
    """
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | (low >> 6 << 4)], axis=1).astype(np.float32)
    mins = np.concatenate([middle & 0x3F, (high >> 4) | (middle >> 6 << 4)], axis=1).astype(np.float32)
    return (_halves(blocks, 0) * scales)[:, :, None], (_halves(blocks, 2) * mins)[:, :, None]


def _q4_k(blocks: Bytes) -> Floats:
    scales_BS1, mins_BS1 = _scales_and_mins(blocks)
    codes_BSV = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32).astype(np.float32)
    return (scales_BS1 * codes_BSV - mins_BS1).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    scales_BS1, mins_BS1 = _scales_and_mins(blocks)
    low_BSV = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    fifth_BSV = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit s of byte v: sub-block s
    codes_BSV = (low_BSV | fifth_BSV << 4).astype(np.float32)
    return (scales_BS1 * codes_BSV - mins_BS1).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    scales_BS = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes_BSV = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - np.float32(32)
    return ((_halves(blocks, 208) * scales_BS)[:, :, None] * codes_BSV).reshape(-1, 256)


BLOCK_FORMATS: dict[int, BlockFormat] = {
    form.kind: form
    for form in (
        BlockFormat(0, "F32", 1, 4, 32, (), _float32),
        BlockFormat(1, "F16", 1, 2, 16, (), _float16),
        BlockFormat(2, "Q4_0", 32, 18, 4, (0,), _q4_0),
        BlockFormat(3, "Q4_1", 32, 20, 4, (0, 2), _q4_1),
        BlockFormat(6, "Q5_0", 32, 22, 5, (0,), _q5_0),
        BlockFormat(7, "Q5_1", 32, 24, 5, (0, 2), _q5_1),
        BlockFormat(8, "Q8_0", 32, 34, 8, (0,), _q8_0),
        BlockFormat(12, "Q4_K", 256, 144, 4, (0, 2), _q4_k),
        BlockFormat(13, "Q5_K", 256, 176, 5, (0, 2), _q5_k),
        BlockFormat(14, "Q6_K", 256, 210, 6, (208,), _q6_k),
        BlockFormat(30, "BF16", 1, 2, 16, (), _bfloat16),
    )
}
"""The tensor types that are read, by their number in the file."""

UNREAD_TYPES: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of ggml's other types, so that an error can say which one a file uses."""
