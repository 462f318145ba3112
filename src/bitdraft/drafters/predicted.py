"""Draft what the caller says the answer is going to repeat, and by other means where the answer leaves that.

The idea is a reference text that the output copies from (Yang et al. 2304.04487, "Inference with Reference"); here the
caller names it. Where the output stands in it is found from committed tokens alone, so whether a step drafts from the
prediction or by other means is decided by the past, and the output's law is the target's.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ..decoding.protocols import Drafter, DraftRow
from ..types import Proposal
from .point_mass import allowed_prefix, point_masses

SHORTEST, LONGEST = 2, 8
"""Tokens that have to agree before a prediction is taken up again: at first, and after it was wrong several times."""


class PredictedDrafter:
    """Drafts from a row's own prediction where the output follows it, and asks another drafter for the other rows."""

    def __init__(self, otherwise: Drafter | None) -> None:
        """Wrap a drafter; None drafts nothing where no prediction is followed."""
        self._otherwise = otherwise
        self._places: dict[int, _Place] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Up to `row.room` tokens of the prediction after each row that follows one, else what the other drafts."""
        predicted = {b: tokens for b, row in enumerate(rows) if row.prediction and (tokens := self._ahead(row))}
        rest = [replace(row, budget=0) if b in predicted else row for b, row in enumerate(rows)]
        if self._otherwise and any(row.budget for row in rest):
            proposal = self._otherwise.propose(rest)
        else:
            proposal = point_masses([()] * len(rows))
        if not predicted:
            return proposal
        blocks = tuple(predicted.get(b, block) for b, block in enumerate(proposal.tokens))
        return replace(proposal, tokens=blocks, predicted=frozenset(predicted))

    def commit(self, request: int, length: int) -> None:
        """Nothing of the prediction has to be forgotten: only committed tokens were looked at."""
        if self._otherwise:
            self._otherwise.commit(request, length)

    def release(self, request: int) -> None:
        """Forget a request."""
        self._places.pop(request, None)
        if self._otherwise:
            self._otherwise.release(request)

    def _ahead(self, row: DraftRow) -> tuple[int, ...]:
        place = self._places.setdefault(row.request, _Place(row.prediction))
        at = place.after(row.tokens, row.prompt_length)
        if at is None or row.room < 1:
            return ()
        return allowed_prefix(row.history.constraint, row.prediction[at : at + row.room])


class _Place:
    """Where in a prediction an output stands.

    An output begins at the prediction's beginning, and follows it as long as the tokens are the same. After another
    token it is somewhere else until its last tokens stand in the prediction again: at the nearest place after the one
    that it left, or else at the nearest before. A place that turns out wrong at once makes the next one harder to find.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(SHORTEST, len(prediction) + 1):
            self._ends[tuple(prediction[end - SHORTEST : end])].append(end)
        self._at: int | None = 0
        self._left = 0  # the place that the output followed the prediction to
        self._read = 0  # output tokens that were looked at
        self._needed = SHORTEST
        self._fresh = False  # whether nothing yet was right after the place that was found last

    def after(self, tokens: Sequence[int], start: int) -> int | None:
        """The place in the prediction that comes next, None if the output does not follow it; O(1) for a new token.

        Args:
            tokens: prompt and output, which only ever grows.
            start: where the output begins.
        """
        while start + self._read < len(tokens):
            self._read += 1
            end = start + self._read
            if self._at is not None and self._prediction[self._at : self._at + 1] == (tokens[end - 1],):
                self._at += 1
                self._needed, self._fresh = SHORTEST, False
                continue
            if self._at is not None:
                self._left = self._at
                self._needed = min(self._needed + self._fresh, LONGEST)
            self._at = self._found(tokens[max(start, end - self._needed) : end])
            self._fresh = True
        return self._at

    def _found(self, last: Sequence[int]) -> int | None:
        """The place after the last tokens of an output."""
        if len(last) < self._needed:
            return None
        ends = self._ends.get(tuple(last[-SHORTEST:]), [])
        first = bisect_left(ends, self._left)
        for end in (*ends[first:], *reversed(ends[:first])):
            if tuple(self._prediction[max(0, end - len(last)) : end]) == tuple(last):
                return end
        return None
