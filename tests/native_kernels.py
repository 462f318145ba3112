"""The compiled kernels of every instruction set that this machine runs, for tests that compare them."""

from functools import cache

import pytest

from bitdraft.ops import native
from bitdraft.ops.native import Native


@cache
def kernels(isa: str, threads: int) -> Native:
    """The kernels of one instruction set."""
    library, why = native.load()
    assert library is not None, why
    return Native(library, isa, threads)


def instruction_sets() -> list[str]:
    """Names for a parametrised test; one that fails where there is no library, for CI builds it."""
    library, _ = native.load()
    return library.bd_isas().decode().split() if library else ["scalar"]


every_isa = pytest.mark.parametrize("isa", instruction_sets())
"""Runs a test once for each instruction set."""
