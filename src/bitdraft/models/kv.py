"""The paged KV cache: a pool of ref-counted blocks, and a block table per sequence. Rollback is a length.

Several sequences may share the blocks of a common prefix; a shared block is copied before it is written (copy on
write), so that no sequence sees another's tokens.
"""

import torch

from ..errors import UsageError
from ..ops.batch import KVCache, KVLayer

BLOCK_SIZE = 16
"""Tokens a block. Small enough that a short sequence wastes little, large enough that tables stay short."""


class OutOfBlocks(UsageError):
    """The pool has no free block left."""


class BlockPool:
    """All KV blocks of one model.

    Attributes:
        layers: one `KVLayer` per layer.
        num_blocks, block_size: how many blocks, and tokens in each.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        """Allocate the blocks.

        Args:
            num_layers, num_blocks, kv_heads, head_dim: the usual sizes.
            dtype: what keys and values are stored as: float32, bfloat16, or int8 with a scale per token and head.
            block_size: tokens a block; compiled kernels want the default.
        """
        blocks = (num_blocks, kv_heads)

        def layer() -> KVLayer:
            keys = torch.zeros(*blocks, head_dim, block_size, dtype=dtype)
            values = torch.zeros(*blocks, block_size, head_dim, dtype=dtype)
            if dtype != torch.int8:
                return KVLayer(keys, values)
            return KVLayer(keys, values, torch.zeros(*blocks, block_size), torch.zeros(*blocks, block_size))

        self.layers = KVCache(layer() for _ in range(num_layers))
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]
        self._users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    def take(self) -> int:
        """A free block, with one user.

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
        return block

    def share(self, block: int) -> None:
        """One more user of a block in use."""
        assert self._users[block] > 0
        self._users[block] += 1

    def shared(self, block: int) -> bool:
        """Whether a block has several users."""
        return self._users[block] > 1

    def give_back(self, block: int) -> None:
        """One user less; the last one frees the block."""
        assert self._users[block] > 0
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def copy(self, block: int) -> int:
        """A new block with the same contents."""
        new = self.take()
        for layer in self.layers:
            for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
                if tensor is not None:
                    tensor[new] = tensor[block]
        return new


class BlockTable:
    """The blocks of one sequence, in order, and how many tokens of them are true.

    Attributes:
        blocks: block numbers; token i lives in blocks[i // block_size].
        length: tokens held.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def append(self, count: int) -> list[int]:
        """Make room for `count` more tokens and return their slots (block * block_size + offset).

        Raises:
            OutOfBlocks: if the pool cannot hold them; the table is then as it was.
        """
        size = self._pool.block_size
        missing = -(-(self.length + count) // size) - len(self.blocks)
        partial = self.length // size if self.length % size else None
        copy_first = count > 0 and partial is not None and self._pool.shared(self.blocks[partial])
        if missing + copy_first > self._pool.num_free:
            raise OutOfBlocks(
                f"{count} more tokens need {missing + copy_first} KV blocks of {size}, {self._pool.num_free} are free. "
                "Run fewer sequences at once, shorter ones, or with a larger KV cache."
            )
        if copy_first and partial is not None:
            old = self.blocks[partial]
            self.blocks[partial] = self._pool.copy(old)
            self._pool.give_back(old)
        self.blocks.extend(self._pool.take() for _ in range(missing))
        places = range(self.length, self.length + count)
        self.length += count
        return [self.blocks[i // size] * size + i % size for i in places]

    def truncate(self, length: int) -> None:
        """Forget every token past `length`, and give back the blocks that only they used."""
        assert 0 <= length <= self.length
        needed = -(-length // self._pool.block_size)
        for block in self.blocks[needed:]:
            self._pool.give_back(block)
        del self.blocks[needed:]
        self.length = length

    def fork(self) -> "BlockTable":
        """A second sequence with the same tokens, sharing every block."""
        twin = BlockTable(self._pool)
        twin.blocks, twin.length = list(self.blocks), self.length
        for block in twin.blocks:
            self._pool.share(block)
        return twin
