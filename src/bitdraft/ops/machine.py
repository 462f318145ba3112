"""What of this machine the kernels may use: cores, and memory in large pages."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError

_LARGE = 1 << 21
"""Bytes of a large page on x86-64, and a multiple of it elsewhere."""


def thread_count(environ: dict[str, str] | os._Environ[str], cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Threads to compute with: `BITDRAFT_THREADS`, or the cores that affinity and the control group's quota leave.

    Raises:
        UsageError: `BITDRAFT_THREADS` is no number from 1 on.
    """
    asked = environ.get("BITDRAFT_THREADS", "")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise UsageError(f"BITDRAFT_THREADS={asked}. Expected a number of threads from 1 on.")
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the control group may use, of either version of control groups; None for no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(limit) / int(period) if limit.isdecimal() and int(period) else None


@contextmanager
def torch_on_all_cores() -> Iterator[None]:
    """Let torch use as many threads as the kernels, for a stretch of work that is torch's alone.

    Beside the kernels torch runs on one: its threads spin for milliseconds after each operation on a row of logits, on
    the cores that the kernels' threads are waiting for.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, thread_count(os.environ)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Slab:
    """Memory that weights are cut from, in large pages where the system grants them.

    Weights are read once a step from end to end: with small pages, looking up addresses costs up to a third of the
    bandwidth. A slab lives for as long as a tensor that was cut from it.
    """

    SIZE = 64 * _LARGE

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Bytes that are 64-byte aligned: [size] uint8, not initialised."""
        padded = -(-size // 64) * 64
        # What is left outlives the caller's inference mode, and its tensors must not be written outside of one.
        with torch.inference_mode(False):
            if padded > len(self._left):
                self._left = _pages(max(padded, self.SIZE) if padded < self.SIZE // 4 else padded)
            taken, self._left = self._left[:size], self._left[padded:]
        return taken


def _pages(size: int) -> Tensor:
    whole = -(-size // _LARGE) * _LARGE
    # Private: the pages of a shared mapping, Python's default, are not made large.
    region = mmap.mmap(-1, whole + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(region, dtype=np.uint8)
    skip = -array.ctypes.data % _LARGE
    return torch.from_numpy(array[skip : skip + whole])
