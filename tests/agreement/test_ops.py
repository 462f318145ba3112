"""Every operation against an independent statement of what it means, and its refusals.

Tolerances: FP32 sums of a few hundred terms in another order differ by a few units in the last place of the largest
partial sum; 2e-5 absolute on values of order one leaves a factor of ten over what was seen.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from bitdraft import ops
from bitdraft.errors import ShapeError
from bitdraft.ops import Rotary, native, reference
from bitdraft.ops.reference import DecodedWeight

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepared(outputs: int, inputs: int, seed: int = 0) -> DecodedWeight:
    return DecodedWeight(random(outputs, inputs, seed=seed) / math.sqrt(inputs), "f32", 4 * outputs * inputs)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation runs as the reference, compiled kernels or not."""
    monkeypatch.setattr(native, "default", lambda: None)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 64])
def test_norm_linear_is_norm_then_linear(rows: int) -> None:
    x, weight, bias, norm = random(rows, 96), prepared(37, 96, seed=1), random(37, seed=2), random(96, seed=3)
    expected = functional.linear(functional.rms_norm(x, (96,), norm, 1e-6), weight.values, bias)
    torch.testing.assert_close(ops.norm_linear(x, norm, 1e-6, weight, bias), expected, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 64])
def test_gated_mlp_adds_its_result(rows: int) -> None:
    x, gate_up, down, norm = random(rows, 32), prepared(88, 32, seed=1), prepared(32, 44, seed=2), random(32, seed=3)
    h = functional.rms_norm(x, (32,), norm, 1e-5)
    gate, up = functional.linear(h, gate_up.values[:44]), functional.linear(h, gate_up.values[44:])
    expected = x + functional.linear(functional.silu(gate) * up, down.values)
    torch.testing.assert_close(ops.gated_mlp(x, norm, 1e-5, gate_up, down), expected, **TOLERANCE)


def test_rotary_angles_are_right_far_out() -> None:
    """Position 32,767 to FP32 accuracy: what a bfloat16 or FP16 position would lose entirely (requirement B6)."""
    rotary = Rotary.make(32768, 4, 10000.0, factors=(1.0, 8.0))
    assert rotary.cos[32767, 0] == pytest.approx(math.cos(32767), abs=1e-7)
    assert rotary.sin[32767, 1] == pytest.approx(math.sin(32767 / 100 / 8), abs=1e-7)


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    """Up to the order of FP32 sums: the reference does not promise more."""
    x, weight, norm = random(64, 96), prepared(37, 96, seed=1), random(96, seed=3)
    together = ops.norm_linear(x, norm, 1e-6, weight)
    for row in (0, 5, 63):
        torch.testing.assert_close(ops.norm_linear(x[row : row + 1], norm, 1e-6, weight)[0], together[row], **TOLERANCE)


def test_a_compiled_version_takes_the_place_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fast(x: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(len(x))
        return reference.linear_add(x, *rest)  # type: ignore[arg-type]

    assert native.why_none() is not None
    monkeypatch.setattr(native, "default", lambda: SimpleNamespace(linear_add=fast))
    x, weight, residual = random(3, 8), prepared(5, 8), random(3, 5)
    assert torch.equal(ops.linear_add(x, weight, residual), reference.linear_add(x, weight, residual))
    assert calls == [3]
    assert native.why_none() is None
    with pytest.raises(ShapeError):
        ops.linear_add(x[:, :7], weight, residual)
    assert calls == [3], "a compiled version never sees what the check refuses"


W, N8 = prepared(16, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.norm_linear(random(2, 9), N8, 1e-6, W), r"float32 \[2, 9\].*rows of 8"),
        (lambda: ops.norm_linear(random(2, 8).double(), N8, 1e-6, W), "float64"),
        (lambda: ops.norm_linear(random(8, 2).T, N8, 1e-6, W), "not contiguous"),
        (lambda: ops.norm_linear(random(2, 8), torch.ones(7), 1e-6, W), r"norm .*\[7\]"),
        (lambda: ops.norm_linear(random(2, 8), N8, 1e-6, W, torch.ones(3)), r"bias .*\[3\]"),
        (lambda: ops.linear_add(random(2, 8), W, random(3, 16)), "2 rows of x, 3 of residual"),
        (lambda: ops.gated_mlp(random(2, 8), N8, 1e-6, W, prepared(8, 9)), r"down of shape \[8, 9\]"),
        (lambda: ops.gated_inputs(random(2, 8), N8, 1e-6, prepared(15, 8)), "15 outputs"),
        (lambda: ops.embed(torch.tensor([16]), W), "ids from 16 to 16"),
        (lambda: ops.embed(torch.tensor([-1]), W), "ids from -1"),
        (lambda: ops.embed(torch.tensor([1.0]), W), "float32"),
        (lambda: ops.logits(random(2, 7), N8, 1e-6, W), "rows of 8"),
        (lambda: ops.logits(random(2, 8), N8, 1e-6, W, 0.0), "a cap of 0.0"),
        (lambda: ops.linear_add(random(2, 8), W, random(2, 16), torch.ones(8)), r"norm .*\[8\]"),
    ],
)
def test_what_does_not_fit_is_named(call: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()  # type: ignore[operator]
