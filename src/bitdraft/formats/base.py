"""What a number format is: how weights become codes, and how inputs are rounded before they meet them.

A name says all of it: `w4a16-g64-asym` is 4-bit weights in groups of 64 with zero points, inputs in bfloat16. The
width of the activations is part of the name because it is part of the model's law, not a matter of speed.
`stored` leaves weights and inputs as the model's file says; `stored-a8` and `stored-a16` leave the weights, and say how
inputs are rounded. `-h6` brings the output head and the embedding to 6 bits.

Shape suffixes: N outputs, K inputs.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import FormatError
from ..ops.encoding import dequantize
from ..ops.packed import Activation, Packed
from . import integer, minifloat

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP = 32


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: the canonical name.
        kind: of the codes: plain floats, integers with scales, one of the 8-bit floats with a scale per output, or
            whatever the model's file stores.
        bits: of a code; 0 if the file decides.
        activation: how inputs are rounded; of `stored`, where the file does not say. What a file stores as floats reads
            16-bit inputs in `stored-a8`, too.
        group_size: inputs that share a scale; None for one scale per output, or none at all.
        symmetric: without zero points.
        head: the format that the output head and the embedding are kept in. Unless it is said (`-h4`, `-h6`), they stay
            at 8 bits where layers have fewer: the head's error goes straight into the logits.
    """

    name: str
    kind: Literal["float", "integer", "fp8_e4m3", "fp8_e5m2", "stored"]
    bits: int
    activation: Activation
    group_size: int | None = None
    symmetric: bool = True
    head: str = ""

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a weight, its share of its group's 16-bit scale and 8-bit zero point included.

        A scale per output is 32 bits for a whole row of weights, and is not counted. None if the model's file decides:
        `Checkpoint.stored_bits` says it then.
        """
        if self.kind == "stored":
            return None
        if self.group_size is None:
            return float(self.bits)
        return self.bits + (16 + (0 if self.symmetric else 8)) / self.group_size

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        """See whether the format fits a layer.

        Raises:
            FormatError: the group size does not divide the layer's inputs.
        """
        if self.group_size is not None and shape[1] % self.group_size:
            fitting = [g for g in GROUP_SIZES if shape[1] % g == 0]
            remedy = f"use -g{max(fitting)}" if fitting else "keep this model in an 8-bit format"
            raise FormatError(
                f"{layer}: {shape[1]} inputs do not divide into groups of {self.group_size} ({self.name}). Expected a "
                f"multiple of the group size; {remedy}."
            )

    def encode(self, weight_NK: Tensor, shrink: Tensor | float = 1.0) -> Packed:
        """Round a weight to nearest; for all but `stored` formats.

        Args:
            weight_NK: [N, K] float32, finite.
            shrink: the share of each group's range that is kept; what lies outside is clipped. A number, or [N, G];
                other than 1 only for integers.

        Raises:
            FormatError: the group size does not divide K.
        """
        assert self.kind == "integer" or (self.kind != "stored" and shrink == 1.0)
        shape = (weight_NK.shape[0], weight_NK.shape[1])
        self.check("a weight", shape)
        scales: Tensor | None = None
        zeros: Tensor | None = None
        if self.kind == "float":
            codes = weight_NK.to(torch.bfloat16 if self.bits == 16 else torch.float32)
        elif self.kind == "integer":
            codes, scales, zeros = integer.encode(weight_NK, self.bits, self.group_size, self.symmetric, shrink)
        else:
            codes, scales = minifloat.encode(weight_NK, self.kind)
        return Packed(self.name, shape, self.bits, self.activation, codes, scales, zeros)

    def keep(self, packed: Packed) -> Packed:
        """Take a weight as its file stores it: for `stored` formats. Plain floats go on reading 16-bit inputs."""
        assert self.kind == "stored"
        floats = packed.blocks is None and packed.scales is None
        as_filed = floats or self.name == "stored"
        return replace(packed, format=self.name, activation=packed.activation if as_filed else self.activation)

    def decode(self, packed: Packed) -> Tensor:
        """The values that a packed weight stands for, [N, K] float32."""
        return dequantize(packed)

    def round(self, weight_NK: Tensor, shrink: Tensor | float = 1.0) -> Tensor:
        """`decode(encode(weight, shrink))`, to the bit, without packing: for searches that round the same weight often.

        Raises:
            FormatError: the group size does not divide K.
        """
        if self.kind != "integer":
            return self.decode(self.encode(weight_NK, shrink))
        self.check("a weight", (weight_NK.shape[0], weight_NK.shape[1]))
        return integer.round_to_nearest(weight_NK, self.bits, self.group_size, self.symmetric, shrink)


def _integers() -> dict[str, Format]:
    widths: dict[str, Activation] = {"16": "bf16", "8": "int8"}
    return {
        f"w{bits}a{width}": Format(
            f"w{bits}a{width}", "integer", bits, activation, None if bits == 8 else DEFAULT_GROUP, head=f"w8a{width}"
        )
        for bits in (8, 6, 4, 3, 2)
        for width, activation in widths.items()
    }


FORMATS: dict[str, Format] = {
    "f32": Format("f32", "float", 32, "f32", head="f32"),
    "bf16": Format("bf16", "float", 16, "bf16", head="bf16"),
    "fp8_e4m3": Format("fp8_e4m3", "fp8_e4m3", 8, "fp8_e4m3", head="fp8_e4m3"),
    "fp8_e5m2": Format("fp8_e5m2", "fp8_e5m2", 8, "fp8_e5m2", head="fp8_e5m2"),
    "fp8_e4m3-w": Format("fp8_e4m3-w", "fp8_e4m3", 8, "bf16", head="fp8_e4m3-w"),
    **_integers(),
    "stored": Format("stored", "stored", 0, "bf16", head="stored"),
    "stored-a16": Format("stored-a16", "stored", 0, "bf16", head="stored-a16"),
    "stored-a8": Format("stored-a8", "stored", 0, "int8", head="stored-a8"),
}
"""The formats by name. Integer ones below 8 bits also take a group size, zero points and the head's width:
`w4a16-g64-asym-h6`."""

_HEADS = {f"h{bits}": bits for bits in (8, 6, 4, 3, 2)}

ALIASES = {"fp8": "fp8_e4m3"}


def get_format(name: str) -> Format:
    """A format by name: a key of `FORMATS`, an alias, or an integer format with options.

    Options are -g32 to -g128, -asym and -h2 to -h8 below 8 bits, and -ag32 where inputs are 8-bit integers.

    Raises:
        FormatError: there is no such format.
    """
    base = ALIASES.get(name, name)
    if base in FORMATS:
        return FORMATS[base]
    base, *options = name.split("-")
    found = FORMATS.get(base)
    if found is not None and found.activation == "int8" and "ag32" in options:
        options.remove("ag32")
        plain = get_format("-".join([base, *options]))
        return replace(plain, name=_placed(plain.name), activation="int8_g32", head=_placed(plain.head))
    if found is None or found.group_size is None:
        raise _unknown(name)
    groups = [int(option[1:]) for option in options if option in {f"g{g}" for g in GROUP_SIZES}]
    heads = [option for option in options if option in _HEADS]
    asymmetric = options.count("asym")
    if max(len(groups), len(heads), asymmetric) > 1 or len(groups) + len(heads) + asymmetric < len(options):
        raise _unknown(name)
    found = replace(found, group_size=groups[0] if groups else DEFAULT_GROUP, symmetric=not asymmetric)
    group = "" if found.group_size == DEFAULT_GROUP else f"-g{found.group_size}"
    zeros = "" if found.symmetric else "-asym"
    if not heads or _HEADS[heads[0]] == 8:
        return replace(found, name=base + group + zeros)
    width = base.partition("a")[2]
    return replace(found, name=f"{base}{group}{zeros}-{heads[0]}", head=f"w{_HEADS[heads[0]]}a{width}{group}{zeros}")


def _placed(name: str) -> str:
    """A format's name with -ag32, which stands before the head's width."""
    base, dash, head = name.partition("-h")
    return f"{base}-ag32{dash}{head}"


def _unknown(name: str) -> FormatError:
    return FormatError(
        f"there is no format {name!r}. Expected one of {', '.join(FORMATS)}, fp8 for fp8_e4m3; integer formats below 8 "
        "bits take -g32, -g64 or -g128, -asym and the head's width, -h2 to -h8, as in w4a16-g64-asym-h6; those with "
        "8-bit inputs take -ag32. The method comes last: -awq, or -rtn for rounding to nearest."
    )
