"""Run requests from end to end, plain and speculative in turn, to see whether the prediction holds.

Every round runs each prompt once without a draft and once with each candidate, one after the other, so that a slow
drift of the machine hits all of them alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..decoding.lookahead import Fixed
from ..decoding.verify import Rule
from ..drafters.model import ModelDrafter
from ..engine.engine import Engine
from ..engine.sequence import Request
from ..models.cached import CachedModel
from ..types import Feed, SamplingParams, StepRecord
from .stats import BlockCounts
from .texts import Key
from .trace import Confirmation


@dataclass(frozen=True)
class Candidate:
    """A format and a draft length to run, on one workload."""

    workload: str
    format: str
    k: int


@dataclass(frozen=True)
class Bench:
    """What every confirming run shares.

    Attributes:
        target: the target model. drafts: the candidates' drafts by format.
        sampling: the serving parameters. rule: how blocks are verified. eos_ids: what ends an output.
        clock: seconds.
    """

    target: CachedModel
    drafts: Mapping[str, CachedModel]
    sampling: SamplingParams
    rule: Rule
    eos_ids: tuple[int, ...]
    clock: Callable[[], float]

    def confirm(
        self, key: Key, prompt: Sequence[int], candidates: Sequence[Candidate], round_number: int
    ) -> Iterator[Confirmation]:
        """Run one prompt plainly and with each candidate."""
        plain_ids, plain = self._run(key, prompt, None, round_number)
        yield plain
        for candidate in candidates:
            ids, run = self._run(key, prompt, candidate, round_number)
            yield self._compared(run, prompt, plain_ids, ids) if self.sampling.temperature == 0 else run

    def _run(
        self, key: Key, prompt: Sequence[int], candidate: Candidate | None, round_number: int
    ) -> tuple[list[int], Confirmation]:
        records: list[StepRecord] = []
        drafter = None
        if candidate:
            drafter = ModelDrafter(self.drafts[candidate.format], Fixed(candidate.k), self.eos_ids)
        engine = Engine(
            self.target,
            drafter,
            eos_ids=self.eos_ids,
            max_draft=candidate.k if candidate else 0,
            max_batch=1,
            rule=self.rule,
            on_record=records.append,
            clock=self.clock,
        )
        engine.submit(Request(0, tuple(prompt), self.sampling))
        ids: list[int] = []
        first: tuple[float, int] | None = None
        started = self.clock()
        for emission in engine.run():
            ids += emission.tokens
            first = first or (self.clock() - started, len(ids))
        seconds = self.clock() - started
        assert first is not None
        counts = BlockCounts.of_blocks((r.proposed, r.accepted) for r in records)
        return ids, Confirmation(
            format=candidate.format if candidate else None,
            k=candidate.k if candidate else 0,
            workload=key[0],
            index=key[1],
            round=round_number,
            seconds=seconds,
            tokens=len(ids),
            first_seconds=first[0],
            first_tokens=first[1],
            steps=len(records),
            proposed=counts.proposed,
            tested=counts.tested,
            accepted=counts.accepted,
            draft_seconds=sum(r.draft_seconds for r in records),
            verify_seconds=sum(r.verify_seconds for r in records),
            other_seconds=sum(r.other_seconds for r in records),
        )

    def _compared(
        self, run: Confirmation, prompt: Sequence[int], plain: Sequence[int], ids: Sequence[int]
    ) -> Confirmation:
        """Say whether greedy output is the plain run's and, where it is not, how near a tie the target was."""
        if list(plain) == list(ids):
            return replace(run, same_ids=True)
        at = next((i for i, (a, b) in enumerate(zip(plain, ids, strict=False)) if a != b), min(len(plain), len(ids)))
        known = [*prompt, *plain[:at]]
        logits = self.target.forward([Feed(0, known, 0, len(known) - 1)])[0]
        self.target.release(0)
        top = logits.topk(2).values
        return replace(run, same_ids=False, first_difference=at, margin=float(top[0] - top[1]))
