"""How many tokens to draft.

A policy may end a block after a token that stays in it. It must not draw a token and drop it because of its own
probability: what is left would no longer have been drawn from q, and the output's law would change (DeepSeek's DSpark
calls what is needed here the non-anticipating property).
"""

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError


@dataclass(frozen=True)
class Fixed:
    """Blocks of always the same length, where there is room."""

    limit: int

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    @property
    def reads_probabilities(self) -> bool:
        """Never."""
        return False

    def stop_after(self, drafted: int, chosen_prob: float, top_prob: float) -> bool:
        """True when the block has `limit` tokens."""
        return drafted >= self.limit


@dataclass(frozen=True)
class Confidence:
    """Blocks that end after the first token that the draft was not sure of.

    Attributes:
        limit: longest block.
        threshold: a probability; the token that is less likely than this is kept and is the last one.
        statistic: whose probability is compared: the token's own ("chosen"), or the likeliest token's at its position
            ("top").
    """

    limit: int
    threshold: float
    statistic: Literal["chosen", "top"] = "chosen"

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        if not 0 <= self.threshold <= 1:
            raise UsageError(f"the confidence threshold is {self.threshold!r}. Expected a number from 0 to 1.")
        if self.statistic not in ("chosen", "top"):
            raise UsageError(f"the confidence statistic is {self.statistic!r}. Expected 'chosen' or 'top'.")

    @property
    def reads_probabilities(self) -> bool:
        """Always."""
        return True

    def stop_after(self, drafted: int, chosen_prob: float, top_prob: float) -> bool:
        """True when the block has `limit` tokens or the statistic is below the threshold."""
        confidence = chosen_prob if self.statistic == "chosen" else top_prob
        return drafted >= self.limit or confidence < self.threshold


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise UsageError(f"the draft length is {limit!r}. Expected at least 1; to decode without drafts, use no draft.")
