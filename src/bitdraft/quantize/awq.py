"""AWQ's scales (Lin et al., 2306.00978, section 3.2): inputs that carry much are scaled up before rounding.

Their weights are then rounded finely, and the scale is undone in whatever makes those inputs (`fold.py`). It is
`mean|x|^alpha`, with the alpha that changes the outputs least.

Shape suffixes: K inputs.
"""

from collections.abc import Callable

from torch import Tensor


def awq_scale(magnitude_K: Tensor) -> Callable[[float], Tensor]:
    """The scale by its exponent alpha, from the mean |x| of every input, [K]."""
    return magnitude_K.clamp(min=1e-4).pow
