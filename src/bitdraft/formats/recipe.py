"""A format together with the method that rounds to it: `w4a16-awq`, `w8a8-smooth-gptq`."""

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


@dataclass(frozen=True)
class Recipe:
    """How to bring a model into a format.

    Attributes:
        name: the canonical name: the format's, and the method's unless it is nearest.
        format: the format.
        method: how integers are rounded; whatever else is among `formats` is rounded to nearest or kept as stored.
        formats: of linear layers that have one of their own, by name without '.weight'; 'lm_head' among them.
    """

    name: str
    format: Format
    method: Method
    formats: Mapping[str, Format] = field(default_factory=dict)

    @property
    def scaling(self) -> Literal["awq", "smooth"] | None:
        """Which scales of inputs are folded into the layer before it is rounded."""
        first = self.method.partition("-")[0]
        return first if first in ("awq", "smooth") else None  # type: ignore[return-value]

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at what the layers read on a calibration set."""
        return self.method not in ("nearest", "clip")

    def format_of(self, layer: str) -> Format:
        """The format of a linear layer, by name without '.weight'; 'lm_head' for head and embedding."""
        own = self.formats.get(layer)
        return own or (get_format(self.format.head) if layer == "lm_head" else self.format)

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Read a format name with a method at its end; -rtn or nothing is rounding to nearest.

        Raises:
            FormatError: an unknown format, or a method that does nothing for it.
        """
        for method in sorted(METHODS, key=len, reverse=True):
            base = text.removesuffix("-rtn" if method == "nearest" else f"-{method}")
            if base != text:
                return cls.make(get_format(base), method)
        return cls.make(get_format(text), "nearest", named=False)

    @classmethod
    def make(cls, form: Format, method: Method, *, named: bool = True) -> "Recipe":
        """A format and a method; `named` says that the method was asked for.

        Raises:
            FormatError: the method does nothing for the format.
        """
        if named:
            _check(form, method)
        return cls(form.name if method == "nearest" else f"{form.name}-{method}", form, method)


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
