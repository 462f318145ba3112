"""How a quantised layer is stored in a folder of safetensors, and which layers are: `quantization_config` as we see it.

The terms are those of compressed-tensors 0.20 (its `quantization/quant_args.py` and `quant_scheme.py`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelFileError
from ..ops.packed import Activation

Storage = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "gptq",
    "gptq_v2",
    "awq",
]
"""How the tensors of a layer are laid out: compressed-tensors' name of it, or the older ones of GPTQ and AWQ."""


@dataclass(frozen=True)
class Scheme:
    """How one kind of linear layers is stored, and what its inputs are.

    Attributes:
        storage: the layout of the tensors.
        kind: of the codes.
        bits: width of a code.
        group_size: inputs that share a scale; None for one scale per output, 0 for one scale in all.
        symmetric: without zero points.
        activation: how inputs are rounded before they meet the weight.
        input_note: what the file asks of inputs and is not done so; '' where all is.
    """

    storage: Storage
    kind: Literal["int", "float"]
    bits: int
    group_size: int | None = None
    symmetric: bool = True
    activation: Activation = "bf16"
    input_note: str = ""

    @property
    def format_name(self) -> str:
        """What our own formats call it, whether or not there is one of this name."""
        if self.storage in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
            return self.storage.partition("-")[0]
        if self.kind == "float":
            return "fp8_e4m3" if self.activation == "fp8_e4m3" else "fp8_e4m3-w"
        group = f"-g{self.group_size}" if self.group_size and self.group_size != 32 else ""
        return f"w{self.bits}a{8 if self.activation == 'int8' else 16}{group}{'' if self.symmetric else '-asym'}"


@dataclass(frozen=True)
class Layout:
    """Which layers of a folder are stored in which way.

    Attributes:
        method: 'compressed-tensors', 'gptq' or 'awq'.
        groups: targets and the scheme of what they match. A target is a layer's name, 're:' and a pattern that its
            name begins with, or the class 'Linear'.
        ignore: targets of layers that are stored plainly.
        kv_cache: whether scales of keys and values may stand beside the layers.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...] = ()
    kv_cache: bool = False

    def scheme_of(self, layer: str) -> Scheme | None:
        """The scheme of a linear layer, by name without '.weight'; None for one that is stored plainly.

        A name decides before a pattern, and a pattern before a class, as compressed-tensors has it.
        """
        if any(_matches(layer, target) for target in self.ignore):
            return None
        found = [
            (_rank(target), target, scheme)
            for targets, scheme in self.groups
            for target in targets
            if _matches(layer, target)
        ]
        return min(found, key=lambda match: match[:2])[2] if found else None


def _rank(target: str) -> int:
    return 2 if target == "Linear" else 1 if target.startswith("re:") else 0


def _matches(layer: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), layer) is not None
    return target in (layer, "Linear")


def field(raw: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any, where: str) -> Any:
    """A field of a settings object; `default` where it is missing or null.

    Raises:
        ModelFileError: it is of another kind.
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        expected = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise ModelFileError(
            f"{where}: {name!r} is {str(value)[:60]!r}. Expected {expected}: the file is damaged or of a version that "
            "bitdraft does not know; fetch it again."
        )
    return value


def refused(where: str, given: str, remedy: str = "") -> ModelFileError:
    """The error for a way to store layers that is not read."""
    return ModelFileError(
        f"{where}: {given}, which bitdraft does not read. "
        + (remedy or "Choose another version of the model, or the original, which bitdraft quantises itself.")
    )
