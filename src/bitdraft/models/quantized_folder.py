"""A folder of safetensors whose linear layers are quantised, as a checkpoint: compressed-tensors, GPTQ and AWQ.

What bitdraft itself wrote says more under `bitdraft` in config.json, so that the very same `Packed` comes back:

    "bitdraft": {"recipe": "w4a8-awq",
                 "head": "bitdraft-head.safetensors", "head_config": {"config_groups": ...},
                 "formats": [{"format": "w4a8", "activation": "int8", "layers": ["model.layers.0.mlp.up_proj", ...]}]}

The head and the embedding of such a folder stand twice: in 16 bits for others, who keep them so, and as our format has
them in a file of their own that the index does not name.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import ModelFileError
from ..ops.encoding import dequantize
from ..ops.packed import Activation, Packed, float_matrix
from .compressed import PARTS, decode, logical_shape, with_own_facts
from .compressed_config import compressed_layout, quantization_method
from .config import ModelConfig
from .gptq_awq import OLDER_PARTS, decode_older, older_layout, older_shape
from .safetensors_files import SafetensorsFiles
from .scheme import Layout, Scheme, field, refused
from .tensor_names import EMBEDDING, HEAD, PLAIN_FAMILIES, check_tensors
from .tokenizer import Tokenizer
from .tokenizer_folder import folder_tokenizer

_FLOATS = ("F32", "F16", "BF16")
_BYTES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I64": 8}
_OLDER = ("gptq", "gptq_v2", "awq")


class QuantizedCheckpoint:
    """A model folder whose config.json has a `quantization_config`, or was written by bitdraft.

    Attributes:
        origin: the folder.
        config: the model's sizes.
        stored_as: the layouts of the linear layers, their mean bits, and what is asked of inputs but not done so.
        stored_bits: mean bits per weight of the linear layers, scales included.
        kv_scales: whether the folder has scales for keys and values (`kv_cache_scheme`).
    """

    def __init__(self, folder: Path, files: SafetensorsFiles, config: ModelConfig, raw: Mapping[str, Any]) -> None:
        """Check what config.json says against the tensors.

        Args:
            folder: the model folder.
            files: its safetensors.
            config: the model's sizes.
            raw: the contents of config.json.

        Raises:
            ModelFileError: a tensor is missing, unknown or of another shape, or a way to store it that is not read.
        """
        self.origin, self.config = str(folder), config
        self._folder, self._files = folder, files
        where = str(folder / "config.json")
        if config.family not in PLAIN_FAMILIES:
            raise refused(where, f"a {config.family} model that is quantised", _FAMILY_REMEDY)
        self._layout = _layout(field(raw, "quantization_config", dict, {}, where), where)
        own = field(raw, "bitdraft", dict, {}, where)
        self._facts = _facts(own, where)
        self._head = _head_files(folder, own, where)
        self.kv_scales = self._layout.kv_cache
        self._schemes = self._chosen()
        self._check()
        bits, names = self._stored_linears()
        notes = list(dict.fromkeys(s.input_note for s in self._schemes.values() if s and s.input_note))
        self.stored_bits = bits
        self.stored_as = f"{names}, {bits:.1f} bits a weight" + "".join(f"; {note}" for note in notes)

    def _chosen(self) -> dict[str, Scheme]:
        """Schemes of the linear layers that are quantised."""
        names = [n for n in self.config.linear_shapes() if not (n == "lm_head" and self.config.tied_head)]
        found = {name: self._layout.scheme_of(name) for name in names}
        return {name: scheme for name, scheme in found.items() if scheme}

    def _parts(self, layer: str) -> dict[str, str]:
        """Full names of a quantised layer's tensors by what follows its name."""
        known = (*PARTS, *OLDER_PARTS, "weight")
        return {part: f"{layer}.{part}" for part in known if f"{layer}.{part}" in self._files.shapes}

    def _check(self) -> None:
        shapes = dict(self._files.shapes)
        linear = self.config.linear_shapes()
        for layer, scheme in self._schemes.items():
            parts = {part: shapes.pop(full) for part, full in self._parts(layer).items()}
            older = scheme.storage in _OLDER
            shape = older_shape(scheme, parts) if older else logical_shape(scheme, parts, linear[layer][1])
            if shape is None:
                codes = "qweight" if older else "weight_packed" if "pack" in scheme.storage else "weight"
                raise ModelFileError(
                    f"{self.origin}: tensor '{layer}.{codes}' is missing. The quantization_config says that {layer} is "
                    f"stored as {scheme.storage}: fetch all files of the model again."
                )
            shapes[f"{layer}.weight"] = shape
            if self._facts.get(layer, {}).get("outliers") and "weight_outliers" not in parts:
                raise ModelFileError(
                    f"{self.origin}: tensor '{layer}.weight_outliers' is missing, and config.json says that {layer} "
                    "keeps inputs in 16 bits: fetch all files of the model again."
                )
        for name in shapes:
            if self._files.dtypes.get(name, "BF16") not in _FLOATS and not self._quantised(name):
                raise ModelFileError(
                    f"{self.origin}: tensor {name!r} is stored as {self._files.dtypes[name]}, and the folder's "
                    "quantization_config does not say how it is quantised. The two are of different models: fetch both "
                    "again."
                )
        harmless = [n for n in shapes if n.endswith((".rotary_emb.inv_freq", *_KV_SCALES * self.kv_scales))]
        check_tensors(self.origin, self.config, shapes, harmless + [HEAD] * self.config.tied_head)

    def _quantised(self, name: str) -> bool:
        return name.removesuffix(".weight") in self._schemes

    def _stored_linears(self) -> tuple[float, str]:
        weights: Counter[str] = Counter()
        stored = 0
        for layer, (rows, columns) in self.config.linear_shapes().items():
            scheme = self._schemes.get(layer)
            name = self._stored_name(f"{layer}.weight")
            parts = self._parts(layer).values() if scheme else [name]
            stored += sum(_size(self._files, part) for part in parts)
            method = scheme.storage if scheme else self._files.dtypes[name].lower()
            weights[f"{method} {scheme.bits} bits" if scheme else method] += rows * columns
        return 8 * stored / weights.total(), "/".join(name for name, _ in weights.most_common())

    def _stored_name(self, name: str) -> str:
        return EMBEDDING if name == HEAD and self.config.tied_head else name

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name; a tied head counts."""
        return self._stored_name(name) in self._files.shapes or self._quantised(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name, dequantised: float32, fresh.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        known = self._known(name)
        if self._quantised(known) or self._from_head(known):
            return dequantize(self.packed(name))
        return self._files.tensor(known).to(torch.float32, copy=True)

    def holds_floats(self, name: str) -> bool:
        """Whether a matrix is stored as plain floats.

        Raises:
            ModelFileError: there is no such tensor.
        """
        known = self._known(name)
        return not self._quantised(known) and not self._from_head(known)

    def packed(self, name: str) -> Packed:
        """The matrix of this Hugging Face name as it is stored; it may lie in the file's pages: not to be changed.

        Raises:
            ModelFileError: there is no such tensor, it cannot be read, or its parts do not fit.
        """
        known = self._known(name)
        layer = known.removesuffix(".weight")
        if (head := self._from_head(known)) is not None:
            return head
        scheme = self._schemes.get(layer)
        if scheme is None:
            found = float_matrix(self._files.tensor(known))
        else:
            parts = {part: self._files.tensor(full) for part, full in self._parts(layer).items()}
            read = decode_older if scheme.storage in _OLDER else decode
            found = read(layer, parts, scheme, self.config.linear_shapes()[layer], self.origin)
        return with_own_facts(found, self._facts[layer]) if layer in self._facts else found

    def _from_head(self, name: str) -> Packed | None:
        """Head or embedding as bitdraft wrote them beside the 16-bit ones."""
        if self._head is None or name not in (EMBEDDING, HEAD):
            return None
        files, schemes = self._head
        layer = name.removesuffix(".weight")
        if layer not in schemes:
            return None
        prefix = f"{layer}."
        parts = {n.removeprefix(prefix): files.tensor(n) for n in files.shapes if n.startswith(prefix)}
        shape = (self.config.vocab_size, self.config.hidden_size)
        found = decode(layer, parts, schemes[layer], shape, self.origin)
        return with_own_facts(found, self._facts[layer]) if layer in self._facts else found

    def _known(self, name: str) -> str:
        if not self.has(name):
            raise ModelFileError(f"{self.origin}: there is no tensor {name!r}. Its config says which there are.")
        return self._stored_name(name)

    def cache_scales(self, layer: int) -> dict[str, Tensor]:
        """Scales of a layer's keys and values as the folder gives them, by 'k' and 'v': float32; {} where it has none.

        A key or value is stored as `x / scale` in E4M3.
        """
        names = {kind: f"model.layers.{layer}.self_attn.{kind}_scale" for kind in ("k", "v")}
        return {k: self._files.tensor(n).to(torch.float32) for k, n in names.items() if n in self._files.shapes}

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder.

        Raises:
            ModelFileError: tokenizer.json is missing, damaged or of a kind that is not read.
        """
        return folder_tokenizer(self._folder)


