"""What this machine is, and the most that it can do: measured, so that a kernel's speed has something beside it."""

import platform
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from ..errors import UsageError
from . import native
from .machine import Slab

_SYSTEM = Path("/")


@dataclass(frozen=True)
class Ticks:
    """Time of the processors so far, in ticks of the system.

    Attributes:
        total: of all of them. used: by anyone, other guests of the same host among them. own: by one process.
    """

    total: int
    used: int
    own: int

    @classmethod
    def now(cls, process: int | str = "self", root: Path = _SYSTEM) -> "Ticks | None":
        """The ticks up to now; None where the system does not say."""
        try:
            counts = (root / "proc/stat").read_text().split(maxsplit=9)[1:9]
            user, nice, system, idle, wait, irq, soft_irq, steal = map(int, counts)
            of_process = (root / f"proc/{process}/stat").read_text().rpartition(")")[2].split()
            used = user + nice + system + irq + soft_irq + steal
            return cls(used + idle + wait, used, int(of_process[11]) + int(of_process[12]))
        except (OSError, ValueError, IndexError):
            return None

    def others_since(self, before: "Ticks") -> float:
        """The share of the machine that others used."""
        others = (self.used - before.used) - (self.own - before.own)
        return max(0.0, others / max(1, self.total - before.total))


def processor(root: Path = _SYSTEM) -> str:
    """The processor's name."""
    names = _cpuinfo(root, "model name")
    return names or platform.processor() or platform.machine()


def vector_flags(root: Path = _SYSTEM) -> frozenset[str]:
    """The instruction set extensions that the system reports for the processor; none where it does not say."""
    return frozenset((_cpuinfo(root, "flags") or _cpuinfo(root, "Features")).split())


def _cpuinfo(root: Path, field: str) -> str:
    """What /proc/cpuinfo says of the first processor; '' if it does not say."""
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in pairs if name.strip() == field), "")


def last_level_cache(root: Path = _SYSTEM) -> int | None:
    """Bytes of the largest cache that one core sees; None where the system does not say."""
    sizes = []
    for path in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdecimal():
            sizes.append(int(digits) * unit)
    return max(sizes, default=None)


def instruction_sets() -> tuple[str, ...]:
    """What the compiled library was built with and this machine runs, the widest last; none without a library."""
    library, _ = native.load()
    return () if library is None else tuple(library.bd_isas().decode().split())


@dataclass(frozen=True)
class Limits:
    """The most that this machine does with the instruction set and the threads in use.

    Attributes:
        read: bytes that all threads together read from memory in a second.
        operations: FP32 operations that they do in a second, on values in registers; a multiply-add counts as two.
    """

    read: float
    operations: float


class Probe:
    """Measures limits with the instruction set and as many threads as the operations use, on threads of its own."""

    def __init__(self) -> None:
        """Start the threads.

        Raises:
            UsageError: there are no compiled kernels, or the environment asks for the reference.
        """
        library, kernels = native.load()[0], native.default()
        if library is None or kernels is None:
            raise UsageError(f"there are no compiled kernels to measure: {native.why_none()}. See `bitdraft doctor`.")
        self._library = library
        self._pool = library.bd_pool_new(kernels.isa.encode(), kernels.threads)
        if not self._pool:
            raise UsageError(f"{kernels.isa}: {library.bd_error().decode()}")

    def __del__(self) -> None:
        if getattr(self, "_pool", None):
            self._library.bd_pool_free(self._pool)

    def limits(self, size: int, repeats: int) -> Limits:
        """Medians of `repeats` measurements; `size` is the buffer that is read, in bytes, larger than every cache."""
        buffer = Slab().take(size).fill_(1)  # pages that were never written are all one page, and in the cache
        read = [self._library.bd_measure_read(self._pool, buffer.data_ptr(), size) for _ in range(repeats)]
        operations = [self._library.bd_measure_ops(self._pool) for _ in range(repeats)]
        return Limits(median(read), median(operations))

    def softmax(self, logits_RV: Tensor) -> Tensor:
        """Softmax of rows of logits as the kernels compute it: [R, V] float32 -> the same."""
        out_RV = torch.empty_like(logits_RV)
        rows, width = logits_RV.shape
        code = self._library.bd_softmax(self._pool, logits_RV.data_ptr(), rows, width, 1.0, out_RV.data_ptr())
        assert not code, self._library.bd_error().decode()
        return out_RV
