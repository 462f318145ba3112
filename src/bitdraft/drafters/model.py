"""Draft with a smaller model, or with a low-bit copy.

Letters: B rows, K drafted tokens of the longest row, V vocabulary.
"""

import sys
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..decoding.protocols import DraftRow, LanguageModel, LookaheadPolicy, Purpose
from ..decoding.sampling import History, distribution, greedy_tokens
from ..errors import NothingLeftError, NumericsError, UsageError
from ..types import Feed, Proposal
from .point_mass import point_masses


class _Block:
    """The block that is being drafted for one row.

    Attributes:
        missing: tokens of the row that the draft's cache does not hold yet; fed before the first draft.
        open: whether more is to be drafted.
        behind: a part of a long text is fed, and nothing is drafted in this step.
    """

    def __init__(self, row: DraftRow) -> None:
        self.row = row
        self.tokens: list[int] = []
        self.probs: list[Tensor] = []  # stays empty for a point mass, and where the coupled rule verifies
        self.history: History = row.history
        self.missing: Sequence[int] = ()
        self.budget = 0
        self.open = self.behind = False


class ModelDrafter:
    """Draws each token from the draft model's own distribution, under the request's own filters.

    The rows of a batch are drafted together, token by token; a row leaves when its block is full, when the policy
    stops it, after an end-of-sequence token, or where a grammar ends. Nothing is drafted for a row whose text has
    outgrown the draft's context, that finds no room in the draft's cache, or of which more than a chunk is still to be
    fed. All of this looks at what was committed and how long it is, never at what is drawn, so it biases nothing.
    """

    def __init__(
        self, model: LanguageModel, policy: LookaheadPolicy, eos_ids: Iterable[int], max_rows: int | None = None
    ) -> None:
        """Wrap a model.

        Args:
            model: the draft, with the target's vocabulary (ids it does not share at -inf).
            policy: how long blocks get.
            eos_ids: nothing is drafted after these, unless a request ignores them.
            max_rows: tokens of one text that a step feeds at most, of longer ones a part in each step; None feeds all.
        """
        self._model, self._policy, self._eos_ids = model, policy, frozenset(eos_ids)
        self._max_rows = max_rows or sys.maxsize
        self._cached: dict[int, int] = {}

    def propose(self, rows: Sequence[DraftRow]) -> Proposal:
        """Draft up to `row.budget` tokens after each row; `probs` is what each token was drawn from.

        If all rows are greedy or coupled, every token is a point mass: nothing of the size of the vocabulary is
        written down. A coupled row's tokens are drawn with the noise that the target's own are drawn with.
        """
        point_mass = all(row.sampling.temperature == 0 or row.coupled for row in rows)
        blocks = self._blocks(rows)
        feeding = [block for block in blocks if block.open or block.behind]
        while feeding:
            logits = self._feed(feeding)
            for block, logits_V in zip([block for block in feeding if block.open], logits, strict=True):
                self._draw(block, logits_V, point_mass)
            feeding = [block for block in feeding if block.open]
        if point_mass:
            return point_masses([block.tokens for block in blocks])
        return _pack(blocks, self._model.vocab_size)

    def commit(self, request: int, length: int) -> None:
        """The first `length` tokens of what this drafter was told and drafted are true; forget the rest."""
        if request in self._cached:
            self._cached[request] = min(self._cached[request], length)
            self._model.truncate(request, self._cached[request])

    def release(self, request: int) -> None:
        """Forget a request."""
        self._cached.pop(request, None)
        self._model.release(request)

    def _blocks(self, rows: Sequence[DraftRow]) -> list[_Block]:
        """One block for each row, open where there is something to draft and room for it."""
        blocks, promised = [], 0
        for row in rows:
            block = _Block(row)
            blocks.append(block)
            budget = min(row.budget, self._policy.limit, self._model.context_length - len(row.tokens) + 1)
            if budget < 1:
                continue
            if row.request not in self._cached:
                self._cached[row.request] = self._model.adopt(row.request, row.tokens)
            cached, room = self._cached[row.request], self._model.blocks()
            missing = min(len(row.tokens) - cached, self._max_rows)
            behind = cached + missing < len(row.tokens)
            needed = room.needed(cached, missing if behind else missing + budget - 1)
            if promised + needed <= room.available:
                promised += needed
                block.budget, block.open, block.behind = budget, not behind, behind
                block.missing = row.tokens[cached : cached + missing]
        return blocks

    def _feed(self, blocks: Sequence[_Block]) -> Tensor:
        """Logits [rows, V] after what is new of each block, for the open ones."""
        feeds = []
        for block in blocks:
            new = block.tokens[-1:] or block.missing
            feeds.append(Feed(block.row.request, new, self._cached[block.row.request], len(new) - block.open))
        logits = self._model.forward(feeds)
        for feed in feeds:
            self._cached[feed.request] += len(feed.tokens)
        return logits

    def _draw(self, block: _Block, logits_V: Tensor, point_mass: bool) -> None:
        """Draw one token. Where none can be drawn, the block ends.

        The only tokens that may come may be none of the draft's own; the request may be wrong, which the target finds
        out for this request alone; or the draft's logits are not numbers, and the target can still serve the request.
        """
        try:
            self._extend(block, logits_V, point_mass)
        except (NumericsError, UsageError) as error:
            if isinstance(error, NumericsError) and not isinstance(error, NothingLeftError):
                warnings.warn(f"nothing is drafted where the draft is broken: {error}", RuntimeWarning, stacklevel=2)
            block.open = False

    def _extend(self, block: _Block, logits_V: Tensor, point_mass: bool) -> None:
        row, start = block.row, block.row.start
        ending_ids = row.sampling.ending_ids(self._eos_ids)
        chosen = top = 1.0
        if point_mass and not row.coupled:
            token = greedy_tokens(logits_V[None], (), row.sampling, block.history, ending_ids)[0]
        else:
            probs, position = distribution(logits_V, row.sampling, block.history, ending_ids), start + len(block.tokens)
            if row.coupled:
                token = row.randomness.coupled_draw(probs, position)
            else:
                token = row.randomness.draw(probs, start, position, Purpose.DRAFT)
                block.probs.append(probs)
            chosen, top = float(probs[token]), float(probs.max())
        block.tokens.append(token)
        block.history = block.history.extended(token)
        stop = self._policy.stop_after(len(block.tokens), chosen, top)
        full = len(block.tokens) == block.budget
        block.open = not (stop or full or token in ending_ids or block.history.ended)


def _pack(blocks: Sequence[_Block], vocab_size: int) -> Proposal:
    """Blocks of different lengths in one proposal, their distributions padded to the longest."""
    longest = max((len(block.tokens) for block in blocks), default=0)
    dtype = next((block.probs[0].dtype for block in blocks if block.probs), torch.float32)
    probs = torch.zeros(len(blocks), longest, vocab_size, dtype=dtype)
    for b, block in enumerate(blocks):
        for k, probs_V in enumerate(block.probs):
            probs[b, k] = probs_V
    return Proposal(tuple(tuple(block.tokens) for block in blocks), probs)
