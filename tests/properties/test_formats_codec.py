"""Codes: bit layout, identities of encoding and decoding, and rows that know nothing of one another."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdraft.errors import ShapeError
from bitdraft.formats import FORMATS, get_format
from bitdraft.ops.encoding import FLOAT8, pack_bits, round_activations, unpack_bits
from bitdraft.ops.packed import Activation

GROUPED = [name for name, form in FORMATS.items() if form.group_size and form.kind == "integer"]
WEIGHTS_ONLY = [name for name in GROUPED if name.endswith("a16")]  # how inputs are rounded does not enter the codes
VARIANTS = [name + group + zero for name in WEIGHTS_ONLY for group in ("", "-g64", "-g128") for zero in ("", "-asym")]
PLAIN = [*(name for name in FORMATS if name not in GROUPED), *VARIANTS]
ROTATED = ["w4a16-had", "w3a16-g128-asym-had", "mxfp4-had", "nvfp4-had"]
ALL = [*PLAIN, *ROTATED]
BY_TENSOR = [name for name in ALL if get_format(name).kind in ("fp8", "nvfp4")]  # something is chosen for all rows
ACTIVATIONS: tuple[Activation, ...] = ("f32", "bf16", "int8", "fp8_e4m3", "fp8_e5m2")


def weights(seed: int, N: int = 5, K: int = 256, spread: float = 1.0) -> Tensor:
    """Rows of different sizes, normal but for a few outliers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N, K)) * np.exp(spread * rng.standard_normal((N, 1)))
    values[rng.random((N, K)) < 0.01] *= 20
    return torch.from_numpy(values.astype(np.float32))


@settings(deadline=None)
@given(st.data(), st.sampled_from([1, 2, 3, 4, 5, 6, 7]), st.integers(1, 4), st.integers(1, 6))
def test_a_row_is_one_little_endian_number(data: st.DataObject, bits: int, N: int, eights: int) -> None:
    """The specification of the layout, as one integer a row: code k stands at bit k * bits."""
    K = 8 * eights
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=N * K, max_size=N * K))
    table = torch.tensor(codes, dtype=torch.uint8).view(N, K)
    packed = pack_bits(table, bits)
    assert packed.shape == (N, K * bits // 8)
    for n in range(N):
        number = sum(int(code) << (k * bits) for k, code in enumerate(table[n]))
        assert bytes(packed[n].tolist()) == number.to_bytes(K * bits // 8, "little")
    assert torch.equal(unpack_bits(packed, bits), table)


@pytest.mark.parametrize(("bits", "K"), [(2, 4), (3, 8), (4, 2), (6, 4)])
def test_the_shortest_rows_pack(bits: int, K: int) -> None:
    table = torch.arange(K)[None] % 2**bits
    assert torch.equal(unpack_bits(pack_bits(table, bits), bits), table.to(torch.uint8))
    with pytest.raises(ShapeError, match=f"multiple of {K} codes"):
        pack_bits(table[:, 1:], bits)


def test_a_broken_row_does_not_unpack() -> None:
    with pytest.raises(ShapeError, match="5 bytes a row for codes of 3 bits"):
        unpack_bits(torch.zeros(1, 5, dtype=torch.uint8), 3)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), share=st.sampled_from([1.0, 0.85, 0.5]))
def test_round_is_decode_after_encode_to_the_bit(name: str, seed: int, share: float) -> None:
    form, weight = get_format(name), weights(seed)
    if form.kind != "integer":
        share = 1.0
    assert torch.equal(form.round(weight, share), form.decode(form.encode(weight, share)))


@pytest.mark.parametrize("name", [name for name in PLAIN if not name.endswith("-asym") and name not in BY_TENSOR])
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_rounding_twice_is_rounding_once(name: str, seed: int) -> None:
    """Float16 scales times small codes are exact in float32; a float32 scale comes back with its last bit unsure."""
    form = get_format(name)
    once = form.round(weights(seed))
    exact = form.group_size is not None or form.kind == "float"
    torch.testing.assert_close(form.round(once), once, rtol=0 if exact else 3e-7, atol=0)


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_grid_that_is_representable_comes_back_exactly(name: str, seed: int) -> None:
    form, rng = get_format(name), np.random.default_rng(seed)
    G, S = 256 // (form.group_size or 1), form.group_size or 1
    top, half = 2**form.bits - 1, 2 ** (form.bits - 1)
    low = 0 if not form.symmetric else 1
    code = rng.integers(low, top + 1, (3, G, S))
    code[..., 0], code[..., 1] = low, top  # the ends fix the scale
    zero = half if form.symmetric else rng.integers(0, top + 1, (3, G, 1))
    scale = np.exp(rng.standard_normal((3, G, 1))).astype(np.float16).astype(np.float32)
    weight = torch.from_numpy(((code - zero) * scale).astype(np.float32)).view(3, 256)
    assert torch.equal(form.round(weight), weight)


