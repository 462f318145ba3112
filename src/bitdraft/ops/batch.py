"""A ragged batch and the paged KV cache, as the operations see them.

Shape suffixes: R rows (tokens of all sequences of the call), S sequences, J KV heads, C head dimension, T channels of a
head that turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CodedBlocks:
    """Blocks of a layer in codes whose scales several tokens share: `value = least + step * code`, but for outliers.

    Keys have a step and a least value for each channel of a block, values for each token (KIVI, Liu et al.,
    2402.02750). A row at position i reads the tokens below `coded_tokens(i)` from here and the others from their full
    copies, whatever the call is and however long the sequence has become: what it reads depends on i alone.

    Attributes:
        bits: of a code, 8 or 4.
        window: tokens before a row, at least, that it reads from full copies.
        keys: [blocks, J, C * bits / 8, block size] uint8; of 4 bits, channel c is the low half of row c, and channel
            c + C / 2 the high one.
        values: [blocks, J, block size, C * bits / 8] uint8, likewise.
        key_grid: [blocks, J, 2, C] bfloat16: steps, then least values. value_grid: [blocks, J, 2, block size].
        key_outliers, value_outliers: [blocks, J, outliers, 2] int16: a place among the block's [C, block size] keys or
            [block size, C] values, and the bits of the bfloat16 value there.
        copies: [blocks] int64, where in the layer's `keys` and `values` a block's full copy lies; -1 if it has none.
            The same tensor for all layers.
    """

    bits: int
    window: int
    keys: Tensor
    values: Tensor
    key_grid: Tensor
    value_grid: Tensor
    key_outliers: Tensor
    value_outliers: Tensor
    copies: Tensor

    def coded_tokens(self, position: int) -> int:
        """How many tokens a row at `position` reads in codes: whole blocks that ended `window` tokens before it."""
        size = self.values.shape[2]
        return max(0, position - self.window) // size * size


@dataclass(frozen=True)
class KVLayer:
    """One layer's share of the pool of KV blocks.

    Attributes:
        keys: [blocks, J, C, block size], float32, bfloat16, int8 or float8 E4M3; stored rotated, tokens innermost.
        values: [blocks, J, block size, C], of the same dtype.
        key_scales, value_scales: float32, what codes are to be multiplied by: [blocks, J, block size] for int8, one for
            each token and head; [J] for E4M3; else None.
        coded: the blocks in codes; None for a cache that keeps every token by itself. With it, `keys` and `values` are
            bfloat16 and hold full copies of some blocks, at `coded.copies`.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    coded: CodedBlocks | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that slots and tables may name."""
        return len(self.keys if self.coded is None else self.coded.copies)

    def tensors(self) -> list[Tensor]:
        """Everything that holds something of a block of that number: the first axis is `num_blocks`."""
        if self.coded is not None:
            c = self.coded
            return [c.keys, c.values, c.key_grid, c.value_grid, c.key_outliers, c.value_outliers]
        scales = [] if self.keys.dtype != torch.int8 else [self.key_scales, self.value_scales]
        return [self.keys, self.values, *(scale for scale in scales if scale is not None)]

    @property
    def kv_heads(self) -> int:
        """J."""
        return self.keys.shape[1]

    @property
    def head_dim(self) -> int:
        """C."""
        return self.keys.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.keys.shape[3]


class KVCache(tuple[KVLayer, ...]):
    """The blocks of all layers of a model.

    Attributes:
        compiled: what a backend derives from them once, at first use.
        angles: the kinds of attention whose rotary angles were last found to fit them.
    """

    compiled: Any = None
    angles: Any = None


@dataclass(frozen=True)
class Ragged:
    """Rows of tokens from several sequences in one call: prefill, decode and verify alike.

    Attributes:
        ids: [R] int64 token ids, sequence after sequence.
        positions: [R] int64, the absolute position of each row in its sequence.
        slots: [R] int64, where the row's key and value go: block * block size + offset.
        row_counts: rows of each sequence, S numbers that sum to R.
        tables: the block table of each sequence, S tensors of int64 block numbers.
        lengths: tokens in each sequence's KV after this call, S numbers.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    row_counts: tuple[int, ...]
    tables: tuple[Tensor, ...]
    lengths: tuple[int, ...]

    @property
    def numbers(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Sequence[int]]]:
        """Ids, positions, slots and tables as Python's numbers."""
        tables = [table.tolist() for table in self.tables]
        return self.ids.tolist(), self.positions.tolist(), self.slots.tolist(), tables


class Listed(Ragged):
    """The same of Python's numbers: tensors are made only where a backend asks for them.

    A tensor is a few microseconds, and ten times that while the weights of a step have just gone through the caches.
    """

    def __init__(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        row_counts: tuple[int, ...],
        tables: Sequence[Sequence[int]],
        lengths: tuple[int, ...],
    ) -> None:
        object.__setattr__(self, "_numbers", (ids, positions, slots, tables))
        object.__setattr__(self, "row_counts", row_counts)
        object.__setattr__(self, "lengths", lengths)

    @property
    def numbers(self) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[Sequence[int]]]:
        """Ids, positions, slots and tables as they were given."""
        return self._numbers  # type: ignore[attr-defined, no-any-return]

    @cached_property
    def ids(self) -> Tensor:
        """[R] int64."""
        return torch.tensor(self.numbers[0], dtype=torch.int64)

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64."""
        return torch.tensor(self.numbers[1], dtype=torch.int64)

    @cached_property
    def slots(self) -> Tensor:
        """[R] int64."""
        return torch.tensor(self.numbers[2], dtype=torch.int64)

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """S tensors of int64 block numbers."""
        return tuple(torch.tensor(table, dtype=torch.int64) for table in self.numbers[3])


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines of the rotary angles, [positions, T / 2] float32 (Su et al., 2104.09864).

    The first T channels of a head turn, c with c + T / 2; any after them stay as they are.

    Angles are made in float64 and only the finished cosine is rounded: a position in bfloat16 is exact up to 256 only,
    and its error past 512 turns a key by more than a radian.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def make(
        cls, positions: int, turned: int, theta: float, factors: Sequence[float] | None = None, scale: float = 1.0
    ) -> "Rotary":
        """The table for positions 0 to positions - 1.

        Args:
            positions: rows of the table.
            turned: T, channels of a head that turn.
            theta: base of the frequencies.
            factors: divisors of the T / 2 frequencies.
            scale: what cosines and sines are multiplied by (LongRoPE, 2402.13753).
        """
        frequency = theta ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
        if factors is not None:
            frequency = frequency / torch.tensor(factors, dtype=torch.float64)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return cls((angle.cos() * scale).float(), (angle.sin() * scale).float())


@dataclass(frozen=True)
class AttentionKind:
    """How some of a model's layers attend; models whose layers differ in this have two of them.

    Attributes:
        rotary: angles for the positions of queries and keys.
        window: positions that a row sees, itself included; None for all.
        scale: what scores are multiplied by; None for 1 / sqrt(C).
    """

    rotary: Rotary
    window: int | None = None
    scale: float | None = None
