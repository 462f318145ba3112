"""Inputs that are kept in 16 bits: the compiled operations against the reference, and a row's independence.

Tolerances are those of test_native_linear.py: sums in another order, 2e-6 of the largest output; after a norm an 8-bit
code may fall to the other side of a tie, 2e-3.

Shape suffixes: R rows, N outputs, K inputs, M inner size of an MLP.
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
from bitdraft.errors import FormatError, ShapeError
from bitdraft.formats import get_format
from bitdraft.ops import native, reference
from bitdraft.ops.encoding import round_activations
from bitdraft.ops.packed import Outliers, Packed, fuse
from bitdraft.quantize.outliers import with_outliers, without

FORMATS = ["w8a8", "w4a8", "w4a8-ag32", "w3a8-g64-asym", "mxfp4-a8", "nvfp4", "fp8_e4m3", "w8a16", "w4a16-asym"]
ROWS = [1, 2, 3, 5, 9, 40]

every_format = pytest.mark.parametrize("name", FORMATS)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_columns(K: int, count: int) -> Tensor:
    return torch.randperm(K, generator=torch.Generator().manual_seed(K + count))[:count].sort().values.int()


def encoded(name: str, N: int, columns: Tensor, K: int = 256, seed: int = 1) -> Packed:
    weight = random(N, K, seed=seed) / math.sqrt(K)
    return with_outliers(get_format(name).encode(without(weight, columns)), weight, columns)


def rows_with_outliers(R: int, columns: Tensor, K: int = 256) -> Tensor:
    x = random(R, K, seed=5)
    x[:, columns.long()] *= 50
    return x


def assert_close(got: Tensor, expected: Tensor, share: float) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= share * float(expected.abs().max())


@every_isa
@every_format
@pytest.mark.parametrize("count", [1, 16, 64])
def test_norm_linear_agrees_and_rows_are_alone(isa: str, name: str, count: int) -> None:
    columns = some_columns(256, count)
    packed, x = encoded(name, 37, columns), rows_with_outliers(40, columns)
    norm, bias = random(256, seed=2).abs() + 0.5, random(37, seed=3)
    expected = reference.norm_linear(x, norm, 1e-6, reference.prepare(packed), bias)
    made = []
    for threads in (1, 2):
        run = kernels(isa, threads)
        weight = run.prepare(packed)
        whole = run.norm_linear(x, norm, 1e-6, weight, bias)
        assert_close(whole, expected, 2e-3)
        for rows in ROWS:
            assert torch.equal(run.norm_linear(x[:rows], norm, 1e-6, weight, bias), whole[:rows])
            assert torch.equal(run.norm_linear(x[-rows:], norm, 1e-6, weight, bias), whole[-rows:])
        made.append(whole)
    assert torch.equal(*made)


@every_isa
@every_format
def test_linear_add_agrees_with_and_without_a_norm(isa: str, name: str) -> None:
    columns = some_columns(256, 8)
    packed, x, residual, after = encoded(name, 40, columns), rows_with_outliers(9, columns), random(9, 40), random(40)
    run, weight = kernels(isa, 2), reference.prepare(packed)
    got = run.linear_add(x, run.prepare(packed), residual)
    assert_close(got, reference.linear_add(x, weight, residual), 2e-6)
    normed = run.linear_add(x, run.prepare(packed), residual, after, 1e-3)
    assert_close(normed, reference.linear_add(x, weight, residual, after, 1e-3), 1e-5)


@every_isa
@settings(max_examples=40)
@given(data=st.data())
def test_any_shape(isa: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FORMATS))
    K = 64 * data.draw(st.integers(1, 4))
    columns = torch.tensor(
        sorted(data.draw(st.sets(st.integers(0, K - 1), min_size=1, max_size=40))), dtype=torch.int32
    )
    N, R = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    packed, x = encoded(name, N, columns, K), rows_with_outliers(R, columns, K)
    run = kernels(isa, data.draw(st.sampled_from([1, 2])))
    got = run.linear_add(x, run.prepare(packed), torch.zeros(R, N))
    weight = reference.prepare(packed)
    expected = reference.linear_add(x, weight, torch.zeros(R, N))
    rounded = round_activations(x, packed.activation, columns)
    bound = 2e-6 * (rounded.abs() @ weight.values.abs().T)  # small sums may cancel: the terms bound the error
    assert bool(((got - expected).abs() <= bound + 1e-30).all())


@every_isa
@pytest.mark.parametrize("second", ["w4a8", "w6a8"])
@pytest.mark.parametrize("M", [128, 72])
def test_a_gated_mlp_agrees_whichever_way_gate_and_up_are_stored(isa: str, second: str, M: int) -> None:
    """M = 72 is no multiple of a panel; gate and up of two formats are parts of one weight."""
    columns, inner_columns = some_columns(256, 16), some_columns(M, 8)
    parts = fuse([encoded("w4a8", M, columns), encoded(second, M, columns, seed=3)])
    down = encoded("w4a8" if M == 128 else "w8a8", 256, inner_columns, K=M, seed=4)
    x, norm = rows_with_outliers(9, columns), random(256, seed=2).abs() + 0.5
    run = kernels(isa, 2)
    weights, decoded = (run.prepare(*parts), run.prepare(down)), (reference.prepare(*parts), reference.prepare(down))
    inner = run.gated_inputs(x, norm, 1e-6, weights[0])
    assert_close(inner, reference.gated_inputs(x, norm, 1e-6, decoded[0]), 4e-3)
    whole = run.gated_mlp(x, norm, 1e-6, *weights)
    assert_close(whole, reference.gated_mlp(x, norm, 1e-6, *decoded), 4e-3)
    assert torch.equal(whole, run.linear_add(inner, weights[1], x))
    for rows in (1, 2, 3, 5):
        assert torch.equal(run.gated_mlp(x[:rows], norm, 1e-6, *weights), whole[:rows])


@every_isa
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a8-ag32"])
def test_however_large_an_outlier_is_the_other_inputs_round_alike(isa: str, name: str) -> None:
    """What a column adds is its own weights times its own bfloat16 value, and nothing else changes.

    The sums of the two differ by the column's term alone, rounded once where it is added: half a unit of the whole.
    """
    columns = torch.tensor([7, 40], dtype=torch.int32)
    packed, run = encoded(name, 24, columns), kernels(isa, 1)
    weight, zero = run.prepare(packed), torch.zeros(1, 24)
    x = random(1, 256)
    x[0, columns.long()] = 0
    quiet = run.linear_add(x, weight, zero)
    x[0, 7] = 4096.0
    loud = run.linear_add(x, weight, zero)
    assert packed.outliers is not None
    assert_close(loud - quiet, 4096.0 * packed.outliers.side[:, 0].float()[None], 2.0**-22)


def test_without_them_the_same_rows_lose_all_others() -> None:
    """The control of the test before: one loud input leaves no code to inputs that are 4000 times smaller."""
    x = random(1, 256)
    x[0, 7] = 40960.0
    plain = round_activations(x, "int8")
    kept = round_activations(x, "int8", torch.tensor([7]))
    assert int((plain != 0).sum()) == 1
    assert float((kept - x).abs().max()) < float(x[0, 8:].abs().max()) / 127


def test_what_does_not_fit_is_refused() -> None:
    good = encoded("w4a8", 16, some_columns(256, 8))
    assert good.outliers is not None
    side = good.outliers.side
    descending = torch.arange(8, 0, -1, dtype=torch.int32)
    for columns, weights in (
        (descending, side),
        (descending.flip(0) + 250, side),
        (descending.flip(0).long(), side),
        (descending.flip(0), side[:, :7]),
        (descending.flip(0), side.float()),
    ):
        with pytest.raises(ShapeError, match="prepare"):
            ops.prepare(replace(good, outliers=Outliers(columns, weights)))
    rotated = get_format("w4a8-had").encode(random(16, 256))
    with pytest.raises(ShapeError, match="one of the two"):
        ops.prepare(replace(rotated, outliers=good.outliers))
    with pytest.raises(ShapeError, match="outliers"):
        ops.embed([0], ops.prepare(good))
    with pytest.raises(FormatError, match="the same columns"):
        fuse([good, encoded("w4a8", 16, some_columns(256, 16))])
    with pytest.raises(ShapeError, match="one each"):
        ops.prepare(good, get_format("w4a8").encode(random(16, 256)))


def test_kernels_that_are_given_columns_out_of_order_refuse_them() -> None:
    packed = encoded("w4a8", 16, some_columns(256, 8))
    assert packed.outliers is not None
    run = kernels("scalar", 1)
    twice = run.prepare(replace(packed, outliers=replace(packed.outliers, columns=torch.zeros(8, dtype=torch.int32))))
    with pytest.raises(ShapeError, match="ascending"):
        run.linear_add(random(1, 256), twice, torch.zeros(1, 16))


def test_the_library_is_of_the_version_that_has_them() -> None:
    library, why = native.load()
    assert library is not None, why
    assert library.bd_abi() == 4
