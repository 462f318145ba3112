"""A format together with the method that rounds to it: `w4a16-awq`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import FormatError
from .base import Format, get_format

Method = Literal["nearest", "awq"]


@dataclass(frozen=True)
class Recipe:
    """How to bring a model into a format.

    Attributes:
        name: the canonical name: the format's, and -awq.
        format: the format.
        method: rounding to nearest, or AWQ with a calibration set.
        formats: of linear layers that have one of their own, by name without '.weight'; 'lm_head' among them.
    """

    name: str
    format: Format
    method: Method
    formats: Mapping[str, Format] = field(default_factory=dict)

    def format_of(self, layer: str) -> Format:
        """The format of a linear layer, by name without '.weight'; 'lm_head' for head and embedding."""
        own = self.formats.get(layer)
        return own or (get_format(self.format.head) if layer == "lm_head" else self.format)

    @classmethod
    def parse(cls, text: str) -> "Recipe":
        """Read a format name with -awq, or with -rtn or nothing for rounding to nearest.

        Raises:
            FormatError: an unknown format, AWQ for one that has no groups of integers, or a method for one that rounds nothing.
        """
        base, _, method = text.rpartition("-")
        if method not in ("rtn", "awq"):
            return cls(get_format(text).name, get_format(text), "nearest")
        found = get_format(base)
        if found.kind == "stored":
            raise FormatError(
                f"{text!r}: {found.name} keeps weights as the model's file stores them, and no method rounds them. "
                f"Expected {found.name} alone, or an integer format, such as w4a16-awq."
            )
        if method == "rtn":
            return cls(found.name, found, "nearest")
        if found.group_size is not None and found.kind != "integer":
            raise FormatError(
                f"{text!r}: AWQ chooses the range of integer groups, and {found.name} has floats, whose scales are "
                "chosen by their error already. Expected an integer format below 8 bits, such as w4a16-awq."
            )
        if found.group_size is None:
            raise FormatError(
                f"{text!r}: AWQ shifts error between the inputs of a group, and {found.name} has no groups. Expected "
                "an integer format below 8 bits, such as w4a16-awq."
            )
        return cls(f"{found.name}-awq", found, "awq")
