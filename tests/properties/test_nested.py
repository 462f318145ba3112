"""Nested weights: what the nibbles are, and what each view loses beside a weight of its width alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.errors import FormatError
from bitdraft.formats import get_format
from bitdraft.formats.nested import HIGHEST, LOWEST, WORSE, high_nibble
from bitdraft.ops.encoding import unpack_bits
from bitdraft.ops.packed import Packed


def weights(seed: int, N: int = 8, K: int = 128) -> Tensor:
    """Rows of different sizes and signs, normal but for a few outliers and a group of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N, K)) * np.exp(3 * rng.standard_normal((N, 1)))
    values[rng.random((N, K)) < 0.01] *= 20
    values[0], values[1, :32] = np.abs(values[0]), 0
    return torch.from_numpy(values.astype(np.float32))


def encoded(weight: Tensor) -> tuple[Packed, Tensor]:
    packed = get_format("w8n4a8").encode(weight)
    assert packed.scales is not None
    return packed, packed.scales


def square(off: Tensor) -> Tensor:
    """Squared error of each group."""
    return off.double().square().view(len(off), -1, 32).sum(-1)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_high_nibble_is_the_nearest_four_bit_code(seed: int) -> None:
    """Code by code: 16 * high is within 8 of the 8-bit code, and the four-bit view is an ordinary weight of those."""
    packed, scales = encoded(weights(seed))
    view = high_nibble(packed)
    high = unpack_bits(view.codes, 4).int() - 8
    low = packed.codes.int() - 16 * high
    assert int(low.min()) >= -8
    assert int(low.max()) <= 7
    assert int(packed.codes.min()) >= LOWEST
    assert int(packed.codes.max()) <= HIGHEST
    assert (view.format, view.bits, view.activation, view.shape) == ("w4a8", 4, "int8", packed.shape)
    assert torch.equal(scales.half().float(), scales)
    values = (16 * high).float().view(8, 4, 32) * scales[..., None]
    assert torch.equal(get_format("w4a8").decode(view), values.view(8, 128))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_eight_bit_view_is_as_good_as_is_said(seed: int) -> None:
    """Beside its own error at the scale that just holds the group, which is float16 in both."""
    weight = weights(seed)
    packed, _ = encoded(weight)
    w_NGS = weight.view(8, 4, 32)
    high, low = w_NGS.amax(-1).clamp(min=0), -w_NGS.amin(-1).clamp(max=0)
    holds = torch.maximum(torch.maximum(high, low) / -LOWEST, torch.minimum(high, low) / HIGHEST)
    scale = torch.where(high > low, -1.0, 1.0) * holds.clamp(2.0**-24).half().float()
    plain = ((w_NGS / scale[..., None]).round().clamp(LOWEST, HIGHEST) * scale[..., None]).view(8, 128)
    found = square(get_format("w8n4a8").decode(packed) - weight)
    assert bool((found <= WORSE * square(plain - weight) * 1.001 + 1e-30).all())


def test_both_views_hold_their_own_on_gaussian_weights() -> None:
    """The nibble beats a symmetric w4 of the same groups, and the byte loses a tenth to an 8-bit weight of its own."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    packed, _ = encoded(weight)
    nibble = float((get_format("w4a8").decode(high_nibble(packed)) - weight).norm())
    assert nibble < 0.92 * float((get_format("w4a8").round(weight) - weight).norm())
    scale = weight.view(64, 32, 32).abs().amax(-1, keepdim=True) / 127
    alone = ((weight.view(64, 32, 32) / scale).round() * scale).view(64, 1024)
    byte = float((get_format("w8n4a8").decode(packed) - weight).norm())
    assert byte < 1.1 * float((alone - weight).norm())


def test_only_nested_weights_have_a_nibble() -> None:
    with pytest.raises(FormatError, match=r"w4a8: no weight .* Expected w8n4a8 or w8n4a16"):
        high_nibble(get_format("w4a8").encode(weights(0)))
    view = high_nibble(get_format("w8n4a16-had").encode(weights(0)))
    assert (view.format, view.activation, view.rotation) == ("w4a16-had", "bf16", 32)
