"""Who runs in the next step, and how many tokens each may draft.

First come, first served. A request is admitted when the cache has room for its prompt and what it writes first, not for
all that it may come to write; a long prompt is fed in chunks beside the others' decoding. Where the rows of a step do
not fit the cache, the youngest running request gives its place up: its cache is released, it waits again before all who
came later, and goes on later where it was. Nothing of this changes an output: the random numbers of a request are named
by positions. So whoever runs is older than whoever waits, the oldest one always gets on, and nobody starves.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from ..decoding.protocols import DraftRow, LanguageModel
from ..types import Blocks, Feed, Proposal
from .controller import Asked, DraftLengths
from .sequence import Sequence

LEAST_SHARE = 4
"""Prompts get a chunk of one in so many of a step's rows, at least, whatever is decoded and drafted beside them."""


@dataclass(frozen=True)
class Batch:
    """One step's work.

    Attributes:
        filling: sequences that only get a chunk of their prompt into the cache, with the chunk's size; 0 for one that
            needs nothing more.
        deciding: sequences whose whole text is in the cache after this step: they draft, verify and emit.
        rows: the deciding sequences as drafters see them, in the same order.
    """

    filling: tuple[tuple[Sequence, int], ...]
    deciding: tuple[Sequence, ...]
    rows: tuple[DraftRow, ...]

    def feeds(self, proposal: Proposal) -> list[Feed]:
        """What the target is given: chunks, then true and drafted tokens of the deciding sequences.

        Chunks return logits only of rows that score the prompt; so do the rows before a deciding sequence's last one.
        """
        feeds = []
        for s, count in self.filling:
            tokens = tuple(s.pending[:count])
            feeds.append(Feed(s.request.number, tokens, s.cached, logits_from=count - s.scoring_rows(count)))
        for s, drafted in zip(self.deciding, proposal.tokens, strict=True):
            true = s.pending
            first = len(true) - 1 - s.scoring_rows(len(true))
            feeds.append(Feed(s.request.number, (*true, *drafted), s.cached, logits_from=first))
        return [feed for feed in feeds if feed.tokens]


