"""Micro-scaled floats and rotation: the tables of the formats, what a scale may be, and identities before rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.errors import ShapeError
from bitdraft.formats import get_format
from bitdraft.formats.minifloat import encode_fp8, round_e2m1
from bitdraft.ops.encoding import E2M1, rotate, unpack_bits
from bitdraft.ops.packed import Packed
from bitdraft.ops.reference import linear_add, prepare

FP4 = ["mxfp4", "nvfp4"]
MX = ["mxfp4", "mxfp8"]


def weights(seed: int, N: int = 6, K: int = 256) -> Tensor:
    """Rows of different sizes, normal but for a few outliers and a block of zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N, K)) * np.exp(3 * rng.standard_normal((N, 1)))
    values[rng.random((N, K)) < 0.01] *= 20
    values[1, 32:64] = 0
    return torch.from_numpy(values.astype(np.float32))


def test_float4_goes_to_the_nearest_value_and_ties_to_the_even_code() -> None:
    """Every value, every halfway point between neighbours, and both sides of it."""
    values = E2M1.unique()
    assert torch.equal(round_e2m1(values), values)
    halfway = (values[1:] + values[:-1]) / 2
    upper = torch.tensor([int((E2M1 == v).nonzero()[0]) % 2 == 0 for v in values[1:]])
    assert torch.equal(round_e2m1(halfway), torch.where(upper, values[1:], values[:-1]))
    assert torch.equal(round_e2m1(halfway + 1e-3), values[1:])
    assert torch.equal(round_e2m1(halfway - 1e-3), values[:-1])
    assert round_e2m1(torch.tensor([6.9, 1e30, -9.0])).tolist() == [6.0, 6.0, -6.0]


@pytest.mark.parametrize("name", FP4)
def test_every_code_comes_back(name: str) -> None:
    """A block of all values at a scale of 1, as the tensor's or the block's scale gives it; 0 has one code."""
    values = E2M1.repeat(2)[None]
    scale = 1.0 if name == "mxfp4" else 448.0  # so that NVFP4's scale of the tensor is 1
    packed = get_format(name).encode(values * scale)
    assert unpack_bits(packed.codes, 4)[0].tolist() == [*range(8), 0, *range(9, 16)] * 2
    assert torch.equal(get_format(name).decode(packed), values * scale)


