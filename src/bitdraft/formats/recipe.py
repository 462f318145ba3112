"""A format, the method that rounds to it, and inputs that are kept apart: `w4a16-awq`, `w8a8-out16-clip`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import FormatError
from .base import Format, get_format

Method = Literal["nearest", "clip", "gptq", "awq", "awq-gptq", "smooth", "smooth-gptq"]

METHODS: dict[Method, str] = {
    "nearest": "round to nearest; -rtn, or nothing, in a name",
    "clip": "shrink each range to what gives the least squared error of the weights; no data",
    "gptq": "column by column, later columns making up for the error of earlier ones",
    "awq": "scale up inputs that carry much, then shrink ranges by the error on data",
    "awq-gptq": "the scales of awq, then gptq",
    "smooth": "scale down inputs with outliers, for 8-bit inputs, then shrink ranges by the error on data",
    "smooth-gptq": "the scales of smooth, then gptq",
}
"""How weights are rounded: name, and what is done."""


OUTLIERS = (8, 16, 32, 64)
"""How many inputs of a linear layer may be kept in 16 bits: -out8 to -out64."""


@dataclass(frozen=True)
class Recipe:
    """How to bring a model into a format.

    Attributes:
        name: the canonical name: the format's, -out and a number where there are such, and the method's unless it is
            nearest.
        format: the format.
        method: how integers are rounded; whatever else is among `formats` is rounded to nearest or kept as stored.
        formats: of linear layers that have one of their own, by name without '.weight'; 'lm_head' among them.
        outliers: inputs of each linear layer of a decoder layer that are kept in 16 bits; 0 for none. The head keeps
            none, being a table, too; its 8-bit inputs then have a scale for every 32.
    """

    name: str
    format: Format
    method: Method
    formats: Mapping[str, Format] = field(default_factory=dict)
    outliers: int = 0

    @property
    def scaling(self) -> Literal["awq", "smooth"] | None:
        """Which scales of inputs are folded into the layer before it is rounded."""
        first = self.method.partition("-")[0]
        return first if first in ("awq", "smooth") else None  # type: ignore[return-value]

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at what the layers read on a calibration set."""
        return self.outliers > 0 or self.method not in ("nearest", "clip")

    def format_of(self, layer: str) -> Format:
        """The format of a linear layer, by name without '.weight'; 'lm_head' for head and embedding."""
        if own := self.formats.get(layer):
            return own
        if layer != "lm_head":
            return self.format
        head = get_format(self.format.head)
        return get_format(f"{head.name}-ag32") if self.outliers and head.activation == "int8" else head

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Read a format name, with -out and a number after it, with a method at its end; -rtn or nothing is nearest.

        Raises:
            FormatError: an unknown format, a method that does nothing for it, or inputs that it cannot keep apart.
        """
        for method in sorted(METHODS, key=len, reverse=True):
            base = text.removesuffix("-rtn" if method == "nearest" else f"-{method}")
            if base != text:
                return cls._with_outliers(base, method, named=True)
        return cls._with_outliers(text, "nearest", named=False)

    @classmethod
    def _with_outliers(cls, text: str, method: Method, *, named: bool) -> "Recipe":
        base, found, count = text.rpartition("-out")
        if not found:
            return cls.make(get_format(text), method, named=named)
        if count not in map(str, OUTLIERS):
            allowed = ", ".join(f"-out{k}" for k in OUTLIERS)
            raise FormatError(
                f"{text!r}: -out{count} says nothing. Expected {allowed} after the format and before the method, as in "
                "w8a8-out16-clip: so many inputs of a layer are kept in 16 bits."
            )
        return cls.make(get_format(base), method, named=named, outliers=int(count))

    @classmethod
    def make(cls, form: Format, method: Method, *, named: bool = True, outliers: int = 0) -> "Recipe":
        """A format, a method and outliers; `named` says that the method was asked for.

        Raises:
            FormatError: the method does nothing for the format, or it cannot keep inputs apart.
        """
        if named:
            _check(form, method)
        name = form.name
        if outliers:
            _check_outliers(form, outliers)
            name += f"-out{outliers}"
        return cls(name if method == "nearest" else f"{name}-{method}", form, method, outliers=outliers)


def _check_outliers(form: Format, outliers: int) -> None:
    given = f"{form.name}-out{outliers}"
    if form.kind in ("stored", "float"):
        what = "keeps what a file stores" if form.kind == "stored" else "rounds nothing below 16 bits"
        raise FormatError(
            f"{given!r}: -out{outliers} keeps a few inputs and their weights in 16 bits, and {form.name} {what}. "
            f"Expected {form.name} alone, or a format that rounds, such as w8a8-out{outliers}."
        )
    if form.rotated:
        raise FormatError(
            f"{given!r}: -had spreads large inputs over their block, and -out{outliers} keeps them apart. Expected one "
            "of the two."
        )


def _check(form: Format, method: Method) -> None:
    given = f"{form.name}-{'rtn' if method == 'nearest' else method}"
    if form.kind == "stored":
        raise FormatError(
            f"{given!r}: {form.name} keeps weights as the model's file stores them, and no method rounds them. "
            f"Expected {form.name} alone, or an integer format, such as w4a16-awq."
        )
    if method == "nearest":
        return
    if form.kind != "integer":
        raise FormatError(
            f"{given!r}: {method} chooses among the codes of integers, and {form.name} has none. Expected {form.name} "
            "alone, or an integer format, such as w4a16-awq."
        )
    if method.endswith("gptq") and form.rotated:
        raise FormatError(
            f"{given!r}: GPTQ rounds weights as they are, and {form.name} rotates them first. Expected one of the two."
        )
    if method == "awq" and form.group_size is None:
        raise FormatError(
            f"{given!r}: AWQ shifts error between the inputs of a group, and {form.name} has no groups. Expected "
            "an integer format below 8 bits, such as w4a16-awq; 8-bit weights gain by -smooth and -gptq."
        )
    if method.startswith("smooth") and form.activation in ("f32", "bf16"):
        raise FormatError(
            f"{given!r}: SmoothQuant makes room for outliers among 8-bit inputs, and {form.name} reads 16-bit inputs. "
            f"Expected 8-bit inputs, such as {form.name.replace('a16', 'a8')}-{method}, or -awq in its place."
        )
