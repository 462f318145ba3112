"""Draft by copying what followed the last few tokens earlier in the request's own text.

The idea is prompt lookup (Yang et al. 2304.04487, "Inference with Reference"; Saxena 2023, prompt lookup decoding).
"""

from collections.abc import Sequence

from ..decoding.protocols import DraftRow
from ..errors import UsageError
from ..types import Proposal
from .point_mass import allowed_prefix, point_masses


class NGramDrafter:
    """Finds the longest suffix of the text that occurred before, and drafts what came after it.

    Suffixes of `max_n` down to `min_n` tokens are tried. Of several occurrences the latest one with enough tokens
    after it is copied, else the one with the most tokens after it. A request that was seen before costs O(max_n) for
    each new token and O(budget) for the look-up. A draft ends before the first token that a grammar does not allow.
    """

    def __init__(self, max_n: int = 3, min_n: int = 1) -> None:
        """Set the lengths.

        Args:
            max_n: longest suffix that is looked up, tokens.
            min_n: shortest one.

        Raises:
            UsageError: not 1 <= min_n <= max_n.
        """
        if not 1 <= min_n <= max_n:
            raise UsageError(f"n-grams from {min_n} to {max_n} tokens. Expected 1 <= min_n <= max_n.")
        self._sizes = range(max_n, min_n - 1, -1)
        self._indexes: dict[int, _Index] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Copy up to `row.budget` tokens after each row; rows without a match get none."""
        return point_masses([self._draft(row) for row in rows])

    def commit(self, request: int, length: int) -> None:
        """Nothing to forget: the index holds committed tokens only."""

    def release(self, request: int) -> None:
        """Forget the index of a request."""
        self._indexes.pop(request, None)

    def _draft(self, row: DraftRow) -> Sequence[int]:
        index = self._indexes.setdefault(row.request, _Index(self._sizes))
        index.extend(row.tokens)
        if row.budget < 1:
            return ()
        for size in self._sizes:
            end = index.earlier_end(row.tokens, size, row.budget)
            if end is not None:
                return allowed_prefix(row.history.constraint, row.tokens[end : end + row.budget])
        return ()


class _Index:
    """Where every n-gram of one text ends: the latest place, and from each place the one before."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._length = 0
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: dict[int, list[int | None]] = {size: [None] for size in sizes}

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what is new in `tokens`, which only ever grows."""
        assert len(tokens) >= self._length, "committed tokens were taken back"
        for end in range(self._length + 1, len(tokens) + 1):
            for size, before in self._before.items():
                gram = tuple(tokens[end - size : end]) if end >= size else None
                before.append(self._latest.get(gram) if gram else None)
                if gram:
                    self._latest[gram] = end
        self._length = len(tokens)

    def earlier_end(self, tokens: Sequence[int], size: int, budget: int) -> int | None:
        """Where an earlier occurrence of the last `size` tokens ends, None if there is none.

        Steps back until `budget` tokens follow: at most `budget` steps, as every step is a token or more.
        """
        before = self._before[size]
        end = before[len(tokens)]
        while end is not None and end + budget > len(tokens) and before[end] is not None:
            end = before[end]
        return end
