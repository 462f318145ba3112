"""The safetensors files of a model folder, opened together and read tensor by tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelFileError
from .tokenizer_folder import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsFiles:
    """Tensors of several files under one set of names.

    Attributes:
        folder: where they lie.
        shapes: sizes of every tensor, by name.
        dtypes: how it is stored, as safetensors calls it: 'BF16', 'I32', 'F8_E4M3'.
        metadata: what the files' headers say beside the tensors, file by file, in order.
    """

    def __init__(self, folder: Path, files: list[Path]) -> None:
        """Read the headers of the files.

        Raises:
            ModelFileError: a file is truncated or damaged.
        """
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.metadata: list[dict[str, str]] = []
        self._opened: dict[str, Any] = {}
        for file in files:
            with reading(file):
                opened: Any = safe_open(file, framework="pt")
                self.metadata.append(opened.metadata() or {})
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                    view = opened.get_slice(name)
                    self._opened[name] = opened
                    self.shapes[name], self.dtypes[name] = tuple(view.get_shape()), view.get_dtype()

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored; it may lie in the file's pages: not to be changed.

        Raises:
            KeyError: there is no such tensor.
            ModelFileError: it cannot be read.
        """
        with reading(self.folder):
            tensor: Tensor = self._opened[name].get_tensor(name)
            return tensor


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say what to do when a file is not what it should be."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"{path}: cannot be read as safetensors ({error}). The file is truncated or damaged: fetch it again."
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, each once: model.safetensors, or those that its index names.

    Raises:
        ModelFileError: there are none, the index is damaged, or a file that it names is missing.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelFileError(
            f"{folder}: there is neither model.safetensors nor model.safetensors.index.json. Expected a model in "
            "safetensors; convert other kinds with transformers' save_pretrained."
        )
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) and Path(s).name == s for s in shards.values()):
        raise ModelFileError(f"{index}: 'weight_map' names no files beside it. Fetch the file again.")
    names = sorted(set(shards.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFileError(
            f"{folder}: {len(missing)} of {len(names)} files of the model are missing: {', '.join(missing[:4])}. "
            "Fetch them into this folder."
        )
    return [folder / name for name in names]
