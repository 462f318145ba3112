"""A decoder with a paged KV cache per request: what both a target and a model draft are to the engine.

Prefill, decode and verify are the same call: tokens to append, and from which of them on logits are wanted.

Shape suffixes: R rows that return logits, D hidden size, V vocabulary.
"""

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import ops
from ..errors import NumericsError, UsageError
from ..formats.kv import KV_FORMATS, KVFormat
from ..ops.batch import Listed, Ragged
from ..types import Blocks, Feed
from .decoder import Decoder, Observer
from .kv import BLOCK_SIZE, BlockPool, BlockTable
from .prefix import Path, PrefixCache


class CachedModel:
    """A `Decoder`, the pool of KV blocks it writes to, and a block table per request.

    Attributes:
        decoder: the model.
        vocab_size: width of the logits.
        context_length: tokens that one request may hold.
        kv_scales_from: where the scales of keys and values in 8-bit floats came from: 'folder', 'text', 'caller', or
            'none' where all of them are 1.0; None where the format has none.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        kv_tokens: int,
        vocab_size: int,
        usable: int | None = None,
        context_length: int | None = None,
        kv: KVFormat = KV_FORMATS["bf16"],
        kv_scales: Sequence[tuple[Tensor, Tensor]] | None = None,
        prefix_cache: bool = False,
        kv_scales_from: str | None = None,
    ) -> None:
        """Allocate the cache.

        Args:
            decoder: the model.
            kv_tokens: tokens that the cache holds for all requests together; rounded up to whole blocks.
            vocab_size: width of the logits; a padded table is cut to it, a smaller one is filled up with -inf.
            usable: ids from here on have another meaning or none: their logits are -inf. None: all are usable.
            context_length: a smaller limit than the model's own.
            kv: what keys and values are kept in; float32 is for an exact oracle.
            kv_scales: for a format that needs them, of keys and values for each layer, [J] float32 both: see
                `find_scales`.
            prefix_cache: keep what requests computed for others that begin alike. Formats with codes have none,
                whatever is asked: see `PrefixCache`.
            kv_scales_from: who says so, see above; None for the caller.
        """
        config = decoder.config
        self.decoder = decoder
        self.vocab_size = vocab_size
        self.context_length = min(context_length or config.context_length, config.context_length)
        self._usable = min(vocab_size, config.vocab_size, usable or vocab_size)
        blocks = -(-kv_tokens // BLOCK_SIZE)
        self.pool = BlockPool(config.num_layers, blocks, config.num_kv_heads, config.head_dim, kv, scales=kv_scales)
        self._tables: dict[int, BlockTable] = {}
        self.kv_scales_from = _scales_from(kv, kv_scales, kv_scales_from)
        self._prefix = PrefixCache(self.pool) if prefix_cache and not kv.bits else None
        self._paths: dict[int, Path] = {}  # of the requests that adopted

    def blocks(self) -> Blocks:
        """What the cache has room for now."""
        idle = self._prefix.idle if self._prefix else 0
        return Blocks(self.pool.block_size, self.pool.num_blocks, self.pool.num_free, idle)

    def adopt(self, request: int, tokens: Sequence[int]) -> int:
        """Start `request` with the longest prefix that is cached: see `LanguageModel.adopt`."""
        assert request not in self._tables, f"request {request} is known already"
        if self._prefix is None:
            return 0
        table = self._tables[request] = BlockTable(self.pool)
        self._paths[request] = self._prefix.start(table, tokens)
        return table.length

    def forward(self, feeds: Sequence[Feed]) -> Tensor:
        """Append tokens and return the wanted logits, [R, V] float32: see `LanguageModel.forward`.

        Nobody has looked yet whether they are numbers: whoever makes distributions of them does.
        """
        return self._logits(self.hidden(feeds))

    def hidden(self, feeds: Sequence[Feed], observe: Observer | None = None) -> Tensor:
        """Append tokens and return the residual rows before the final norm of the wanted rows, [R, D] float32.

        `observe` sees what every linear layer reads, see `Decoder.hidden`.

        Raises:
            UsageError: if a request would grow past the context.
            OutOfBlocks: if the cache is full; nothing was changed then.
        """
        tables = [self._tables.setdefault(feed.request, BlockTable(self.pool)) for feed in feeds]
        for feed, table in zip(feeds, tables, strict=True):
            assert feed.start == table.length, (
                f"request {feed.request}: cache holds {table.length}, fed at {feed.start}"
            )
            if table.length + len(feed.tokens) > self.context_length:
                raise UsageError(
                    f"request {feed.request} would hold {table.length + len(feed.tokens)} tokens, the context is "
                    f"{self.context_length}. Shorten the prompt or lower max_tokens."
                )
        x_RD = self._rows(feeds, tables, observe)
        wanted: list[int] = []
        row = 0
        for feed in feeds:
            if path := self._paths.get(feed.request):
                path.tokens += feed.tokens
            wanted += range(row + feed.logits_from, row + len(feed.tokens))
            row += len(feed.tokens)
        return x_RD if len(wanted) == row else x_RD[wanted]

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits of residual rows, [R, V] float32; -inf on ids that are not usable.

        Raises:
            NumericsError: if a usable logit is NaN.
        """
        logits = self._logits(x_RD)
        _, largest = ops.top(logits)
        if any(map(math.isnan, largest)):
            row = next(i for i, value in enumerate(largest) if math.isnan(value))
            raise NumericsError(
                f"the model's logits are NaN in row {row} of {len(x_RD)}. Expected numbers. The weights or their "
                "scales are broken, or a format is too narrow for this model: try it in bf16."
            )
        return logits

    def _logits(self, x_RD: Tensor) -> Tensor:
        if not x_RD.shape[0]:
            return torch.empty(0, self.vocab_size)
        usable = self.decoder.logits(x_RD)
        if usable.shape[1] != self._usable:
            usable = usable[:, : self._usable]
        if self._usable == self.vocab_size:
            return usable
        return functional.pad(usable, (0, self.vocab_size - self._usable), value=-torch.inf)

    def truncate(self, request: int, length: int) -> None:
        """Forget everything of `request` past `length` tokens."""
        if request not in self._tables:
            return
        table = self._tables[request]
        table.truncate(length)
        if self._prefix and (path := self._paths.get(request)):
            self._prefix.keep(path, table)

    def release(self, request: int) -> None:
        """Forget `request` and give its blocks back. What it held past its last truncation is nobody's prefix."""
        if request not in self._tables:
            return
        self._tables.pop(request).truncate(0)
        if self._prefix and (path := self._paths.pop(request, None)):
            self._prefix.leave(path)

    def fork(self, request: int, twin: int) -> None:
        """Start `twin` with everything that `request` holds, sharing its blocks."""
        assert twin not in self._tables
        table = self._tables[request]
        if self._prefix and (path := self._paths.get(request)):
            self._prefix.keep(path, table)  # or one of the two would give the tree a block that the other uses untold
            self._paths[twin] = Path(path.tokens, path.nodes)
        self._tables[twin] = table.fork()

    def length(self, request: int) -> int:
        """Tokens that the cache holds for `request`; 0 if it was never seen."""
        return self._tables[request].length if request in self._tables else 0

    def _rows(self, feeds: Sequence[Feed], tables: Sequence[BlockTable], observe: Observer | None) -> Tensor:
        """Residual rows of all tokens, feed after feed, [rows, D] float32.

        Where blocks are read in codes, no call may fill a block that its own rows read so: long feeds go in parts.
        """
        rows: list[list[Tensor]] = [[] for _ in feeds]
        part = self.pool.format.window or None
        for first in range(0, max((len(feed.tokens) for feed in feeds), default=0), part or sys.maxsize):
            mine = [i for i, feed in enumerate(feeds) if len(feed.tokens) > first]
            cut = [_part(feeds[i], first, part) for i in mine]
            slots: list[int] = []
            try:
                for i, some in zip(mine, cut, strict=True):
                    if self._prefix:
                        self._prefix.make_room(tables[i].missing(len(some.tokens)))
                    slots += tables[i].append(len(some.tokens), feeds[i].start)
            except UsageError:
                for feed, table in zip(feeds, tables, strict=True):
                    table.truncate(feed.start)
                raise
            x_RD = self.decoder.hidden(_ragged(cut, [tables[i] for i in mine], slots), self.pool.layers, observe)
            if len(cut) == len(feeds) and all(len(a.tokens) == len(b.tokens) for a, b in zip(cut, feeds, strict=True)):
                return x_RD
            for i, its in zip(mine, torch.split(x_RD, [len(feed.tokens) for feed in cut]), strict=True):
                rows[i].append(its)
        return torch.cat([some for its in rows for some in its])


def _scales_from(kv: KVFormat, scales: Sequence[tuple[Tensor, Tensor]] | None, given: str | None) -> str | None:
    if not kv.needs_scales:
        return None
    calibrated = any(bool((scale != 1).any()) for pair in scales or () for scale in pair)
    return (given or "caller") if calibrated else "none"


def _part(feed: Feed, first: int, count: int | None) -> Feed:
    if first == 0 and (count is None or len(feed.tokens) <= count):
        return feed
    return Feed(feed.request, feed.tokens[first:][:count], feed.start + first, 0)


def _ragged(feeds: Sequence[Feed], tables: Sequence[BlockTable], slots: list[int]) -> Ragged:
    ids = [token for feed in feeds for token in feed.tokens]
    positions = [feed.start + i for feed in feeds for i in range(len(feed.tokens))]
    return Listed(
        ids=ids,
        positions=positions,
        slots=slots,
        row_counts=tuple(len(feed.tokens) for feed in feeds),
        tables=[table.blocks for table in tables],
        lengths=tuple(table.length for table in tables),
    )
