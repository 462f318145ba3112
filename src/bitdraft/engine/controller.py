"""How many tokens to draft for each sequence of a step, none included.

Only the past is looked at: what is committed, and how long steps took. A drafted token never has a say in whether it
is verified, so the output's law is the target's, whatever the lengths are (`decoding/lookahead.py` says what would not
do).

No drafts at all is one of the candidates, and then nothing of the draft runs. It is tried again now and then, at a cost
that is kept to a small share of the time.

Letters: n sequences of a step, K drafted tokens of one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from ..errors import UsageError
from ..types import StepRecord
from .acceptance import Acceptance
from .curve import StepCurve
from .fastest import Choice, fastest
from .step_time import StepTimes, Tables


@dataclass(frozen=True)
class Asked:
    """One sequence of the step that is about to run.

    Attributes:
        request: its number.
        domain: what kind of traffic it is; '' for no particular one.
        context: tokens of prompt and output so far.
        limit: tokens that may be drafted for it now at most; 0 for none.
        left: output tokens that may still come.
        unread: true tokens that the target reads in this step anyway; 1 but for the rest of a prompt.
    """

    request: int
    domain: str
    context: int
    limit: int
    left: int
    unread: int = 1


class DraftLengths(Protocol):
    """Decides how many tokens to draft for each sequence of a step, from the past alone."""

    def lengths(self, asked: Sequence[Asked]) -> list[int]:
        """For each sequence a length from 0 to its limit; called once before every step that emits."""
        ...

    def observe(self, record: StepRecord) -> None:
        """What became of one sequence in the step; called for each of them, in the order in which they were asked."""
        ...

    def forget(self, request: int) -> None:
        """The request has ended."""
        ...

    def reasons(self) -> str:
        """What was decided last and why, in one line, for people."""
        ...


class FixedLengths:
    """Always the same length, where there is room."""

    def __init__(self, k: int) -> None:
        """Take the length.

        Raises:
            UsageError: it is negative.
        """
        if k < 0:
            raise UsageError(f"the draft length is {k}. Expected 0 (no drafts) or more.")
        self._k = k

    def lengths(self, asked: Sequence[Asked]) -> list[int]:
        """The length, or the limit where that is lower."""
        return [min(self._k, one.limit) for one in asked]

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def forget(self, request: int) -> None:
        """Nothing to forget."""

    def reasons(self) -> str:
        """The length, and that nobody chose it here."""
        return f"K = {self._k}: fixed."


_CERTAIN = 0.95  # a draft's acceptance when it goes as well as can be hoped for
_MARGIN = 1.01  # a smaller gain than this is not worth the risk that the estimates are wrong
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 512  # steps of a request without drafts before it is tried again
_PLAIN_SEEN = 3  # steps without drafts of a size of batch that have to be seen before the first one with
_FIRST_PLAIN, _RARELY_PLAIN = 8, 64  # steps with drafts before one without, to know what that costs
_PROBE_LENGTH = 2
_KEPT_UP = 2  # unread tokens of a draft that missed no step, at most
_FAR_BEHIND = 16  # unread tokens of a step from which on the draft's reading has to pay by itself
_SAVED_STEPS = 12  # plain steps' time that may be saved up for probes
_SHARE_OF_GAINS = 0.1  # of the time that drafts have saved: also goes into probes
_LONG_OUTPUT = 128.0  # tokens of an output, until some have ended


@dataclass
class _Known:
    """What the controller keeps of a request."""

    domain: str
    read: int = 0  # tokens that the draft has read
    idle: int = 0  # steps since it was last drafted for
    pause: int = _FIRST_PAUSE
    produced: int = 0


@dataclass(frozen=True, eq=False)
class _Step:
    """A decision that has not been seen to happen yet."""

    asked: tuple[Asked, ...]
    lengths: tuple[int, ...]
    context: int
    tables: Tables
    probed: int | None  # index of the sequence that is drafted for in order to learn
    unread: tuple[int, ...]  # for the draft, by sequence


@dataclass(frozen=True, eq=False)
class _Decided:
    """The last decision, to be put in words when somebody asks."""

    best: Choice
    pays: bool
    tables: Tables
    acceptance: float | None

    def __str__(self) -> str:
        n = len(self.best.lengths)
        lengths = self.best.lengths if self.pays else (0,) * n
        low, high = min(lengths), max(lengths)
        plain, rate = n / self.tables.plain, self.best.rate
        if high:
            speeds = f"{rate:.3g} tokens/s expected, {plain:.3g} without drafts"
        elif any(self.best.lengths):
            speeds = f"{plain:.3g} tokens/s expected, {rate:.3g} with the best drafts, which is too little"
        else:
            speeds = f"{plain:.3g} tokens/s expected, and fewer with drafts"
        accepted = "" if self.acceptance is None else f", conditional acceptance {self.acceptance:.2f} at position 1"
        cost = self.tables.first[1] / self.tables.plain
        return (
            f"K = {low if low == high else f'{low} to {high}'} for {n} sequence{'s' if n > 1 else ''}: {speeds}"
            f"{accepted}, a drafted token costs {cost:.2f} of a plain step."
        )


class MeasuredLengths:
    """The fastest lengths, from measured step times and each request's running acceptance.

    Attributes:
        times: what steps cost. acceptance: what is believed of the drafts.
    """

    def __init__(
        self,
        target: StepCurve,
        draft: StepCurve | None,
        prior: Mapping[str, Sequence[float]] | None = None,
        probing: float = 0.01,
        reading: float | None = None,
    ) -> None:
        """Start from measured curves.

        Args:
            target, draft: step times of both models; no draft curve for drafts that are looked up.
            prior: acceptance that was measured before, by domain and position, see `Acceptance`.
            probing: share of the time that drafts may cost which are not expected to pay.
            reading: seconds a token that the draft takes to read a text, see `StepTimes`.
        """
        self.times, self.acceptance = StepTimes(target, draft, reading), Acceptance(prior or {})
        self._probing = probing
        # Seconds that probes may cost. The first ones are on credit: that drafts do not pay has to be tried early.
        self._saved = _SAVED_STEPS * target.seconds(1, 1, 1)
        self._requests: dict[int, _Known] = {}
        self._outputs: dict[str, float] = {}
        self._plain_seen: dict[int, int] = {}  # by size of batch: steps without drafts, up to `_PLAIN_SEEN`
        self._since_plain: dict[int, tuple[int, int]] = {}  # by size of batch: steps, and how many to wait for
        self._step: _Step | None = None
        self._records: list[StepRecord] = []
        self._decided: _Decided | None = None
        self._ended: list[int] = []

    def reasons(self) -> str:
        """What was decided last and why, in one line."""
        return str(self._decided) if self._decided else "Nothing was decided yet."

    def expected(self, context: int, longest: int) -> tuple[int, float]:
        """What is fastest for one request of which nothing is known yet.

        Args:
            context: tokens of prompt and output so far.
            longest: longest block.

        Returns:
            a draft length, and how many times as fast as plain decoding it is, reading apart; 0 and 1 where none pays.
        """
        tables = self.times.at(1, context, longest)
        best = fastest([list(accumulate(self.acceptance.hazards(-1, "", longest), mul))], tables)
        return best.lengths[0], best.rate * tables.plain

    def lengths(self, asked: Sequence[Asked]) -> list[int]:
        """Choose for one step."""
        self._learn()
        longest = max((one.limit for one in asked), default=0)
        if not longest:
            return [0] * len(asked)
        known = [self._known(one) for one in asked]
        context = round(sum(one.context for one in asked) / len(asked))
        tables = self.times.at(len(asked), context, longest)
        unread = [one.context - k.read for one, k in zip(asked, known, strict=True)]
        survival = [self._survival(one) for one in asked]
        best = self._worthwhile(asked, known, unread, survival, tables)
        pays = best.rate > _MARGIN * len(asked) / tables.plain
        lengths, probed = list(best.lengths) if pays else [0] * len(asked), None
        self._decided = _Decided(best, pays, tables, survival[0][0] if survival[0] else None)
        if any(lengths) and self._plain_is_due(len(asked)):
            lengths = [0] * len(asked)
        else:
            probed = self._probe(asked, known, unread, lengths, tables)
        for k, length in zip(known, lengths, strict=True):
            k.idle = 0 if length else k.idle + 1
        self._step = _Step(tuple(asked), tuple(lengths), context, tables, probed, tuple(unread))
        return lengths

    def observe(self, record: StepRecord) -> None:
        """Collect what became of the step."""
        self._records.append(record)
        if record.request in self._requests:
            self._requests[record.request].produced = record.start + record.emitted

    def forget(self, request: int) -> None:
        """Drop a request that has ended, once its last step was learnt from."""
        self._ended.append(request)

    def _known(self, one: Asked) -> _Known:
        known = self._requests.get(one.request)
        if known is None:
            known = self._requests[one.request] = _Known(self.acceptance.known(one.domain))
        if one.unread > 1:
            known.read = 0  # a prompt, or a request whose cache was given away for a while: the draft's was as well
        return known

    def _survival(self, one: Asked) -> list[float]:
        hazards = self.acceptance.hazards(one.request, one.domain, one.limit)
        return list(accumulate(hazards, mul))

    def _worthwhile(
        self,
        asked: Sequence[Asked],
        known: Sequence[_Known],
        unread: Sequence[int],
        survival: list[list[float]],
        tables: Tables,
    ) -> Choice:
        """The fastest lengths, without sequences for which the draft would have to read more than that gives back.

        Such reading is paid for once and helps until the output ends, so it is held against the time that drafts save
        in the rest of the output.
        """
        best = fastest(survival, tables)
        plain = tables.plain / len(asked)  # seconds a token
        saved = plain - 1 / best.rate
        behind = [i for i, k in enumerate(best.lengths) if k and unread[i] > _KEPT_UP]
        if sum(unread[i] for i in behind) <= _FAR_BEHIND:
            return best
        dear = {i for i in behind if tables.catch_up * unread[i] > saved * self._to_come(asked[i], known[i])}
        if not dear:
            return best
        return fastest([[] if i in dear else row for i, row in enumerate(survival)], tables)

    def _to_come(self, one: Asked, known: _Known) -> float:
        """Output tokens that are still to be expected: as outputs of the domain go; a long one goes on, at that."""
        usual = self._outputs.get(known.domain, _LONG_OUTPUT) - known.produced
        return min(one.left, max(usual, known.produced, 1))

    def _plain_is_due(self, batch: int) -> bool:
        """Whether to see what a step without drafts costs here: at first, and then again, rarer and rarer."""
        size = batch.bit_length()
        if self._plain_seen.get(size, 0) < _PLAIN_SEEN:
            return True
        steps, wait = self._since_plain.get(size, (0, _FIRST_PLAIN))
        due = steps + 1 >= wait
        self._since_plain[size] = (0, min(2 * wait, _RARELY_PLAIN)) if due else (steps + 1, wait)
        return due

    def _probe(
        self, asked: Sequence[Asked], known: Sequence[_Known], unread: Sequence[int], lengths: list[int], tables: Tables
    ) -> int | None:
        """Draft for one sequence that was not chosen, if it is its turn, affordable, and could pay at its best."""
        due = [i for i, k in enumerate(known) if not lengths[i] and k.idle >= k.pause and asked[i].limit]
        if not due:
            return None
        i = min(due, key=lambda i: unread[i])
        hoped = [
            [_CERTAIN**j for j in range(1, one.limit + 1)] if k or at == i else []
            for at, (one, k) in enumerate(zip(asked, lengths, strict=True))
        ]
        if fastest(hoped, tables).lengths[i] == 0:
            return None
        tried = [*lengths[:i], min(asked[i].limit, _PROBE_LENGTH), *lengths[i + 1 :]]
        cost = tables.seconds(tried) - tables.seconds(lengths)
        if unread[i] > _FAR_BEHIND:
            cost += tables.catch_up * unread[i]
        if cost > self._saved:
            return None
        self._saved -= cost
        lengths[i] = tried[i]
        return i

    def _learn(self) -> None:
        """Take in the step that was decided last, now that all is known of it, and drop what has ended with it."""
        step, records = self._step, {record.request: record for record in self._records}
        self._step, self._records = None, []
        if step and records:
            some = next(iter(records.values()))
            self._learn_times(step, records, some)
            seconds = some.draft_seconds + some.verify_seconds + some.other_seconds
            gain = sum(r.emitted for r in records.values()) * step.tables.plain / len(step.asked) - seconds
            ours = any(step.lengths) and not any(r.predicted for r in records.values())
            earned = self._probing * seconds + (_SHARE_OF_GAINS * max(gain, 0.0) if ours else 0.0)
            self._saved = min(self._saved + earned, _SAVED_STEPS * step.tables.plain)
            for i, one in enumerate(step.asked):
                record, known = records.get(one.request), self._requests.get(one.request)
                if record and known and step.lengths[i] and not record.predicted:
                    # The draft feeds all but the last token that it drafts; what was rejected is taken out again.
                    # Where it drafted nothing it is still reading, which has been paid for.
                    known.read = one.context + min(max(record.proposed - 1, 0), record.accepted)
                    if record.overlap:
                        self._learn_acceptance(step, i, record, known)
        for request in self._ended:
            self._drop(request)
        self._ended.clear()

    def _drop(self, request: int) -> None:
        self.acceptance.forget(request)
        known = self._requests.pop(request, None)
        if known and known.produced:
            mean = self._outputs.get(known.domain, float(known.produced))
            self._outputs[known.domain] = mean + (known.produced - mean) / 16

    def _learn_acceptance(self, step: _Step, i: int, record: StepRecord, known: _Known) -> None:
        one = step.asked[i]
        believed = self.acceptance.hazards(one.request, one.domain, 1)[0]
        gap = 0 if i != step.probed else known.pause
        self.acceptance.observe(one.request, one.domain, record.overlap, gap)
        if i != step.probed:
            known.pause = _FIRST_PAUSE
            return
        self._saved += record.accepted * step.tables.plain / len(step.asked)
        better = sum(record.overlap) / len(record.overlap) > believed
        known.pause = 1 if better else min(2 * max(known.pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def _learn_times(self, step: _Step, records: Mapping[int, StepRecord], some: StepRecord) -> None:
        """Compare the step's time with the curves, but for the target's where it read prompts, of which they know
        nothing."""
        if any(one.request not in records or records[one.request].predicted for one in step.asked):
            return  # what a caller's prediction drafted was not decided here, and cost nothing
        drafted = [records[one.request].proposed for one in step.asked]
        whole = some.rows == len(drafted) + sum(drafted) and all(one.unread == 1 for one in step.asked)
        rest = some.verify_seconds + some.other_seconds if whole else None
        if not any(step.lengths):
            if rest is not None:
                self.times.observe_plain(len(drafted), step.context, some.draft_seconds + rest)
                size = len(drafted).bit_length()
                self._plain_seen[size] = min(self._plain_seen.get(size, 0) + 1, _PLAIN_SEEN)
                self._since_plain[size] = 0, self._since_plain.get(size, (0, _FIRST_PLAIN))[1]
        elif any(drafted):
            unread = sum(u for u, k in zip(step.unread, step.lengths, strict=True) if k and u > _KEPT_UP)
            unread = unread if unread > _FAR_BEHIND else 0
            reading = any(k and not n for k, n in zip(step.lengths, drafted, strict=True))
            self.times.observe_drafted(step.context, drafted, unread, None if reading else some.draft_seconds, rest)
