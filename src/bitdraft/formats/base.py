"""What a number format is: how weights become codes, and how inputs are rounded before they meet them.

A name says all of it: `w4a16-g64-asym` is 4-bit weights in groups of 64 with zero points, inputs in bfloat16. The
width of the activations is part of the name because it is part of the model's law, not a matter of speed.
`stored` leaves weights and inputs as the model's file says; `stored-a8` and `stored-a16` leave the weights, and say how
inputs are rounded. `-had` mixes inputs and weights by a Hadamard matrix before they are rounded. `-h6` brings the
output head and the embedding to 6 bits.

Shape suffixes: N outputs, K inputs.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..errors import FormatError
from ..ops.encoding import dequantize, rotate, round_activations
from ..ops.packed import Activation, Packed
from . import integer, minifloat, nested

GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP = 32

Kind = Literal["float", "integer", "nested", "fp8", "fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp8", "nvfp4", "stored"]

_SCALE_BITS = {"integer": 16, "nested": 16, "mxfp4": 8, "mxfp8": 8, "nvfp4": 8}
"""Bits of a group's scale, by kind of format."""

_WORDS = {
    "nested": "8-bit integers, their high nibbles 4-bit weights",
    "fp8": "float8 E4M3 or E5M2 by tensor, whichever has the smaller squared error",
    "fp8_e4m3": "float8 E4M3",
    "fp8_e5m2": "float8 E5M2",
    "mxfp4": "float4 E2M1, scales E8M0",
    "mxfp8": "float8 E4M3, scales E8M0",
    "nvfp4": "float4 E2M1, scales E4M3, one float32 for the tensor",
    "stored": "as the model's file stores them",
}


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: the canonical name.
        kind: of the codes: plain floats, integers with scales, 8-bit floats with a scale per output (`fp8`: the split
            of exponent and fraction with less error), micro-scaled floats, 8-bit integers with 4-bit ones in their high
            nibbles, or whatever the model's file stores.
        bits: of a code; 0 if the file decides.
        activation: how inputs are rounded; of `stored`, where the file does not say. What a file stores as floats reads
            16-bit inputs in `stored-a8`, too.
        group_size: inputs that share a scale; None for one scale per output, or none at all.
        symmetric: without zero points.
        rotated: a Hadamard matrix mixes blocks of inputs, those of a group but 32 at least, before they are rounded.
        head: the format that the output head and the embedding are kept in. Unless it is said (`-h4`, `-h6`), they stay
            at 8 bits where layers have fewer: the head's error goes straight into the logits.
    """

    name: str
    kind: Kind
    bits: int
    activation: Activation
    group_size: int | None = None
    symmetric: bool = True
    rotated: bool = False
    head: str = ""

    @property
    def rotation(self) -> int | None:
        """Inputs of a block that are mixed; None without rotation."""
        return max(32, self.group_size or 0) if self.rotated else None

    @property
    def weights(self) -> str:
        """What weights are stored as, in words."""
        if self.kind == "float":
            return "bfloat16" if self.bits == 16 else "float32"
        if self.kind == "integer":
            return f"{self.bits}-bit integers"
        return _WORDS[self.kind]

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of a weight, its share of its group's scale and 8-bit zero point included.

        A group's scale has 16 bits, and 8 in micro-scaled floats. A scale per output or tensor is 32 bits for all its
        weights, and is not counted. None if the model's file decides: `Checkpoint.stored_bits` says it then.
        """
        if self.kind == "stored":
            return None
        if self.group_size is None:
            return float(self.bits)
        return self.bits + (_SCALE_BITS[self.kind] + (0 if self.symmetric else 8)) / self.group_size

    def check(self, layer: str, shape: tuple[int, int]) -> None:
        """See whether the format fits a layer.

        Raises:
            FormatError: the group size does not divide the layer's inputs.
        """
        if self.group_size is not None and shape[1] % self.group_size:
            fitting = [g for g in GROUP_SIZES if shape[1] % g == 0]
            fitting = fitting if self.kind == "integer" else []
            remedy = f"use -g{max(fitting)}" if fitting else "keep this model in an 8-bit format"
            raise FormatError(
                f"{layer}: {shape[1]} inputs do not divide into groups of {self.group_size} ({self.name}). Expected a "
                f"multiple of the group size; {remedy}."
            )
        if self.rotation is not None and shape[1] % self.rotation:
            raise FormatError(
                f"{layer}: {shape[1]} inputs do not divide into blocks of {self.rotation} to rotate ({self.name}). "
                "Expected a multiple of that; leave -had away."
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
        if self.rotation is not None:
            weight_NK = rotate(weight_NK, self.rotation)
        scales: Tensor | None = None
        zeros: Tensor | None = None
        channel: Tensor | None = None
        if self.kind == "float":
            codes = weight_NK.to(torch.bfloat16 if self.bits == 16 else torch.float32)
        elif self.kind == "integer":
            codes, scales, zeros = integer.encode(weight_NK, self.bits, self.group_size, self.symmetric, shrink)
        elif self.kind == "nested":
            codes, scales = nested.encode(weight_NK, self.group_size or shape[1])
        elif self.kind == "nvfp4":
            codes, scales, channel = minifloat.encode_nvfp4(weight_NK)
        elif self.kind == "mxfp4":
            codes, scales = minifloat.encode_mxfp4(weight_NK)
        elif self.kind == "mxfp8":
            codes, scales = minifloat.encode_mxfp8(weight_NK)
        else:
            codes, scales = minifloat.encode_fp8(weight_NK, self.kind)
        return Packed(
            self.name,
            shape,
            self.bits,
            self.activation,
            codes,
            scales,
            zeros,
            element="e2m1" if self.kind in ("mxfp4", "nvfp4") else None,
            channel=channel,
            rotation=self.rotation,
        )

    def keep(self, packed: Packed) -> Packed:
        """Take a weight as its file stores it: for `stored` formats. Plain floats go on reading 16-bit inputs."""
        assert self.kind == "stored"
        floats = packed.blocks is None and packed.scales is None
        as_filed = floats or self.name == "stored"
        return replace(packed, format=self.name, activation=packed.activation if as_filed else self.activation)

    def decode(self, packed: Packed) -> Tensor:
        """The values that a packed weight stands for, [N, K] float32: of a rotated one, turned back."""
        values_NK = dequantize(packed)
        return values_NK if packed.rotation is None else rotate(values_NK, packed.rotation)

    def round_inputs(self, x_RK: Tensor) -> Tensor:
        """The values that rounded inputs stand for, [R, K] float32: of rotated ones, turned back.

        Raises:
            ShapeError: blocks to rotate that do not divide K.
        """
        if self.rotation is None:
            return round_activations(x_RK, self.activation)
        return rotate(round_activations(rotate(x_RK, self.rotation), self.activation), self.rotation)

    def round(self, weight_NK: Tensor, shrink: Tensor | float = 1.0) -> Tensor:
        """`decode(encode(weight, shrink))`, to the bit, without packing: for searches that round the same weight often.

        Raises:
            FormatError: the group size does not divide K.
        """
        if self.kind != "integer" or self.rotated:
            return self.decode(self.encode(weight_NK, shrink))
        self.check("a weight", (weight_NK.shape[0], weight_NK.shape[1]))
        return integer.round_to_nearest(weight_NK, self.bits, self.group_size, self.symmetric, shrink)


def _microscaled() -> dict[str, Format]:
    forms = (
        Format("mxfp4", "mxfp4", 4, "bf16", 32, head="w8a16"),
        Format("mxfp4-a8", "mxfp4", 4, "int8", 32, head="w8a8"),
        Format("nvfp4", "nvfp4", 4, "bf16", 16, head="w8a16"),
        Format("nvfp4-a8", "nvfp4", 4, "int8", 16, head="w8a8"),
        Format("mxfp8", "mxfp8", 8, "bf16", 32, head="mxfp8"),
    )
    return {form.name: form for form in forms}


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
    "fp8": Format("fp8", "fp8", 8, "fp8_e4m3", head="fp8"),
    "fp8_e4m3": Format("fp8_e4m3", "fp8_e4m3", 8, "fp8_e4m3", head="fp8_e4m3"),
    "fp8_e5m2": Format("fp8_e5m2", "fp8_e5m2", 8, "fp8_e5m2", head="fp8_e5m2"),
    "fp8_e4m3-w": Format("fp8_e4m3-w", "fp8_e4m3", 8, "bf16", head="fp8_e4m3-w"),
    **_integers(),
    "w8n4a16": Format("w8n4a16", "nested", 8, "bf16", DEFAULT_GROUP, head="w8a16"),
    "w8n4a8": Format("w8n4a8", "nested", 8, "int8", DEFAULT_GROUP, head="w8a8"),
    **_microscaled(),
    "stored": Format("stored", "stored", 0, "bf16", head="stored"),
    "stored-a16": Format("stored-a16", "stored", 0, "bf16", head="stored-a16"),
    "stored-a8": Format("stored-a8", "stored", 0, "int8", head="stored-a8"),
}
"""The formats by name. Integer ones below 8 bits also take a group size, zero points, a rotation and the head's width:
`w4a16-g64-asym-had-h6`; those of 8 bits and of 4-bit floats a rotation: `w8a8-had`."""

