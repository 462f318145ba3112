"""`bitdraft doctor`: what this machine offers, what of it is in use, and what to do about the rest.

Looks only: nothing is timed, and nothing is changed. `examine` collects facts, `Checkup.findings` judges them.
"""

import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..errors import UsageError
from ..models.hub import cache_folder
from ..models.registry import KNOWN_MODELS
from ..ops import hardware, native
from ..ops.machine import thread_count

_NEEDED = {
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}),
}
"""What the system calls the extensions that each set of kernels is made of."""

_NOTHING_RUNS = "nothing that computes runs"
_FP32 = (
    "every format runs as plain PyTorch in FP32 and reads 4 bytes a weight, however few bits it has, so that a low-bit "
    "draft gains no time"
)


@dataclass(frozen=True)
class Finding:
    """Something that could be better.

    Attributes:
        what: is missing or unusual. costs: what it costs. remedy: what to do.
        grave: the compiled kernels do not run.
    """

    what: str
    costs: str
    remedy: str
    grave: bool = False


@dataclass(frozen=True)
class Checkup:
    """What was found, as facts.

    Attributes:
        processor, system: names.
        memory_bytes, memory_available_bytes: that this process may use, and that is free; None if the system is silent.
        cores, usable_cores: of the machine, and what affinity and the control group's quota leave of them.
        threads: that compute; None where BITDRAFT_THREADS cannot be used.
        threads_asked, isa_asked: BITDRAFT_THREADS and BITDRAFT_ISA; None where they are not set.
        processor_runs: wider instruction sets that the system reports, of those that there are kernels for.
        library_runs: what the library was built with and the machine runs, the widest last; none without a library.
        library_fault: why there is no library.
        isa: instruction set in use; 'reference' for plain PyTorch; None where the environment asks for another.
        fault: what is wrong with what the environment asks for.
        large_pages: always, madvise or never; None if the system is silent.
        compiler: path of a C++ compiler.
        bitdraft, torch, python: versions.
        cache, cache_writable, free_bytes: the folder of fetched models, and the space on its disk.
    """

    processor: str
    system: str
    memory_bytes: int | None
    memory_available_bytes: int | None
    cores: int
    usable_cores: int
    threads: int | None
    threads_asked: str | None
    processor_runs: tuple[str, ...]
    library_runs: tuple[str, ...]
    library_fault: str | None
    isa: str | None
    isa_asked: str | None
    fault: str | None
    large_pages: str | None
    compiler: str | None
    bitdraft: str
    torch: str
    python: str
    cache: str
    cache_writable: bool
    free_bytes: int

    @property
    def well(self) -> bool:
        """Whether the compiled kernels run."""
        return not any(finding.grave for finding in self.findings)

    @property
    def findings(self) -> list[Finding]:
        """Everything that could be better, the gravest first."""
        return [*_on_kernels(self), *_on_instructions(self), *_on_threads(self), *_on_memory(self), *_on_cache(self)]

    def as_json(self) -> dict[str, Any]:
        """All facts and findings, and `well`."""
        return {"well": self.well, **asdict(self), "findings": [asdict(finding) for finding in self.findings]}


def _on_kernels(found: Checkup) -> Iterator[Finding]:
    if found.fault is not None:
        yield Finding(found.fault, _NOTHING_RUNS, "Correct or unset that variable", True)
    elif found.isa_asked == "reference":
        yield Finding("BITDRAFT_ISA=reference switches the compiled kernels off", _FP32, "Unset BITDRAFT_ISA", True)
    elif found.library_fault is not None:
        remedy = f"There is a compiler now: {found.compiler}" if found.compiler else "No compiler is on the PATH yet"
        yield Finding(found.library_fault, _FP32, remedy, True)


def _on_instructions(found: Checkup) -> Iterator[Finding]:
    if not found.library_runs or found.isa in (None, "reference"):
        return
    widest = found.library_runs[-1]
    if found.isa != widest:
        yield Finding(
            f"BITDRAFT_ISA={found.isa_asked}, and this machine runs {widest}",
            "each instruction does less work",
            "Unset BITDRAFT_ISA",
        )
    missing = [name for name in found.processor_runs if name not in found.library_runs]
    if missing:
        yield Finding(
            f"the processor has {' and '.join(missing)}, and the library was built without",
            "each instruction does less work",
            "Install bitdraft again with a newer g++ or clang++",
        )
    elif widest == "scalar":
        yield Finding(
            "there are no kernels for this processor's vector instructions",
            "arithmetic instead of memory limits every step",
            "Use a processor with AVX2 or AVX-512 if you can",
        )


def _on_threads(found: Checkup) -> Iterator[Finding]:
    if found.threads is not None and found.threads > found.usable_cores:
        yield Finding(
            f"{found.threads} threads on {found.usable_cores} usable cores",
            "threads wait for each other at the end of every operation, and steps become slow and uneven",
            f"Unset BITDRAFT_THREADS, or set it to {found.usable_cores}",
        )
    elif found.threads is not None and found.threads < found.usable_cores:
        yield Finding(
            f"{found.threads} of {found.usable_cores} usable cores compute",
            "the others are idle, unless other programs use them",
            f"Unset BITDRAFT_THREADS, or set it to {found.usable_cores}",
        )
    if found.usable_cores < found.cores:
        yield Finding(
            f"{found.usable_cores} of {found.cores} cores may be used",
            "the others are kept from this process by its affinity or by its control group's quota",
            "Raise the container's CPU limit, or start bitdraft without taskset",
        )


