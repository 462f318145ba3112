"""Weights as the operations see them: packed as a format stores them, prepared as a backend multiplies by them.

Shape suffixes: N outputs (rows), K inputs (columns), G groups along K.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..errors import FormatError, ShapeError
from .gguf_blocks import BlockFormat

Activation = Literal["f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2", "int8_g32"]
"""How an operation rounds its input rows before it multiplies. `int8` and the FP8 kinds scale every row by its own
largest magnitude, `int8_g32` every 32 neighbouring inputs of a row by theirs. Part of a format's name and of the
model's law, not a matter of speed."""


@dataclass(frozen=True)
class Outliers:
    """The few inputs of a weight that are kept apart, in 16 bits.

    Attributes:
        columns: which inputs, [k] int32, ascending.
        side: what they are multiplied by, [N, k] bfloat16.
    """

    columns: Tensor
    side: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that they take on disk."""
        return 4 * self.columns.numel() + 2 * self.side.numel()


@dataclass(frozen=True)
class Packed:
    """A weight matrix in a low-bit format.

    `value[n, k] = channel[n] * scale[n, g(k)] * (code[n, k] - zero[n, g(k)])`, without what a format has not. With a
    rotation, these are the values of W H, which multiply x H: see `ops.encoding.rotate`. With outliers, it is
    `y = W round(x, those columns 0) + side bf16(x[columns])`, and the codes of those columns stand for zeros.

    Attributes:
        format: the name of the format that made it.
        shape: (N, K).
        bits: width of a code.
        activation: how inputs are rounded before they meet this weight.
        codes: float32, bf16, float16 or float8 values, [N, K]; int8 codes, [N, K]; codes below 8 bits packed along K
            into uint8, the first code in the lowest bits: 2 and 4 bits [N, K * bits / 8], other widths as a dense
            little-endian bit stream per row; or the blocks of a GGUF file, scales and all, [N, bytes of a row] uint8.
        scales: [N, G] float32 values that are exact in float16 for integer groups, [N, 1] float32 for per-channel
            scales, [N, G] float8_e8m0fnu or float8_e4m3fn for micro-scaled floats; None for floats and for blocks.
        zeros: [N, G] uint8 zero points of an asymmetric format, else None.
        blocks: what the blocks are; None if there are none.
        element: what packed codes are: None for integers, `e2m1` for the 4-bit float of `ops.encoding.E2M1`.
        channel: [N, 1] float32, a factor of each output beside the scales of its groups (NVFP4: the scale of the tensor
            that the output came from); else None.
        rotation: inputs of a block that a Hadamard matrix mixes in inputs and weight; None without rotation.
        outliers: the inputs that are kept apart; None without such.
    """

    format: str
    shape: tuple[int, int]
    bits: int
    activation: Activation
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    blocks: BlockFormat | None = None
    element: Literal["e2m1"] | None = None
    channel: Tensor | None = None
    rotation: int | None = None
    outliers: Outliers | None = None

    @property
    def columns(self) -> tuple[int, ...]:
        """Inputs that are kept apart."""
        return () if self.outliers is None else tuple(self.outliers.columns.tolist())

    @property
    def nbytes(self) -> int:
        """Bytes on disk: codes, scales (1 or 2 bytes a group, 4 an output or a tensor), zeros, outliers."""
        size = self.codes.numel() * self.codes.element_size()
        if self.scales is not None:
            wide = self.scales.dtype == torch.float32
            grouped = self.bits < 8 or self.scales.shape[1] > 1
            size += self.scales.numel() * (1 if not wide else 2 if grouped else 4)
        if self.channel is not None:
            size += 4 * len(set(self.channel[:, 0].tolist()))
        if self.zeros is not None:
            size += self.zeros.numel()
        return size if self.outliers is None else size + self.outliers.nbytes


def float_matrix(values_NK: Tensor) -> Packed:
    """A weight of plain floats, [N, K] float32, float16 or bfloat16, that reads 16-bit inputs."""
    shape = (values_NK.shape[0], values_NK.shape[1])
    return Packed(str(values_NK.dtype).removeprefix("torch."), shape, 8 * values_NK.itemsize, "bf16", values_NK)


def block_matrix(blocks: Tensor, form: BlockFormat) -> Packed:
    """A weight as a GGUF file stores it, [N, bytes of a row] uint8, that reads 16-bit inputs."""
    shape = (blocks.shape[0], blocks.shape[1] // form.nbytes * form.values)
    return Packed(form.name, shape, form.code_bits, "bf16", blocks, blocks=form)


Gate = Literal["silu", "gelu_tanh"]
"""What the gate of an MLP goes through: x sigmoid(x), or GELU (1606.08415) in its tanh form."""


class Prepared(Protocol):
    """A weight in the layout that a backend multiplies by; only that backend looks inside."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    @property
    def activation(self) -> Activation:
        """How inputs are rounded before they meet this weight."""
        ...

    @property
    def rotation(self) -> int | None:
        """Inputs of a block that a Hadamard matrix mixes before they are rounded; None without rotation."""
        ...

    @property
    def columns(self) -> Tensor | None:
        """Inputs that are kept apart, in bfloat16, [k] int32; None without such."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Bytes that the weight takes in its packed form."""
        ...

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes in this layout."""
        ...


@dataclass(frozen=True)
class Layer:
    """The prepared weights of one decoder layer; None where a family has no such thing.

    Attributes:
        input_norm, mlp_norm: [D] float32.
        qkv: the query heads' rows, then the key heads', then the value heads', [(H + 2 J) C, D]; its bias as long.
        q_norm, k_norm: per-head norms, [C] float32 (Qwen3).
        o: [D, H C].
        gate_up, down: [2 M, D], the gate's rows first, and [D, M].
        o_norm, down_norm: norms of what o and down make, before it is added to the residual, [D] float32 (Gemma).
        gate: what the gate goes through.
        attention: which of the model's `AttentionKind`s is this layer's.
    """

    input_norm: Tensor
    qkv: Prepared
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Prepared
    mlp_norm: Tensor
    gate_up: Prepared
    down: Prepared
    o_norm: Tensor | None = None
    down_norm: Tensor | None = None
    gate: Gate = "silu"
    attention: int = 0


class Stack(tuple[Layer, ...]):
    """A model's layers, in order.

    Attributes:
        compiled: what a backend derives from them once, at first use.
    """

    compiled: Any = None


def concatenate(parts: Sequence[Packed]) -> Packed:
    """One weight with the rows of all parts, in order.

    Raises:
        ShapeError: if the parts differ in format, width or scale layout.
    """
    first = parts[0]
    for part in parts:
        if not _alike(part, first):
            raise _unlike(part, first)

    def stack(tensors: list[Tensor | None]) -> Tensor | None:
        present = [t for t in tensors if t is not None]
        return torch.cat(present) if present else None

    return replace(
        first,
        shape=(sum(p.shape[0] for p in parts), first.shape[1]),
        codes=torch.cat([p.codes for p in parts]),
        scales=stack([p.scales for p in parts]),
        zeros=stack([p.zeros for p in parts]),
        channel=stack([p.channel for p in parts]),
        outliers=first.outliers
        and Outliers(first.outliers.columns, torch.cat([p.outliers.side for p in parts if p.outliers])),
    )


def fuse(parts: Sequence[Packed]) -> list[Packed]:
    """The rows of all parts, in order, in as few weights as hold them: how q, k, v and gate, up are fused.

    The rows of a fused weight read the same rounded inputs. Where some of them are integers and others floats, which
    do not multiply 8-bit inputs, all read 16-bit ones.

    Returns:
        weights of one activation; neighbours differ in format or in how they are stored.

    Raises:
        ShapeError: if the parts differ in inputs.
        FormatError: if only some of them read rotated inputs, or keep other inputs apart.
    """
    for part in parts:
        if part.shape[1] != parts[0].shape[1]:
            raise _unlike(part, parts[0])
    if len({part.rotation for part in parts}) > 1:
        raise FormatError(
            f"{', '.join(part.format for part in parts)}: q, k and v, and gate and up, read the same inputs, rotated "
            "in the same blocks or not at all. Expected -had and one group size for all of them, or -had for none."
        )
    if len({part.columns for part in parts}) > 1:
        raise FormatError(
            f"{', '.join(part.format for part in parts)}: q, k and v, and gate and up, read the same inputs, and keep "
            "the same ones apart. Expected the same columns in all of them."
        )
    if len({part.activation for part in parts}) > 1:
        parts = [replace(part, activation="bf16") for part in parts]
    runs: list[list[Packed]] = []
    for part in parts:
        if runs and _alike(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [concatenate(run) if len(run) > 1 else run[0] for run in runs]


def _alike(a: Packed, b: Packed) -> bool:
    """Whether rows of the two can stand in one weight."""
    kinds = [
        (w.format, w.shape[1], w.bits, w.activation, w.codes.dtype, w.blocks, w.element, w.rotation) for w in (a, b)
    ]
    return kinds[0] == kinds[1] and a.columns == b.columns


def _unlike(part: Packed, first: Packed) -> ShapeError:
    return ShapeError(
        f"concatenate: {part.format} [{part.shape[0]}, {part.shape[1]}] beside {first.format} "
        f"[{first.shape[0]}, {first.shape[1]}]. Expected one format and one number of inputs."
    )
