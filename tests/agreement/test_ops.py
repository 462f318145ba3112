"""Every operation against an independent statement of what it means, and its refusals.

Tolerances: FP32 sums of a few hundred terms in another order differ by a few units in the last place of the largest
partial sum; 2e-5 absolute on values of order one leaves a factor of ten over what was seen.
"""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from bitdraft import ops
from bitdraft.errors import ShapeError
from bitdraft.ops import KVLayer, Prepared, Ragged, Rotary, native, reference

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prepared(outputs: int, inputs: int, seed: int = 0) -> Prepared:
    return Prepared(random(outputs, inputs, seed=seed) / math.sqrt(inputs), "f32", 4 * outputs * inputs)


def paged(lengths: list[int], counts: list[int], heads: int, dim: int, size: int = 4) -> tuple[Ragged, KVLayer, list]:
    """A cache of shuffled blocks that holds random keys and values, and the plain [L, J, C] copies of each sequence."""
    shuffled = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    tables, used = [], 0
    for length in lengths:
        need = -(-length // size)
        tables.append(shuffled[used : used + need])
        used += need
    kv = KVLayer(random(40, size, heads, dim, seed=2), random(40, size, heads, dim, seed=3))
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)])
    slots = torch.cat(
        [
            t[torch.arange(n - c, n) // size] * size + torch.arange(n - c, n) % size
            for t, n, c in zip(tables, lengths, counts, strict=True)
        ]
    )
    batch = Ragged(
        torch.zeros(sum(counts), dtype=torch.int64), positions, slots, tuple(counts), tuple(tables), tuple(lengths)
    )
    plain = [
        (kv.keys[t].flatten(0, 1)[:n], kv.values[t].flatten(0, 1)[:n]) for t, n in zip(tables, lengths, strict=True)
    ]
    return batch, kv, plain


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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (7, 1)])
def test_attention_is_sdpa_per_sequence(heads: int, kv_heads: int, window: int | None) -> None:
    lengths, counts = [11, 1, 6], [5, 1, 6]
    batch, kv, plain = paged(lengths, counts, kv_heads, 16)
    q = random(sum(counts), heads, 16, seed=4)
    got = ops.attention(q, batch, kv, window)
    row = 0
    for (keys, values), length, count in zip(plain, lengths, counts, strict=True):
        at, position = torch.arange(length), torch.arange(length - count, length)[:, None]
        seen = (at <= position) & (at > position - (window or length + 1))
        expected = functional.scaled_dot_product_attention(
            q[row : row + count].transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=seen,
            enable_gqa=True,
        )
        torch.testing.assert_close(got[row : row + count], expected.transpose(0, 1).flatten(1), **TOLERANCE)
        row += count


def test_attention_does_not_see_past_a_row_or_into_another_sequence() -> None:
    batch, kv, _ = paged([9, 5], [2, 2], 2, 8)
    q = random(4, 4, 8, seed=4)
    before = ops.attention(q, batch, kv)
    unseen = batch.slots[1]  # position 8 of the first sequence: only its own row may see it
    kv.keys.flatten(0, 1)[unseen] += 100
    kv.values.flatten(0, 1)[unseen] += 100
    after = ops.attention(q, batch, kv)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.equal(before[1], after[1])


def test_rotary_is_a_rotation_by_the_absolute_position() -> None:
    """As complex numbers: the pair (c, c + C / 2) turns by position * theta^(-2c / C)."""
    batch, kv, _ = paged([700], [3], 1, 8, size=32)
    rotary = Rotary.make(700, 8, 10000.0)
    qkv = random(3, 4 * 8, seed=5)
    q = ops.rope_append(qkv, batch, rotary, kv)
    turn = torch.exp(
        1j * batch.positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    )

    def rotated(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x[..., :4].double(), x[..., 4:].double()) * turn[:, None]
        return torch.cat((z.real, z.imag), -1).float()

    heads = qkv.view(3, 4, 8)
    torch.testing.assert_close(q, rotated(heads[:, :2]), **TOLERANCE)
    torch.testing.assert_close(kv.keys.flatten(0, 1)[batch.slots], rotated(heads[:, 2:3]), **TOLERANCE)
    assert torch.equal(kv.values.flatten(0, 1)[batch.slots], heads[:, 3:])


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
    monkeypatch.setitem(native.KERNELS, "linear_add", fast)
    x, weight, residual = random(3, 8), prepared(5, 8), random(3, 5)
    assert torch.equal(ops.linear_add(x, weight, residual), reference.linear_add(x, weight, residual))
    assert calls == [3]
    assert native.why_none() is None
    with pytest.raises(ShapeError):
        ops.linear_add(x[:, :7], weight, residual)
    assert calls == [3], "a compiled version never sees what the check refuses"


W, N8 = prepared(16, 8), torch.ones(8)
BATCH, KV, _ = paged([5], [2], 2, 8)
OUT_OF_CACHE = dataclasses.replace(BATCH, slots=BATCH.slots + 1000)


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
        (lambda: ops.rope_append(random(2, 35), BATCH, Rotary.make(9, 8, 1e4), KV), "width 35"),
        (lambda: ops.rope_append(random(2, 48), BATCH, Rotary.make(4, 8, 1e4), KV), "position 4.*below 4"),
        (lambda: ops.rope_append(random(3, 48), BATCH, Rotary.make(9, 8, 1e4), KV), "3 rows"),
        (lambda: ops.rope_append(random(2, 48), OUT_OF_CACHE, Rotary.make(9, 8, 1e4), KV), "slots below 160"),
        (lambda: ops.attention(random(2, 3, 8), BATCH, KV), "a multiple of 2"),
        (lambda: ops.attention(random(3, 4, 8), BATCH, KV), "3 rows, counts"),
    ],
)
def test_what_does_not_fit_is_named(call: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()  # type: ignore[operator]
