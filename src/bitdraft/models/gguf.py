"""Reading GGUF files: metadata, tensor table and tensors, over a memory map.

A file is: the magic, a version, two counts, the metadata (key, type, value), the tensor table (name, shape, type,
offset), padding, and the tensors (ggml's docs/gguf.md). Nothing of a tensor is read before it is asked for.

A file may be cut or damaged anywhere, so every count and length in it is checked against the bytes that are left
before anything is made from it.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import ModelFileError
from ..ops.gguf_blocks import BLOCK_FORMATS, UNREAD_TYPES, BlockFormat, Bytes, dequantise

Value = bool | int | float | str | list["Value"]
"""What a metadata key can hold."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value types of a fixed size, by their number in the file, as the `struct` module spells them."""
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DEEPEST_ARRAY = 4

T = TypeVar("T", bool, int, float, str)


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table.

    Attributes:
        name: the tensor's name in the file.
        shape: sizes, outermost first, as torch writes them (the file has them the other way round).
        form: how the values are stored.
        start: byte of the file where the tensor begins.
    """

    name: str
    shape: tuple[int, ...]
    form: BlockFormat
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in the file."""
        return math.prod(self.shape) // self.form.values * self.form.nbytes


class _Cursor:
    """Reads values one after the other and knows what it is reading, for the error when the file ends."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0
        self.reading = "the header"

    def fail(self, what: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: {what} (in {self.reading}, at byte {self.position} of {len(self.data)}). "
            "The file is truncated or damaged: fetch it again."
        )

    def need(self, count: int) -> None:
        if count > len(self.data) - self.position:
            raise self.fail(f"{count} more bytes are announced than there are left" if count > 64 else "the file ends")

    def number(self, code: str) -> int | float | bool:
        size = struct.calcsize("<" + code)
        self.need(size)
        (value,) = struct.unpack_from("<" + code, self.data, self.position)
        self.position += size
        return cast("int | float | bool", value)

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def string(self) -> str:
        length = self.count()
        self.need(length)
        raw = self.data[self.position : self.position + length]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None
        self.position += length
        return text

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < _DEEPEST_ARRAY:
            return self.array(depth)
        raise self.fail(f"a value of type {kind}, which GGUF does not have")

    def array(self, depth: int) -> list[Value]:
        kind, length = self.count("I"), self.count()
        if kind in _NUMBERS:
            code = _NUMBERS[kind]
            size = struct.calcsize("<" + code) * length
            self.need(size)
            values = np.frombuffer(self.data, dtype="<" + code.replace("?", "u1"), count=length, offset=self.position)
            self.position += size
            return cast("list[Value]", (values != 0 if code == "?" else values).tolist())
        self.need(8 * length)  # a string or an array takes at least its own length
        if kind == _STRING:
            return self.string_array(length)
        return [self.value(kind, depth + 1) for _ in range(length)]

    def string_array(self, length: int) -> list[Value]:
        """As `length` calls of `string`, three times as fast: vocabularies have 150 000 of them."""
        data, position, end = self.data, self.position, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found: list[bytes] = []
        for i in range(length):
            start = position + 8
            if start <= end:
                position = start + length_at(data, position)[0]
            if start > end or position > end:
                raise self.fail(f"string {i} of {length} goes past the end of the file")
            found.append(data[start:position])
        self.position = position
        try:
            return [raw.decode("utf-8") for raw in found]
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None


class GGUFFile:
    """A GGUF file of version 2 or 3, opened for reading.

    Attributes:
        path: the file.
        metadata: every key and its value.
        tensors: the tensor table, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the header, the metadata and the tensor table.

        Raises:
            ModelFileError: not there, not GGUF, truncated, damaged, or with a tensor type that is not read.
        """
        self.path = path
        self._data = _map(path)
        cursor = _Cursor(self._data, path)
        tensor_count, metadata_count = _header(cursor)
        self.metadata: Mapping[str, Value] = _metadata(cursor, metadata_count)
        if self.number("split.count", int, 1) > 1:
            raise ModelFileError(
                f"{path}: one part of a GGUF that is split into {self.metadata['split.count']} files. bitdraft reads "
                "whole files: join the parts with `llama-gguf-split --merge`."
            )
        entries = _table(cursor, tensor_count)
        self.tensors: Mapping[str, TensorEntry] = _placed(cursor, entries, self.number("general.alignment", int, 32))

    def number(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The metadata value of `key`: a bool, int, float or str, as `kind` says.

        Raises:
            ModelFileError: the key is missing and there is no default, or it holds something else.
        """
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(
                f"{self.path}: the metadata key {key!r} is missing. Expected {_article(kind)}: fetch or convert the "
                "file again."
            )
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelFileError(
                f"{self.path}: the metadata key {key!r} is {str(value)[:40]!r}. Expected {_article(kind)}: fetch or "
                "convert the file again."
            )
        return value

    def strings(self, key: str) -> list[str] | None:
        """The metadata value of `key` as a list of strings; None if the key is missing.

        Raises:
            ModelFileError: it holds something else.
        """
        return self._list(key, str)

    def integers(self, key: str) -> list[int] | None:
        """The metadata value of `key` as a list of integers; None if the key is missing.

        Raises:
            ModelFileError: it holds something else.
        """
        return self._list(key, int)

    def floats(self, key: str) -> list[float] | None:
        """The metadata value of `key` as a list of floats; None if the key is missing.

        Raises:
            ModelFileError: it holds something else.
        """
        return self._list(key, float)

    def _list(self, key: str, kind: type[T]) -> list[T] | None:
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(v) is not kind for v in value):
            raise ModelFileError(
                f"{self.path}: the metadata key {key!r} is no list of {kind.__name__} values: fetch or convert the "
                "file again."
            )
        return cast("list[T]", value)

    def tensor(self, name: str) -> Tensor:
        """The values of a tensor, dequantised: float32 in the table's shape, a fresh tensor.

        Raises:
            KeyError: if the table has no such tensor.
        """
        entry = self.tensors[name]
        return torch.from_numpy(dequantise(self._raw(entry), entry.form)).view(entry.shape)

    def stored(self, name: str) -> Tensor:
        """A matrix [N, K] as the file has it: floats in their own dtype, or its blocks, [N, bytes of a row] uint8.

        Raises:
            KeyError: if the table has no such tensor.
        """
        entry = self.tensors[name]
        rows = torch.from_numpy(self._raw(entry).copy()).view(entry.shape[0], -1)
        return rows.view(_FLOATS[entry.form.name]) if entry.form.values == 1 else rows

    def _raw(self, entry: TensorEntry) -> Bytes:
        return np.frombuffer(self._data, dtype=np.uint8, count=entry.nbytes, offset=entry.start)


