"""What a grammar allows, position by position, for the target and the draft alike."""

from typing import Protocol

from torch import Tensor


class Constraint(Protocol):
    """The state of a grammar after some output. A value: `after` returns another one and leaves this one as it is.

    The engine keeps one at the committed text; the positions of a block are reached from it token by token, so a
    rejected draft leaves no trace.
    """

    @property
    def allowed_V(self) -> Tensor | None:
        """Which tokens may come next, [V] bool; None allows all, and no token at all ends the output as it is.

        Ending ids are allowed where the text may end.

        Raises:
            UsageError: the grammar cannot go on from here.
        """
        ...

    def after(self, token: int) -> "Constraint":
        """The state after one more token. One that is not allowed leads to a state that allows all: its position's
        probability is 0, so what follows it is never reached."""
        ...
