"""In what keys and values are kept. Like the format of weights, part of the model's law and not a matter of speed."""

from dataclasses import dataclass

import torch

from ..errors import FormatError


@dataclass(frozen=True)
class KVFormat:
    """One format of keys and values.

    Attributes:
        name: the canonical name.
        dtype: what a token's own keys and values are written as.
        bits: of the codes that blocks of tokens are kept in once they are `window` tokens old; None where every token
            stays as it was written.
        window: so many tokens before a row, at least, are read as they were written. No step may draft more, and no
            call may feed more rows of a sequence. A multiple of the block size.
        outliers: numbers of a block and head that are kept beside its codes, of keys and of values each.
    """

    name: str
    dtype: torch.dtype
    bits: int | None = None
    window: int = 0
    outliers: int = 0

    @property
    def needs_scales(self) -> bool:
        """Whether a scale for each layer and KV head has to be found from data."""
        return self.dtype == torch.float8_e4m3fn

    def bits_per_number(self, head_dim: int, block_size: int = 16) -> float:
        """Bits of a key or value of an old token, scales and outliers included.

        Args:
            head_dim: numbers of a token and head.
            block_size: tokens that share the scales of keys.
        """
        if self.bits is None:
            return 8 * self.dtype.itemsize + (32 / head_dim if self.dtype == torch.int8 else 0)
        grids = 32 / block_size + 32 / head_dim  # two bfloat16 numbers for a channel of keys, and for a token of values
        return self.bits + grids / 2 + 32 * self.outliers / (head_dim * block_size)


KV_FORMATS: dict[str, KVFormat] = {
    kv.name: kv
    for kv in (
        KVFormat("f32", torch.float32),
        KVFormat("bf16", torch.bfloat16),
        KVFormat("int8", torch.int8),
        KVFormat("fp8", torch.float8_e4m3fn),
        KVFormat("int8-kc", torch.bfloat16, bits=8, window=128),
        KVFormat("int4", torch.bfloat16, bits=4, window=128, outliers=16),
    )
}
"""By name, most bits first."""


def get_kv_format(name: str) -> KVFormat:
    """The format of that name.

    Raises:
        FormatError: there is none.
    """
    if name not in KV_FORMATS:
        raise FormatError(f"format of keys and values {name!r}. Expected one of: {', '.join(KV_FORMATS)}.")
    return KV_FORMATS[name]
