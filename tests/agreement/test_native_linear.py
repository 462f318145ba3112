"""The compiled linear operations against the reference, and a row's independence of everything beside it.

Tolerances. Formats with 16-bit inputs multiply the very same FP32 values as the reference and add them up in another
order: a few units in the last place of the largest partial sum, 2e-6 of the largest output. 8-bit inputs are rounded
from rows whose RMSNorm differs in the last place, so that a code at a tie may fall to the other side: one code of 127
in one of K inputs, 2e-3 of the largest output in the worst case here. Without a norm the codes are the same.

Shape suffixes: R rows, D hidden size, N outputs, K inputs, M inner size of an MLP.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import every_isa, kernels
from torch import Tensor

from bitdraft.errors import FormatError, ShapeError, UsageError
from bitdraft.formats import get_format
from bitdraft.ops import native, reference
from bitdraft.ops.native import Native
from bitdraft.ops.packed import Packed

GROUPED = [
    f"w{bits}a{width}{group}{zeros}"
    for bits in (6, 4, 3, 2)
    for width in (8, 16)
    for group in ("", "-g64", "-g128")
    for zeros in ("", "-asym")
]
WHOLE = ["f32", "bf16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3-w", "w8a8", "w8a16"]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 64]

every_format = pytest.mark.parametrize("name", WHOLE + GROUPED)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(name: str, N: int, K: int, seed: int = 1) -> Packed:
    return get_format(name).encode(random(N, K, seed=seed) / math.sqrt(K))


def assert_close(got: Tensor, expected: Tensor, share: float) -> None:
    """Every entry within `share` of the largest expected one."""
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= share * float(expected.abs().max())


def share_of(name: str) -> float:
    return 2e-3 if get_format(name).activation in ("int8", "fp8_e4m3", "fp8_e5m2") else 2e-6


@every_isa
@every_format
def test_norm_linear_agrees_and_rows_are_alone(isa: str, name: str) -> None:
    packed = encoded(name, 37, 256)
    x, norm, bias = random(64, 256) * 3, random(256, seed=2).abs() + 0.5, random(37, seed=3)
    expected = reference.norm_linear(x, norm, 1e-6, reference.prepare(packed), bias)
    for threads in (1, 2):
        run = kernels(isa, threads)
        weight = run.prepare(packed)
        whole = run.norm_linear(x, norm, 1e-6, weight, bias)
        assert_close(whole, expected, share_of(name))
        for rows in ROWS:
            assert torch.equal(run.norm_linear(x[:rows], norm, 1e-6, weight, bias), whole[:rows])
            assert torch.equal(run.norm_linear(x[-rows:], norm, 1e-6, weight, bias), whole[-rows:])
    one, two = (kernels(isa, t).norm_linear(x, norm, 1e-6, kernels(isa, t).prepare(packed), bias) for t in (1, 2))
    assert torch.equal(one, two)


@every_isa
@every_format
def test_linear_add_agrees(isa: str, name: str) -> None:
    """Without a norm the inputs round to the same codes, so what differs is the order of the sum alone."""
    packed, x, residual = encoded(name, 40, 384), random(9, 384), random(9, 40, seed=2)
    expected = reference.linear_add(x, reference.prepare(packed), residual)
    run = kernels(isa, 2)
    assert_close(run.linear_add(x, run.prepare(packed), residual), expected, 2e-6)


@every_isa
@every_format
def test_gated_mlp_agrees(isa: str, name: str) -> None:
    M = 128 if name in GROUPED else 72  # 72 is no multiple of a panel: gate and up rows share one
    gate_up, down = encoded(name, 2 * M, 128), encoded(name, 128, M, seed=4)
    x, norm = random(9, 128), random(128, seed=2).abs() + 0.5
    decoded = reference.prepare(gate_up), reference.prepare(down)
    run = kernels(isa, 2)
    weights = run.prepare(gate_up), run.prepare(down)
    inner = run.gated_inputs(x, norm, 1e-6, weights[0])
    assert_close(inner, reference.gated_inputs(x, norm, 1e-6, decoded[0]), 2 * share_of(name) + 1e-5)
    whole = run.gated_mlp(x, norm, 1e-6, *weights)
    assert_close(whole, reference.gated_mlp(x, norm, 1e-6, *decoded), 2 * share_of(name) + 1e-5)
    assert torch.equal(whole, run.linear_add(inner, weights[1], x))
    for rows in (1, 2, 3, 5):
        assert torch.equal(run.gated_mlp(x[:rows], norm, 1e-6, *weights), whole[:rows])


@every_isa
@pytest.mark.parametrize("name", ["f32", "w8a8", "w4a16-g64"])
@pytest.mark.parametrize("M", [128, 72])
def test_gemmas_gate_and_norms_agree(isa: str, name: str, M: int) -> None:
    """GELU in its tanh form, inputs far out included, and norms of what is added to the residual."""
    gate_up, down = encoded(name, 2 * M, 128), encoded(name if M == 128 else "bf16", 128, M, seed=4)
    x, norm, after = random(9, 128), random(128, seed=2).abs() * 4, random(128, seed=3)
    decoded = reference.prepare(gate_up), reference.prepare(down)
    run = kernels(isa, 2)
    weights = run.prepare(gate_up), run.prepare(down)
    inner = run.gated_inputs(x, norm, 1e-6, weights[0], "gelu_tanh")
    expected = reference.gated_inputs(x, norm, 1e-6, decoded[0], "gelu_tanh")
    assert_close(inner, expected, 2 * share_of(name) + 1e-5)
    normed = run.linear_add(inner, weights[1], x, after, 1e-3)
    assert_close(normed, reference.linear_add(inner, decoded[1], x, after, 1e-3), 2e-5)
    whole = run.gated_mlp(x, norm, 1e-3, *weights, "gelu_tanh", after)
    assert torch.equal(
        whole, run.linear_add(run.gated_inputs(x, norm, 1e-3, weights[0], "gelu_tanh"), weights[1], x, after, 1e-3)
    )
    for rows in (1, 2, 5):
        assert torch.equal(run.gated_mlp(x[:rows], norm, 1e-3, *weights, "gelu_tanh", after), whole[:rows])


@every_isa
def test_capped_logits_agree(isa: str) -> None:
    """cap * tanh(y / cap) to a few units in the last place of the cap; what is not a number stays none."""
    head, x, norm = encoded("f32", 37, 64), random(5, 64) * 3, torch.ones(64)
    run, expected = kernels(isa, 2), reference.logits(x, norm, 1e-6, reference.prepare(head), 0.7)
    got = run.logits(x, norm, 1e-6, run.prepare(head), 0.7)
    assert_close(got, expected, 2e-6)
    assert torch.equal(run.logits(x[2:3], norm, 1e-6, run.prepare(head), 0.7), got[2:3])
    x[1, 3] = torch.nan
    assert bool(run.logits(x, norm, 1e-6, run.prepare(head), 0.7)[1].isnan().all())


@every_isa
@every_format
def test_embedding_is_the_decoded_weight_to_the_bit(isa: str, name: str) -> None:
    packed = encoded(name, 50, 128)
    run, ids = kernels(isa, 2), torch.tensor([49, 0, 17, 17, 31])
    assert torch.equal(run.embed(ids, run.prepare(packed)), reference.prepare(packed).values[ids])


@every_isa
@settings(max_examples=60)
@given(data=st.data())
def test_any_shape(isa: str, data: st.DataObject) -> None:
    """Outputs and rows that fill no panel and no block, inputs that fill no register."""
    name = data.draw(st.sampled_from(WHOLE + GROUPED))
    group = get_format(name).group_size
    K = data.draw(st.integers(1, 5)) * group if group else data.draw(st.integers(1, 100))
    N, R = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 70))
    packed, x = encoded(name, N, K), random(R, K) * data.draw(st.sampled_from([1e-20, 1.0, 1e4]))
    run = kernels(isa, data.draw(st.sampled_from([1, 2])))
    got = run.linear_add(x, run.prepare(packed), torch.zeros(R, N))
    expected = reference.linear_add(x, reference.prepare(packed), torch.zeros(R, N))
    # Small sums may cancel: what bounds the error of a sum is the sum of magnitudes.
    bound = 2e-6 * (reference.round_activations(x, packed.activation).abs() @ reference.prepare(packed).values.abs().T)
    assert bool(((got - expected).abs() <= bound + 1e-44).all())


@every_isa
@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "w8a8", "w4a8", "w4a16"])
def test_rows_of_zeros_and_large_rows(isa: str, name: str) -> None:
    packed, x = encoded(name, 16, 64), torch.stack([torch.zeros(64), torch.full((64,), 1e30), random(64)])
    run = kernels(isa, 1)
    got = run.linear_add(x, run.prepare(packed), torch.zeros(3, 16))
    expected = reference.linear_add(x, reference.prepare(packed), torch.zeros(3, 16))
    assert bool((got[0] == 0).all())
    for row in (1, 2):
        assert_close(got[row], expected[row], 1e-5)


@every_isa
def test_no_rows(isa: str) -> None:
    run = kernels(isa, 2)
    weight = run.prepare(encoded("w4a8", 16, 64))
    assert run.norm_linear(torch.empty(0, 64), torch.ones(64), 1e-6, weight, None).shape == (0, 16)


def test_a_scale_layout_that_no_format_has_is_refused() -> None:
    run = kernels("scalar", 1)
    odd = Packed("odd", (16, 96), 4, "int8", torch.zeros(16, 48, dtype=torch.uint8), torch.ones(16, 2))
    with pytest.raises(ShapeError, match="multiple of 32"):
        run.prepare(odd)
    bare = Packed("bare", (16, 64), 4, "int8", torch.zeros(16, 32, dtype=torch.uint8))
    with pytest.raises(FormatError, match="without scales"):
        run.prepare(bare)


def test_an_instruction_set_that_the_machine_lacks_is_refused() -> None:
    library, _ = native.load()
    assert library is not None
    with pytest.raises(UsageError, match="mmx"):
        Native(library, "mmx")
