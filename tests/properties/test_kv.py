"""Block tables under every order of append, truncate, fork and release: nobody sees another's tokens, nothing leaks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.formats import KV_FORMATS
from bitdraft.models.kv import BlockPool, BlockTable, OutOfBlocks

BLOCK = 4


def make_pool(blocks: int = 12) -> BlockPool:
    return BlockPool(1, blocks, kv_heads=1, head_dim=1, format=KV_FORMATS["f32"], block_size=BLOCK)


def write(pool: BlockPool, slots: list[int], values: list[int]) -> None:
    flat = pool.layers[0].keys.view(-1)
    flat[torch.tensor(slots, dtype=torch.int64)] = torch.tensor(values, dtype=torch.float32)


def read(pool: BlockPool, table: BlockTable) -> list[int]:
    blocks = torch.tensor(table.blocks, dtype=torch.int64)
    return pool.layers[0].keys[blocks].view(-1)[: table.length].int().tolist()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 20)),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("release"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(actions)
def test_tables_hold_what_a_list_would(steps: list[tuple[str, int, int]]) -> None:
    pool = make_pool()
    tables: dict[int, BlockTable] = {}
    model: dict[int, list[int]] = {}
    fresh = iter(range(1, 10_000))
    for action, who, n in steps:
        table = tables.setdefault(who, BlockTable(pool))
        held = model.setdefault(who, [])
        if action == "append":
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
            table.truncate(keep)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_copied_block_is_copied_whole(dtype: torch.dtype) -> None:
    """Keys, values and, where there are codes, their scales; in every layer."""
    pool = BlockPool(2, 3, kv_heads=2, head_dim=4, dtype=dtype)
    block = pool.take()
    for layer in pool.layers:
        parts = [t for t in (layer.keys, layer.values, layer.key_scales, layer.value_scales) if t is not None]
        assert len(parts) == (4 if dtype == torch.int8 else 2)
        for number, part in enumerate(parts):
            part[block] = number + 1
    new = pool.copy(block)
    for layer in pool.layers:
        for part in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
            if part is not None:
                assert torch.equal(part[new], part[block])
                assert bool((part[new] != 0).all())
