"""A calibration set on its way through a model, one layer at a time, and what that layer's linear layers read.

The rows of all tokens are kept, [T, D]; of the model, one layer. What a layer is observed on has gone through the
layers below it as they were rounded.

Shape suffixes: T rows (tokens), D hidden size, K inputs, G groups of inputs, S inputs of a group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import NumericsError, UsageError
from ..formats import KV_FORMATS, Format, get_format
from ..models.checkpoint import Checkpoint, Weights
from ..models.decoder import Decoder, PreparedModel, prepare_layer
from ..models.kv import BLOCK_SIZE, BlockPool, BlockTable
from ..models.tensor_names import EMBEDDING
from ..ops import KVCache, KVLayer, Ragged, Stack, prepare
from ..ops.packed import Packed

MIN_TOKENS = 512
"""Fewer tokens than this say little about a channel: calibration refuses."""

TOKENS = 2048
"""Tokens that are read unless the caller says otherwise: each costs as much time as running the model on it twice."""

WINDOW = 512
"""Tokens that are read as one text; a longer text goes on in a fresh context."""

_CHUNK = 1024
"""Rows that are run at once, whole windows: bounds the memory of attention and of the MLP."""


@dataclass
class _Inputs:
    """What is kept of the inputs of one linear layer."""

    total: Tensor
    largest: Tensor
    products: Tensor
    rows: list[Tensor]
    tokens: int = 0


class LayerInputs:
    """What the linear layers of one layer read: over all tokens, the mean and the largest magnitude of every channel,
    and the products of the channels of a group; and a uniform sample of rows.

    A few tokens carry far larger activations than all others (a text's first one is the usual case). A sample of rows
    holds one or two of them, or none: what is decided group by group is decided on the products, which miss nothing.
    """

    def __init__(self, layer: int, sizes: Mapping[str, int], chosen_T: Tensor) -> None:
        """Start empty.

        Args:
            layer: its number, for messages.
            sizes: by inputs ('qkv', ...), how many neighbouring channels have their products summed: all of them, or
                those of a group; divides the number of inputs.
            chosen_T: numbers of the rows to keep, ascending, int64.
        """
        self._layer, self._sizes, self._chosen = layer, sizes, chosen_T
        self._inputs: dict[str, _Inputs] = {}

    def observe(self, name: str, x_TK: Tensor) -> None:
        """Take in the next rows [T, K] that the linear layers of `name` read.

        Raises:
            NumericsError: NaN or infinity among them.
        """
        magnitude_TK = x_TK.abs()
        total_K = magnitude_TK.sum(0)
        if not bool(total_K.isfinite().all()):
            raise NumericsError(
                f"layer {self._layer}, {name}: the model's activations are NaN or infinite on the calibration set. "
                "Expected numbers; the weights are damaged, or the model does not work in FP32."
            )
        K, S = x_TK.shape[1], self._sizes[name]
        if name not in self._inputs:
            self._inputs[name] = _Inputs(torch.zeros(K), torch.zeros(K), torch.zeros(K // S, S, S), [])
        found = self._inputs[name]
        x_GTS = x_TK.view(-1, K // S, S).transpose(0, 1)
        found.products.baddbmm_(x_GTS.transpose(1, 2), x_GTS)
        found.total += total_K
        if len(x_TK):
            found.largest = torch.maximum(found.largest, magnitude_TK.amax(0))
        here = self._chosen - found.tokens
        found.rows.append(x_TK[here[(here >= 0) & (here < len(x_TK))]])
        found.tokens += len(x_TK)

    def tokens(self, name: str) -> int:
        """Rows that were seen."""
        return self._inputs[name].tokens

    def mean_magnitude(self, name: str) -> Tensor:
        """Mean |x| of every channel, [K]."""
        return self._inputs[name].total / self._inputs[name].tokens

    def mean_square(self, name: str) -> Tensor:
        """Mean x^2 of every channel, [K]."""
        found = self._inputs[name]
        return found.products.diagonal(dim1=1, dim2=2).flatten() / found.tokens

    def largest(self, name: str) -> Tensor:
        """Largest |x| of every channel, [K]."""
        return self._inputs[name].largest

    def products(self, name: str, size: int) -> Tensor:
        """`X^T X` of neighbouring channels over all tokens, [K / size, size, size]; size divides the announced one."""
        products_GSS = self._inputs[name].products
        parts = range(0, products_GSS.shape[1], size)
        if len(parts) == 1:
            return products_GSS
        return torch.stack([products_GSS[:, i : i + size, i : i + size] for i in parts], 1).flatten(0, 1)

    def rows(self, name: str) -> Tensor:
        """The sample of rows, [T, K]."""
        return torch.cat(self._inputs[name].rows)


def count_tokens(sequences: Sequence[Sequence[int]], limit: int = TOKENS) -> int:
    """How many tokens of a calibration set will be read, about: `limit` at most.

    Raises:
        UsageError: there are fewer than `MIN_TOKENS`, or the limit is lower.
    """
    total = sum(len(s) for s in sequences)
    if limit < MIN_TOKENS:
        raise UsageError(
            f"{limit} calibration tokens were asked for. Expected at least {MIN_TOKENS}: with fewer the statistics are "
            "chance."
        )
    if total < MIN_TOKENS:
        given = f"has {total} tokens in {len(sequences)} texts" if total else "is empty"
        raise UsageError(
            f"the calibration set {given}. Expected {MIN_TOKENS} tokens, {MIN_TOKENS - total} more: with fewer "
            "the statistics are chance. Give more text like your traffic."
        )
    return min(total, limit)


def windows(
    sequences: Sequence[Sequence[int]], limit: int, context: int, rng: np.random.Generator
) -> list[Sequence[int]]:
    """The parts of a calibration set that are read: windows drawn from all of it, in its order.

    Args:
        sequences: token ids of texts.
        limit: tokens in all, at most; the last window that is drawn is cut to it.
        context: tokens that the model can hold.
        rng: chooses the windows where there are more than `limit` tokens.
    """
    size = min(context, WINDOW)
    found = [text[i : i + size] for text in sequences for i in range(0, len(text), size)]
    chosen: dict[int, Sequence[int]] = {}
    left = limit
    for i in rng.permutation(len(found)):
        if left:
            chosen[int(i)] = found[i][:left]
            left -= len(chosen[int(i)])
    return [chosen[i] for i in sorted(chosen)]


class Calibration:
    """The residual rows of a calibration set between two layers.

    Attributes:
        tokens: T.
    """

    def __init__(self, source: Checkpoint, texts: Sequence[Sequence[int]], table: Format) -> None:
        """Embed the texts.

        Args:
            source: the model; its embedding is read.
            texts: windows of token ids, none longer than the context.
            table: the format of the embedding.
        """
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        used, self._ids = torch.unique(ids, return_inverse=True)
        self.tokens = len(ids)
        self._batches = list(_batches([len(text) for text in texts]))
        blocks = max(sum(-(-count // BLOCK_SIZE) for count in counts) for _, counts in self._batches)
        config = source.config
        self._pool = BlockPool(1, blocks, config.num_kv_heads, config.head_dim, KV_FORMATS["f32"])
        # Only the rows that occur: the table is the largest weight of a small model.
        values = source.tensor(EMBEDDING)[used]
        small = prepare(values_of(values) if table.kind == "stored" else table.encode(values))
        self._model = PreparedModel(config, Stack(), torch.zeros(config.hidden_size), small, small, 0)
        self._rows_TD = torch.empty(self.tokens, config.hidden_size)
        for rows, batch in self._ragged():
            self._rows_TD[rows] = Decoder(self._model).hidden(batch, KVCache(), observe=lambda *_: None)

    def observe(self, layer: int, weights: Weights, inputs: LayerInputs) -> None:
        """Let `inputs` see what the linear layers of a layer read; the rows stay before it.

        Raises:
            NumericsError: an activation is NaN or infinite.
        """
        decoder = self._decoder(layer, weights)

        def see(_: int, name: str, x_TK: Tensor) -> bool:
            inputs.observe(name, x_TK)
            return name == "down"  # what comes after it is a third of a layer's work, and nobody reads it

        for rows, batch in self._ragged():
            decoder.hidden(batch, self._pool.layers, see, self._rows_TD[rows], layer)

    def advance(self, layer: int, weights: Weights, see: Callable[[KVLayer], None] | None = None) -> None:
        """Take the rows through a layer, as these weights and the rounding of its inputs have it.

        `see` is shown the layer's keys and values, float32, of a few rows at a time; zeros where there are none.
        """
        decoder = self._decoder(layer, weights)
        (kv,) = self._pool.layers
        for rows, batch in self._ragged():
            if see:
                kv.keys.zero_(), kv.values.zero_()
            self._rows_TD[rows] = decoder.hidden(batch, self._pool.layers, None, self._rows_TD[rows], layer)
            if see:
                see(kv)

    def _decoder(self, layer: int, weights: Weights) -> Decoder:
        return Decoder(replace(self._model, layers=Stack([prepare_layer(weights, layer)])))

    def _ragged(self) -> Iterator[tuple[slice, Ragged]]:
        """Batch by batch, the rows and their places; each batch takes the whole pool."""
        for rows, counts in self._batches:
            tables = [BlockTable(self._pool) for _ in counts]
            slots = [slot for table, count in zip(tables, counts, strict=True) for slot in table.append(count)]
            yield (
                rows,
                Ragged(
                    ids=self._ids[rows],
                    positions=torch.cat([torch.arange(count) for count in counts]),
                    slots=torch.tensor(slots, dtype=torch.int64),
                    row_counts=counts,
                    tables=tuple(torch.tensor(table.blocks, dtype=torch.int64) for table in tables),
                    lengths=counts,
                ),
            )
            for table in tables:
                table.truncate(0)


def values_of(tensor: Tensor) -> Packed:
    """A matrix [N, K] float32 as it is, for inputs as they are."""
    return get_format("f32").encode(tensor)


def _batches(lengths: Sequence[int]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Neighbouring windows of up to `_CHUNK` rows together, one window at least: their rows, and how many of each."""
    start, counts = 0, [lengths[0]]
    for length in lengths[1:]:
        if sum(counts) + length > _CHUNK:
            yield slice(start, start + sum(counts)), tuple(counts)
            start, counts = start + sum(counts), []
        counts.append(length)
    yield slice(start, start + sum(counts)), tuple(counts)
