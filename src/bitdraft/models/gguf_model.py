"""A GGUF file as a checkpoint: its metadata as sizes, its tensors under Hugging Face's names.

Shape suffixes: H heads, C channels of a head, N outputs, K inputs.
"""

from collections import Counter
from pathlib import Path

from torch import Tensor

from ..errors import ModelFileError
from ..ops.gguf_blocks import BlockFormat
from ..ops.packed import Packed, block_matrix, float_matrix
from .gguf import GGUFFile
from .gguf_config import FACTORS, config_from_gguf
from .gguf_vocab import gguf_tokenizer
from .tensor_names import EMBEDDING, HEAD, Place, check_sizes, check_tensors, hf_name, places
from .tokenizer import Tokenizer


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
        self._names = {
            hf_name(name, self.config.family) or name: name for name in self._file.tensors if name not in FACTORS
        }
        shapes = {name: self._file.tensors[stored].shape for name, stored in self._names.items()}
        check_sizes(self.origin, self.config)
        self._places, shapes = places(self.config, shapes)
        check_tensors(self.origin, self.config, shapes)
        bits, names = self._stored_linears()
        self.stored_bits = bits
        self.stored_as = f"{names}, {bits:.1f} bits a weight"

    def _stored_linears(self) -> tuple[float, str]:
        """Mean bits of the linear layers, and their tensor types, the most used first."""
        weights: Counter[str] = Counter()
        bits = 0.0
        for name, (rows, columns) in self.config.linear_shapes().items():
            form = self._form(f"{name}.weight")
            weights[form.name] += rows * columns
            bits += rows * columns * form.bits
        return bits / weights.total(), "/".join(name for name, _ in weights.most_common())

    def _stored_name(self, name: str) -> str:
        return EMBEDDING if name == HEAD and self.config.tied_head else name

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this Hugging Face name; a tied head counts."""
        return self._stored_name(name) in self._places

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name: float32, fresh.

        Raises:
            ModelFileError: there is no such tensor.
        """
        stored, rows = self._known(name)
        tensor = self._file.tensor(self._names[stored])
        return self._ordered(name, tensor if rows is None else tensor[rows])

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
        (known, rows), form = self._known(name), self._form(name)
        stored = self._file.stored(self._names[known])
        stored = self._ordered(name, stored if rows is None else stored[rows])
        return float_matrix(stored) if form.values == 1 else block_matrix(stored, form)

    def _form(self, name: str) -> BlockFormat:
        return self._file.tensors[self._names[self._known(name).stored]].form

    def _known(self, name: str) -> Place:
        if not self.has(name):
            raise ModelFileError(f"{self.origin}: there is no tensor {name!r}. Its config says which there are.")
        return self._places[self._stored_name(name)]

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
