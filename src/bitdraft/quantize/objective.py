"""What an allocation is to reach, and within which budget.

    maximise   E[tokens of a step] / (K draft_ms(bytes) + verify_ms(K + 1))     within a budget of bytes
    E = 1 + a + ... + a^K,        a = response(sum over tensors of KL(q0 || q))

Losses add in KL, where they are small (sensitivity.py); what acceptance a sum of them leaves is read off a curve
through uniform formats that were run for real. Fewer bytes draft faster and more bytes draft better, so a budget need
not be used up where speed is known. One token is taken to be like another here, which orders choices well and
predicts no speedup: `bitdraft measure` does that.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import UsageError

MAX_DRAFT = 8
"""Longest draft that a speed is predicted for."""


@dataclass(frozen=True)
class Response:
    """The acceptance that is left when q has moved: `full - scale * KL ** power`.

    Attributes:
        full: of the draft at full precision. scale, power: fitted, see `fit`.
    """

    full: float
    scale: float
    power: float

    @classmethod
    def fit(cls, full: float, points: Sequence[tuple[float, float]]) -> "Response":
        """Through measured points (sum of predicted KL, acceptance): a line of logarithms.

        The power is kept from 1/2, which it is where p and q agree (the overlap has a kink there), to 1, which it is
        where they are far apart.

        Raises:
            UsageError: no point, or a KL that is not positive.
        """
        if not points or min(kl for kl, _ in points) <= 0:
            raise UsageError(f"a response through {list(points)}. Expected at least one point with a KL above 0.")
        logs = [(math.log(kl), math.log(max(full - acceptance, 1e-4))) for kl, acceptance in points]
        x, y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
        spread = sum((a - x) ** 2 for a, _ in logs)
        slope = sum((a - x) * (b - y) for a, b in logs) / spread if spread else 1.0
        power = min(max(slope, 0.5), 1.0)
        return cls(full, math.exp(y - power * x), power)

    def acceptance(self, kl: float) -> float:
        """What is left after a KL of so many nats a token."""
        return max(0.0, self.full - self.scale * math.pow(kl, self.power))


@dataclass(frozen=True)
class Speed:
    """What steps take.

    Attributes:
        draft_ms: from the draft's bytes to the milliseconds of one drafted token, rising.
        verify_ms: from rows of the target's step to its milliseconds.
    """

    draft_ms: Callable[[float], float]
    verify_ms: Callable[[int], float]

    def tokens_per_second(self, acceptance: float, size: float) -> float:
        """At the best draft length up to `MAX_DRAFT`, with the same acceptance at every position."""
        tokens, best, survival = 1.0, 0.0, 1.0
        for k in range(1, MAX_DRAFT + 1):
            survival *= acceptance
            tokens += survival
            best = max(best, 1000 * tokens / (k * self.draft_ms(size) + self.verify_ms(k + 1)))
        return best


@dataclass(frozen=True)
class Budget:
    """The most that a draft may be.

    Attributes:
        amount, unit: as given: 'bits' a weight, scales and zero points counted; 'bytes'; or 'ms' a drafted token.
        with_head: whether the head, and the embedding where it is another, count among the bits and bytes.
    """

    amount: float
    unit: str
    with_head: bool = True

    @classmethod
    def parse(cls, text: str, with_head: bool = True) -> "Budget":
        """Read '4.25bits', '350MB', '0.35GB' or '12ms'.

        Raises:
            UsageError: it is none of these.
        """
        for suffix, unit, factor in (("bits", "bits", 1), ("GB", "bytes", 1e9), ("MB", "bytes", 1e6), ("ms", "ms", 1)):
            number = text.strip().removesuffix(suffix)
            if number != text.strip():
                try:
                    amount = float(number) * factor
                except ValueError:
                    break
                if amount > 0 and math.isfinite(amount):
                    return cls(amount, unit, with_head)
        raise UsageError(f"the budget is {text!r}. Expected bits a weight, a size or a time: 4.25bits, 350MB, 12ms.")

    def bytes_of(self, weights: int, speed: Speed | None) -> float:
        """The budget in bytes.

        Args:
            weights: how many weights it is for.
            speed: needed for a budget in milliseconds.

        Raises:
            UsageError: milliseconds without a speed, or fewer than the smallest draft takes.
        """
        if self.unit == "bits":
            return self.amount * weights / 8
        if self.unit == "bytes":
            return self.amount
        if speed is None or speed.draft_ms(1) > self.amount:
            raise UsageError(
                f"a budget of {self.amount:g} ms a token. Expected measured step costs, and more than the "
                f"{speed.draft_ms(1) if speed else 0:g} ms of a step that reads nothing; or a budget in bits or bytes."
            )
        low, high = 1.0, 1.0
        while speed.draft_ms(high) <= self.amount and high < 1e15:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if speed.draft_ms(middle) <= self.amount else (low, middle)
        return low
