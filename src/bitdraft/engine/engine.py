"""The loop: schedule, propose, verify, commit.

`step` is the whole system. Everything before `commit` is speculation and can be thrown away; `commit` is the only
place where anything becomes true.

Letters: B deciding sequences, K drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from ..decoding.protocols import Drafter, LanguageModel, Randomness
from ..decoding.sampling import History, PointMasses, verifiable
from ..decoding.streams import Streams
from ..decoding.verify import Rule, verify
from ..errors import UsageError
from ..types import Origin, Proposal, StepRecord, Verification
from .scheduler import Batch, Scheduler
from .sequence import Finish, Request
from .sequence import Sequence as Running


@dataclass(frozen=True)
class Emission:
    """What one step added to one request.

    Attributes:
        request: its number.
        tokens: new output tokens, at least one.
        origins: where each came from.
        text: new text, cut before a stop string, and held back while it may begin one; empty without a detokeniser.
        finish: why the output ended with this step; None if it goes on.
    """

    request: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    finish: Finish | None


class Engine:
    """Runs requests through a target and, if there is one, a drafter."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        *,
        eos_ids: Iterable[int],
        max_draft: int,
        max_batch: int,
        kv_tokens: int,
        max_rows: int = 512,
        rule: Rule = "block",
        randomness: Callable[[int, int], Randomness] = Streams,
        on_record: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Put the parts together.

        Args:
            target: the model whose distribution the output follows.
            drafter: what suggests tokens; None decodes without speculation.
            eos_ids: ids that end an output unless a request ignores them.
            max_draft: longest block that may be drafted.
            max_batch: requests that run at once.
            kv_tokens: tokens that the target's cache holds.
            max_rows: rows of tokens that a step with chunks of prompts aims at.
            rule: how blocks are verified, see `decoding.verify`.
            randomness: makes a request's random decisions from (seed, request number).
            on_record: is handed a `StepRecord` for every sequence of every step.
            clock: seconds, for the records.
        """
        self.target = target
        self.drafter = drafter
        self.scheduler = Scheduler(
            max_batch=max_batch,
            max_rows=max_rows,
            kv_tokens=kv_tokens,
            context_length=target.context_length,
            max_draft=max_draft if drafter else 0,
        )
        self._eos_ids = frozenset(eos_ids)
        self._rule: Rule = rule
        self._randomness = randomness
        self._on_record = on_record
        self._clock = clock

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UsageError: a prompt that is empty, does not fit the context or the vocabulary, or stop strings without a
                detokeniser.
        """
        limit, length = self.target.context_length, len(request.prompt)
        if not 0 < length < limit:
            raise UsageError(
                f"request {request.number}: the prompt has {length} tokens. Expected 1 to {limit - 1}: the context is "
                f"{limit} and the output needs a place in it. Shorten the prompt."
            )
        if max(request.prompt) >= self.target.vocab_size or min(request.prompt) < 0:
            raise UsageError(
                f"request {request.number}: token ids from {min(request.prompt)} to {max(request.prompt)}. "
                f"Expected ids from 0 to {self.target.vocab_size - 1}. Use the target's own tokenizer."
            )
        if request.sampling.stop and request.text is None:
            raise UsageError(
                f"request {request.number}: stop strings need a detokeniser. Pass `text`, or use stop_ids."
            )
        sequence = Running(
            request=request,
            randomness=self._randomness(request.sampling.seed, request.number),
            history=History.after_prompt(request.prompt, request.constraint),
            tokens=list(request.prompt),
            ending_ids=request.sampling.ending_ids(self._eos_ids),
        )
        if request.sampling.max_tokens > 0:
            self.scheduler.waiting.append(sequence)

    def step(self) -> list[Emission]:
        """Run one step and return what it made true."""
        started = self._clock()
        batch = self.scheduler.schedule()
        try:
            proposal = self._propose(batch)
            drafted = self._clock()
            logits = self.target.forward(batch.feeds(proposal))
            verified = self._clock()
            verdict = verify(proposal, self._distributions(batch, proposal, logits), batch.rows, self._rule)
        except BaseException:
            self._roll_back(batch)
            raise
        emissions = self.commit(batch, proposal, verdict)
        self._record(batch, proposal, verdict, emissions, (started, drafted, verified, self._clock()))
        return emissions

    def commit(self, batch: Batch, proposal: Proposal, verdict: Verification) -> list[Emission]:
        """The one place where anything becomes true: tokens, text, counts, cache lengths, the end of a request."""
        for sequence, count in batch.filling:
            sequence.cached += count
        emissions = []
        for b, sequence in enumerate(batch.deciding):
            accepted, drafted = verdict.accepted[b], proposal.tokens[b]
            block: list[tuple[int, Origin]] = [(token, "draft") for token in drafted[:accepted]]
            block.append((verdict.next_token[b], "corrected" if accepted < len(drafted) else "free"))
            known, text = len(sequence.tokens), sequence.visible
            for token, origin in block:
                sequence.append(token, origin, self.target.context_length)
                if sequence.finish:
                    break
            sequence.cached = min(known + accepted, len(sequence.tokens))
            emitted = len(sequence.tokens) - known
            emissions.append(
                Emission(
                    sequence.request.number,
                    tuple(sequence.tokens[known:]),
                    tuple(sequence.origins[-emitted:]),
                    sequence.visible[len(text) :],
                    sequence.finish,
                )
            )
            self._settle(sequence)
        return emissions

    def run(self) -> Iterable[Emission]:
        """Step until nothing is left, yielding what becomes true as it does."""
        while self.scheduler.running or self.scheduler.waiting:
            yield from self.step()

    def cancel(self, request: int) -> None:
        """Stop a request and free what it holds. An unknown request is no error."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.number == request:
                self._retire(sequence)

    def _propose(self, batch: Batch) -> Proposal:
        if self.drafter and batch.rows:
            return self.drafter.propose(batch.rows)
        return Proposal(((),) * len(batch.rows))

    def _distributions(self, batch: Batch, proposal: Proposal, logits: Tensor) -> Sequence[Tensor | PointMasses]:
        per_row, at = [], 0
        for sequence, drafted in zip(batch.deciding, proposal.tokens, strict=True):
            rows = logits if len(batch.deciding) == 1 else logits[at : at + len(drafted) + 1]
            sampling, history = sequence.request.sampling, sequence.history
            per_row.append(verifiable(rows, drafted, sampling, history, sequence.ending_ids))
            at += len(drafted) + 1
        return per_row

    def _settle(self, sequence: Running) -> None:
        """Bring the caches of target and drafter to what is true, or free them if the request has ended."""
        if sequence.finish:
            self._retire(sequence)
            return
        self.target.truncate(sequence.request.number, sequence.cached)
        if self.drafter:
            self.drafter.commit(sequence.request.number, sequence.cached)

    def _retire(self, sequence: Running) -> None:
        self.scheduler.retire(sequence)
        self.target.release(sequence.request.number)
        if self.drafter:
            self.drafter.release(sequence.request.number)

    def _roll_back(self, batch: Batch) -> None:
        """After an error: every cache back to what was true before the step."""
        for sequence in [*(s for s, _ in batch.filling), *batch.deciding]:
            self.target.truncate(sequence.request.number, sequence.cached)
            if self.drafter:
                self.drafter.commit(sequence.request.number, sequence.cached)

    def _record(
        self,
        batch: Batch,
        proposal: Proposal,
        verdict: Verification,
        emissions: Sequence[Emission],
        times: tuple[float, float, float, float],
    ) -> None:
        if self._on_record is None:
            return
        started, drafted, verified, ended = times
        rows = sum(count for _, count in batch.filling) + sum(1 + len(drafted) for drafted in proposal.tokens)
        for b, emission in enumerate(emissions):
            sequence = batch.deciding[b]
            self._on_record(
                StepRecord(
                    request=emission.request,
                    start=len(sequence.origins) - len(emission.tokens),
                    proposed=len(proposal.tokens[b]),
                    accepted=verdict.accepted[b],
                    emitted=len(emission.tokens),
                    overlap=verdict.overlap[b],
                    batch=len(batch.deciding),
                    rows=rows,
                    draft_seconds=drafted - started,
                    verify_seconds=verified - drafted,
                    other_seconds=ended - verified,
                )
            )