class Scheduler:
    """The queue of waiting and the set of running sequences.

    Attributes:
        waiting: admitted in this order.
        running: sequences with a place in the cache, in the order in which they came.
        lengths: decides how much of the longest block is drafted; None drafts all.
        preemptions: how often a running sequence gave its place up.
    """

    def __init__(
        self,
        target: LanguageModel,
        release: Callable[[int], None],
        *,
        max_batch: int,
        max_rows: int,
        max_scored: int,
        context_length: int,
        max_draft: int,
        lengths: DraftLengths | None = None,
    ) -> None:
        """Set the limits.

        Args:
            target: whose cache is to be shared out.
            release: forgets a request's caches, the target's and the drafter's.
            max_batch: running sequences at most.
            max_rows: rows of tokens in one step, a soft limit on chunks of prompts: decoding always goes on.
            max_scored: rows of logits in one step that log-probabilities of prompts are made from.
            context_length: tokens of one sequence at most; the cache holds as many.
            max_draft: longest block that is ever drafted; 0 without speculation.
            lengths: see the class.
        """
        self.lengths = lengths
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._target, self._release = target, release
        self._max_batch, self._max_rows, self._max_scored = max_batch, max_rows, max_scored
        self._context_length, self._max_draft = context_length, max_draft
        self._drafted = 0  # tokens that the last step was to draft: the next one will be much like it

    def schedule(self) -> Batch:
        """Make room for those who run, admit who fits, and divide the step's rows: decoding first, then prompts."""
        while len(self.running) > 1 and self._least_of_all() > self._target.blocks().available:
            self._preempt(self.running[-1])
        while self.waiting and len(self.running) < self._max_batch and self._admit(self.waiting[0]):
            pass
        return self._divide()

    def budget(self, sequence: Sequence) -> int:
        """Tokens that may be drafted: the target adds one of its own, so the last place is never drafted.

        Nothing for the first token after a prompt that is scored: the same calls score it with and without drafts, and
        the first block is the same however the prompt was fed.
        """
        if sequence.request.prompt_logprobs is not None and not sequence.origins:
            return 0
        asked = sequence.request.max_draft
        longest = self._max_draft if asked is None else min(asked, self._max_draft)
        left = sequence.request.sampling.max_tokens - len(sequence.origins)
        room = self._context_length - len(sequence.tokens)
        return max(0, min(longest, left - 1, room - 1))

    def retire(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def _least(self, s: Sequence, blocks: Blocks) -> int:
        """New blocks without which a running sequence does not get on: for all its rows if it decides, else for one."""
        rows = 1 + self.budget(s) if s.decides and s.missing == 1 else min(s.missing, 1)
        return blocks.needed(s.cached, rows)

    def _least_of_all(self) -> int:
        blocks = self._target.blocks()
        return sum(self._least(s, blocks) for s in self.running)

    def _soon(self, s: Sequence, blocks: Blocks) -> int:
        """New blocks for all missing tokens of a sequence, and for what it writes first."""
        end = min(len(s.request.prompt) + s.request.sampling.max_tokens, self._context_length) - 1
        return blocks.needed(s.cached, min(len(s.tokens) + max(blocks.size, self._max_draft), end) - s.cached)

    def _preempt(self, s: Sequence) -> None:
        self._release(s.request.number)
        s.cached = 0
        self.running.remove(s)
        self.waiting.appendleft(s)
        self.preemptions += 1

    def _admit(self, s: Sequence) -> bool:
        """Let the first in the queue run, with what the prefix cache has of it, if it fits beside those who run."""
        number = s.request.number
        adopted = self._target.adopt(number, s.tokens) if s.scored else 0  # scores need every row of the prompt
        s.cached = adopted
        blocks = self._target.blocks()
        if self.running and sum(self._soon(r, blocks) for r in (*self.running, s)) > blocks.available:
            self._target.release(number)
            s.cached = 0
            return False
        if s.adopted is None:
            s.adopted = adopted
        self.running.append(self.waiting.popleft())
        return True

    def _divide(self) -> Batch:
        blocks = self._target.blocks()
        free = max(blocks.available - self._least_of_all(), 0)
        deciding = [s for s in self.running if s.decides and s.missing == 1]
        drafted = min(self._drafted, sum(self.budget(s) for s in deciding))
        rows = max(self._max_rows - len(deciding) - drafted, self._max_rows // LEAST_SHARE, 1)
        scored, filling = self._max_scored, []
        for s in [s for s in self.running if not s.decides or s.missing > 1]:
            least = self._least(s, blocks)
            held = -(-s.cached // blocks.size) + least + free
            count = min(s.missing, rows, held * blocks.size - s.cached)
            while (excess := s.scoring_rows(count) - scored) > 0:
                count -= excess
            whole = s.decides and count == s.missing
            if whole and blocks.needed(s.cached, count + self.budget(s)) > least + free:
                whole, count = False, count - 1  # the last token waits until a whole draft fits behind it
            if s.missing and not count:
                continue
            free -= blocks.needed(s.cached, count + whole * self.budget(s)) - least
            rows, scored = rows - count, scored - s.scoring_rows(count)
            if whole:
                deciding.append(s)
            else:
                filling.append((s, count))
        lengths = self._draft_lengths(deciding)
        self._drafted = sum(lengths)
        rows_to_draft = tuple(s.draft_row(length, self.budget(s)) for s, length in zip(deciding, lengths, strict=True))
        return Batch(tuple(filling), tuple(deciding), rows_to_draft)

    def _draft_lengths(self, deciding: Sequences[Sequence]) -> list[int]:
        """How many tokens to draft for each sequence that decides in this step."""
        budgets = [self.budget(s) for s in deciding]
        if self.lengths is None or not deciding:
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
        return self.lengths.lengths(asked)
