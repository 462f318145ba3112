"""The machine that a measurement is made on."""

import os
import platform
from pathlib import Path

import torch

from .. import __version__
from .trace import Machine


def this_machine() -> Machine:
    """Describe the machine: processor, cores that may be used, memory, versions."""
    return Machine(
        cpu=_cpu_name(),
        cores=min(torch.get_num_threads(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 10**6),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        bitdraft=__version__,
    )


def _cpu_name() -> str:
    """The processor's name with the widest vector instructions, on which speeds depend as much."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    widest = torch.backends.cpu.get_cpu_capability()
    return f"{names[0] if names else platform.processor() or platform.machine()} ({widest})"
