"""Rotary embedding, the paged cache and attention: the reference against independent statements of what they mean, the
compiled kernels of every instruction set against both, and what a row may depend on.

Tolerances. FP32 sums of a few hundred terms in another order differ by a few units in the last place of the largest
partial sum: 2e-5 absolute on values of order one. A number in the cache differs from the exact one by half a step of
its kind: 2^-9 of itself in bfloat16, half its vector's scale in 8-bit integers, 2^-4 of itself in E4M3, half a step of
its group in codes.

Shape suffixes: R rows, H query heads, J KV heads, C head dimension, L tokens in a sequence's KV.
"""

import dataclasses
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import instruction_sets, kernels
from torch import Tensor
from torch.nn import functional

from bitdraft import ops
from bitdraft.errors import ShapeError
from bitdraft.formats import KV_FORMATS
from bitdraft.models.kv import BlockPool
from bitdraft.ops import KVCache, KVLayer, Ragged, Rotary, reference
from bitdraft.ops.checks import check_batch
from bitdraft.ops.native import Native

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
BLOCK = 16
ROTARY = {dim: Rotary.make(800, dim, 10000.0) for dim in (8, 16, 20, 64)}

every_backend = pytest.mark.parametrize("name", ["reference", *instruction_sets()])
every_kind = pytest.mark.parametrize("kind", KV_FORMATS)
alone_kinds = pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "fp8"])  # each token is kept by itself
coded_kinds = pytest.mark.parametrize("kind", ["int8-kc", "int4"])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def backend(name: str, threads: int = 2) -> ModuleType | Native:
    return reference if name == "reference" else kernels(name, threads)


def new_layer(heads: int, dim: int, kind: str = "f32", blocks: int = 60, size: int = BLOCK) -> KVLayer:
    """One layer, each block with its full copy where there are such; E4M3 with a scale of its own for each head."""
    scales = 0.01 + 0.01 * torch.arange(2 * heads, dtype=torch.float32)
    pool = BlockPool(1, blocks, heads, dim, KV_FORMATS[kind], size, [(scales[:heads], scales[heads:])])
    for _ in range(blocks):
        pool.take()
    return pool.layers[0]


