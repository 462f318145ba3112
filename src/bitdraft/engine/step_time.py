"""How long a step of so many sequences, some with drafts, will take: measured curves, corrected by what happens.

A curve knows steps in which every sequence has the same number of rows. A ragged step is read off it as the even step
with as many rows altogether: weights are read once and arithmetic goes by rows, whoever's they are, and what a
sequence's keys and values cost does not depend on its rows. Contexts are averaged for the same reason.

Curves are measured on an idle machine, once. So what steps really take is compared with them, in ratios for each size
of batch (1, 2-3, 4-7, ...): of plain steps, of drafting, and of the target's part of speculative steps. The last one is
kept for each class of lengths as well (1, 2-3, 4-7, ...): a curve may be wrong about what rows cost.

Letters: S sequences, K drafted tokens of one of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .curve import StepCurve

Part = Literal["plain", "verify", "draft"]
_MEMORY = 16  # observations that a ratio remembers
_LARGEST_SURPRISE = math.log(2)  # one odd timing, such as the first of a kind, must not decide
_MOST_TABLES = 512
_CONTEXT_STEP = 64


@dataclass(frozen=True)
class Tables:
    """Seconds of the parts of a step of S sequences at one context, corrections included.

    Attributes:
        plain: the whole step without drafts.
        verify: by drafted tokens of all sequences together, [S K + 1]; entry 0 is `plain`.
        first: drafting the first token of each of 0, 1, .. S sequences, [S + 1].
        later: drafting any later one.
        catch_up: reading one token that the draft has not seen.
    """

    plain: float
    verify: Sequence[float]
    first: Sequence[float]
    later: Sequence[float]
    catch_up: float

    def seconds(self, lengths: Sequence[int]) -> float:
        """A step with these draft lengths."""
        return self.drafting(lengths) + self.verify[sum(lengths)]

    def drafting(self, lengths: Sequence[int]) -> float:
        """The draft's part: round after round, as many rows as still draft."""
        rounds = [sum(k >= j for k in lengths) for j in range(1, max(lengths, default=0) + 1)]
        return sum((self.later if j else self.first)[rows] for j, rows in enumerate(rounds))


class _Ratio:
    """Observed over expected, a running mean of logarithms that begins with a belief worth one observation."""

    def __init__(self, believed: float) -> None:
        self.log, self.count = math.log(believed), 1

    def add(self, observed: float, expected: float) -> None:
        if observed <= 0 or expected <= 0:
            return
        surprise = math.log(observed / expected) - self.log
        self.count = min(self.count + 1, _MEMORY)
        self.log += min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE) / self.count


class StepTimes:
    """Predicts step times and learns from observed ones."""

    def __init__(self, target: StepCurve, draft: StepCurve | None, reading: float | None = None) -> None:
        """Take the curves.

        Args:
            target: of the target.
            draft: of the draft model; None for drafts that are looked up and not computed, whose time is observed.
            reading: seconds a token that the draft takes to read a text; None for those of a row of its widest step.
        """
        self._target, self._draft = target, draft
        self._ratios: dict[tuple[Part, int, int], _Ratio] = {}
        self._raw: dict[tuple[int, int, int], Tables] = {}
        self._look_up = 0.0  # seconds a sequence, where there is no draft model
        if reading is None:
            rows = max((step.rows for step in draft.steps), default=1) if draft else 1
            reading = draft.seconds(rows, _CONTEXT_STEP) / rows if draft else 0.0
        self._catch_up = reading

    def at(self, batch: int, context: int, k: int) -> Tables:
        """The times of steps of `batch` sequences, up to k drafted tokens each, with `context` tokens in each cache."""
        raw = self._curves(batch, context, k)
        size = batch.bit_length()
        verify = [self._ratio("verify", size, depth) for depth in range(k.bit_length() + 1)]
        draft = self._ratio("draft", size)
        plain = raw.plain * self._ratio("plain", size)
        seconds = [plain, *(s * verify[_depth(t, batch)] for t, s in enumerate(raw.verify[1:], start=1))]
        later = [s * draft for s in raw.later]
        first = later if self._draft else [sequences * self._look_up for sequences in range(batch + 1)]
        return Tables(plain, seconds, first, later, self._catch_up)

    def observe_plain(self, batch: int, context: int, seconds: float) -> None:
        """A whole step in which nothing was drafted took so long."""
        self._add("plain", batch, seconds, self._curves(batch, context, 1).plain)

    def observe_drafted(
        self, context: int, lengths: Sequence[int], unread: int, drafting: float | None, rest: float | None
    ) -> None:
        """A step with drafts took so long.

        Args:
            context: tokens in each cache, on average.
            lengths: tokens drafted for each sequence.
            unread: tokens that the draft had to catch up on, all sequences together.
            drafting, rest: seconds of the draft, and of all else; None where other things were done besides.
        """
        batch = len(lengths)
        raw = self._curves(batch, context, max(lengths))
        if rest is not None:
            self._add("verify", batch, rest, raw.verify[sum(lengths)], sum(lengths))
        if drafting is None:
            return
        if self._draft is None:
            each = drafting / sum(k > 0 for k in lengths)
            self._look_up += (each - self._look_up) / (8 if self._look_up else 1)
        elif unread:
            expected = raw.drafting(lengths) * self._ratio("draft", batch.bit_length())
            self._catch_up += (max(drafting - expected, 0.0) / unread - self._catch_up) / 4
        else:
            self._add("draft", batch, drafting, raw.drafting(lengths))

    def _add(self, part: Part, batch: int, observed: float, expected: float, drafted: int = 0) -> None:
        key = part, batch.bit_length(), _depth(drafted, batch)
        if key not in self._ratios:
            self._ratios[key] = _Ratio(self._ratio(*key))
        self._ratios[key].add(observed, expected)

    def _ratio(self, part: Part, size: int, depth: int = 0) -> float:
        """The ratio of this size of batch and length; else the nearest one; else, of the target's two, the other's."""
        exact = self._ratios.get((part, size, depth))
        if exact:
            return math.exp(exact.log)
        others: tuple[Part, ...] = ("draft",) if part == "draft" else (part, "plain", "verify")
        for kind in others:
            keys = [key for key in self._ratios if key[0] == kind]
            if keys:
                nearest = min(keys, key=lambda key: (abs(key[1] - size), abs(key[2] - depth)))
                return math.exp(self._ratios[nearest].log)
        return 1.0

    def _curves(self, batch: int, context: int, k: int) -> Tables:
        """The curves' own figures; contexts in steps, so that they are read off rarely."""
        step = max(_CONTEXT_STEP, 1 << max(context.bit_length() - 4, 0))
        context = max(round(context / step) * step, 1)
        key = batch, context, k
        if key not in self._raw:
            if len(self._raw) >= _MOST_TABLES:
                self._raw.clear()
            even = [self._target.seconds(rows, context, batch) for rows in range(1, k + 2)]
            verify = [*np.interp(np.arange(batch * k + 1) / batch, np.arange(k + 1), even).tolist()]
            draft = [self._draft.seconds(1, context, s) if self._draft and s else 0.0 for s in range(batch + 1)]
            self._raw[key] = Tables(even[0], verify, draft, draft, 0.0)
        return self._raw[key]


def _depth(drafted: int, batch: int) -> int:
    """Classes of drafted tokens a sequence: 0, 1, 2-3, 4-7, ..."""
    return (-(-drafted // batch)).bit_length()
