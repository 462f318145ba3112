"""The compiled linear operations against the reference, and a row's independence of everything beside it.

Tolerances. Formats with 16-bit inputs multiply the very same FP32 values as the reference and add them up in another
order: a few units in the last place of the largest partial sum, 2e-6 of the largest output. 8-bit inputs are rounded
from rows whose RMSNorm differs in the last place, so that a code at a tie may fall to the other side: one code of 127
in one of K inputs, 2e-3 of the largest output in the worst case here. Without a norm the codes are the same.

Shape suffixes: R rows, D hidden size, N outputs, K inputs, M inner size of an MLP.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import every_isa, kernels
from torch import Tensor

from bitdraft import ops
from bitdraft.errors import FormatError, ShapeError, UsageError
from bitdraft.formats import get_format
from bitdraft.ops import native, reference
from bitdraft.ops.encoding import rotate, round_activations
from bitdraft.ops.native import Native
from bitdraft.ops.packed import Packed

GROUPED = [
    f"w{bits}a{width}{group}{zeros}"
    for bits in (6, 4, 3, 2)
    for width in (8, 16)
    for group in ("", "-g64", "-g128")
    for zeros in ("", "-asym")
]
SMALL_FLOATS = ["mxfp4", "mxfp4-a8", "nvfp4", "nvfp4-a8", "mxfp8"]
NESTED = ["w8n4a8", "w8n4a16"]
ROTATED = ["w8a8-had", "w4a8-had", "w4a16-g64-asym-had", "w3a8-g128-had", "mxfp4-a8-had", "nvfp4-had", "w8n4a8-had"]
INPUT_GROUPS = ["w8a8", "w6a8", "w4a8", "w4a8-g128-asym", "w3a8-asym", "w2a8", "mxfp4-a8", "w8n4a8", "w4a8-had"]
GROUPED += SMALL_FLOATS + NESTED + ROTATED + [f"{name}-ag32" for name in INPUT_GROUPS]
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
    if get_format(name).activation not in ("f32", "bf16"):
        return 2e-3
    # After a rotation of rows that differ in the last place, inputs may round to the other bfloat16 beside a tie.
    return 2e-3 if get_format(name).rotated else 2e-6


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
    packed = replace(encoded(name, 50, 128), rotation=None)  # no table is rotated
    run, ids = kernels(isa, 2), torch.tensor([49, 0, 17, 17, 31])
    assert torch.equal(run.embed(ids, run.prepare(packed)), reference.prepare(packed).values[ids])


@every_isa
@settings(max_examples=60)
@given(data=st.data())
def test_any_shape(isa: str, data: st.DataObject) -> None:
    """Outputs and rows that fill no panel and no block, inputs that fill no register."""
    name = data.draw(st.sampled_from(WHOLE + GROUPED))
    form = get_format(name)
    group = form.rotation or form.group_size
    K = data.draw(st.integers(1, 5)) * group if group else data.draw(st.integers(1, 100))
    N, R = data.draw(st.integers(1, 50)), data.draw(st.integers(1, 70))
    packed, x = encoded(name, N, K), random(R, K) * data.draw(st.sampled_from([1e-20, 1.0, 1e4]))
    run = kernels(isa, data.draw(st.sampled_from([1, 2])))
    got = run.linear_add(x, run.prepare(packed), torch.zeros(R, N))
    expected = reference.linear_add(x, reference.prepare(packed), torch.zeros(R, N))
    # Small sums may cancel: what bounds the error of a sum is the sum of magnitudes.
    inputs = x if packed.rotation is None else rotate(x, packed.rotation)
    bound = 2e-6 * (round_activations(inputs, packed.activation).abs() @ reference.prepare(packed).values.abs().T)
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


@every_isa
@pytest.mark.parametrize("block", [32, 64, 128])
def test_a_rotation_is_the_reference_to_the_bit(isa: str, block: int) -> None:
    """Sums in the same order, so that inputs round alike: the identity as weight shows them."""
    size = 2 * block
    identity = Packed("eye", (size, size), 32, "bf16", torch.eye(size), rotation=block)
    x, run = random(3, size), kernels(isa, 1)
    got = run.linear_add(x, run.prepare(identity), torch.zeros(3, size))
    assert torch.equal(got, rotate(x, block).bfloat16().float())


@every_isa
@pytest.mark.parametrize("name", ["mxfp4", "mxfp4-a8"])
@pytest.mark.parametrize("sizes", [(1e-20, 1e-18), (1e8, 1e12), (1e-9, 1.0)])
def test_powers_of_two_beyond_float16_stay_exact(isa: str, name: str, sizes: tuple[float, float]) -> None:
    """A factor for the output takes what the groups' float16 scales cannot; groups of zeros may have any scale."""
    weight = random(18, 96)
    weight[:, :32] *= sizes[0]
    weight[:, 32:64] *= sizes[1]
    weight[:, 64:] = 0
    packed = get_format(name).encode(weight)
    assert packed.scales is not None
    packed.scales[:, 2] = torch.tensor(2.0**-127).to(packed.scales.dtype)
    run, x = kernels(isa, 1), random(5, 96)
    prepared = run.prepare(packed)
    assert prepared.parts[0].kind.codec == "fp4"
    expected = reference.linear_add(x, reference.prepare(packed), torch.zeros(5, 18))
    assert_close(run.linear_add(x, prepared, torch.zeros(5, 18)), expected, 2e-6)


def test_scales_that_no_factor_brings_together_are_bfloat16_or_refused() -> None:
    weight = random(18, 64)
    weight[:, :32] *= 2.0**-60
    run, x = kernels("scalar", 1), random(5, 64)
    packed = get_format("mxfp4").encode(weight)
    prepared = run.prepare(packed)
    assert prepared.parts[0].kind.codec == "bf16"
    expected = reference.linear_add(x, reference.prepare(packed), torch.zeros(5, 18))
    assert_close(run.linear_add(x, prepared, torch.zeros(5, 18)), expected, 2e-6)
    with pytest.raises(FormatError, match=r"mxfp4-a8: .*further apart than 2\^39.* use mxfp4"):
        run.prepare(get_format("mxfp4-a8").encode(weight))


def test_values_that_bfloat16_would_round_are_refused() -> None:
    scales = torch.full((2, 2), 2.0**-127).to(torch.float8_e8m0fnu)
    codes = torch.full((2, 64), 2.0**-6 * 1.125).to(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match=r"odd: values that bfloat16.*BITDRAFT_ISA=reference"):
        kernels("scalar", 1).prepare(Packed("odd", (2, 64), 8, "bf16", codes, scales))


def test_float4_codes_with_other_scales_are_refused() -> None:
    odd = Packed("odd", (2, 32), 4, "bf16", torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), element="e2m1")
    with pytest.raises(FormatError, match=r"odd: torch\.float32 scales .*MXFP4.*NVFP4"):
        kernels("scalar", 1).prepare(odd)


def test_parts_that_rotate_otherwise_are_refused() -> None:
    parts = [replace(encoded("w4a8", 16, 128), rotation=block) for block in (32, 64)]
    with pytest.raises(ShapeError, match="rotation"):
        ops.prepare(*parts)
    run = kernels("scalar", 1)
    with pytest.raises(ShapeError, match="round them otherwise"):
        run.linear_add(random(1, 128), run.prepare(*parts), torch.zeros(1, 32))
    with pytest.raises(ShapeError, match="whole blocks"):
        run.prepare(replace(encoded("w4a8", 16, 96), rotation=64))
    with pytest.raises(ShapeError, match="rotated"):
        run.embed(torch.tensor([0]), run.prepare(parts[0]))


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
