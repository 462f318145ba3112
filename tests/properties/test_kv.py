"""Block tables under every order of append, truncate, fork and release: nobody sees another's tokens, nothing leaks."""

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.errors import UsageError
from bitdraft.formats import KV_FORMATS, KVFormat
from bitdraft.models import kv
from bitdraft.models.kv import BlockPool, BlockTable, OutOfBlocks

BLOCK = 4


CODED = KVFormat("coded", torch.bfloat16, bits=8, window=2 * BLOCK)
every_format = pytest.mark.parametrize("format", [KV_FORMATS["f32"], CODED], ids=lambda kv: kv.name)


@pytest.fixture(autouse=True)
def short_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that blocks of short sequences give up their full copies."""
    monkeypatch.setattr(kv, "LONGEST_ROLLBACK", BLOCK)


def make_pool(blocks: int = 12, format: KVFormat = KV_FORMATS["f32"]) -> BlockPool:
    return BlockPool(1, blocks, kv_heads=1, head_dim=2, format=format, block_size=BLOCK)


def write(pool: BlockPool, slots: list[int], values: list[int]) -> None:
    layer = pool.layers[0]
    for slot, value in zip(slots, values, strict=True):
        block = slot // BLOCK if layer.coded is None else int(layer.coded.copies[slot // BLOCK])
        layer.keys[block, 0, 0, slot % BLOCK] = value


def read(pool: BlockPool, table: BlockTable) -> list[int]:
    """The full copy of a block if it has one, else its codes: 255 steps from 1 to 200 tell integers apart."""
    layer, numbers = pool.layers[0], []
    for i, block in enumerate(table.blocks):
        if layer.coded is None:
            numbers += layer.keys[block, 0, 0].tolist()
        elif i >= table.sealed:
            numbers += layer.keys[layer.coded.copies[block], 0, 0].tolist()
        else:
            step, least = layer.coded.key_grid[block, 0, :, 0].tolist()
            numbers += [least + step * code for code in layer.coded.keys[block, 0, 0].tolist()]
    return [round(x) for x in numbers[: table.length]]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@every_format
@settings(max_examples=200, deadline=None)
@given(actions)
def test_tables_hold_what_a_list_would(format: KVFormat, steps: list[tuple[str, int, int]]) -> None:
    pool = make_pool(format=format)
    tables: dict[int, BlockTable] = {}
    model: dict[int, list[int]] = {}
    fresh = cycle(range(1, 201))
    for action, who, n in steps:
        table = tables.setdefault(who, BlockTable(pool))
        held = model.setdefault(who, [])
        if action == "append":
            n = min(n, format.window or n)
            values = [next(fresh) for _ in range(n)]
            try:
                slots = table.append(n)
            except OutOfBlocks:
                assert read(pool, table) == held
                continue
            write(pool, slots, values)
            held += values
        elif action == "truncate":
            keep = min(n, len(held))
            try:
                table.truncate(keep)
            except UsageError:
                assert format.bits
                assert keep < len(held) - BLOCK
                keep = len(held)
            del held[keep:]
        elif action == "fork" and n != who:
            if n in tables:
                tables[n].truncate(0)
            tables[n], model[n] = table.fork(), list(held)
        elif action == "release":
            table.truncate(0)
            model[who] = []
        for name, expected in model.items():
            assert read(pool, tables[name]) == expected
    for table in tables.values():
        table.truncate(0)
    assert pool.num_free == pool.num_blocks
    assert format.bits is None or bool((pool.layers[0].coded.copies == -1).all())


def test_a_full_pool_says_so_and_changes_nothing() -> None:
    pool = make_pool(blocks=2)
    table = BlockTable(pool)
    table.append(5)
    with pytest.raises(OutOfBlocks, match="need 1 KV blocks of 4, 0 are free"):
        table.append(4)
    assert (table.length, len(table.blocks), pool.num_free) == (5, 2, 0)


def test_a_fork_shares_blocks_until_one_writes() -> None:
    pool = make_pool()
    first = BlockTable(pool)
    write(pool, first.append(6), [1, 2, 3, 4, 5, 6])
    second = first.fork()
    assert second.blocks == first.blocks
    write(pool, second.append(1), [70])
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    assert read(pool, first) == [1, 2, 3, 4, 5, 6]
    assert read(pool, second) == [1, 2, 3, 4, 5, 6, 70]


@pytest.mark.parametrize("name", KV_FORMATS)
def test_a_copied_block_is_copied_whole(name: str) -> None:
    """Keys, values and, where there are codes, all that belongs to them; in every layer."""
    pool = BlockPool(2, 3, kv_heads=2, head_dim=4, format=KV_FORMATS[name])
    blocks = [pool.take()]
    parts = [(part, blocks) for layer in pool.layers for part in layer.tensors()]
    assert len(parts) == 2 * {"int8": 4, "int8-kc": 6, "int4": 6}.get(name, 2)
    if pool.format.bits:
        copies = pool.layers[0].coded.copies
        parts += [(part, copies) for layer in pool.layers for part in (layer.keys, layer.values)]
    for number, (part, at) in enumerate(parts):
        part[blocks[0] if at is blocks else int(at[blocks[0]])] = number + 1
    blocks.append(pool.copy(blocks[0]))
    for part, at in parts:
        places = [block if at is blocks else int(at[block]) for block in blocks]
        assert torch.equal(part[places[0]].float(), part[places[1]].float())
        assert bool((part[places[1]].float() != 0).all())


def test_full_copies_get_more_room_and_give_it_back() -> None:
    """More sequences than there is room for at first; the pool as a whole is what limits them."""
    pool = make_pool(blocks=100, format=CODED)
    tables = [BlockTable(pool) for _ in range(50)]
    for i, table in enumerate(tables):
        write(pool, table.append(5), [i, 2, 3, 4, 5])
    assert [read(pool, table) for table in tables] == [[i, 2, 3, 4, 5] for i in range(50)]
    assert len(pool.layers[0].keys) == 100
    for table in tables:
        table.truncate(0)
    long = BlockTable(pool)
    for _ in range(40):
        long.append(BLOCK)
    assert sum(copy >= 0 for copy in pool.layers[0].coded.copies.tolist()) == 4  # window and draft, and what is new
    assert long.encoded - long.sealed == 1