def _article(kind: type) -> str:
    return {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[kind]


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if path.stat().st_size < 4 or file.read(4) != b"GGUF":
                raise ModelFileError(
                    f"{path}: not a GGUF file: it does not begin with the letters GGUF. Expected a whole .gguf file: "
                    "fetch it again."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions."
        ) from None


def _header(cursor: _Cursor) -> tuple[int, int]:
    """Check the version; return the counts of tensors and of metadata keys."""
    cursor.position = 4
    version = cursor.count("I")
    if version not in (2, 3):
        big_endian = version in (2 << 24, 3 << 24)
        given = "a big-endian file" if big_endian else f"version {version}"
        raise ModelFileError(
            f"{cursor.path}: {given} of GGUF. bitdraft reads little-endian files of versions 2 and 3: fetch the file "
            "again or convert it with a current llama.cpp."
        )
    return cursor.count(), cursor.count()


def _metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    cursor.reading = "the metadata"
    cursor.need(13 * count)  # the smallest entry: an empty key, a type and one byte
    found: dict[str, Value] = {}
    for _ in range(count):
        cursor.reading = "the metadata"
        key = cursor.string()
        cursor.reading = f"the metadata key {key[:80]!r}"
        if key in found:
            raise cursor.fail("the key appears twice")
        found[key] = cursor.value(cursor.count("I"))
    return found


def _table(cursor: _Cursor, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
    """The tensor table as it stands: (name, shape, type, offset from the start of the data)."""
    cursor.reading = "the tensor table"
    cursor.need(24 * count)  # the smallest entry: an empty name, no dimensions, a type and an offset
    entries = []
    for _ in range(count):
        cursor.reading = "the tensor table"
        name = cursor.string()
        cursor.reading = f"the table entry of tensor {name[:80]!r}"
        dimensions = cursor.count("I")
        if dimensions > _MOST_DIMENSIONS:
            raise cursor.fail(f"{dimensions} dimensions, where GGUF has {_MOST_DIMENSIONS} at most")
        shape = tuple(reversed([cursor.count() for _ in range(dimensions)]))
        entries.append((name, shape, cursor.count("I"), cursor.count()))
    return entries


def _placed(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, TensorEntry]:
    """Check the table against the file: known types, whole blocks, and every tensor inside the file."""
    path, size = cursor.path, len(cursor.data)
    cursor.reading = "the tensor table"
    if alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment}, where a power of two is expected")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in entries:
        if kind not in BLOCK_FORMATS:
            given = UNREAD_TYPES.get(kind, f"type {kind}, which is not known")
            read = ", ".join(form.name for form in BLOCK_FORMATS.values())
            raise ModelFileError(
                f"{path}: tensor {name!r} is stored as {given}. bitdraft reads {read}: choose a file of one of these "
                "types, or convert this one."
            )
        entry = TensorEntry(name, shape, BLOCK_FORMATS[kind], data_start + offset)
        cursor.reading = f"tensor {name[:80]!r}"
        if name in tensors:
            raise cursor.fail("the tensor appears twice")
        if 0 in shape or (shape[-1] if shape else 1) % entry.form.values:
            raise cursor.fail(f"the shape {list(shape)} does not go into {entry.form.name} blocks")
        if offset % alignment:
            raise cursor.fail(f"its offset {offset} is no multiple of {alignment}")
        if entry.start + entry.nbytes > size:
            raise ModelFileError(
                f"{path}: tensor {name!r} needs bytes {entry.start} to {entry.start + entry.nbytes}, but the file has "
                f"{size}. The file is truncated or damaged: fetch it again."
            )
        tensors[name] = entry
    return tensors