@pytest.mark.parametrize("name", [*FP4, "mxfp8"])
def test_scales_are_what_files_hold(name: str) -> None:
    packed = get_format(name).encode(weights(0))
    assert packed.scales is not None
    block, dtype = (16, torch.float8_e4m3fn) if name == "nvfp4" else (32, torch.float8_e8m0fnu)
    assert (packed.scales.shape, packed.scales.dtype) == ((6, 256 // block), dtype)
    assert bool((packed.scales.float() > 0).all())
    assert (packed.channel is not None) == (name == "nvfp4")


@pytest.mark.parametrize("name", MX)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_power_of_two_has_less_error(name: str, seed: int) -> None:
    """Over every exponent within 4 of the chosen one, not only the two that are tried."""
    form, weight = get_format(name), weights(seed)
    packed = form.encode(weight)
    assert packed.scales is not None
    chosen = (form.decode(packed) - weight).square().view(6, 8, 32).sum(-1)
    for off in range(-4, 5):
        w_NGS = weight.view(6, 8, 32) / packed.scales.float()[..., None] * 2.0**-off
        limit = 6.0 if name == "mxfp4" else 448.0
        rounded = round_e2m1(w_NGS) if name == "mxfp4" else w_NGS.clamp(-limit, limit).to(torch.float8_e4m3fn).float()
        error = (rounded * packed.scales.float()[..., None] * 2.0**off - weight.view(6, 8, 32)).square().sum(-1)
        # Half the scale clips more than half the largest away, which other weights make up for in no block of 32 here.
        assert bool((chosen <= error * 1.0001).all()), off


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_nvfp4_has_no_more_error_than_the_largest_magnitude_gives(seed: int) -> None:
    weight = weights(seed)
    form = get_format("nvfp4")
    w_NGS = (weight / (weight.abs().max() / 2688)).view(6, 16, 16)
    scale = (w_NGS.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float()
    plain = ((round_e2m1(w_NGS / scale) * scale - w_NGS) * (weight.abs().max() / 2688)).square().sum(-1)
    found = (form.round(weight) - weight).view(6, 16, 16).square().sum(-1)
    assert bool((found <= plain * 1.0001 + 1e-12 * weight.abs().max() ** 2).all())


def test_fp8_takes_the_split_with_less_error() -> None:
    """Weights of one size need fraction; weights over 30 octaves need exponents, which E4M3 has 18 of."""
    smooth = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    assert get_format("fp8").encode(smooth).codes.dtype == torch.float8_e4m3fn
    spread = torch.full((4, 4096), 2.0**-20)
    spread[:, 0] = 1.0
    packed = get_format("fp8").encode(spread)
    assert (packed.codes.dtype, packed.activation) == (torch.float8_e5m2, "fp8_e4m3")
    for weight in (smooth, spread):
        errors = [
            float((codes.float() * scale - weight).square().sum())
            for codes, scale in (encode_fp8(weight, kind) for kind in ("fp8_e4m3", "fp8_e5m2"))
        ]
        assert float((get_format("fp8").round(weight) - weight).square().sum()) == min(errors)


@pytest.mark.parametrize("block", [1, 2, 32, 64, 128])
def test_a_rotation_is_its_own_inverse_and_keeps_lengths(block: int) -> None:
    x = weights(1)
    turned = rotate(x, block)
    torch.testing.assert_close(rotate(turned, block), x, rtol=1e-5, atol=1e-6 * float(x.abs().max()))
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1))


def test_a_rotation_is_sylvesters_matrix() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    x = weights(2)
    expected = torch.cat([part @ (matrix * 32**-0.5) for part in x.split(32, dim=1)], 1)
    torch.testing.assert_close(rotate(x, 32), expected, rtol=1e-4, atol=1e-5 * float(x.abs().max()))
    assert rotate(torch.eye(32), 32)[0].tolist() == [float(torch.tensor(32**-0.5))] * 32


@pytest.mark.parametrize(("K", "block"), [(96, 64), (48, 24), (32, 0)])
def test_blocks_that_do_not_fit_are_refused(K: int, block: int) -> None:
    with pytest.raises(ShapeError, match=f"rotate: {K} inputs in blocks of {block}"):
        rotate(torch.zeros(1, K), block)


def test_a_rotation_changes_nothing_before_rounding() -> None:
    """x H (W H)^T = x W^T with weights and inputs in float32."""
    x, weight = weights(3), weights(4)
    rotated = Packed("f32", (6, 256), 32, "f32", rotate(weight, 32), rotation=32)
    got = linear_add(x, prepare(rotated), torch.zeros(6, 6))
    bound = 1e-5 * x.norm(dim=1)[:, None] * weight.norm(dim=1)
    assert bool(((got - x @ weight.T).abs() <= bound).all())


@pytest.mark.parametrize("name", ["w4a8-had", "mxfp4-a8-had"])
def test_a_rotation_helps_where_an_input_is_much_larger_than_its_neighbours(name: str) -> None:
    """What it is for: one input of 32 at 100 times the others leaves int8 a step as large as they are."""
    x, weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)), weights(5)
    x[:, ::32] *= 100
    weight[:, ::32] /= 100
    exact, errors = x @ weight.T, []
    for form in (get_format(name), get_format(name.removesuffix("-had"))):
        got = linear_add(x, prepare(form.encode(weight)), torch.zeros(8, 6))
        errors.append(float((form.round_inputs(x) - x)[:, 1::32].norm()))
        assert got.isfinite().all()
    assert exact.isfinite().all()
    assert errors[0] < errors[1]
