"""`quantization_config` of compressed-tensors 0.20: from config.json to a `Layout`, and from schemes to config.json."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelFileError
from ..ops.packed import Activation
from .scheme import Layout, Scheme, Storage, field, refused

_STORAGES: tuple[Storage, ...] = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


def compressed_layout(raw: Mapping[str, Any], where: str) -> Layout:
    """Read a `quantization_config`.

    Args:
        raw: the object.
        where: the file, for errors.

    Raises:
        ModelFileError: it is damaged, or describes what is not read; the group is named.
    """
    groups = field(raw, "config_groups", dict, {}, where)
    top = field(raw, "format", str, "", where)
    if raw.get("sparsity_config"):
        raise refused(where, "sparse weights (sparsity_config)")
    if any((raw.get("transform_config") or {}).get("config_groups", {}).values()):
        raise refused(where, "weights that were rotated (transform_config)")
    found = []
    for name, group in groups.items():
        place = f"{where}, group {name!r}"
        if not isinstance(group, dict):
            raise refused(place, f"{str(group)[:40]!r} in place of the description of a group")
        targets = field(group, "targets", list, [], place)
        for target in targets:
            _check_target(target, place)
        if group.get("weights") is not None:
            found.append((tuple(targets), _scheme(group, top, place)))
    ignore = tuple(field(raw, "ignore", list, [], where))
    for target in ignore:
        _check_target(target, where)
    if not found and not raw.get("kv_cache_scheme"):
        raise refused(where, "a quantization_config without config_groups")
    return Layout("compressed-tensors", tuple(found), ignore, bool(raw.get("kv_cache_scheme")))


def _check_target(target: object, where: str) -> None:
    if not isinstance(target, str):
        raise refused(where, f"{str(target)[:40]!r} as the name of a layer")
    if target.startswith("re:"):
        try:
            re.compile(target.removeprefix("re:"))
        except re.error as error:
            raise refused(where, f"the pattern {target!r} ({error})") from None


def _scheme(group: Mapping[str, Any], top: str, where: str) -> Scheme:
    weights = field(group, "weights", dict, {}, where)
    kind = field(weights, "type", str, "int", where).lower()
    bits = field(weights, "num_bits", int, 8, where)
    symmetric = field(weights, "symmetric", bool, True, where)
    group_size = _group_size(weights, where)
    if str(weights.get("actorder") or "").lower() in ("group", "dynamic", "true"):
        raise refused(where, f"inputs in an order of activations (actorder {weights['actorder']!r})", _ACTORDER)
    activation, note = _inputs(field(group, "input_activations", dict, None, where), where)
    if group.get("output_activations"):
        note = "; ".join(filter(None, (note, "outputs are not rounded")))
    storage = (field(group, "format", str, None, where) or top).removeprefix(_OWN)
    if storage not in _STORAGES:
        raise refused(where, f"weights in the format {storage!r}", f"Expected one of {', '.join(_STORAGES)}.")
    _check_codes(storage, kind, bits, symmetric, group_size, where)
    return Scheme(storage, "int" if kind == "int" else "float", bits, group_size, symmetric, activation, note)


_ACTORDER = "Choose a version without it, or with actorder 'weight', which stores the same layout as none."


def _group_size(weights: Mapping[str, Any], where: str) -> int | None:
    """Inputs that share a scale; None for one scale per output, 0 for one in all."""
    size: int | None = field(weights, "group_size", int, None, where)
    strategy = field(weights, "strategy", str, None, where)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return 0
    if strategy == "channel":
        return None
    if strategy not in ("group", "tensor_group"):
        raise refused(where, f"scales by {strategy!r}", "Expected scales by tensor, channel, group or tensor_group.")
    if size is None or size < 1:
        raise refused(where, f"groups of {size} inputs", "Expected a positive group_size: the file is damaged.")
    return size


def _check_codes(storage: str, kind: str, bits: int, symmetric: bool, group_size: int | None, where: str) -> None:
    """Refuse codes that the storage does not hold."""
    four = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
    if storage in four:
        ok = kind == "float" and bits == 4 and group_size == four[storage] and symmetric
    elif storage == "pack-quantized":
        ok = kind == "int" and 2 <= bits <= 8 and (symmetric or group_size != 0)
    elif kind == "float":
        ok = bits == 8 and symmetric and not group_size
    else:
        ok = kind == "int" and 2 <= bits <= 8
    if not ok:
        signs = "" if symmetric else " with zero points"
        raise refused(where, f"{bits}-bit {kind} weights{signs} in groups of {group_size} stored as {storage}")


def _inputs(raw: Mapping[str, Any] | None, where: str) -> tuple[Activation, str]:
    """How inputs are rounded, and what differs from what the file asks for."""
    if raw is None:
        return "bf16", ""
    kind = field(raw, "type", str, "int", where).lower()
    bits = field(raw, "num_bits", int, 8, where)
    if bits >= 16:
        return "bf16", ""
    if bits != 8:
        return "bf16", f"inputs keep 16 bits where the file asks for {bits}"
    notes = []
    if raw.get("dynamic") is not True:
        notes.append("inputs have a scale of their own for each row where the file has one for all")
    elif raw.get("strategy") not in (None, "token"):
        notes.append(f"inputs have a scale for each row where the file asks for one by {raw['strategy']}")
    if not field(raw, "symmetric", bool, True, where):
        notes.append("inputs are rounded without zero points")
    return "int8" if kind == "int" else "fp8_e4m3", "; ".join(notes)


_OWN = "bitdraft-outliers-"
"""Before the name of a storage whose layers keep inputs in 16 bits: others, who would take these for zeros, then find a
format that they do not know, and refuse it. (A `quant_method` that they do not know is no refusal: transformers warns,
and loads the codes as weights.)"""


def quantization_config(
    schemes: Mapping[str, Scheme | None], *, outliers: bool = False, kv_scales: bool = False
) -> dict[str, Any] | None:
    """The `quantization_config` of a model: one group for each scheme.

    Args:
        schemes: of every linear layer, by name without '.weight'; None for a layer that is stored plainly.
        outliers: whether layers keep inputs in 16 bits, for which compressed-tensors has no words.
        kv_scales: whether the folder has scales for keys and values in E4M3, one for a layer's keys and one for its
            values.

    Returns:
        the object for config.json; None if nothing is quantised.
    """
    found = list(dict.fromkeys(scheme for scheme in schemes.values() if scheme))
    if not found and not kv_scales:
        return None
    own = _OWN if outliers else ""
    ignore = [name for name, scheme in schemes.items() if scheme is None]
    groups = {}
    for i, scheme in enumerate(found):
        names = [name for name, own in schemes.items() if own == scheme]
        groups[f"group_{i}"] = _group(scheme, ["Linear"] if len(found) == 1 else _targets(names, schemes))
        groups[f"group_{i}"]["format"] = own + scheme.storage
    storages = {scheme.storage for scheme in found}
    return {
        "quant_method": "compressed-tensors",
        "version": "0.20.1",
        "format": own + ("dense" if not found else found[0].storage if len(storages) == 1 else "mixed-precision"),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": dict(_KV_SCHEME) if kv_scales else None,
        "global_compression_ratio": None,
    }


_KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "group_size": None,
    "dynamic": False,
}


def _targets(names: Sequence[str], schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Patterns for kinds of layers that are alike in all decoder layers, and names for the others."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_kind(name), []).append(name)
    targets = []
    for kind, members in alike.items():
        whole = sum(_kind(name) == kind for name in schemes) == len(members)
        targets += [f"re:.*{re.escape(kind)}$"] if whole and kind else members
    return targets


def _kind(name: str) -> str:
    """'self_attn.q_proj' of a decoder layer's q projection; '' outside of them."""
    parts = re.fullmatch(r"model\.layers\.\d+\.(.+)", name)
    return parts[1] if parts else ""


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    strategy = {None: "channel", 0: "tensor"}.get(scheme.group_size, "group")
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": scheme.symmetric,
        "strategy": "tensor_group" if scheme.storage == "nvfp4-pack-quantized" else strategy,
        "group_size": scheme.group_size or None,
        "dynamic": False,
    }
    if scheme.storage == "nvfp4-pack-quantized":
        weights["scale_dtype"] = "torch.float8_e4m3fn"
    if scheme.storage == "mxfp4-pack-quantized":
        weights["scale_dtype"] = "torch.uint8"
    kinds = {"int8": "int", "fp8_e4m3": "float"}
    inputs = None
    if scheme.activation in kinds:
        inputs = {
            "num_bits": 8,
            "type": kinds[scheme.activation],
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
    return {
        "targets": targets,
        "format": scheme.storage,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }


def quantization_method(raw: Mapping[str, Any], where: str) -> str:
    """The `quant_method` of a `quantization_config`.

    Raises:
        ModelFileError: it is of a kind that is not read.
    """
    method: str = field(raw, "quant_method", str, "", where)
    if method not in ("compressed-tensors", "gptq", "awq"):
        raise ModelFileError(
            f"{where}: a checkpoint that is quantised by {method or 'an unnamed method'}. bitdraft reads "
            "compressed-tensors, GPTQ and AWQ: choose one of these, the original model, which bitdraft quantises "
            "itself, or a .gguf file."
        )
    return method