def ragged(lengths: list[int], counts: list[int], size: int = BLOCK) -> Ragged:
    """The last rows of sequences whose blocks lie all over a pool of 60."""
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    tables, used = [], 0
    for length in lengths:
        need = -(-length // size)
        tables.append(shuffled[used : used + need])
        used += need
    at = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    slots = [t[a // size] * size + a % size for t, a in zip(tables, at, strict=True)]
    R = sum(counts)
    return Ragged(
        torch.zeros(R, dtype=torch.int64), torch.cat(at), torch.cat(slots), tuple(counts), tuple(tables), tuple(lengths)
    )


def alone(batch: Ragged, sequence: int, position: int) -> Ragged:
    """One row of a batch's sequence, as plain decoding would feed it."""
    table = batch.tables[sequence]
    slot = table[position // BLOCK] * BLOCK + position % BLOCK
    at = torch.tensor([position])
    return Ragged(at * 0, at, slot[None], (1,), (table[: position // BLOCK + 1],), (position + 1,))


def stored(kv: KVLayer, batch: Ragged) -> tuple[Tensor, Tensor]:
    """The numbers that a layer holds for the rows of a batch, [R, J, C] both: read slot by slot."""
    keys, values = [], []
    for slot in batch.slots.tolist():
        block, at = divmod(slot, kv.block_size)
        key, value = kv.keys[block, :, :, at].float(), kv.values[block, :, at].float()
        if kv.key_scales is not None and kv.value_scales is not None:
            own = (block, slice(None), at) if kv.keys.dtype == torch.int8 else slice(None)
            key, value = key * kv.key_scales[own][:, None], value * kv.value_scales[own][:, None]
        keys.append(key)
        values.append(value)
    return torch.stack(keys), torch.stack(values)


def filled(
    name: str, lengths: list[int], heads: int, kv_heads: int, dim: int, kind: str = "f32"
) -> tuple[KVLayer, Ragged, Tensor]:
    """A cache with whole sequences in it, their batch, and their rotated queries."""
    kv, batch = new_layer(kv_heads, dim, kind), ragged(lengths, lengths)
    qkv = random(sum(lengths), (heads + 2 * kv_heads) * dim, seed=5)
    q = backend(name).rope_append(qkv, batch, ROTARY[dim], kv, None, None, 1e-6)
    full = [table[: length // BLOCK] for table, length in zip(batch.tables, lengths, strict=True)]
    ops.encode_blocks(KVCache((kv,)), torch.cat(full).tolist())
    return kv, batch, q


@every_backend
@pytest.mark.parametrize("dim", [8, 20, 64])
def test_rotary_is_a_rotation_by_the_absolute_position(name: str, dim: int) -> None:
    """As complex numbers: the pair (c, c + C / 2) turns by position * theta^(-2c / C)."""
    kv, batch = new_layer(1, dim), ragged([700], [3])
    qkv, half = random(3, 4 * dim, seed=5), dim // 2
    q = backend(name).rope_append(qkv, batch, ROTARY[dim], kv, None, None, 1e-6)
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.exp(1j * batch.positions.double()[:, None] * frequency)

    def rotated(x: Tensor) -> Tensor:
        z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn[:, None]
        return torch.cat((z.real, z.imag), -1).float()

    heads, (keys, values) = qkv.view(3, 4, dim), stored(kv, batch)
    torch.testing.assert_close(q, rotated(heads[:, :2]), **TOLERANCE)
    torch.testing.assert_close(keys, rotated(heads[:, 2:3]), **TOLERANCE)
    assert torch.equal(values, heads[:, 3:])


@every_backend
@pytest.mark.parametrize(("dim", "turned"), [(128, 96), (20, 6)])
def test_channels_past_those_that_turn_are_left(name: str, dim: int, turned: int) -> None:
    """Phi-4 turns the first three quarters of a head; what is left has the norm alone."""
    kv, batch = new_layer(1, dim), ragged([700], [3])
    qkv, norms = random(3, 4 * dim, seed=5), (random(dim, seed=6), random(dim, seed=7))
    rotary = Rotary.make(800, turned, 10000.0, scale=1.5)
    q = backend(name).rope_append(qkv, batch, rotary, kv, *norms, 1e-6)
    part, small = new_layer(1, turned), Rotary.make(800, turned, 10000.0)
    heads = qkv.view(3, 4, dim)
    normed = torch.cat([functional.rms_norm(heads[:, i : i + 1], (dim,), norms[i > 1], 1e-6) for i in range(3)], 1)
    cut = torch.cat((normed[..., :turned], heads[:, 3:, :turned]), 1).reshape(3, -1)
    expected = backend("reference").rope_append(cut, batch, small, part, None, None, 1e-6)
    torch.testing.assert_close(q[..., :turned], expected * 1.5, **TOLERANCE)
    torch.testing.assert_close(q[..., turned:], normed[:, :2, turned:], **TOLERANCE)
    torch.testing.assert_close(stored(kv, batch)[0][..., :turned], stored(part, batch)[0] * 1.5, **TOLERANCE)
    torch.testing.assert_close(stored(kv, batch)[0][..., turned:], normed[:, 2:, turned:], **TOLERANCE)


@every_backend
def test_scores_are_scaled_as_asked(name: str) -> None:
    """A scale of its own is the usual one of queries that are larger by the ratio."""
    kv, batch, q = filled(name, [40], 4, 2, 64)
    expected = backend(name).attention(q * 2.5, batch, kv, None)
    torch.testing.assert_close(backend(name).attention(q, batch, kv, None, 2.5 / 8), expected, **TOLERANCE)


@every_backend
def test_a_norm_of_q_and_k_comes_before_the_rotation(name: str) -> None:
    """At position 0 nothing turns, so that the norm is all that happens; v has none."""
    kv, batch = new_layer(2, 20), ragged([1], [1])
    qkv, q_norm, k_norm = random(1, 8 * 20, seed=5), random(20, seed=6), random(20, seed=7)
    q = backend(name).rope_append(qkv, batch, ROTARY[20], kv, q_norm, k_norm, 1e-5)
    heads, (keys, values) = qkv.view(1, 8, 20), stored(kv, batch)
    torch.testing.assert_close(q, functional.rms_norm(heads[:, :4], (20,), q_norm, 1e-5), **TOLERANCE)
    torch.testing.assert_close(keys, functional.rms_norm(heads[:, 4:6], (20,), k_norm, 1e-5), **TOLERANCE)
    assert torch.equal(values, heads[:, 6:])


@every_backend
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 16), (4, 4, 64), (7, 1, 20)])
def test_attention_is_sdpa_per_sequence(name: str, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    lengths, counts = [290, 1, 70], [5, 1, 70]
    kv, whole, q = filled(name, lengths, heads, kv_heads, dim)
    batch = ragged(lengths, counts)
    first = (0, 290, 291)
    rows = torch.cat([torch.arange(f + n - c, f + n) for f, n, c in zip(first, lengths, counts, strict=True)])
    q = q[rows]
    got = backend(name).attention(q, batch, kv, window)
    keys, values = stored(kv, whole)
    row = 0
    for start, length, count in zip(first, lengths, counts, strict=True):
        at, position = torch.arange(length), torch.arange(length - count, length)[:, None]
        seen = (at <= position) & (at > position - (window or length + 1))
        expected = functional.scaled_dot_product_attention(
            q[row : row + count].transpose(0, 1),
            keys[start : start + length].transpose(0, 1),
            values[start : start + length].transpose(0, 1),
            attn_mask=seen,
            enable_gqa=True,
        )
        torch.testing.assert_close(got[row : row + count], expected.transpose(0, 1).flatten(1), **TOLERANCE)
        row += count


@every_backend
@every_kind
def test_attention_does_not_see_past_a_row_or_into_another_sequence(name: str, kind: str) -> None:
    kv, batch, q = filled(name, [9, 5], 4, 2, 8, kind)
    before = backend(name).attention(q, batch, kv, None)
    block, at = divmod(int(batch.slots[8]), BLOCK)  # position 8 of the first sequence: only its own row may see it
    block = block if kv.coded is None else int(kv.coded.copies[block])
    kv.keys[block, :, :, at] = 99
    kv.values[block, :, at] = 99
    after = backend(name).attention(q, batch, kv, None)
    others = [row for row in range(14) if row != 8]
    assert torch.equal(before[others], after[others])
    assert not torch.equal(before[8], after[8])


@every_backend
def test_int8_keys_and_values_are_within_half_a_step(name: str) -> None:
    exact, batch, _ = filled("reference", [130, 40], 6, 2, 64)
    coded, _, _ = filled(name, [130, 40], 6, 2, 64, "int8")
    assert coded.key_scales is not None
    assert coded.value_scales is not None
    for want, got in zip(stored(exact, batch), stored(coded, batch), strict=True):
        scale = want.abs().amax(-1, keepdim=True) / 127
        assert bool(((got - want).abs() <= scale * (0.5 + 1e-4)).all())
        torch.testing.assert_close(got.abs().amax(-1), want.abs().amax(-1), rtol=1e-6, atol=1e-6)  # has a code of 127


@every_backend
def test_int8_ties_zeros_and_what_is_not_a_number(name: str) -> None:
    kv, batch = new_layer(1, 8, "int8"), ragged([3], [3])
    value = torch.tensor([[127, 0.5, 1.5, -2.5, 0, -127, 3, 4], [0.0] * 8, [torch.nan, *[1.0] * 7]])
    qkv = torch.cat((random(3, 16), value), 1)
    backend(name).rope_append(qkv, batch, ROTARY[8], kv, None, None, 1e-6)
    _, values = stored(kv, batch)
    assert values[0, 0].tolist() == [127, 0, 2, -2, 0, -127, 3, 4]
    assert values[1].tolist() == [[0] * 8]
    assert kv.value_scales is not None
    assert kv.value_scales[int(batch.slots[1]) // BLOCK, 0, int(batch.slots[1]) % BLOCK] == 1
    assert bool(values[2].isnan().all())


@every_backend
@alone_kinds
@pytest.mark.parametrize("window", [None, 50])
def test_attention_reads_the_numbers_that_the_codes_stand_for(name: str, kind: str, window: int | None) -> None:
    """What is lost is lost when a token is written: to read an 8-bit cache is to read its decoded copy."""
    kv, batch, q = filled(name, [300, 17], 6, 2, 20, kind)
    decoded = new_layer(2, 20)
    keys, values = stored(kv, batch)
    decoded.keys[batch.slots // BLOCK, :, :, batch.slots % BLOCK] = keys
    decoded.values[batch.slots // BLOCK, :, batch.slots % BLOCK] = values
    expected = reference.attention(q, batch, decoded, window)
    torch.testing.assert_close(backend(name).attention(q, batch, kv, window), expected, **TOLERANCE)


def coded_numbers(kv: KVLayer, block: int) -> tuple[Tensor, Tensor]:
    """What a block's codes stand for, number by number: keys [J, C, 16] and values [J, 16, C]."""
    c = kv.coded
    assert c is not None
    J, C = kv.kv_heads, kv.head_dim
    keys, values = torch.zeros(J, C, BLOCK), torch.zeros(J, BLOCK, C)
    for j in range(J):
        for channel in range(C):
            row, shift = (channel, 0) if c.bits == 8 else (channel % (C // 2), 4 * (channel // (C // 2)))
            for at in range(BLOCK):
                codes = int(c.keys[block, j, row, at]) >> shift, int(c.values[block, j, at, row]) >> shift
                key, value = (code % 2**c.bits for code in codes)
                step, least = c.key_grid[block, j, :, channel].tolist()
                keys[j, channel, at] = least + step * key
                step, least = c.value_grid[block, j, :, at].tolist()
                values[j, at, channel] = least + step * value
        for apart, numbers in ((c.key_outliers, keys), (c.value_outliers, values)):
            for place, bits in apart[block, j].tolist():
                numbers[j].view(-1)[place] = float(torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16))
    return keys, values


@every_backend
@coded_kinds
@pytest.mark.parametrize("window", [None, 50, 200])
@pytest.mark.parametrize("dim", [8, 20])
def test_a_row_reads_a_block_in_codes_when_it_is_a_window_old(
    name: str, kind: str, window: int | None, dim: int
) -> None:
    """Row i and block b: i >= 16 (b + 1) + 128, row by row, by a cache that holds just what the row is to read."""
    kv, batch, q = filled(name, [220], 4, 2, dim, kind)
    got = backend(name).attention(q, batch, kv, window)
    assert kv.coded is not None
    copies = kv.coded.copies[batch.tables[0]]
    numbers = [coded_numbers(kv, block) for block in batch.tables[0].tolist()]
    for i in (0, 15, 143, 144, 150, 159, 160, 219):
        plain = new_layer(2, dim)
        for b, block in enumerate(batch.tables[0].tolist()):
            old = i >= 16 * (b + 1) + 128
            plain.keys[block] = numbers[b][0] if old else kv.keys[copies[b]].float()
            plain.values[block] = numbers[b][1] if old else kv.values[copies[b]].float()
        expected = reference.attention(q[i : i + 1], alone(batch, 0, i), plain, window)
        torch.testing.assert_close(got[i : i + 1], expected, **TOLERANCE)


@coded_kinds
def test_codes_are_within_half_a_step_and_outliers_are_kept(kind: str) -> None:
    """The grid spans its group but for the outliers, which are as exact as bfloat16; those are the farthest ones."""
    kv = new_layer(2, 20, kind)
    c, at = kv.coded, 7
    assert c is not None
    kv.keys.copy_(random(60, 2, 20, 16, seed=1) + 50 * random(60, 2, 20, 1, seed=2))  # channels that are far from zero
    kv.values.copy_(random(60, 2, 16, 20, seed=3))
    kv.keys[c.copies[at], 1, 3, 5] = 1000
    ops.encode_blocks(KVCache((kv,)), [at])
    exact = kv.keys[c.copies[at]].float(), kv.values[c.copies[at]].float()
    for want, got, grid in zip(exact, coded_numbers(kv, at), (c.key_grid[at], c.value_grid[at]), strict=True):
        half = grid[:, 0].float() / 2
        assert bool(((got - want).abs() <= half[..., None] * 1.001 + 1e-6).all())
    count = KV_FORMATS[kind].outliers
    assert c.key_outliers.shape[2] == count
    if count:
        assert 3 * 16 + 5 in c.key_outliers[at, 1, :, 0].tolist()
        assert float(c.key_grid[at, 1, 0, 3]) < 1  # the step does not know of the outlier


@coded_kinds
def test_a_block_without_its_full_copy_is_refused(kind: str) -> None:
    """By whoever reads or writes it as it was written; rows that read it in codes do not mind."""
    kv, batch, q = filled("reference", [220], 4, 2, 8, kind)
    assert kv.coded is not None
    row = alone(batch, 0, 219)
    kv.coded.copies[batch.tables[0][4]] = -1  # ends at 80 = 208 - 128: the last that row 219 reads in codes
    ops.attention(q[219:], row, kv)
    kv.coded.copies[batch.tables[0][5]] = -1
    with pytest.raises(ShapeError, match="without its full copy"):
        ops.attention(q[219:], row, kv)
    with pytest.raises(ShapeError, match="without its full copy"):
        ops.rope_append(random(1, 64), row, ROTARY[8], kv)


@every_backend
def test_e4m3_saturates_and_rounds_as_torch_does(name: str) -> None:
    """Every code from values at, between and beyond them; a scale for each head; 2^-9 is the least step."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(448)
    between = (codes + torch.tensor([0.49, 0.51])[:, None] * codes.abs().clamp(min=2**-6) / 8).view(-1)
    extra = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 2.0**-10, 3 * 2.0**-10, 0])
    x = torch.cat((codes, between, extra)).view(-1, 8)
    kv, batch = new_layer(1, 8, "fp8", blocks=60), ragged([len(x)], [len(x)])
    assert kv.value_scales is not None
    qkv = torch.cat((torch.zeros(len(x), 16), x * kv.value_scales[0]), 1)
    backend(name).rope_append(qkv, batch, ROTARY[8], kv, None, None, 1e-6)
    expected = (x * kv.value_scales[0] / kv.value_scales[0]).clamp(-448, 448).nan_to_num(-448).to(torch.float8_e4m3fn)
    written = kv.values[batch.slots // BLOCK, 0, batch.slots % BLOCK]
    assert torch.equal(written.float(), expected.float())  # a zero may lose its sign


def test_int8_attention_is_close_to_exact_attention() -> None:
    """Two independent roundings of half a step at most: 0.02 on values of order one is three times what was seen."""
    exact, batch, q = filled("reference", [300], 6, 2, 64)
    coded, _, _ = filled("reference", [300], 6, 2, 64, "int8")
    want, got = (reference.attention(q, batch, kv, None) for kv in (exact, coded))
    assert 1e-4 < float((want - got).abs().max()) < 0.02


@every_backend
@every_kind
def test_what_is_written_does_not_depend_on_how_a_prompt_was_fed(name: str, kind: str) -> None:
    """All at once, token by token, or over tokens that were taken back: the same bits in the cache."""
    once, batch, q = filled(name, [70], 4, 2, 20, kind)
    again = new_layer(2, 20, kind)
    qkv = random(70, 8 * 20, seed=5)
    run, wrong = backend(name), dataclasses.replace(ragged([40], [12]), tables=batch.tables)
    run.rope_append(
        random(12, 8 * 20, seed=9), dataclasses.replace(wrong, tables=batch.tables), ROTARY[20], again, None, None, 1e-6
    )
    for position in range(70):
        row = alone(batch, 0, position)
        got = run.rope_append(qkv[position : position + 1], row, ROTARY[20], again, None, None, 1e-6)
        assert torch.equal(got[0], q[position])
    ops.encode_blocks(KVCache((again,)), batch.tables[0][:4].tolist())
    parts = zip([once.keys, once.values, *once.tensors()], [again.keys, again.values, *again.tensors()], strict=True)
    for one, other in parts:
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("isa", instruction_sets())
@every_kind
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(7, 1, 64), (4, 2, 20), (3, 3, 64)])
def test_a_row_of_compiled_attention_is_alone(isa: str, kind: str, heads: int, kv_heads: int, dim: int) -> None:
    """To the bit: one row or nine, other sequences or none, one thread or two, around the ends of chunks of 256."""
    kv, batch, q = filled(isa, [600, 100], heads, kv_heads, dim, kind)
    for first in (3, 250, 255, 511, 590):
        row = kernels(isa, 1).attention(q[first : first + 1].contiguous(), alone(batch, 0, first), kv, None)
        for count in (1, 2, 3, 5, 9):
            rows = ragged([first + count], [count])
            several = dataclasses.replace(rows, tables=batch.tables[:1])
            for threads in (1, 2):
                got = kernels(isa, threads).attention(q[first : first + count], several, kv, None)
                assert torch.equal(got[:1], row)
        assert torch.equal(kernels(isa, 2).attention(q, batch, kv, None)[first : first + 1], row)


def changed(**changes: object) -> Ragged:
    return dataclasses.replace(BATCH, **changes)  # type: ignore[arg-type]


BATCH, KV = ragged([20, 5], [2, 1]), new_layer(2, 8)
CODES = new_layer(2, 8, "int8")
TABLE = BATCH.tables[0]
REFUSED = [
    (changed(slots=BATCH.slots + 1000), KV, "slots .*below 960"),
    (changed(slots=-BATCH.slots), KV, "slots from -"),
    (changed(slots=BATCH.slots[:2]), KV, "2 slots for 3 rows"),
    (changed(slots=BATCH.slots.int()), KV, "slots torch.int32"),
    (changed(positions=torch.tensor([18, 20, 4])), KV, "position 20 in a sequence of length 20"),
    (changed(positions=torch.tensor([18, 19, 5])), KV, "position 5 in a sequence of length 5"),
    (changed(positions=torch.tensor([-1, 19, 4])), KV, "position -1"),
    (changed(positions=BATCH.positions[:, None]), KV, r"positions torch.int64 \[3, 1\]"),
    (changed(positions=torch.arange(6)[::2]), KV, "not contiguous"),
    (changed(row_counts=(3, 1)), KV, r"3 rows, counts \(3, 1\)"),
    (changed(row_counts=(4, -1)), KV, r"counts \(4, -1\)"),
    (changed(row_counts=(3,)), KV, "2 tables"),
    (changed(lengths=(33, 5)), KV, "length of 33 with a table of 2 blocks"),
    (changed(lengths=(20, -1)), KV, "length of -1"),
    (changed(tables=(TABLE + 60, TABLE)), KV, "blocks .*below 60"),
    (changed(tables=(TABLE - 60, TABLE)), KV, "blocks from -"),
    (changed(tables=(TABLE[:1], TABLE)), KV, "table of 1 blocks"),
    (changed(tables=(TABLE.float(), TABLE)), KV, "a table torch.float32"),
    (BATCH, dataclasses.replace(KV, keys=KV.keys.transpose(2, 3)), r"keys torch.float32 \[60, 2, 16, 8\]"),
    (BATCH, dataclasses.replace(KV, values=KV.values[:9]), r"values torch.float32 \[9, 2, 16, 8\]"),
    (BATCH, dataclasses.replace(KV, values=KV.values.bfloat16()), "values torch.bfloat16"),
    (BATCH, KVLayer(KV.keys.half(), KV.values.half()), "float16"),
    (BATCH, KVLayer(CODES.keys, CODES.values), "key_scales None"),
    (BATCH, dataclasses.replace(CODES, value_scales=torch.ones(60, 2, 8)), r"value_scales .*\[60, 2, 8\]"),
    (BATCH, dataclasses.replace(KV, key_scales=CODES.key_scales), "with scales"),
]


@pytest.mark.parametrize(("batch", "kv", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_batch_or_cache_that_does_not_fit_is_named(batch: Ragged, kv: KVLayer, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ops.rope_append(random(3, 6 * 8), batch, ROTARY[8], kv)
    with pytest.raises(ShapeError, match=message):
        ops.attention(random(3, 2, 8), batch, kv)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rope_append(random(3, 35), BATCH, ROTARY[8], KV), "width 35"),
        (lambda: ops.rope_append(random(4, 48), BATCH, ROTARY[8], KV), "4 rows"),
        (lambda: ops.rope_append(random(3, 48), BATCH, Rotary.make(19, 8, 1e4), KV), "position 19.*below 19"),
        (lambda: ops.rope_append(random(3, 48), BATCH, ROTARY[16], KV), r"cosines .*\[800, 8\]"),
        (lambda: ops.rope_append(random(3, 48), BATCH, ROTARY[8], KV, torch.ones(8)), "a norm for one"),
        (lambda: ops.rope_append(random(3, 48), BATCH, ROTARY[8], KV, torch.ones(7), torch.ones(8)), r"q_norm .*\[7\]"),
        (lambda: ops.attention(random(3, 3, 8), BATCH, KV), "a multiple of 2"),
        (lambda: ops.attention(random(4, 4, 8), BATCH, KV), "4 rows, counts"),
        (lambda: ops.attention(random(3, 4, 8).double(), BATCH, KV), "float64"),
        (lambda: ops.attention(random(4, 3, 8).transpose(0, 1), BATCH, KV), "not contiguous"),
        (lambda: ops.attention(random(3, 4, 8), BATCH, KV, 0), "a window of 0"),
        (lambda: ops.attention(random(3, 4, 8), BATCH, KV, None, -1.0), "a scale of -1.0"),
    ],
)
def test_what_does_not_fit_a_batch_is_named(call: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call()  # type: ignore[operator]


small = st.integers(-2, 9)


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 12), st.lists(small, max_size=3)), max_size=3), st.data())
def test_what_a_check_lets_through_stays_inside(
    sequences: list[tuple[int, int, list[int]]], data: st.DataObject
) -> None:
    """Whatever a batch says: it is refused, or every place that it names is in the pool of 6 blocks of 4."""
    rows = max(0, sum(count for count, _, _ in sequences))
    at = st.lists(st.integers(-1, 12), min_size=rows, max_size=rows)
    positions, slots = data.draw(at), data.draw(at)
    batch = Ragged(
        torch.zeros(rows, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        tuple(count for count, _, _ in sequences),
        tuple(torch.tensor(table, dtype=torch.int64) for _, _, table in sequences),
        tuple(length for _, length, _ in sequences),
    )
    try:
        check_batch("attention", batch, new_layer(1, 2, blocks=6, size=4), rows)
    except ShapeError:
        return
    assert all(0 <= slot < 24 for slot in slots)
    row = 0
    for count, length, table in sequences:
        assert count >= 0
        for position in positions[row : row + count]:
            assert 0 <= position < length
            assert all(0 <= table[seen // 4] < 6 for seen in range(position + 1))
        row += count
    assert row == rows


def test_a_batch_of_no_rows_is_one() -> None:
    empty = ragged([20], [0])
    assert ops.rope_append(torch.empty(0, 48), empty, ROTARY[8], KV).shape == (0, 2, 8)
    assert ops.attention(torch.empty(0, 4, 8), empty, KV).shape == (0, 32)
