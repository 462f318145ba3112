"""Weights in the compiled kernels' layout: panels of 16 outputs (csrc/layout.h), alike for every instruction set.

A fused weight whose rows are stored in several ways has a part for each: the rows of a part are of one kind.

Shape suffixes: N outputs, K inputs.
"""

import ctypes
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import FormatError
from . import abi
from .encoding import dequantize
from .packed import Activation, Packed

_FLOATS = {
    torch.float32: "f32",
    torch.float16: "f32",  # which holds every one of its values; bfloat16 does not
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@dataclass(frozen=True)
class PanelKind:
    """What the panels of a part hold.

    Attributes:
        codec: how codes are stored, a key of `abi.CODECS`.
        grid: what scales stand beside them, a key of `abi.GRIDS`.
        group: inputs that share a scale; 0 where the grid says it.
        activation: how inputs are rounded before they meet this weight.
        shape: (N, K).
        rotation: inputs of a block that are rotated before they are rounded; 0 without rotation.
    """

    codec: str
    grid: str
    group: int
    activation: Activation
    shape: tuple[int, int]
    rotation: int = 0


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight, or a part of one: rows that are stored alike.

    Attributes:
        kind: sizes and layout.
        panels: the bytes, [bytes] uint8, 64-byte aligned.
        channel: a scale for each output, [N padded to 16] float32, or None.
        columns: inputs that are kept apart, [k] int32, or None.
        side: what those are multiplied by, [N, k] in BF16, or None.
    """

    kind: PanelKind
    panels: Tensor
    channel: Tensor | None
    columns: Tensor | None = None
    side: "Panels | None" = None

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes in memory."""
        size = self.panels.numel() + (0 if self.channel is None else 4 * self.channel.numel())
        return (
            size
            if self.columns is None or self.side is None
            else size + 4 * len(self.columns) + self.side.resident_bytes
        )

    def struct(self) -> abi.Weight:
        """What the C interface is given; it points into `panels`, `channel` and `columns`."""
        return abi.Weight(
            abi.CODECS[self.kind.codec],
            abi.GRIDS[self.kind.grid],
            abi.ACTIVATIONS[self.kind.activation],
            self.kind.group,
            self.kind.rotation,
            0 if self.columns is None else len(self.columns),
            *self.kind.shape,
            self.panels.data_ptr(),
            None if self.channel is None else self.channel.data_ptr(),
            None if self.columns is None else self.columns.data_ptr(),
            None if self.side is None else ctypes.pointer(self.side.struct()),
        )


@dataclass(frozen=True, eq=False)
class PanelWeight:
    """A weight as the kernels multiply by it.

    Attributes:
        parts: its rows, in order; nearly always one part. All read the same rounded inputs.
        packed_bytes: what it takes in its packed form.
    """

    parts: tuple[Panels, ...]
    packed_bytes: int

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return sum(part.kind.shape[0] for part in self.parts), self.parts[0].kind.shape[1]

    @property
    def activation(self) -> Activation:
        """How inputs are rounded before they meet this weight."""
        return self.parts[0].kind.activation

    @property
    def rotation(self) -> int | None:
        """Inputs of a block that are rotated before they are rounded; None without rotation."""
        return self.parts[0].kind.rotation or None

    @property
    def columns(self) -> Tensor | None:
        """Inputs that are kept apart, [k] int32; None without such."""
        return self.parts[0].columns

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes in memory."""
        return sum(part.resident_bytes for part in self.parts)

    @cached_property
    def struct(self) -> abi.Weight:
        """What the C interface is given: the first part, which leads to the others."""
        first, *others = [part.struct() for part in self.parts]
        last = first
        for other in others:
            last.next = ctypes.pointer(other)
            last = other
        return first


@dataclass(frozen=True, eq=False)
class PanelSource:
    """What the panels of a part are made from: a `Packed` in the terms of the C interface.

    Attributes:
        kind: sizes and layout.
        codes: floats [N, K], int8 [N, K], or packed codes, contiguous.
        scales: [N, G] float32, exact in float16, or None.
        zeros: [N, G] uint8, or None.
        channel: a scale for each output, [N] float32, or None.
    """

    kind: PanelKind
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    channel: Tensor | None = None


def panel_source(packed: Packed) -> PanelSource:
    """How a packed weight goes into panels; one of blocks is laid out as the library says, not here.

    Raises:
        FormatError: codes that need scales and have none, or scales that the kernels cannot hold.
    """
    codes, scales = packed.codes.contiguous(), packed.scales
    if packed.element == "e2m1":
        return _float4_source(packed)
    if codes.dtype in _FLOATS and (scales is None or scales.shape[1] == 1):
        codes = codes.float() if codes.dtype == torch.float16 else codes
        channel = None if scales is None else scales.float()[:, 0]
        return PanelSource(_kind(packed, _FLOATS[codes.dtype], "none", 0), codes, channel=channel)
    if scales is None:
        raise FormatError(f"{packed.format}: {packed.bits}-bit codes without scales. Expected a scale for each group.")
    if codes.dtype in _FLOATS:
        return _bfloat16_source(packed)
    if packed.bits == 8 and scales.shape[1] == 1:
        return PanelSource(_kind(packed, "int8", "none", 0), codes, channel=scales[:, 0])
    grid = "sym" if packed.zeros is None else "asym"
    zeros = None if packed.zeros is None else packed.zeros.contiguous()
    kind = _kind(packed, f"int{packed.bits}", grid, packed.shape[1] // scales.shape[1])
    return PanelSource(kind, codes, scales.contiguous(), zeros)


def _kind(packed: Packed, codec: str, grid: str, group: int) -> PanelKind:
    return PanelKind(codec, grid, group, packed.activation, packed.shape, packed.rotation or 0)


def _float4_source(packed: Packed) -> PanelSource:
    """The kernels multiply by twice the value of a code, so that scales are halved."""
    K, scales, codes = packed.shape[1], packed.scales, packed.codes.contiguous()
    if scales is not None and scales.dtype == torch.float8_e4m3fn and 16 * scales.shape[1] == K:
        channel = None if packed.channel is None else packed.channel[:, 0]
        return PanelSource(_kind(packed, "fp4", "sym16", 16), codes, (scales.float() / 2).contiguous(), channel=channel)
    if scales is None or scales.dtype != torch.float8_e8m0fnu or 32 * scales.shape[1] != K:
        found = "no scales" if scales is None else f"{scales.dtype} scales {list(scales.shape)}"
        raise FormatError(
            f"{packed.format}: {found} beside float4 codes of {K} inputs. Expected float8_e8m0fnu ones for each 32 "
            "inputs (MXFP4), or float8_e4m3fn ones for each 16 (NVFP4)."
        )
    held = _in_float16(codes, scales.float() / 2)
    if held is not None:
        return PanelSource(_kind(packed, "fp4", "sym", 32), codes, held[0], channel=held[1])
    if packed.activation == "int8":
        raise FormatError(
            f"{packed.format}: an output whose scales are further apart than 2^39, which is what the kernels for 8-bit "
            "inputs hold. Expected closer ones; use mxfp4, which reads 16-bit inputs."
        )
    return _bfloat16_source(packed)


def _in_float16(codes: Tensor, scale_NG: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Powers of two as float16 holds them, 2^-24 to 2^15, and a factor for each output where some do not fit so.

    Returns:
        None if those of an output are too far apart.
    """
    N, G = scale_NG.shape
    # A group of zeros may have any scale, and files give it the smallest that there is: its output's largest will do.
    nothing_NG = ((codes.view(N, G, -1) & 0x77) == 0).all(-1)
    largest_N1 = scale_NG.masked_fill(nothing_NG, 0).amax(-1, keepdim=True)
    largest_N1 = torch.where(largest_N1 > 0, largest_N1, 1.0)
    scale_NG = torch.where(nothing_NG, largest_N1, scale_NG)
    if bool(((scale_NG >= 2.0**-24) & (scale_NG <= 2.0**15)).all()):
        return scale_NG, None
    scale_NG = scale_NG / largest_N1 * 2.0**15
    return None if bool((scale_NG < 2.0**-24).any()) else (scale_NG, largest_N1[:, 0] * 2.0**-15)


def _bfloat16_source(packed: Packed) -> PanelSource:
    """The values as bfloat16, which holds those of a small float times a power of two.

    Raises:
        FormatError: some are too small for it.
    """
    values_NK = dequantize(packed)
    kept_NK = values_NK.bfloat16()
    if not torch.equal(kept_NK.float(), values_NK):
        raise FormatError(
            f"{packed.format}: values that bfloat16, in which the kernels hold them, would round: scales below 2^-117. "
            "Expected larger ones; BITDRAFT_ISA=reference runs this weight."
        )
    return PanelSource(_kind(packed, "bf16", "none", 0), kept_NK)
