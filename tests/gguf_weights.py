"""Weights as GGUF files store them: random blocks of every type, whose values have the sizes that weights have."""

import numpy as np
import torch
from torch import Tensor

from bitdraft.formats import get_format
from bitdraft.ops.gguf_blocks import BLOCK_FORMATS, BlockFormat
from bitdraft.ops.packed import Packed, block_matrix, float_matrix

QUANTISED = {form.name: form for form in BLOCK_FORMATS.values() if form.values > 1}
"""The tensor types that are no plain floats, by ggml's name."""


def random_blocks(form: BlockFormat, N: int, K: int, seed: int = 0) -> Tensor:
    """Blocks of a weight, [N, bytes of a row] uint8: any codes, any small scales, float16 scales of either sign.

    The float16 scales are such that values are of the order of 1 / sqrt(K). Codes of 8 bits are never -128, as in ggml.
    """
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (N * K // form.values, form.nbytes), dtype=np.uint8)
    step = K**-0.5 / 2 ** (form.code_bits - 1) / (64 if form.values == 256 else 1)
    for i, start in enumerate(form.scales):
        size = step * (2 ** (form.code_bits - 1) if i else 1)  # a minimum is of the size of a value
        scales = (size * rng.uniform(0.5, 1.5, (len(blocks), 1)) * rng.choice([-1, 1], (len(blocks), 1))).astype(
            np.float16
        )
        blocks[:, start : start + 2] = scales.view(np.uint8)
    if form.code_bits == 8:
        codes = blocks[:, form.nbytes - form.values :]
        codes[codes == 128] = 129
    return torch.from_numpy(blocks.reshape(N, -1))


def stored(name: str, N: int, K: int, activation: int = 8, seed: int = 0) -> Packed:
    """A random weight [N, K] of a tensor type, with 8-bit or 16-bit inputs: F32, F16 and BF16 read 16-bit ones."""
    form = get_format(f"stored-a{activation}")
    if name in QUANTISED:
        return form.keep(block_matrix(random_blocks(QUANTISED[name], N, K, seed), QUANTISED[name]))
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) * K**-0.5
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    return form.keep(float_matrix(values.to(dtype)))
