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
    """

    codec: str
    grid: str
    group: int
    activation: Activation
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Panels:
    """A weight, or a part of one: rows that are stored alike.

    Attributes:
        kind: sizes and layout.
        panels: the bytes, [bytes] uint8, 64-byte aligned.
        channel: a scale for each output, [N padded to 16] float32, or None.
    """

    kind: PanelKind
    panels: Tensor
    channel: Tensor | None

    @property
    def resident_bytes(self) -> int:
        """Bytes that it takes in memory."""
        return self.panels.numel() + (0 if self.channel is None else 4 * self.channel.numel())

    def struct(self) -> abi.Weight:
        """What the C interface is given; it points into `panels` and `channel`."""
        return abi.Weight(
            abi.CODECS[self.kind.codec],
            abi.GRIDS[self.kind.grid],
            abi.ACTIVATIONS[self.kind.activation],
            self.kind.group,
            *self.kind.shape,
            self.panels.data_ptr(),
            None if self.channel is None else self.channel.data_ptr(),
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


def panel_kind(packed: Packed) -> PanelKind:
    """How a packed weight is laid out in panels; one of blocks is laid out as the library says, not here.

    Raises:
        FormatError: codes that need scales and have none.
    """
    K, scales = packed.shape[1], packed.scales
    if packed.codes.dtype in _FLOATS:
        return PanelKind(_FLOATS[packed.codes.dtype], "none", 0, packed.activation, packed.shape)
    if scales is None:
        raise FormatError(f"{packed.format}: {packed.bits}-bit codes without scales. Expected a scale for each group.")
    if packed.bits == 8 and scales.shape[1] == 1:
        return PanelKind("int8", "none", 0, packed.activation, packed.shape)
    grid = "sym" if packed.zeros is None else "asym"
    return PanelKind(f"int{packed.bits}", grid, K // scales.shape[1], packed.activation, packed.shape)