def _on_memory(found: Checkup) -> Iterator[Finding]:
    if found.large_pages == "never":
        yield Finding(
            "large pages are switched off",
            "weights are read in small pages, and looking up addresses takes up to a third of the bandwidth",
            "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def _on_cache(found: Checkup) -> Iterator[Finding]:
    if not found.cache_writable:
        yield Finding(
            f"{found.cache} cannot be written",
            "no model can be fetched by name, and nothing that was made once is kept there",
            "Give it write permission, or set BITDRAFT_CACHE to another folder",
        )
    needed = 2 * max(model.size for model in KNOWN_MODELS.values())  # while it is fetched, it is there in parts too
    if found.free_bytes < needed:
        yield Finding(
            f"{found.free_bytes / 1e9:.1f} GB free for {found.cache}",
            f"the largest known model needs {needed / 1e9:.1f} GB while it is fetched",
            "Free some space, or set BITDRAFT_CACHE to a folder on another disk",
        )


def examine(environ: Mapping[str, str], root: Path = Path("/")) -> Checkup:
    """Look at this machine.

    Args:
        environ: the environment that bitdraft was started in.
        root: where /proc and /sys lie.
    """
    flags = hardware.vector_flags(root)
    threads, isa, fault = _in_use()
    cache = cache_folder()
    place = next(path for path in (cache, *cache.absolute().parents) if path.is_dir())
    total, available = _memory(root)
    return Checkup(
        processor=hardware.processor(root),
        system=f"{platform.system()} {platform.machine()}",
        memory_bytes=total,
        memory_available_bytes=available,
        cores=os.cpu_count() or 1,
        usable_cores=thread_count({}),
        threads=threads,
        threads_asked=environ.get("BITDRAFT_THREADS") or None,
        processor_runs=tuple(name for name, needed in _NEEDED.items() if needed <= flags),
        library_runs=hardware.instruction_sets(),
        library_fault=native.load()[1],
        isa=isa,
        isa_asked=environ.get("BITDRAFT_ISA") or None,
        fault=fault,
        large_pages=_large_pages(root),
        compiler=next(filter(None, map(shutil.which, (environ.get("CXX") or "g++", "g++", "clang++", "c++"))), None),
        bitdraft=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        cache=str(cache),
        cache_writable=os.access(place, os.W_OK),
        free_bytes=shutil.disk_usage(place).free,
    )


def _in_use() -> tuple[int | None, str | None, str | None]:
    """Threads, instruction set, and what is wrong with what the environment asks for."""
    try:
        threads = thread_count(os.environ)
    except UsageError as error:
        return None, None, str(error).rstrip(".")
    try:
        kernels = native.default()
    except UsageError as error:
        return threads, None, str(error).rstrip(".")
    return (threads, "reference", None) if kernels is None else (kernels.threads, kernels.isa, None)


def _memory(root: Path) -> tuple[int | None, int | None]:
    """Bytes of memory that this process may use, and bytes of the machine that are free."""
    known = {}
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            known[name] = int(rest.split()[0]) * 1024
    total = known.get("MemTotal")
    with suppress(OSError, ValueError):
        limit = int((root / "sys/fs/cgroup/memory.max").read_text())
        total = limit if total is None else min(total, limit)
    return total, known.get("MemAvailable")


def _large_pages(root: Path) -> str | None:
    """The setting in brackets of 'always [madvise] never'."""
    with suppress(OSError):
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return text.partition("[")[2].partition("]")[0] or None
    return None


def print_facts(rows: Iterable[tuple[str, str]], console: Console) -> None:
    """Print names and what was found, one below the other."""
    table = Table(box=None, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)


def print_finding(grave: bool, text: str, console: Console) -> None:
    """Print something that could be better; `grave` if something does not work."""
    style, word = ("bold red", "problem") if grave else ("yellow", "note")
    console.print(f"\n[{style}]{word}:[/] {escape(text)}", highlight=False, soft_wrap=True)


def render_checkup(found: Checkup, console: Console) -> None:
    """Print the facts as a table, and below it what could be better."""
    print_facts(_rows(found), console)
    for finding in found.findings:
        print_finding(finding.grave, f"{finding.what}. Costs: {finding.costs}. {finding.remedy}.", console)
    if not found.findings:
        console.print("\n[green]All is well.[/]")


def _rows(found: Checkup) -> Iterator[tuple[str, str]]:
    yield "processor", f"{found.processor} ({found.system})"
    yield "cores", f"{found.usable_cores} of {found.cores} usable"
    why = f"BITDRAFT_THREADS={found.threads_asked}" if found.threads_asked else "one for each usable core"
    yield "threads", f"{found.threads or 'none'} ({why})"
    yield "memory", f"{_gib(found.memory_bytes)}, {_gib(found.memory_available_bytes)} free"
    yield "large pages", {None: "unknown", "never": "off"}.get(found.large_pages, f"on ({found.large_pages})")
    runs = ", ".join(found.library_runs) or "no compiled library"
    why = f"BITDRAFT_ISA={found.isa_asked}" if found.isa_asked else "the widest that there is"
    if found.isa == "reference":
        why = "plain PyTorch in FP32"
    yield "instruction sets", f"{found.isa or 'none'} in use ({why}); there are: {runs}"
    if found.library_fault is not None:
        yield "C++ compiler", found.compiler or "none found"
    yield "versions", f"bitdraft {found.bitdraft}, torch {found.torch}, Python {found.python}"
    yield "cache", f"{found.cache}, {found.free_bytes / 1e9:.1f} GB free"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
