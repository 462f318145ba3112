"""Model files as tensors: what a checkpoint offers, safetensors folders, and what is made from either.

A checkpoint is opened once, checked at once, and read tensor by tensor. Its names are Hugging Face's.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ModelFileError
from ..ops.packed import Packed, float_matrix
from .config import ModelConfig
from .gguf_model import GGUFCheckpoint
from .quantized_folder import QuantizedCheckpoint
from .safetensors_files import SafetensorsFiles, weight_files
from .tensor_names import EMBEDDING, HEAD, check_tensors
from .tokenizer import Tokenizer
from .tokenizer_folder import folder_tokenizer, read_json


class Checkpoint(Protocol):
    """A model as its files store it."""

    @property
    def origin(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        ...

    @property
    def stored_as(self) -> str:
        """How the linear layers are stored: 'bf16', or 'Q4_K/Q6_K, 5.1 bits a weight'."""
        ...

    @property
    def stored_bits(self) -> float:
        """Mean bits per weight of the linear layers, scales included, as they are stored."""
        ...

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name; a tied head counts."""
        ...

    def tensor(self, name: str) -> Tensor:
        """A tensor by its Hugging Face name, `model.layers.0.self_attn.q_proj.weight`: float32, fresh.

        'lm_head.weight' of a model with a tied head is the embedding.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        ...

    def holds_floats(self, name: str) -> bool:
        """Whether a matrix is stored as plain floats of 16 or 32 bits, by its Hugging Face name.

        Raises:
            ModelFileError: there is no such tensor.
        """
        ...

    def packed(self, name: str) -> Packed:
        """A matrix as it is stored, by its Hugging Face name: floats, blocks, or codes with their scales.

        Its `format` says how the file calls it; its activation is what the file asks for, and bf16 if it asks for
        nothing. It may lie in the file's pages: not to be changed.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the model; made anew at each call.

        Raises:
            ModelFileError: there is none, or it is of a kind that is not read.
        """
        ...


@dataclass
class Weights:
    """The weights of one model in one format, ready for a decoder.

    Attributes:
        config: the model's sizes.
        packed: linear layers by name without '.weight', 'lm_head' last among them, and 'model.embed_tokens': the very
            object under 'lm_head' where the head is tied.
        tensors: norms and biases by Hugging Face name, float32.
    """

    config: ModelConfig
    packed: dict[str, Packed]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take on disk; a tied table counts once."""
        packed = {id(weight): weight.nbytes for weight in self.packed.values()}
        return sum(packed.values()) + sum(t.numel() * t.element_size() for t in self.tensors.values())


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder with config.json and safetensors, or a .gguf file, and check that it is whole.

    Raises:
        ModelFileError: missing, truncated, damaged, or of a kind that is not read.
    """
    if path.is_dir():
        raw = read_json(_config_file(path))
        if raw.get("quantization_config") or raw.get("bitdraft"):
            return QuantizedCheckpoint(path, SafetensorsFiles(path, weight_files(path)), _folder_config(path, raw), raw)
        return SafetensorsCheckpoint(path, raw)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder. Expected a model folder or a .gguf file.")
    return GGUFCheckpoint(path)


_DTYPES = {"F32": ("f32", 32), "F16": ("f16", 16), "BF16": ("bf16", 16)}
"""Tensor types of safetensors that are read: our name, and bits."""


class SafetensorsCheckpoint:
    """A folder with config.json and model.safetensors, or several of them and their index.

    Attributes:
        origin: the folder.
        config: the model's sizes.
        stored_as: 'bf16', 'f16', 'f32', or several of these.
        stored_bits: mean bits per weight of the linear layers.
    """

    def __init__(self, folder: Path, raw: Mapping[str, Any]) -> None:
        """Read the headers of all files, and check them against config.json.

        Args:
            folder: the model folder.
            raw: the contents of its config.json.

        Raises:
            ModelFileError: a file is missing, damaged or of a kind that is not read.
        """
        self.origin = str(folder)
        self._folder = folder
        self.config = _folder_config(folder, raw)
        self._files = SafetensorsFiles(folder, weight_files(folder))
        shapes = self._files.shapes
        harmless = [n for n in shapes if n.endswith(".rotary_emb.inv_freq")] + [HEAD] * self.config.tied_head
        check_tensors(self.origin, self.config, shapes, harmless)
        self.stored_as, self.stored_bits = self._stored_linears(self._files.dtypes)

    def _stored_linears(self, dtypes: Mapping[str, str]) -> tuple[str, float]:
        for name, dtype in dtypes.items():
            if dtype not in _DTYPES:
                raise ModelFileError(
                    f"{self.origin}: tensor {name!r} is stored as {dtype}. bitdraft reads {', '.join(_DTYPES)}: choose "
                    "a checkpoint that is not quantised."
                )
        weights: Counter[str] = Counter()
        for name, (rows, columns) in self.config.linear_shapes().items():
            weights[dtypes[self._stored_name(f"{name}.weight")]] += rows * columns
        bits = sum(_DTYPES[d][1] * n for d, n in weights.items()) / weights.total()
        return "/".join(_DTYPES[d][0] for d, _ in weights.most_common()), bits

    def _stored_name(self, name: str) -> str:
        return EMBEDDING if name == HEAD and self.config.tied_head else name

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name; a tied head counts."""
        return self._stored_name(name) in self._files.shapes

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name: float32, fresh.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        return self._stored(name).to(torch.float32, copy=True)

    def holds_floats(self, name: str) -> bool:
        """Whether a matrix is stored as plain floats: all of them are.

        Raises:
            ModelFileError: there is no such tensor.
        """
        return bool(self._known(name))

    def packed(self, name: str) -> Packed:
        """The matrix of this Hugging Face name as it is stored; it lies in the file's pages: not to be changed.

        Raises:
            ModelFileError: there is no such tensor, or it cannot be read.
        """
        return float_matrix(self._stored(name))

    def _stored(self, name: str) -> Tensor:
        return self._files.tensor(self._known(name))

    def _known(self, name: str) -> str:
        if not self.has(name):
            raise ModelFileError(f"{self.origin}: there is no tensor {name!r}. Its config says which there are.")
        return self._stored_name(name)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder.

        Raises:
            ModelFileError: tokenizer.json is missing, damaged or of a kind that is not read.
        """
        return folder_tokenizer(self._folder)


def _config_file(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.exists():
        raise ModelFileError(
            f"{folder}: there is no config.json. Expected a model folder with config.json, tokenizer.json and "
            "safetensors files, or a .gguf file."
        )
    return path


def _folder_config(folder: Path, raw: Mapping[str, Any]) -> ModelConfig:
    path = folder / "config.json"
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelFileError(
            f"{path}: an activation called {raw['hidden_act']!r}. bitdraft decodes models whose MLP is gated by SiLU: "
            "choose another model."
        )
    try:
        return ModelConfig.from_hf(raw, str(path))
    except ModelFileError:
        raise
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        raise ModelFileError(f"{path}: a field is of the wrong kind ({error}). Fetch the file again.") from None
