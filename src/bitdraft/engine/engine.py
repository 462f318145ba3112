"""The loop: schedule, propose, verify, commit.

`step` is the whole system. Everything before `commit` is speculation and can be thrown away; `commit` is the only
place where anything becomes true.

Letters: B deciding sequences, K drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ..decoding.protocols import Drafter, LanguageModel, Randomness
from ..decoding.sampling import History
from ..decoding.streams import Streams
from ..decoding.verify import Rule, verify
from ..errors import BitdraftError, UsageError
from ..types import Feed, Origin, Proposal, StepRecord, TokenLogprob, Verification
from .controller import DraftLengths
from .judge import Judged, describe, judge
from .scheduler import Batch, Scheduler
from .sequence import Finish, Request
from .sequence import Sequence as Running

SCORED_BYTES = 1 << 26
"""What the logits may take that one step makes log-probabilities of prompts from."""


@dataclass(frozen=True)
class Emission:
    """What one step added to one request.

    Attributes:
        request: its number.
        tokens: new output tokens; at least one, unless the request ends without.
        origins: where each came from.
        text: new text, cut before a stop string, and held back while it may begin one; empty without a detokeniser.
        finish: why the output ended with this step; None if it goes on.
        stop_reason: the stop id or stop string that ended it; None for anything else.
        logprobs: of each new token, if the request asks for them.
        prompt_logprobs: of the prompt's tokens, on the first emission of a request that asks for them; None for the
            first token, which nothing stands before.
        cached_tokens: tokens of the prompt that the prefix cache held, on the first emission; then 0.
        error: what went wrong, with the finish "error".
    """

    request: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    text: str
    finish: Finish | None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Load:
    """How busy an engine is.

    Attributes:
        running, waiting: requests.
        kv_blocks_used, kv_blocks_total: of the target's cache; used by running requests, and in all.
        cached_blocks: those that only the prefix cache holds; they are not counted as used.
        preemptions: how often a running request had to wait again, since the start.
    """

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    cached_blocks: int
    preemptions: int


class Engine:
    """Runs requests through a target and, if there is one, a drafter.

    Attributes:
        target, drafter: the models.
        scheduler: who waits and who runs.
        context_length: tokens of prompt and output together: the target's context, or its whole cache if that is less.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None,
        *,
        eos_ids: Iterable[int],
        max_draft: int,
        max_batch: int,
        max_rows: int = 512,
        rule: Rule = "block",
        lengths: DraftLengths | None = None,
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
            max_rows: rows of tokens that a step with chunks of prompts aims at.
            rule: how blocks are verified, see `decoding.verify`.
            lengths: decides how many tokens to draft, up to `max_draft`; None drafts as many as there is room for.
            randomness: makes a request's random decisions from (seed, request number).
            on_record: is handed a `StepRecord` for every sequence of every step.
            clock: seconds, for the records.
        """
        self.target = target
        self.drafter = drafter
        blocks = target.blocks()
        self.context_length = min(target.context_length, blocks.total * blocks.size)
        self.scheduler = Scheduler(
            target,
            self._release,
            max_batch=max_batch,
            max_rows=max_rows,
            max_scored=max(1, SCORED_BYTES // (4 * target.vocab_size)),
            context_length=self.context_length,
            max_draft=max_draft if drafter else 0,
            lengths=lengths,
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
        limit, length = self.context_length, len(request.prompt)
        if not 0 < length < limit:
            what = "context" if limit == self.target.context_length else "KV cache"
            raise UsageError(
                f"request {request.number}: the prompt has {length} tokens. Expected 1 to {limit - 1}: the {what} "
                f"holds {limit} and the output needs a place in it. Shorten the prompt."
            )
        if max(request.prompt) >= self.target.vocab_size or min(request.prompt) < 0:
            raise UsageError(
                f"request {request.number}: token ids from {min(request.prompt)} to {max(request.prompt)}. "
                f"Expected ids from 0 to {self.target.vocab_size - 1}. Use the target's own tokenizer."
            )
        sampling = request.sampling
        named = {*sampling.logit_bias, *(sampling.allowed_ids or ()), *(i for word in sampling.bad_words for i in word)}
        if named and not 0 <= min(named) <= max(named) < self.target.vocab_size:
            raise UsageError(
                f"request {request.number}: logit_bias, allowed_ids and bad_words name token ids from {min(named)} to "
                f"{max(named)}. Expected ids from 0 to {self.target.vocab_size - 1}. Use the target's own tokenizer."
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
        self.scheduler.waiting.append(sequence)

    def step(self) -> list[Emission]:
        """Run one step and return what it made true.

        What goes wrong with one request ends it, with the finish "error". Anything else is raised after every cache is
        back where it was; the requests are still there, and `step` may be called again.
        """
        started = self._clock()
        batch = self.scheduler.schedule()
        try:
            proposal = self._propose(batch)
            drafted = self._clock()
            logits = self._forward(batch.feeds(proposal))
            verified = self._clock()
            judged = judge(batch, proposal, logits)
            verdict = verify(judged.proposal, judged.distributions, judged.batch.rows, self._rule)
            logprobs = judged.logprobs(verdict)  # before anything is true: it may fail, too
        except BaseException:
            self._roll_back(batch)
            raise
        emissions = self.commit(judged, verdict, logprobs)
        self._record(judged.batch, judged.proposal, verdict, emissions, (started, drafted, verified, self._clock()))
        return emissions

    def commit(
        self, judged: Judged, verdict: Verification, logprobs: Sequence[tuple[TokenLogprob, ...]]
    ) -> list[Emission]:
        """The one place where anything becomes true: tokens, text, counts, cache lengths, the end of a request.

        Returns:
            what is new, of the deciding sequences first, in their order.
        """
        emissions = []
        for b, sequence in enumerate(judged.batch.deciding):
            sequence.scores += judged.scores.get(sequence.request.number, ())
            accepted, drafted = verdict.accepted[b], judged.proposal.tokens[b]
            block: list[tuple[int, Origin]] = [(token, "draft") for token in drafted[:accepted]]
            block.append((verdict.next_token[b], "corrected" if accepted < len(drafted) else "free"))
            known, text = len(sequence.tokens), sequence.visible
            try:
                for token, origin in block:
                    sequence.append(token, origin, self.context_length)
                    if sequence.finish:
                        break
            except Exception as error:  # a detokeniser's or a grammar's: this request's alone
                sequence.finish, sequence.error = "error", describe(error)
            sequence.cached = min(known + accepted, len(sequence.tokens))
            emissions.append(_emission(sequence, known, text, logprobs[b]))
            self._settle(sequence)
        for sequence, count in judged.batch.filling:
            sequence.cached += count
            sequence.scores += judged.scores.get(sequence.request.number, ())
            if not sequence.decides and not sequence.missing:
                sequence.finish = "length"
                emissions.append(_emission(sequence, len(sequence.tokens), "", ()))
            self._settle(sequence)
        for sequence, reason in judged.failed:
            text = sequence.visible
            sequence.finish, sequence.error = "error", reason
            emissions.append(_emission(sequence, len(sequence.tokens), text, ()))
            self._settle(sequence)
        return emissions

    def run(self) -> Iterable[Emission]:
        """Step until nothing is left, yielding what becomes true as it does.

        Raises:
            BitdraftError: a request ended with an error. Who serves several callers looks at `finish` and uses `step`.
        """
        while self.scheduler.running or self.scheduler.waiting:
            for emission in self.step():
                if emission.finish == "error":
                    raise BitdraftError(emission.error)
                yield emission

    def draft_by(self, drafter: Drafter | None, lengths: DraftLengths | None) -> None:
        """From the next step on, let another drafter draft, for requests that run already, too.

        What drafts has no say in an output's law, so each ends as it would have ended: greedy ones to the bit.

        Args:
            drafter: instead of the present one, which is told to forget what runs.
            lengths: what decides how many tokens it drafts, likewise.
        """
        if self.drafter:
            for sequence in self.scheduler.running:
                self.drafter.release(sequence.request.number)
        self.drafter, self.scheduler.lengths = drafter, lengths

    def load(self) -> Load:
        """How busy the engine is now."""
        blocks, scheduler = self.target.blocks(), self.scheduler
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks_used=blocks.total - blocks.available,
            kv_blocks_total=blocks.total,
            cached_blocks=blocks.cached,
            preemptions=scheduler.preemptions,
        )

    def cancel(self, request: int) -> None:
        """Stop a request and free what it holds. An unknown request is no error."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.number == request:
                self._retire(sequence)

    def _forward(self, feeds: Sequence[Feed]) -> Tensor:
        return self.target.forward(feeds) if feeds else torch.empty(0, self.target.vocab_size)

    def _propose(self, batch: Batch) -> Proposal:
        if self.drafter and any(row.budget or (row.prediction and row.room) for row in batch.rows):
            return self.drafter.propose(batch.rows)
        return Proposal(((),) * len(batch.rows))

    def _settle(self, sequence: Running) -> None:
        """Bring the caches of target and drafter to what is true, and free them if the request has ended."""
        number = sequence.request.number
        self.target.truncate(number, sequence.cached)
        if self.drafter:
            self.drafter.commit(number, sequence.cached)
        if sequence.finish:
            self._retire(sequence)

    def _retire(self, sequence: Running) -> None:
        self.scheduler.retire(sequence)
        self._release(sequence.request.number)
        if self.scheduler.lengths:
            self.scheduler.lengths.forget(sequence.request.number)

    def _release(self, request: int) -> None:
        self.target.release(request)
        if self.drafter:
            self.drafter.release(request)

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
        if self._on_record is None and self.scheduler.lengths is None:
            return
        started, drafted, verified, ended = times
        rows = sum(count for _, count in batch.filling) + sum(1 + len(drafted) for drafted in proposal.tokens)
        for b, emission in enumerate(emissions[: len(batch.deciding)]):
            sequence = batch.deciding[b]
            record = StepRecord(
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
                predicted=b in proposal.predicted,
            )
            if self.scheduler.lengths:
                self.scheduler.lengths.observe(record)
            if self._on_record:
                self._on_record(record)


def _emission(sequence: Running, known: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> Emission:
    """What is new of a sequence: tokens from index `known` on, and text after `text`."""
    emitted = len(sequence.tokens) - known
    first = known == len(sequence.request.prompt)
    return Emission(
        request=sequence.request.number,
        tokens=tuple(sequence.tokens[known:]),
        origins=tuple(sequence.origins[len(sequence.origins) - emitted :]),
        text=sequence.visible[len(text) :],
        finish=sequence.finish,
        stop_reason=sequence.stop_reason,
        logprobs=logprobs[:emitted],
        prompt_logprobs=tuple(sequence.scores) if first and sequence.request.prompt_logprobs is not None else (),
        cached_tokens=(sequence.adopted or 0) if first else 0,
        error=sequence.error,
    )
