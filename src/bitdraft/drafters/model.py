"""Draft with a smaller model, or with a low-bit copy.

Letters: B rows, K drafted tokens of the longest row, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..decoding.protocols import DraftRow, LanguageModel, LookaheadPolicy, Purpose
from ..decoding.sampling import History, distribution, greedy_tokens
from ..errors import NothingLeftError
from ..types import Feed, Proposal
from .point_mass import point_masses


class _Block:
    """The block that is being drafted for one row."""

    def __init__(self, row: DraftRow, budget: int) -> None:
        self.row, self.budget = row, budget
        self.tokens: list[int] = []
        self.probs: list[Tensor] = []  # stays empty for a point mass
        self.history: History = row.history
        self.open = budget > 0


class ModelDrafter:
    """Draws each token from the draft model's own distribution, under the request's own filters.

    The rows of a batch are drafted together, token by token; a row leaves when its block is full, when the policy
    stops it, after an end-of-sequence token, or where a grammar ends. A row whose text has outgrown the draft's context
    is not drafted for.
    """

    def __init__(self, model: LanguageModel, policy: LookaheadPolicy, eos_ids: Iterable[int]) -> None:
        """Wrap a model.

        Args:
            model: the draft, with the target's vocabulary (ids it does not share at -inf).
            policy: how long blocks get.
            eos_ids: nothing is drafted after these, unless a request ignores them.
        """
        self._model, self._policy, self._eos_ids = model, policy, frozenset(eos_ids)
        self._cached: dict[int, int] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft up to `row.budget` tokens after each row; `probs` is what each token was drawn from.

        If all rows are greedy, every token is a point mass: nothing of the size of the vocabulary is written down.
        """
        point_mass = all(row.sampling.temperature == 0 for row in rows)
        blocks = [_Block(row, self._budget(row)) for row in rows]
        while open_blocks := [block for block in blocks if block.open]:
            logits = self._model.forward([self._feed(block) for block in open_blocks])
            for block, logits_V in zip(open_blocks, logits, strict=True):
                self._draw(block, logits_V, point_mass)
        if point_mass:
            return point_masses([block.tokens for block in blocks])
        return _pack(blocks, self._model.vocab_size)

    def commit(self, request: int, length: int) -> None:
        """The first `length` tokens of what this drafter was told and drafted are true; forget the rest."""
        self._cached[request] = min(self._cached.get(request, 0), length)
        self._model.truncate(request, self._cached[request])

    def release(self, request: int) -> None:
        """Forget a request."""
        self._cached.pop(request, None)
        self._model.release(request)

    def _budget(self, row: DraftRow) -> int:
        return min(row.budget, self._policy.limit, self._model.context_length - len(row.tokens) + 1)

    def _feed(self, block: _Block) -> Feed:
        start = self._cached.get(block.row.request, 0)
        new = block.tokens[-1:] or block.row.tokens[start:]
        self._cached[block.row.request] = start + len(new)
        return Feed(block.row.request, new, start, logits_from=len(new) - 1)

    def _draw(self, block: _Block, logits_V: Tensor, point_mass: bool) -> None:
        row, start = block.row, block.row.start
        ending_ids = row.sampling.ending_ids(self._eos_ids)
        chosen = top = 1.0
        try:
            if point_mass:
                token = greedy_tokens(logits_V[None], (), row.sampling, block.history, ending_ids)[0]
            else:
                probs = distribution(logits_V, row.sampling, block.history, ending_ids)
        except NothingLeftError:  # the only tokens that may come are none of the draft's own vocabulary
            block.open = False
            return
        if not point_mass:
            token = row.randomness.draw(probs, start, start + len(block.tokens), Purpose.DRAFT)
            block.probs.append(probs)
            chosen, top = float(probs[token]), float(probs.max())
        block.tokens.append(token)
        block.history = block.history.extended(token)
        stop = self._policy.stop_after(len(block.tokens), chosen, top)
        ended = token in ending_ids or block.history.ended
        block.open = not (stop or ended or len(block.tokens) == block.budget)


def _pack(blocks: Sequence[_Block], vocab_size: int) -> Proposal:
    """Blocks of different lengths in one proposal, their distributions padded to the longest."""
    longest = max((len(block.tokens) for block in blocks), default=0)
    dtype = next((block.probs[0].dtype for block in blocks if block.probs), torch.float32)
    probs = torch.zeros(len(blocks), longest, vocab_size, dtype=dtype)
    for b, block in enumerate(blocks):
        for k, probs_V in enumerate(block.probs):
            probs[b, k] = probs_V
    return Proposal(tuple(tuple(block.tokens) for block in blocks), probs)
