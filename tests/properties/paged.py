"""Toy tables behind the real paged cache: a block holds the very tokens, and logits are the table's after the text that
a block table spells. So whoever reads another's block, or one that was overwritten, says something else.

The alphabet is small and a block has 16 tokens: requests share prefixes, and a cache of a few blocks is soon full.
"""

from collections.abc import Sequence

import model_files
import numpy as np
import torch
from torch import Tensor
from toy import Table, Text

from bitdraft.decoding.lookahead import Fixed
from bitdraft.drafters.model import ModelDrafter
from bitdraft.formats import KV_FORMATS
from bitdraft.models.cached import CachedModel
from bitdraft.ops import KVCache, Ragged
from bitdraft.types import Feed

V = 6
EOS = 5


_SAID, _ADDED = (torch.from_numpy(np.random.default_rng(7).normal(0, size, (4093, V))).float() for size in (1.5, 1))
_SAID[:, EOS] -= 2


def target_table(text: Text) -> Tensor:
    """Logits that depend on every token of the text; the end of sequence is rare."""
    return _SAID[hash(text) % len(_SAID)]


def draft_table(text: Text) -> Tensor:
    """Right about half of the time."""
    return target_table(text) + _ADDED[hash(text) % len(_ADDED)]


class SpellingDecoder:
    """A table as a `Decoder`."""

    def __init__(self, table: Table, context_length: int) -> None:
        self.config = model_files.config(
            vocab_size=V, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2, context_length=context_length
        )
        self._table = table
        self._texts: list[Text] = []

    def hidden(self, batch: Ragged, kv: KVCache, observe: object = None) -> Tensor:
        keys, (ids, _, slots, tables) = kv[0].keys, batch.numbers
        assert len(set(slots)) == len(slots), "two rows of one call share a place"
        for token, slot in zip(ids, slots, strict=True):
            keys[slot // 16, 0, 0, slot % 16] = token
        self._texts = []
        for count, table, length in zip(batch.row_counts, tables, batch.lengths, strict=True):
            text = tuple(int(x) for block in table for x in keys[block, 0, 0].tolist())[:length]
            self._texts += [text[: end + 1] for end in range(length - count, length)]
        return torch.arange(len(ids), dtype=torch.float32)[:, None]

    def logits(self, x_RD: Tensor) -> Tensor:
        return torch.stack([self._table(self._texts[int(row)]) for row in x_RD[:, 0]])


def paged(table: Table, blocks: int, context_length: int = 96, prefix_cache: bool = True) -> CachedModel:
    """The table with a cache of so many blocks."""
    decoder = SpellingDecoder(table, context_length)
    return CachedModel(decoder, kv_tokens=16 * blocks, vocab_size=V, kv=KV_FORMATS["f32"], prefix_cache=prefix_cache)  # type: ignore[arg-type]


def model_drafter(k: int, blocks: int, max_rows: int | None = None) -> ModelDrafter:
    """The real drafter around the draft's table."""
    return ModelDrafter(paged(draft_table, blocks), Fixed(k), (EOS,), max_rows)


def said(model: CachedModel, request: int, tokens: Sequence[int]) -> Tensor:
    """Feed tokens after what the request holds; the logits of all of them."""
    return model.forward([Feed(request, tuple(tokens), model.length(request), 0)])
