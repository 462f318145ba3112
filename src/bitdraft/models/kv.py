"""The paged KV cache: a pool of ref-counted blocks, and a block table per sequence. Rollback is a length.

Several sequences may share the blocks of a common prefix; a shared block is copied before it is written (copy on
write), so that no sequence sees another's tokens.

In formats that keep blocks in codes, a block begins as a full copy in a small pool of its own. It is encoded when rows
get `window` tokens past it, and what rows read depends on their positions alone (`ops.CodedBlocks`). Its copy is given
back when every sequence that uses it is so far past it that no rollback of a draft leads back to a row that reads it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UsageError
from ..formats.kv import KVFormat
from ..ops import CodedBlocks, KVCache, KVLayer, encode_blocks

BLOCK_SIZE = 16
"""Tokens a block. Small enough that a short sequence wastes little, large enough that tables stay short."""
LONGEST_ROLLBACK = 64
"""Tokens that may be taken back from a sequence in a format with codes: no step drafts more."""
FEWEST_COPIES = 32
"""Full copies that there is room for at first; the room doubles when it is used up."""


class OutOfBlocks(UsageError):
    """The pool has no free block left."""


class BlockPool:
    """All KV blocks of one model.

    Attributes:
        layers: one `KVLayer` per layer; another object once there is more room for full copies.
        format: what keys and values are kept in.
        num_blocks, block_size: how many blocks, and tokens in each.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        format: KVFormat,
        block_size: int = BLOCK_SIZE,
        scales: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """Allocate the blocks.

        Args:
            num_layers, num_blocks, kv_heads, head_dim: the usual sizes.
            format: what keys and values are kept in.
            block_size: tokens a block; compiled kernels want the default.
            scales: of keys and of values for each layer, [kv_heads] float32 both, for a format that needs them; None
                for scales of 1.
        """
        self.format, self.num_blocks, self.block_size = format, num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]
        self._users = [0] * num_blocks
        self._readers = [0] * num_blocks  # of a block's full copy
        self._copies = torch.full((num_blocks,), -1, dtype=torch.int64)
        self._free_copies = list(range(min(FEWEST_COPIES, num_blocks)))[::-1] if format.bits else []
        written = len(self._free_copies) if format.bits else num_blocks

        def layer(number: int) -> KVLayer:
            keys = torch.zeros(written, kv_heads, head_dim, block_size, dtype=format.dtype)
            values = torch.zeros(written, kv_heads, block_size, head_dim, dtype=format.dtype)
            if format.bits:
                return KVLayer(keys, values, coded=self._coded(kv_heads, head_dim, format.bits))
            if format.needs_scales:
                key_scales, value_scales = scales[number] if scales else (torch.ones(kv_heads), torch.ones(kv_heads))
                return KVLayer(keys, values, key_scales.contiguous(), value_scales.contiguous())
            if format.dtype != torch.int8:
                return KVLayer(keys, values)
            shape = (num_blocks, kv_heads, block_size)
            return KVLayer(keys, values, torch.zeros(shape), torch.zeros(shape))

        self.layers = KVCache(layer(number) for number in range(num_layers))

    def _coded(self, J: int, C: int, bits: int) -> CodedBlocks:
        N, T, M = self.num_blocks, self.block_size, self.format.outliers
        return CodedBlocks(
            bits=bits,
            window=self.format.window,
            keys=torch.zeros(N, J, C * bits // 8, T, dtype=torch.uint8),
            values=torch.zeros(N, J, T, C * bits // 8, dtype=torch.uint8),
            key_grid=torch.zeros(N, J, 2, C, dtype=torch.bfloat16),
            value_grid=torch.zeros(N, J, 2, T, dtype=torch.bfloat16),
            key_outliers=torch.zeros(N, J, M, 2, dtype=torch.int16),
            value_outliers=torch.zeros(N, J, M, 2, dtype=torch.int16),
            copies=self._copies,
        )

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def first_copied(self, position: int) -> int:
        """The first block that a row at `position` reads as it was written; 0 where tokens stay so."""
        coded = self.layers[0].coded
        return 0 if coded is None else coded.coded_tokens(position) // self.block_size

    def take(self) -> int:
        """A free block, with one user, and with a full copy where the format has such.

        Raises:
            OutOfBlocks: if there is none.
        """
        if not self._free:
            raise OutOfBlocks(
                f"all {self.num_blocks} KV blocks of {self.block_size} tokens are in use. Run fewer sequences at once, "
                "shorter ones, or with a larger KV cache."
            )
        block = self._free.pop()
        self._users[block] = 1
        if self.format.bits:
            if not self._free_copies:
                self._add_copies()
            self._copies[block] = self._free_copies.pop()
            self._readers[block] = 1
        return block

    def _add_copies(self) -> None:
        """Twice the room for full copies: as many as there are blocks suffice."""
        count = len(self.layers[0].keys)
        more = min(count, self.num_blocks - count)

        def grown(x: Tensor) -> Tensor:
            return torch.cat((x, torch.zeros(more, *x.shape[1:], dtype=x.dtype)))

        self.layers = KVCache(replace(kv, keys=grown(kv.keys), values=grown(kv.values)) for kv in self.layers)
        self._free_copies = list(range(count, count + more))[::-1]

    def share(self, block: int, copied: bool) -> None:
        """One more user of a block in use; `copied` if of its full copy, too, where it has one."""
        assert self._users[block] > 0
        self._users[block] += 1
        if self.format.bits and copied:
            assert self._readers[block] > 0
            self._readers[block] += 1

    def shared(self, block: int) -> bool:
        """Whether a block has several users."""
        return self._users[block] > 1

    def seal(self, block: int) -> None:
        """A user will never again read the full copy of a block; the last one frees it. Its codes have to be there."""
        assert self._readers[block] > 0
        self._readers[block] -= 1
        if not self._readers[block]:
            self._free_copies.append(int(self._copies[block]))
            self._copies[block] = -1

    def give_back(self, block: int, copied: bool) -> None:
        """One user less; the last one frees the block. `copied` unless that user has sealed it."""
        assert self._users[block] > 0
        if self.format.bits and copied:
            self.seal(block)
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def copy(self, block: int) -> int:
        """A new block with the same contents."""
        new = self.take()
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor[new] = tensor[block]
            if self.format.bits:
                at, to = int(self._copies[block]), int(self._copies[new])
                layer.keys[to], layer.values[to] = layer.keys[at], layer.values[at]
        return new


class BlockTable:
    """The blocks of one sequence, in order, and how many tokens of them are true.

    Attributes:
        blocks: block numbers; token i lives in blocks[i // block_size].
        length: tokens held.
        encoded: blocks from the first on whose codes are made. sealed: those that gave up their full copies.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = self.encoded = self.sealed = 0

    def missing(self, count: int) -> int:
        """Blocks that `append` takes for `count` more tokens."""
        missing = -(-(self.length + count) // self._pool.block_size) - len(self.blocks)
        return missing + (count > 0 and self._last_is_shared())

    def _last_is_shared(self) -> bool:
        """Whether the last block is to be written on while others use it."""
        return self.length % self._pool.block_size > 0 and self._pool.shared(self.blocks[-1])

    def append(self, count: int, kept: int | None = None) -> list[int]:
        """Make room for `count` more tokens and return their slots (block * block_size + offset).

        In a format with codes, this is also when blocks are encoded that the new rows read in codes, and when full
        copies are given up that no rollback leads back to.

        Args:
            count: tokens; at most the window of a format with codes.
            kept: tokens that will not be taken back, but for a draft; None for all that are held.

        Raises:
            OutOfBlocks: if the pool cannot hold them; the table is then as it was.
        """
        size, missing = self._pool.block_size, self.missing(count)
        if missing > self._pool.num_free:
            raise OutOfBlocks(
                f"{count} more tokens need {missing} KV blocks of {size}, {self._pool.num_free} are free. "
                "Run fewer sequences at once, shorter ones, or with a larger KV cache."
            )
        self._settle(count, self.length if kept is None else kept)
        if count and self._last_is_shared():
            old = self.blocks[-1]
            self.blocks[-1] = self._pool.copy(old)
            self._pool.give_back(old, copied=True)
        while len(self.blocks) * size < self.length + count:
            self.blocks.append(self._pool.take())
        places = range(self.length, self.length + count)
        self.length += count
        return [self.blocks[i // size] * size + i % size for i in places]

    def _settle(self, count: int, kept: int) -> None:
        if not self._pool.format.bits:
            return
        assert count <= self._pool.format.window, f"{count} rows would read blocks that they themselves fill"
        wanted = self._pool.first_copied(self.length + count - 1)
        if wanted > self.encoded:
            encode_blocks(self._pool.layers, self.blocks[self.encoded : wanted])
            self.encoded = wanted
        for block in self.blocks[self.sealed : self._pool.first_copied(kept - LONGEST_ROLLBACK)]:
            self._pool.seal(block)
            self.sealed += 1

    def truncate(self, length: int) -> None:
        """Forget every token past `length`, and give back the blocks that only they used.

        Raises:
            UsageError: the next row would read full copies that were given up.
        """
        assert 0 <= length <= self.length
        if 0 < length < self.length and self._pool.first_copied(length) < self.sealed:
            raise UsageError(
                f"{self.length - length} of {self.length} tokens are to be taken back. With keys and values in "
                f"{self._pool.format.name}, {LONGEST_ROLLBACK} can. Expected fewer, or all: start the sequence again."
            )
        size = self._pool.block_size
        needed = -(-length // size)
        for i in range(needed, len(self.blocks)):
            self._pool.give_back(self.blocks[i], copied=i >= self.sealed)
        del self.blocks[needed:]
        self.length = length
        self.encoded, self.sealed = min(self.encoded, length // size), min(self.sealed, needed)

    def adopt(self, blocks: Sequence[int]) -> None:
        """Begin an empty table with full blocks that others use."""
        assert not self.blocks
        for block in blocks:
            self._pool.share(block, copied=False)
        self.blocks, self.length = list(blocks), len(blocks) * self._pool.block_size

    def replace(self, i: int, block: int) -> None:
        """Use `block`, which holds the same tokens after the same text, in place of the i-th."""
        self._pool.share(block, copied=False)
        self._pool.give_back(self.blocks[i], copied=False)
        self.blocks[i] = block

    def fork(self) -> "BlockTable":
        """A second sequence with the same tokens, sharing every block."""
        twin = BlockTable(self._pool)
        twin.blocks, twin.length = list(self.blocks), self.length
        twin.encoded, twin.sealed = self.encoded, self.sealed
        for i, block in enumerate(twin.blocks):
            self._pool.share(block, copied=i >= self.sealed)
        return twin
