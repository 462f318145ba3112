"""Proposals of drafters that draw nothing: every token is a point mass."""

from collections.abc import Sequence

from ..decoding.constraint import Constraint
from ..errors import UsageError
from ..types import Proposal


def point_masses(drafts: Sequence[Sequence[int]]) -> Proposal:
    """One block of tokens per sequence, of any lengths, as a proposal without probabilities."""
    return Proposal(tuple(map(tuple, drafts)))


def allowed_prefix(constraint: Constraint | None, tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens before the first one that a grammar does not allow: what follows would be verified in vain.

    A grammar that fails is the target's to report, for this request alone: here it allows nothing.
    """
    for count, token in enumerate(tokens):
        if constraint is None:
            break
        try:
            allowed_V = constraint.allowed_V
        except UsageError:
            return tuple(tokens[:count])
        if allowed_V is not None and not (token < len(allowed_V) and bool(allowed_V[token])):
            return tuple(tokens[:count])
        constraint = constraint.after(token)
    return tuple(tokens)
