"""Drafters whose drafts are written down beforehand.

With them the loop around a draft can be tested without one: everything is accepted, nothing is, or the block breaks at
any place. They are ordinary drafters and serve a user's own tests and benchmarks as well.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from ..decoding.protocols import DraftRow
from ..types import Proposal
from .point_mass import point_masses


class Scripted:
    """Drafts what a function of the row says, cut to the row's budget."""

    def __init__(self, script: Callable[[DraftRow], Sequence[int]]) -> None:
        """Take the function."""
        self._script = script

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft by the script."""
        return point_masses([self._script(row)[: row.budget] for row in rows])

    def commit(self, request: int, length: int) -> None:
        """Nothing to forget."""

    def release(self, request: int) -> None:
        """Nothing to forget."""


def oracle(outputs: Mapping[int, Sequence[int]]) -> Scripted:
    """Drafts the outputs that are given per request number. With the target's greedy outputs all is accepted."""
    return Scripted(lambda row: _ahead(outputs, row))


def always_wrong(outputs: Mapping[int, Sequence[int]], vocab_size: int) -> Scripted:
    """Drafts the next id (modulo the vocabulary) after each one that `outputs` has: nothing is accepted."""
    return Scripted(lambda row: [(token + 1) % vocab_size for token in _ahead(outputs, row)])


def half_wrong(outputs: Mapping[int, Sequence[int]], vocab_size: int, random: Random) -> Scripted:
    """Drafts `outputs` with one wrong token in each block, at a place that `random` chooses."""

    def script(row: DraftRow) -> list[int]:
        draft = list(_ahead(outputs, row))
        if draft:
            place = random.randrange(len(draft))
            draft[place] = (draft[place] + 1) % vocab_size
        return draft

    return Scripted(script)


def always(token: int) -> Scripted:
    """Drafts one token everywhere, such as the end of sequence."""
    return Scripted(lambda row: [token] * row.budget)


def _ahead(outputs: Mapping[int, Sequence[int]], row: DraftRow) -> Sequence[int]:
    return outputs[row.request][row.start : row.start + row.budget]
