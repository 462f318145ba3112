"""A ragged batch and the paged KV cache, as the operations see them.

Shape suffixes: R rows (tokens of all sequences of the call), S sequences, J KV heads, C head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    """

    compiled: Any = None


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