_FAMILY_REMEDY = f"Choose one of {', '.join(PLAIN_FAMILIES)}, or the original, which bitdraft quantises itself."
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale")


def _layout(settings: Mapping[str, Any], where: str) -> Layout:
    """What a `quantization_config` says; of none, that all layers are stored plainly."""
    if not settings:
        return Layout("none", ())
    method = quantization_method(settings, where)
    return (
        compressed_layout(settings, where) if method == "compressed-tensors" else older_layout(method, settings, where)
    )


def _size(files: SafetensorsFiles, name: str) -> int:
    """Bytes of a tensor."""
    count = 1
    for size in files.shapes[name]:
        count *= size
    return count * _BYTES.get(files.dtypes[name], 1)


def _facts(own: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Format and activation of every layer that bitdraft wrote."""
    facts: dict[str, dict[str, Any]] = {}
    for entry in field(own, "formats", list, [], where):
        place = f"{where}, 'bitdraft'"
        if not isinstance(entry, dict):
            raise ModelFileError(f"{place}: {str(entry)[:40]!r} is no description of a format. Write the folder again.")
        values = {key: field(entry, key, str, None, place) for key in ("format", "activation")}
        if None in values.values() or values["activation"] not in get_args(Activation):
            raise ModelFileError(f"{place}: the format {values} is not known. Write the folder again.")
        channel = field(entry, "channel", float, None, place)
        values |= {} if channel is None else {"channel": channel}
        values |= {"outliers": field(entry, "outliers", int, 0, place)}
        facts |= dict.fromkeys(field(entry, "layers", list, [], place), values)
    return facts


def _head_files(folder: Path, own: Mapping[str, Any], where: str) -> tuple[SafetensorsFiles, dict[str, Scheme]] | None:
    """The file with head and embedding in our own format, and how they are stored there."""
    name = field(own, "head", str, None, where)
    if name is None:
        return None
    if Path(name).name != name or not (folder / name).exists():
        raise ModelFileError(
            f"{folder}: {name} is missing, which holds the output head as bitdraft wrote it. Fetch all files again."
        )
    layout = compressed_layout(field(own, "head_config", dict, {}, where), where)
    schemes = {layer: layout.scheme_of(layer) for layer in ("lm_head", "model.embed_tokens")}
    files = SafetensorsFiles(folder, [folder / name])
    return files, {k: s for k, s in schemes.items() if s and any(n.startswith(f"{k}.") for n in files.shapes)}
