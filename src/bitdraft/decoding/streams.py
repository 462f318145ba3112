"""The random numbers of a request: every decision has its own, whatever was decided before it.

A generator that is advanced call by call makes the output depend on the order of calls, on the batch and on the draft
length, and sharing it between drafting and verifying biases the output. A counter-based generator (Philox, Salmon et
al., SC 2011) needs no order: the name of a decision is the counter, and the request is the key.
"""

import numpy as np
import torch
from torch import Tensor

from . import race
from .protocols import Purpose


class Streams:
    """The random decisions of one request, a `Randomness`.

    The same seed, request number and decision give the same number on every machine. One number is read per decision,
    so streams of different decisions never overlap.

    `start` is part of the name for the block rule: it decides about early tokens by looking at the later ones, so when
    it throws a suffix away, the noise that drafted the suffix is no longer uniform. Were that noise used again to draft
    the same positions in the next block, the output would be biased.

    The coupled rule has nothing of the kind: no decision looks ahead, and its numbers are named without the block, so
    that the output does not depend on where blocks begin (docs/decisions/0011-same-seed-same-output.md).
    """

    def __init__(self, seed: int, request: int) -> None:
        """Name the streams.

        Args:
            seed: of the request's sampling parameters, 0 to 2**64 - 1.
            request: the number of the request, 0 to 2**64 - 1.
        """
        self._bits = np.random.Philox(key=np.array([seed, request], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state

    def coin(self, chance: float, start: int, position: int) -> bool:
        """True with probability `chance`: always at 1, never at 0."""
        return self._uniform(start, position, Purpose.ACCEPT) < chance

    def draw(self, probs: Tensor, start: int, position: int, purpose: Purpose) -> int:
        """A token id drawn from `probs`, [V] float32 or float64 on any device; never one of probability 0."""
        return token_at(probs, self._uniform(start, position, purpose))

    def coupled_draw(self, probs: Tensor, position: int) -> int:
        """A token id drawn from `probs`, [V], by the clocks of the output position, see `race`."""
        self._seek(*counter(0, position, Purpose.NEXT))
        key = int(self._bits.random_raw())
        return race.winner(probs, lambda ids_N: race.uniforms(key, ids_N))

    def _uniform(self, start: int, position: int, purpose: Purpose) -> float:
        """The first double in [0, 1) of the stream that the decision names."""
        self._seek(*counter(start, position, purpose))
        return float(self._generator.random())

    def _seek(self, *place: int) -> None:
        # Setting the state costs a tenth of making a generator. Position 4 of the buffer is its end: it is empty.
        self._state["state"]["counter"][:] = place
        self._state["buffer_pos"] = 4
        self._bits.state = self._state


def counter(start: int, position: int, purpose: Purpose) -> tuple[int, int, int, int]:
    """The name of a decision as the 256-bit counter of the generator: different decisions, different counters."""
    return position, purpose, start, 0


def token_at(probs_V: Tensor, uniform: float) -> int:
    """Where a uniform number in [0, 1) falls in the distribution: the inverse of its cumulative sum.

    The sum is taken in float64, on the CPU and in order: adding 0 then changes nothing, so a token of probability 0
    has an empty interval. A parallel sum on an accelerator rounds neighbours differently and has no such promise.
    """
    largest, place = probs_V.max(0)
    if largest == 1 and int(torch.count_nonzero(probs_V)) == 1:  # a point mass, as at temperature 0: no sum to take
        return int(place)
    cumulative_V = probs_V.detach().cpu().cumsum(0, dtype=torch.float64).numpy()
    total = cumulative_V[-1]
    # Rounding can make uniform * total reach the total; the last token that adds to the sum ends there.
    last = int(np.searchsorted(cumulative_V, total, side="left"))
    return min(int(np.searchsorted(cumulative_V, uniform * total, side="right")), last)
