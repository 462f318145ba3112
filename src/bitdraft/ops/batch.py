"""A ragged batch and the paged KV cache, as the operations see them.

Shape suffixes: R rows (tokens of all sequences of the call), S sequences, J KV heads, C head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVLayer:
    """One layer's share of the pool of KV blocks.

    Attributes:
        keys: [blocks, J, C, block size], float32, bfloat16 or int8; stored rotated, tokens innermost.
        values: [blocks, J, block size, C], of the same dtype.
        key_scales, value_scales: [blocks, J, block size] float32, what the codes of a token and head are to be
            multiplied by; None unless the codes are int8.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

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
        angles: the rotary angles that were last found to fit them.
    """

    compiled: Any = None
    angles: "Rotary | None" = None


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
    """Cosines and sines of the rotary angles, [positions, C / 2] float32 (Su et al., 2104.09864).

    Angles are made in float64 and only the finished cosine is rounded: a position in bfloat16 is exact up to 256 only,
    and its error past 512 turns a key by more than a radian.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def make(cls, positions: int, head_dim: int, theta: float, factors: Sequence[float] | None = None) -> "Rotary":
        """The table for positions 0 to positions - 1; `factors` divide the head_dim / 2 frequencies."""
        frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        if factors is not None:
            frequency = frequency / torch.tensor(factors, dtype=torch.float64)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return cls(angle.cos().float(), angle.sin().float())