@pytest.mark.parametrize("name", VARIANTS)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_weight_is_further_than_half_a_step(name: str, seed: int) -> None:
    """Half a step, and at the ends of the range what float16 took from the scale: 2^-11 of the range."""
    form, weight = get_format(name), weights(seed)
    weight[0], weight[1] = weight[0].abs() + 1, -weight[1].abs() - 1  # groups whose range does not hold 0
    packed = form.encode(weight)
    assert packed.scales is not None
    step = packed.scales.repeat_interleave(form.group_size or 1, dim=1)
    bound = step * (0.5 + 2**form.bits * 2**-11)
    assert bool(((form.decode(packed) - weight).abs() <= bound).all())


@pytest.mark.parametrize("name", PLAIN)
def test_zero_stays_zero_and_signs_stay(name: str) -> None:
    form, weight = get_format(name), weights(7)
    weight[:, ::3] = 0
    weight[2] = 0
    rounded = form.round(weight)
    assert bool((rounded[weight == 0] == 0).all())
    assert bool((rounded * weight >= 0).all())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e30])
def test_weights_of_any_size_give_numbers(name: str, size: float) -> None:
    form = get_format(name)
    assert bool(form.round(weights(3) * size).isfinite().all())


@pytest.mark.parametrize("name", [name for name in ALL if name not in BY_TENSOR])
def test_a_row_of_weights_is_rounded_by_itself(name: str) -> None:
    form, weight = get_format(name), weights(11)
    assert torch.equal(torch.cat([form.round(row[None]) for row in weight]), form.round(weight))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_row_of_inputs_is_rounded_by_itself(activation: Activation, seed: int) -> None:
    x = weights(seed, spread=8.0)
    x[1] = 0
    rounded = round_activations(x, activation)
    assert torch.equal(torch.cat([round_activations(row[None], activation) for row in x]), rounded)
    assert bool((rounded[1] == 0).all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1.0, 3e38])
def test_inputs_of_any_size_give_numbers(activation: Activation, size: float) -> None:
    x = torch.tensor([[0.0, 0.5, -1.0, 1.0]]) * size
    assert bool(round_activations(x, activation).isfinite().all())


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1))
def test_int8_inputs_are_within_half_a_step(seed: int) -> None:
    x = weights(seed, spread=4.0)
    step = x.abs().amax(-1, keepdim=True) / 127
    assert bool(((round_activations(x, "int8") - x).abs() <= step * 0.50001).all())


def test_int8_ties_go_to_the_even_code() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert round_activations(x, "int8").tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0]]


@pytest.mark.parametrize("kind", FLOAT8)
def test_float8_inputs_go_to_the_nearest_number_of_the_format(kind: Activation) -> None:
    """All numbers of the format, and the points halfway between neighbours, which go to the even code."""
    table = torch.arange(256, dtype=torch.uint8).view(FLOAT8[kind]).float()
    numbers = table[table.isfinite()].unique()
    assert torch.equal(round_activations(numbers[None], kind)[0], numbers)
    halfway = (numbers[1:] + numbers[:-1]) / 2
    row = torch.cat([numbers[-1:], halfway])  # the largest number fixes the scale at 1
    rounded = round_activations(row[None], kind)[0, 1:]
    assert bool(((rounded == numbers[1:]) | (rounded == numbers[:-1])).all())
    assert int((rounded.to(FLOAT8[kind]).view(torch.uint8) & 1).sum()) == 0
    below = round_activations(torch.cat([numbers[-1:], halfway * 0.999])[None], kind)[0, 1:]
    nearer = torch.where(halfway > 0, numbers[:-1], numbers[1:])
    assert torch.equal(below, nearer)
