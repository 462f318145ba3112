"""Prompts of wanted lengths, made of the texts of a workload: real language, as acceptance depends on what is asked.

How many tokens a text has is the server's business, and not every server says. So it is asked twice, with a short and a
long text and one token of output; what it counts gives tokens a character, and what the chat template adds. A prompt
is then as long as wanted to a few percent, and figures are made from what the server counted, not from what was wanted.

Every prompt begins with its own number. Otherwise a second arm would find the first one's prompts in the server's
cache, and read them in no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from .workload import load_workload

CHARACTERS_A_TOKEN = 4.0
"""For servers that do not count: about right for English."""


@dataclass(frozen=True)
class Fit:
    """How tokens follow from characters.

    Attributes:
        per_character: tokens a character. extra: tokens that every prompt has besides.
        counted: whether the server said so.
    """

    per_character: float = 1 / CHARACTERS_A_TOKEN
    extra: float = 0.0
    counted: bool = False

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> "Fit":
        """From (characters, tokens) of two texts."""
        per_character = (long[1] - short[1]) / (long[0] - short[0])
        if per_character <= 0:
            return cls()
        return cls(per_character, max(short[1] - per_character * short[0], 0.0), True)

    def characters(self, tokens: int) -> int:
        """Characters of a prompt with so many tokens; at least a few."""
        return max(round((tokens - self.extra) / self.per_character), 8)


class Prompts:
    """Texts of any length, cut from those of a workload, one after the other and from the start again."""

    def __init__(self, texts: Sequence[str], seed: int) -> None:
        """Take the texts; `seed` draws where each prompt begins."""
        if not any(texts):
            raise UsageError("there is no text to ask about. Expected a workload whose prompts are not empty.")
        self._texts, self._seed = [text for text in texts if text], seed

    @classmethod
    def of(cls, workload: str, seed: int) -> "Prompts":
        """The prompts of a built-in workload or a file.

        Raises:
            UsageError: see `load_workload`.
        """
        found = load_workload(workload, None)
        bodies = [p.text if p.messages is None else "\n\n".join(m["content"] for m in p.messages) for p in found]
        return cls([body or "" for body in bodies], seed)

    def sample(self, characters: int) -> str:
        """A text for counting."""
        return self._from(0, characters)

    def prompt(self, names: Sequence[int], index: int, characters: int) -> str:
        """The text of one request.

        Args:
            names: numbers that tell this block from every other.
            index: of the request; the same index asks about the same texts in every block.
            characters: about so many.
        """
        mark = int(np.random.default_rng([self._seed, *names, index]).integers(10**8, 10**9))
        start = int(np.random.default_rng([self._seed, index]).integers(len(self._texts)))
        head = f"Request {mark}.\n\n"
        return head + self._from(start, max(characters - len(head), 8))

    def _from(self, start: int, characters: int) -> str:
        parts, length, at = [], 0, start
        while length < characters:
            parts.append(self._texts[at % len(self._texts)])
            length += len(parts[-1]) + 2
            at += 1
        return "\n\n".join(parts)[:characters]
