"""Writing GGUF files, version 3: metadata, tensor table and tensors (ggml's docs/gguf.md), one tensor at a time."""

import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError
from ..ops.gguf_blocks import BlockFormat, Bytes
from .gguf import Value

_ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True)
class Planned:
    """A tensor that is to be written.

    Attributes:
        name: in the file.
        shape: outermost first, as torch writes it.
        form: how the values are stored.
        bytes: makes its bytes when its turn comes, of any shape.
    """

    name: str
    shape: tuple[int, ...]
    form: BlockFormat
    bytes: Callable[[], Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the file, without padding."""
        return math.prod(self.shape) // self.form.values * self.form.nbytes


def write_gguf(
    path: Path,
    metadata: Mapping[str, Value],
    tensors: Sequence[Planned],
    progress: Callable[[int, int | None, str], None] | None = None,
) -> None:
    """Write a file. It gets its name only when it is whole.

    Args:
        path: must not exist.
        metadata: true or false, integers (as uint32; in lists as int32), numbers (float32), strings and lists of these.
        tensors: in the order of the file.
        progress: called with (tensors done, tensors, the file's name).

    Raises:
        UsageError: the file is there already, or cannot be written; nothing is left then.
    """
    if path.exists():
        raise UsageError(f"{path} is there already, and is not overwritten. Choose another name, or remove it.")
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "wb") as file:
            _header(file, metadata, tensors)
            for i, tensor in enumerate(tensors):
                raw = tensor.bytes().tobytes()
                assert len(raw) == tensor.nbytes, tensor.name
                file.write(raw)
                file.write(bytes(-len(raw) % _ALIGNMENT))
                if progress:
                    progress(i + 1, len(tensors), path.name)
        os.replace(unfinished, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error}). Free some space, or give write permission.") from None
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _header(file: BinaryIO, metadata: Mapping[str, Value], tensors: Sequence[Planned]) -> None:
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        kind = _kind(value)
        file.write(_string(key) + struct.pack("<I", kind) + _value(kind, value))
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        file.write(_string(tensor.name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        file.write(struct.pack("<IQ", tensor.form.kind, offset))
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    file.write(bytes(-file.tell() % _ALIGNMENT))


def _kind(value: Value) -> int:
    if isinstance(value, list):
        return _ARRAY
    return {bool: _BOOL, int: _UINT32, float: _FLOAT32, str: _STRING}[type(value)]


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Value) -> bytes:
    if isinstance(value, list):
        item = _kind(value[0]) if value else _STRING
        item = _INT32 if item == _UINT32 else item
        return struct.pack("<IQ", item, len(value)) + b"".join(_value(item, v) for v in value)
    if isinstance(value, str):
        return _string(value)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
