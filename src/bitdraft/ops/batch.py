"""A ragged batch and the paged KV cache, as the operations see them.

Shape suffixes: R rows (tokens of all sequences of the call), S sequences, J KV heads, C head dimension, T channels of a
head that turn.
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
