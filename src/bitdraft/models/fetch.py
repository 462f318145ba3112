"""Fetching single files from the Hugging Face hub and from the Python package index.

Each fetch is a program of its own: it can be stopped at any moment, what it prints stays out of the terminal, and what
it leaves half-done lies in a folder that the caller removes.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol

from ..errors import BitdraftError
from .registry import HubFile, Wheel

_HUB_PROGRAM = """
import sys
from huggingface_hub import HfApi
repo, file, folder = sys.argv[1:]
api = HfApi()
api.model_info(repo, timeout=10)  # fails at once where there is no hub; a download would try again for half a minute
api.hf_hub_download(repo, file, local_dir=folder)
"""


class FetchError(BitdraftError):
    """One source did not deliver; another may."""


class Fetch(Protocol):
    """How files get here. Tests put a fake in its place."""

    def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
        """Download one wheel into an empty folder and return its path.

        Raises:
            FetchError: there is no such wheel, or no way to it, or `cancel` was set.
        """
        ...

    def hub_file(self, source: HubFile, folder: Path, cancel: Event) -> Path:
        """Download one file of a hub repository into an empty folder and return its path.

        Raises:
            FetchError: there is no such file, or no way to it, or `cancel` was set.
        """
        ...


@dataclass(frozen=True)
class Downloads:
    """Fetches over the network: packages by pip, with the user's own settings of it, and hub files by huggingface_hub.

    Attributes:
        python: the interpreter that runs either.
    """

    python: str = sys.executable

    def wheel(self, wheel: Wheel, folder: Path, cancel: Event) -> Path:
        """See `Fetch.wheel`. Only wheels are taken: nothing of a package is ever run."""
        if importlib.util.find_spec("pip") is None:
            raise FetchError(f"{self.python} has no pip; `{self.python} -m ensurepip` installs it")
        options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
        command = [self.python, "-m", "pip", "download", *options, "--progress-bar", "off", "--dest", str(folder)]
        _run([*command, f"{wheel.project}=={wheel.version}"], folder, cancel)
        return _only_file(folder, "*.whl")

    def hub_file(self, source: HubFile, folder: Path, cancel: Event) -> Path:
        """See `Fetch.hub_file`."""
        _run([self.python, "-c", _HUB_PROGRAM, source.repo, source.file, str(folder)], folder, cancel)
        return folder / source.file


def _run(command: list[str], folder: Path, cancel: Event) -> None:
    """Run a program to its end, with its temporary files in `folder`.

    Raises:
        FetchError: it fails, with the last thing that it said; or `cancel` is set, and it is stopped.
    """
    log = folder / "output.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None and not cancel.wait(0.05):
                pass
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if cancel.is_set():
        raise FetchError("stopped")
    if process.returncode:
        said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR:")]
        raise FetchError((errors or said or [f"exit code {process.returncode}"])[-1].removeprefix("ERROR: "))


def _only_file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"{len(found)} files where one {pattern} was expected")
    return found[0]
