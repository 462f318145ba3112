"""Who runs in the next step, and how many tokens each may draft.

First come, first served. A request is admitted when the cache can hold it to its end, so that nothing has to be thrown
out half-way; a long prompt is fed in chunks beside the others' decoding.
"""

from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from ..decoding.protocols import DraftRow
from ..models.kv import BLOCK_SIZE
from ..types import Feed, Proposal
from .controller import Asked, DraftLengths
from .sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """One step's work.

    Attributes:
        filling: sequences that only get a chunk of their prompt into the cache, with the chunk's size.
        deciding: sequences whose whole text is in the cache after this step: they draft, verify and emit.
        rows: the deciding sequences as drafters see them, in the same order.
    """

    filling: tuple[tuple[Sequence, int], ...]
    deciding: tuple[Sequence, ...]
    rows: tuple[DraftRow, ...]

    def feeds(self, proposal: Proposal) -> list[Feed]:
        """What the target is given: chunks without logits, then true and drafted tokens of the deciding sequences."""
        chunks = [
            Feed(s.request.number, tuple(s.pending[:count]), s.cached, logits_from=count) for s, count in self.filling
        ]
        blocks = []
        for s, drafted in zip(self.deciding, proposal.tokens, strict=True):
            true = s.pending
            blocks.append(Feed(s.request.number, (*true, *drafted), s.cached, logits_from=len(true) - 1))
        return chunks + blocks


class Scheduler:
    """The queue of waiting and the set of running sequences.

    Attributes:
        waiting: admitted in this order.
        running: sequences with a place in the cache.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_rows: int,
        kv_tokens: int,
        context_length: int,
        max_draft: int,
        lengths: DraftLengths | None = None,
    ) -> None:
        """Set the limits.

        Args:
            max_batch: running sequences at most.
            max_rows: rows of tokens in one step, a soft limit on chunks of prompts: decoding always goes on.
            kv_tokens: tokens that the target's cache holds.
            context_length: tokens of one sequence at most.
            max_draft: longest block that is ever drafted; 0 without speculation.
            lengths: decides how much of that is drafted; None drafts all.
        """
        self._lengths = lengths
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._max_batch, self._max_rows = max_batch, max_rows
        self._kv_tokens, self._context_length, self._max_draft = kv_tokens, context_length, max_draft

    def footprint(self, sequence: Sequence) -> int:
        """Cache tokens that a sequence can come to need, its longest block included, in whole blocks."""
        total = len(sequence.request.prompt) + sequence.request.sampling.max_tokens + self._max_draft
        return -(-min(total, self._context_length) // BLOCK_SIZE) * BLOCK_SIZE

    def schedule(self) -> Batch:
        """Admit what fits, and divide the step's rows: decoding first, then chunks of prompts."""
        held = sum(self.footprint(s) for s in self.running) if self.waiting else 0
        while self.waiting and len(self.running) < self._max_batch:
            held += self.footprint(self.waiting[0])
            if self.running and held > self._kv_tokens:
                break
            self.running.append(self.waiting.popleft())
        deciding = [s for s in self.running if len(s.tokens) - s.cached == 1]
        room = max(self._max_rows - sum(1 + self.budget(s) for s in deciding), 1)
        filling = []
        for s in self.running:
            pending = len(s.tokens) - s.cached
            if pending > 1 and room > 0:
                count = min(pending, room)
                room -= count
                if count == pending:
                    deciding.append(s)
                else:
                    filling.append((s, count))
        lengths = self._draft_lengths(deciding)
        rows = tuple(s.draft_row(length) for s, length in zip(deciding, lengths, strict=True))
        return Batch(tuple(filling), tuple(deciding), rows)

    def _draft_lengths(self, deciding: Sequences[Sequence]) -> list[int]:
        """How many tokens to draft for each sequence that decides in this step."""
        budgets = [self.budget(s) for s in deciding]
        if self._lengths is None or not deciding:
            return budgets
        asked = [
            Asked(
                request=s.request.number,
                domain=s.request.domain,
                context=len(s.tokens),
                limit=budget,
                left=s.request.sampling.max_tokens - len(s.origins),
                unread=len(s.pending),
            )
            for s, budget in zip(deciding, budgets, strict=True)
        ]
        return self._lengths.lengths(asked)

    def budget(self, sequence: Sequence) -> int:
        """Tokens that may be drafted: the target adds one of its own, so the last place is never drafted."""
        left = sequence.request.sampling.max_tokens - len(sequence.origins)
        room = self._context_length - len(sequence.tokens)
        return max(0, min(self._max_draft, left - 1, room - 1))

    def retire(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
