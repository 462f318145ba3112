"""What the target's logits say in one step: a distribution for each drafted place, and log-probabilities of prompts.

What goes wrong with one sequence, such as logits that are not numbers, ends that sequence and leaves the others alone.

Letters: K drafted tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..decoding.sampling import PointMasses, verifiable
from ..errors import BitdraftError
from ..types import Proposal, TokenLogprob, Verification
from .logprobs import token_logprobs
from .scheduler import Batch
from .sequence import Sequence


@dataclass(frozen=True)
class Judged:
    """A step that can be verified.

    Attributes:
        batch, proposal: of the step, without what failed.
        logits: [K+1, V] for each deciding sequence.
        distributions: what the target makes of them, as `verify` takes it.
        scores: log-probabilities of further tokens of prompts, by request.
        failed: the other sequences, each with what went wrong.
    """

    batch: Batch
    proposal: Proposal
    logits: tuple[Tensor, ...]
    distributions: tuple[Tensor | PointMasses, ...]
    scores: Mapping[int, list[TokenLogprob]]
    failed: tuple[tuple[Sequence, str], ...]

    def logprobs(self, verdict: Verification) -> list[tuple[TokenLogprob, ...]]:
        """For each deciding sequence those of its accepted tokens and of the next one; none where not asked for."""
        found: list[tuple[TokenLogprob, ...]] = []
        for b, s in enumerate(self.batch.deciding):
            tokens = (*self.proposal.tokens[b][: verdict.accepted[b]], verdict.next_token[b])
            count = s.request.logprobs
            found.append(() if count is None else tuple(token_logprobs(self.logits[b][: len(tokens)], tokens, count)))
        return found


def judge(batch: Batch, proposal: Proposal, logits: Tensor) -> Judged:
    """Take the logits of `batch.feeds(proposal)` apart."""
    plan: list[tuple[Sequence, int, tuple[int, ...] | None]] = [
        *((s, s.scoring_rows(count), None) for s, count in batch.filling),
        *((s, s.scoring_rows(s.missing), drafted) for s, drafted in zip(batch.deciding, proposal.tokens, strict=True)),
    ]
    sizes = [scoring + (0 if drafted is None else len(drafted) + 1) for _, scoring, drafted in plan]
    scores: dict[int, list[TokenLogprob]] = {}
    failed: dict[Sequence, str] = {}
    mine, distributions = [], []
    kept: dict[Sequence, tuple[int, ...]] = {}
    for (s, scoring, drafted), rows in zip(plan, torch.split(logits, sizes), strict=True):
        try:
            if scoring:
                tokens = s.request.prompt[len(s.scores) : len(s.scores) + scoring]
                scores[s.request.number] = token_logprobs(rows[:scoring], tokens, s.request.prompt_logprobs or 0)
            if drafted is not None:
                deciding = rows[scoring:] if scoring else rows
                kept[s], distribution = _distributions(s, drafted, deciding)
                distributions.append(distribution)
                mine.append(deciding)
        except Exception as error:  # whatever it is, it is this request's: the others go on
            failed[s] = describe(error)
    if failed:
        batch, proposal = _without(batch, proposal, failed)
    proposal = replace(proposal, tokens=tuple(kept[s] for s in batch.deciding))
    return Judged(batch, proposal, tuple(mine), tuple(distributions), scores, tuple(failed.items()))


def _distributions(s: Sequence, drafted: tuple[int, ...], rows: Tensor) -> tuple[tuple[int, ...], Tensor | PointMasses]:
    """What the target makes of a block, and the drafted tokens that it was made for: all, or an error is raised.

    But a reproducible output must not end because of a text that was only drafted: its block is cut before that. Where
    the coupled rule decides, a draft may be cut for any reason.
    """
    while True:
        try:
            params = s.request.sampling
            return drafted, verifiable(rows[: len(drafted) + 1], drafted, params, s.history, s.ending_ids)
        except Exception:
            if not drafted or not params.reproducible:
                raise
            drafted = drafted[:-1]


def _without(batch: Batch, proposal: Proposal, failed: Mapping[Sequence, str]) -> tuple[Batch, Proposal]:
    kept = [b for b, s in enumerate(batch.deciding) if s not in failed]
    left = replace(
        batch,
        filling=tuple((s, count) for s, count in batch.filling if s not in failed),
        deciding=tuple(batch.deciding[b] for b in kept),
        rows=tuple(batch.rows[b] for b in kept),
    )
    probs = None if proposal.probs is None else proposal.probs[kept]
    predicted = frozenset(place for place, b in enumerate(kept) if b in proposal.predicted)
    return left, Proposal(tuple(proposal.tokens[b] for b in kept), probs, predicted)


def describe(error: Exception) -> str:
    """What went wrong, for whoever asked: our own messages as they are."""
    return str(error) if isinstance(error, BitdraftError) else f"{type(error).__name__}: {error}"
