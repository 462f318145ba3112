"""Draws from different distributions that come out the same as often as can be had without knowing one another.

Every token id has a clock that rings after an exponential time E_v. A distribution p runs its clocks at the speeds p_v,
and draws the token whose clock rings first: argmin E_v / p_v, which is v with chance p_v. This is the Gumbel-max trick,
for -log E_v is a Gumbel variable. Two distributions that read the same clocks draw the same token with chance

    sum_v 1 / sum_w max(p_w / p_v, q_w / q_v),    at least (1 - TV) / (1 + TV), at most 1 - TV,

and nothing that works without communication has a better worst case (Daliri, Musco and Suresh 2408.07978, "Coupling
without communication and drafter-invariant speculative decoding", and, for the bound, Bavarian et al. 2020).

Shape suffixes: V vocabulary, N tokens that can come out.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from torch import Tensor

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_LARGEST = 1 - 2.0**-53
_SLACK = 1 + 2.0**-40  # far more than rounding, and far too little to let many tokens through
_PIECE = 16384  # tokens that are looked at together: their numbers stay in the processor's cache

Uniforms = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
"""Token ids [N] -> independent uniform numbers [N] in (0, 1), each a function of its id alone."""


def uniforms(key: int, ids_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Independent uniform numbers, one for each id: functions of key and id alone, whatever else is asked for.

    The numbers of one key are SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) entered at the id, so only what is asked
    for is made. All 64 bits count near 0, where races are won: the chance of less than u is u to within 2**-64.

    Args:
        key: 0 to 2**64 - 1, itself random: keys that differ by a few steps would share their numbers.
        ids_N: token ids.

    Returns:
        [N] float64, above 0 and below 1.
    """
    bits_N = ids_N.astype(np.uint64)
    bits_N *= _STEP
    bits_N += np.uint64(key)
    shifted_N = np.empty_like(bits_N)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits_N ^= np.right_shift(bits_N, np.uint64(shift), out=shifted_N)
        bits_N *= factor
    bits_N ^= np.right_shift(bits_N, np.uint64(31), out=shifted_N)
    uniform_N = bits_N.astype(np.float64)
    uniform_N += 0.5
    uniform_N *= 2.0**-64
    return np.minimum(uniform_N, _LARGEST, out=uniform_N)


def winner(probs_V: Tensor, uniform: Uniforms) -> int:
    """The token whose clock rings first, at -log(1 - u_v) / p_v: the lowest id on ties, never one of probability 0.

    As -log(1 - u) is at least u, who does not ring first can mostly be told from u / p, without a logarithm.

    Args:
        probs_V: [V] float32 or float64 on any device; need not sum to 1.
        uniform: the numbers u of ids.
    """
    p_V = probs_V.detach().cpu().numpy()
    possible_N = np.flatnonzero(p_V > 0)
    if len(possible_N) == 1:
        return int(possible_N[0])
    best, ring = -1, np.inf
    for at in range(0, len(possible_N), _PIECE):
        ids_N = possible_N[at : at + _PIECE]
        p_N = p_V[ids_N].astype(np.float64)
        u_N = uniform(ids_N)
        earliest_N = u_N / p_N
        first = int(earliest_N.argmin())
        bound = min(ring, float(-np.log1p(-u_N[first]) / p_N[first]))
        left = np.flatnonzero(earliest_N <= bound * _SLACK)
        rings = -np.log1p(-u_N[left]) / p_N[left]
        if len(left) and (earliest := float(rings.min())) < ring:
            best, ring = int(ids_N[left[int(rings.argmin())]]), earliest
    return best
