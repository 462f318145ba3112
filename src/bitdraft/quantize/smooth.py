"""SmoothQuant's scales (Xiao et al., 2211.10438, section 4): outliers of the inputs are moved into the weights.

A row of 8-bit inputs has one scale, so that one large input leaves few codes to all others. Each input is divided by
`max|x|^alpha / max|w|^(1 - alpha)`, which its weights are multiplied by, and which is undone in whatever makes the
inputs (`fold.py`). The paper's alpha is 0.5; here it is the one that changes the outputs least.

Shape suffixes: K inputs.
"""

from collections.abc import Callable

from torch import Tensor


def smooth_scale(largest_input_K: Tensor, largest_weight_K: Tensor) -> Callable[[float], Tensor]:
    """The scale by its exponent alpha, from the largest |x| and the largest |w| of every input, [K] both."""
    x_K, w_K = largest_input_K.clamp(min=1e-4), largest_weight_K.clamp(min=1e-4)
    return lambda alpha: x_K.pow(alpha) / w_K.pow(1 - alpha)