_HEADS = {f"h{bits}": bits for bits in (8, 6, 4, 3, 2)}


def get_format(name: str) -> Format:
    """A format by name: a key of `FORMATS`, alone or with the options that it takes.

    Integer formats below 8 bits take -g32 to -g128, -asym, -had and -h2 to -h8; those of 8 bits and of 4-bit floats
    take -had. With 8-bit integer inputs all of them take -ag32.

    Raises:
        FormatError: there is no such format.
    """
    if name in FORMATS:
        return FORMATS[name]
    base = next((known for known in sorted(FORMATS, key=len, reverse=True) if name.startswith(f"{known}-")), "")
    found, options = FORMATS.get(base), name[len(base) + 1 :].split("-")
    if found is None or found.kind not in ("integer", "nested", "mxfp4", "nvfp4"):
        raise _unknown(name)
    if found.activation == "int8" and options.count("ag32") == 1:
        options.remove("ag32")
        plain = get_format("-".join([base, *options]))
        return replace(plain, name=_placed(plain.name), activation="int8_g32", head=_placed(plain.head))
    if options == ["had"]:
        return replace(found, name=name, rotated=True)
    if found.kind != "integer" or found.group_size is None:
        raise _unknown(name)
    groups = [int(option[1:]) for option in options if option in {f"g{g}" for g in GROUP_SIZES}]
    heads = [option for option in options if option in _HEADS]
    asymmetric, rotated = options.count("asym"), options.count("had")
    known = len(groups), len(heads), asymmetric, rotated
    if max(known) > 1 or sum(known) < len(options):
        raise _unknown(name)
    group_size = groups[0] if groups else DEFAULT_GROUP
    grid = ("" if group_size == DEFAULT_GROUP else f"-g{group_size}") + ("-asym" if asymmetric else "")
    full = base + grid + ("-had" if rotated else "")
    found = replace(found, name=full, group_size=group_size, symmetric=not asymmetric, rotated=bool(rotated))
    if not heads or _HEADS[heads[0]] == 8:
        return found
    width = base.partition("a")[2]
    return replace(found, name=f"{full}-{heads[0]}", head=f"w{_HEADS[heads[0]]}a{width}{grid}")


def _placed(name: str) -> str:
    """A format's name with -ag32, which stands before the head's width."""
    base, head = name, ""
    if name.rpartition("-")[2] in _HEADS:
        base, _, head = name.rpartition("-")
    return f"{base}-ag32-{head}" if head else f"{base}-ag32"


def _unknown(name: str) -> FormatError:
    return FormatError(
        f"there is no format {name!r}. Expected one of {', '.join(FORMATS)}; integer formats below 8 bits take -g32, "
        "-g64 or -g128, -asym, -had and the head's width, -h2 to -h8, as in w4a16-g64-asym-h6; those of 8 bits and of "
        "4-bit floats take -had; those with 8-bit inputs -ag32. After those -out8 to -out64 keeps inputs in 16 bits. "
        "The method comes last: -awq, or -rtn for rounding to nearest."
    )
