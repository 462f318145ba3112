"""The machine that a measurement is made on."""

import os
import platform

import torch

from .. import __version__
from ..engine.curve import backend
from ..ops import hardware
from .trace import Machine


def this_machine() -> Machine:
    """Describe the machine: processor, cores that may be used, memory, versions."""
    return Machine(
        # With the widest vector instructions, on which speeds depend as much.
        cpu=f"{hardware.processor()} ({torch.backends.cpu.get_cpu_capability()})",
        cores=backend()[1],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        bitdraft=__version__,
    )
