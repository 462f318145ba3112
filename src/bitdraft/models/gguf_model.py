"""A GGUF file as a checkpoint: its metadata as sizes, its tensors under Hugging Face's names.

Shape suffixes: H heads, C channels of a head, N outputs, K inputs.
"""

import math
from collections import Counter
from pathlib import Path

from torch import Tensor

from ..errors import ModelFileError
from ..ops.gguf_blocks import BlockFormat
from ..ops.packed import Packed, block_matrix, float_matrix
from .config import FAMILIES, ModelConfig
from .gguf import GGUFFile
from .gguf_vocab import gguf_tokenizer
from .tensor_names import EMBEDDING, HEAD, check_tensors, hf_name
from .tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that are read. Mistral's files call themselves llama, and are decoded as such."""

_ROPE_FACTORS = "rope_freqs.weight"


class GGUFCheckpoint:
    """The tensors of a .gguf file, one by one as they are asked for: dequantised, or as they are stored.

    Attributes:
        origin: the file.
        config: the model's sizes.
        stored_as: the tensor types of the linear layers and their mean bits.
        stored_bits: mean bits per weight of the linear layers.
    """

    def __init__(self, path: Path) -> None:
        """Read metadata and tensor table, and check them against one another.

        Raises:
            ModelFileError: not a readable GGUF file of a family that is decoded.
        """
        self.origin = str(path)
        self._file = GGUFFile(path)
        self.config = config_from_gguf(self._file)
        self._names: dict[str, str] = {}
        for name in self._file.tensors:
            known = hf_name(name)
            if name != _ROPE_FACTORS:
                self._names[known or name] = name
        shapes = {name: self._file.tensors[stored].shape for name, stored in self._names.items()}
        check_tensors(self.origin, self.config, shapes)
        bits, names = self._stored_linears()
        self.stored_bits = bits
        self.stored_as = f"{names}, {bits:.1f} bits a weight"

    def _stored_linears(self) -> tuple[float, str]:
        """Mean bits of the linear layers, and their tensor types, the most used first."""
        weights: Counter[str] = Counter()
        bits = 0.0
        for name, (rows, columns) in self.config.linear_shapes().items():
            form = self._file.tensors[self._stored_name(f"{name}.weight")].form
            weights[form.name] += rows * columns
            bits += rows * columns * form.bits
        return bits / weights.total(), "/".join(name for name, _ in weights.most_common())

    def _stored_name(self, name: str) -> str:
        return self._names[EMBEDDING if name == HEAD and self.config.tied_head else name]

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name; a tied head counts."""
        return name in self._names or (name == HEAD and self.config.tied_head)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name: float32, fresh.

        Raises:
            ModelFileError: there is no such tensor.
        """
        return self._ordered(name, self._file.tensor(self._known(name)))

    def holds_floats(self, name: str) -> bool:
        """Whether the matrix of this Hugging Face name is stored as plain floats.

        Raises:
            ModelFileError: there is no such tensor.
        """
        return self._form(name).values == 1

    def packed(self, name: str) -> Packed:
        """The matrix of this Hugging Face name as it is stored: floats, or blocks.

        Raises:
            ModelFileError: there is no such tensor.
        """
        stored, form = self._ordered(name, self._file.stored(self._known(name))), self._form(name)
        return float_matrix(stored) if form.values == 1 else block_matrix(stored, form)

    def _form(self, name: str) -> BlockFormat:
        return self._file.tensors[self._known(name)].form

    def _known(self, name: str) -> str:
        if not self.has(name):
            raise ModelFileError(f"{self.origin}: there is no tensor {name!r}. Its config says which there are.")
        return self._stored_name(name)

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """Rows in Hugging Face's order."""
        if self._file.metadata["general.architecture"] != "llama":
            return tensor
        if ".q_proj." in name:
            return _unpermuted(tensor, self.config.num_heads)
        if ".k_proj." in name:
            return _unpermuted(tensor, self.config.num_kv_heads)
        return tensor

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file carries.

        Raises:
            ModelFileError: it carries none, or one of a kind that is not read.
        """
        return gguf_tokenizer(self._file)


def _unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in Hugging Face's order.

    llama.cpp rotates neighbouring channels, (0, 1), (2, 3), ..., where Hugging Face rotates channel c with
    c + C / 2; its converter interleaves the two halves of every head of a `llama` model for that.

    Args:
        rows: [H * C, K], [H * C, bytes] or, for a bias, [H * C].
        heads: H.
    """
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's sizes, from metadata and tensor table.

    Raises:
        ModelFileError: a family that is not decoded, a missing key, or sizes that make no model.
    """
    arch = file.number("general.architecture", str)
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"{file.path}: a model of family {arch!r}, which bitdraft does not decode yet. It decodes "
            f"{', '.join(FAMILIES.values())}: choose a model of one of these families."
        )
    if file.number(f"{arch}.expert_count", int, 0):
        raise ModelFileError(
            f"{file.path}: a mixture of experts, which bitdraft does not decode: choose a dense model."
        )
    vocab_size, query_rows = _rows(file, "token_embd.weight"), _rows(file, "blk.0.attn_q.weight")
    heads = _positive(file, f"{arch}.attention.head_count")
    hidden = _positive(file, f"{arch}.embedding_length")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden // heads)
    if heads * head_dim != query_rows:  # before anything is made for every channel of a head
        raise ModelFileError(
            f"{file.path}: the metadata call for {heads} heads of {head_dim} channels, but 'blk.0.attn_q.weight' has "
            f"{query_rows} rows. The file is damaged: fetch it again."
        )
    _check_heads(file, arch, head_dim)
    return ModelConfig(
        family=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=_positive(file, f"{arch}.block_count"),
        num_heads=heads,
        num_kv_heads=_positive(file, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        mlp_size=_positive(file, f"{arch}.feed_forward_length"),
        norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.number(f"{arch}.rope.freq_base", float, 10000.0),
        rope_factors=_rope_factors(file, arch, head_dim),
        context_length=_positive(file, f"{arch}.context_length"),
        sliding_window=file.number(f"{arch}.attention.sliding_window", int, 0) or None,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied_head="output.weight" not in file.tensors,
    )


def _check_heads(file: GGUFFile, arch: str, head_dim: int) -> None:
    """Refuse heads that are rotated in part, and values of another size than keys."""
    rotated = file.number(f"{arch}.rope.dimension_count", int, head_dim)
    value_dim = file.number(f"{arch}.attention.value_length", int, head_dim)
    for ok, given in (
        (rotated == head_dim, f"rotary positions on {rotated} of {head_dim} channels"),
        (value_dim == head_dim, f"values of {value_dim} channels beside keys of {head_dim}"),
    ):
        if not ok:
            raise ModelFileError(
                f"{file.path}: the metadata call for {given}, which bitdraft does not decode. Choose another model."
            )


def _rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors or not file.tensors[name].shape:
        raise ModelFileError(f"{file.path}: there is no matrix {name!r}. Expected a whole model: fetch it again.")
    return file.tensors[name].shape[0]


def _positive(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.number(key, int, default)
    if value < 1:
        raise ModelFileError(
            f"{file.path}: the metadata key {key!r} is {value}. Expected at least 1: fetch the file again."
        )
    return value


def _rope_factors(file: GGUFFile, arch: str, head_dim: int) -> tuple[float, ...] | None:
    """Divisors of the rotary frequencies: Llama 3's from their tensor, times those of linear scaling."""
    kind = file.number(f"{arch}.rope.scaling.type", str, "none")
    if kind not in ("none", "linear"):
        raise ModelFileError(
            f"{file.path}: rotary scaling of kind {kind!r}. bitdraft reads none, linear and Llama 3's factors; use a "
            "file without this scaling."
        )
    scale = file.number(f"{arch}.rope.scaling.factor", float, 1.0) if kind == "linear" else 1.0
    factors = [1.0] * (head_dim // 2)
    if _ROPE_FACTORS in file.tensors:
        factors = file.tensor(_ROPE_FACTORS).flatten().tolist()
    if len(factors) != head_dim // 2 or not all(math.isfinite(f * scale) and f * scale > 0 for f in factors):
        raise ModelFileError(
            f"{file.path}: {len(factors)} rotary factors. Expected {head_dim // 2} positive numbers, one for each pair "
            "of channels: the file is damaged; fetch it again."
        )
    return None if scale == 1.0 and _ROPE_FACTORS not in file.tensors else tuple(f * scale for f in factors)
