"""What a step costs on this machine: the target by rows, the draft by token, and everything else.

Timings are samples, not averages: whoever predicts a speedup resamples them together with the acceptance.

Letters: K drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from ..decoding.protocols import Drafter, DraftRow, LanguageModel
from ..decoding.sampling import History, verifiable
from ..decoding.streams import Streams
from ..decoding.verify import Rule, verify
from ..types import Feed, Proposal, SamplingParams

TIMED = -1
"""Number of the request that timings run under."""

_NOTHING = Proposal(((),))


def time_target(
    model: LanguageModel,
    context: Sequence[int],
    rows: Sequence[int],
    repeats: int,
    clock: Callable[[], float],
) -> Iterator[tuple[int, float]]:
    """Time target steps of several widths, interleaved: every repeat goes once through all widths.

    Args:
        model: the target.
        context: token ids that fill the cache before each step, more than max(rows).
        rows: widths to time, in rows of one sequence.
        repeats: samples of each width; one more round warms up and is thrown away.
        clock: seconds.

    Yields:
        (rows, seconds).
    """
    fill, block = context[: -max(rows)], context[-max(rows) :]
    model.forward([Feed(TIMED, fill, 0, len(fill))])
    try:
        for repeat in range(repeats + 1):
            for width in rows:
                started = clock()
                model.forward([Feed(TIMED, block[:width], len(fill), 0)])
                seconds = clock() - started
                model.truncate(TIMED, len(fill))
                if repeat:
                    yield width, seconds
    finally:
        model.release(TIMED)


def time_draft(
    drafter: Drafter,
    target: LanguageModel,
    context: Sequence[int],
    length: int,
    sampling: SamplingParams,
    rule: Rule,
    repeats: int,
    clock: Callable[[], float],
) -> Iterator[tuple[float, float]]:
    """Time drafting, per token, and what a speculative step does beside the models more than a plain one.

    Args:
        drafter: what drafts.
        target: the target, for the shape of its logits only; it is not run.
        context: prompt and output so far.
        length: tokens to draft a step.
        sampling: the request's sampling; end of sequence should be ignored, so that blocks are whole.
        rule: how blocks are verified.
        repeats: samples; one more step fills the draft's cache and is thrown away.
        clock: seconds.

    Yields:
        (seconds per drafted token, seconds per step for verifying a block instead of drawing one token).
    """
    history = History.after_prompt(context)
    logits = torch.zeros(length + 1, target.vocab_size)
    try:
        for repeat in range(repeats + 1):
            randomness = Streams(repeat, 0)
            row = DraftRow(TIMED, context, len(context), length, sampling, history, randomness)
            started = clock()
            proposal = drafter.propose([row])
            drafted = clock()
            _settle(proposal, logits, row, rule)
            settled = clock()
            _settle(_NOTHING, logits, row, rule)
            ended = clock()
            drafter.commit(TIMED, len(context) - 1)
            if repeat and proposal.tokens[0]:
                yield (drafted - started) / len(proposal.tokens[0]), (settled - drafted) - (ended - settled)
    finally:
        drafter.release(TIMED)


def _settle(proposal: Proposal, logits: torch.Tensor, row: DraftRow, rule: Rule) -> None:
    drafted = proposal.tokens[0]
    rows = logits[: len(drafted) + 1]
    verify(proposal, [verifiable(rows, drafted, row.sampling, row.history, frozenset())], [row], rule)
