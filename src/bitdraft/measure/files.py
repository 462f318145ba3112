"""JSON-lines files that are only appended to, and files that are written whole or not at all."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import UsageError
from .records import from_json, parse

R = TypeVar("R")


def read_lines(path: Path, kind: type[R], key_fields: tuple[str, ...]) -> list[R]:
    """The records of a file, one a line; none if there is no file. A last line that was cut short is dropped.

    Raises:
        UsageError: any other broken line, or a second line with the same values in `key_fields`.
    """
    if not path.is_file():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    if _is_json(tail):
        lines.append(tail)
    records, seen = [], dict[tuple[object, ...], int]()
    for number, line in enumerate(lines, start=1):
        origin = f"{path}, line {number}"
        record = from_json(kind, parse(line, origin), origin)
        key = tuple(getattr(record, name) for name in key_fields)
        if key in seen:
            raise UsageError(
                f"{origin}: {key} is also in line {seen[key]}. Expected it once; two measurements were mixed. "
                "Measure again in a new folder."
            )
        seen[key] = number
        records.append(record)
    return records


def mend(path: Path) -> None:
    """Make the file, if there is one, end with a whole line, so that the next one can be appended."""
    if not path.is_file():
        return
    data = path.read_bytes()
    tail = data[data.rfind(b"\n") + 1 :]
    if not tail:
        return
    with path.open("r+b") as file:
        if _is_json(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(len(data) - len(tail))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is either the old one or the whole new one, never half."""
    half = path.with_name(path.name + ".part")
    try:
        with half.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def digest(folder: Path, names: Iterable[str]) -> str:
    """SHA-256 over names and contents of files, in the given order; a file that is not there counts as empty."""
    total = hashlib.sha256()
    for name in names:
        path = folder / name
        data = path.read_bytes() if path.is_file() else b""
        total.update(f"{name} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn what the operating system says about writing in `folder` into a `UsageError`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder}: {error.strerror}. Choose a folder that you may write to."
        ) from None


def _is_json(tail: bytes) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(tail)
        return True
    return False
