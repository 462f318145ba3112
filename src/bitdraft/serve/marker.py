"""A grammar that begins after a marker in the text, at the exact token that ends it.

Shape suffixes: V vocabulary of the target.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..decoding.constraint import Constraint
from ..models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Later:
    """A grammar that begins after a marker.

    Attributes:
        marker: what it waits for.
        then: the grammar.
        tail: the last bytes of the text, as many as may begin the marker.
    """

    marker: "Marker"
    then: Constraint
    tail: bytes = b""

    @property
    def allowed_V(self) -> Tensor | None:
        """Everything, but for what would write past the marker."""
        return self.marker.allowed(self.tail)

    def after(self, token: int) -> Constraint:
        """The state after one more token: the grammar itself, once the marker is there."""
        text = self.tail + self.marker.token_bytes(token)
        if self.marker.text in text:
            return self.then
        return replace(self, tail=text[max(0, len(text) - len(self.marker.text) + 1) :])


class Marker:
    """A text in a vocabulary: what its tokens write, and which of them write past the end of it."""

    def __init__(self, text: bytes, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Take the marker, and the vocabulary of a target with `vocab_size` logits."""
        self.text = text
        self._pieces = [tokenizer.token_bytes(token) or b"" for token in range(tokenizer.vocab_size)]
        self._vocab_size = vocab_size
        self._allowed: dict[bytes, Tensor | None] = {}

    def token_bytes(self, token: int) -> bytes:
        """What a token writes."""
        return self._pieces[token] if token < len(self._pieces) else b""

    def allowed(self, tail: bytes) -> Tensor | None:
        """All tokens but those that end the marker and go on with something else than white space; None for all."""
        begun = next(n for n in range(len(self.text) - 1, -1, -1) if tail.endswith(self.text[:n]))
        beginning = self.text[:begun]
        if beginning not in self._allowed:
            self._allowed[beginning] = self._mask(beginning)
        return self._allowed[beginning]

    def _mask(self, beginning: bytes) -> Tensor | None:
        behind = [(beginning + piece).partition(self.text)[2].strip() for piece in self._pieces]
        spilling = [token for token, text in enumerate(behind) if text]
        if not spilling:
            return None
        allowed_V = torch.ones(self._vocab_size, dtype=torch.bool)
        allowed_V[torch.tensor(spilling)] = False
        return allowed_V
