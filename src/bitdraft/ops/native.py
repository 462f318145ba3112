"""The only place that knows whether an operation has a compiled version.

`find` is the dispatch point: `ops/__init__.py` asks it for every operation and falls back to `reference.py`, which is
the specification. A compiled library announces its operations by filling `KERNELS` when it is imported; while it holds
nothing, every operation runs as plain PyTorch, and `why_none` says so to whoever prints figures.
"""

from collections.abc import Callable
from typing import Any

KERNELS: dict[str, Callable[..., Any]] = {}
"""Operation name -> compiled version with the arguments and the result of `reference.NAME`."""


def find(operation: str) -> Callable[..., Any] | None:
    """The compiled version of `operation`, or None when the reference has to run."""
    return KERNELS.get(operation)


def why_none() -> str | None:
    """Why no compiled kernel runs, in a sentence; None when some do."""
    if KERNELS:
        return None
    return "no compiled kernels in this build: every format runs as plain PyTorch in FP32, at the speed of FP32"
