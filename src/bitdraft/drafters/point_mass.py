"""Proposals of drafters that draw nothing: every token is a point mass."""

from collections.abc import Sequence

import torch

from ..types import Proposal


def point_masses(drafts: Sequence[Sequence[int]]) -> Proposal:
    """One row of tokens per sequence, of any lengths, as a proposal without probabilities."""
    lengths = [len(draft) for draft in drafts]
    longest = max(lengths, default=0)
    padded = [[*draft, *[-1] * (longest - len(draft))] for draft in drafts]
    tokens = torch.tensor(padded, dtype=torch.int64).reshape(len(drafts), longest)
    return Proposal(tokens, torch.tensor(lengths, dtype=torch.int64))
