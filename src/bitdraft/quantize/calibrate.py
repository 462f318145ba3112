"""True activation statistics: what each linear layer really reads, on real text.

Shape suffixes: T rows (tokens), K inputs, G groups of inputs, S inputs of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import NumericsError, UsageError
from ..formats.kv import KV_FORMATS
from ..models.cached import CachedModel
from ..models.decoder import Decoder
from ..types import Feed

MIN_TOKENS = 512
"""Fewer tokens than this say little about a channel: calibration refuses."""

MAX_TOKENS = 2048
"""More are not read: the statistics have settled long before, and reading costs as much time as rounding."""

_CHUNK = 512
"""Tokens that are run at once: bounds the memory of attention."""


@dataclass
class _Inputs:
    """What is kept of one layer's inputs."""

    total: Tensor
    products: Tensor
    rows: Tensor
    tokens: int = 0
    priorities: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))


class ActivationStats:
    """Over all tokens, the mean magnitude of every channel and the products of the channels of a group; and a uniform
    sample of rows; for every linear layer.

    A few tokens carry far larger activations than all others (a text's first one is the usual case). A sample of rows
    holds one or two of them, or none: what is decided group by group is decided on the products, which miss nothing.
    """

    def __init__(self, keep: int, group_size: int, rng: np.random.Generator) -> None:
        """Start empty.

        Args:
            keep: rows to keep for each layer.
            group_size: neighbouring channels whose products are summed; divides the inputs of every layer.
            rng: chooses the rows.
        """
        self._keep, self._group_size, self._rng = keep, group_size, rng
        self._inputs: dict[tuple[int, str], _Inputs] = {}

    def observe(self, layer: int, name: str, x_TK: Tensor) -> None:
        """Take in rows [T, K] that a linear layer reads; made for `Decoder.hidden(observe=...)`.

        Raises:
            NumericsError: NaN or infinity among them.
        """
        if not bool(x_TK.isfinite().all()):
            raise NumericsError(
                f"layer {layer}, {name}: the model's activations are NaN or infinite on the calibration set. Expected "
                "numbers; the weights are damaged, or the model does not work in FP32."
            )
        key, K, S = (layer, name), x_TK.shape[1], self._group_size
        if key not in self._inputs:
            self._inputs[key] = _Inputs(torch.zeros(K), torch.zeros(K // S, S, S), x_TK[:0])
        found = self._inputs[key]
        x_GTS = x_TK.view(-1, K // S, S).transpose(0, 1)
        found.products += x_GTS.transpose(1, 2) @ x_GTS
        found.total += x_TK.abs().sum(0)
        found.tokens += len(x_TK)
        # Every row draws a priority; the rows with the smallest ones are a uniform sample of all rows ever seen.
        rows = torch.cat([found.rows, x_TK])
        priorities = np.concatenate([found.priorities, self._rng.random(len(x_TK))])
        chosen = np.sort(np.argsort(priorities)[: self._keep])
        found.rows, found.priorities = rows[torch.from_numpy(chosen)].clone(), priorities[chosen]

    def mean_magnitude(self, layer: int, name: str) -> Tensor:
        """Mean |x| of every channel, [K].

        Raises:
            UsageError: nothing was observed there.
        """
        found = self._found(layer, name)
        return found.total / found.tokens

    def products(self, layer: int, name: str) -> Tensor:
        """`X^T X` of every group of channels over all tokens, [G, S, S].

        Raises:
            UsageError: nothing was observed there.
        """
        return self._found(layer, name).products

    def rows(self, layer: int, name: str) -> Tensor:
        """The sample of rows, [T, K] with T up to `keep`.

        Raises:
            UsageError: nothing was observed there.
        """
        return self._found(layer, name).rows

    def _found(self, layer: int, name: str) -> _Inputs:
        if (layer, name) not in self._inputs:
            raise UsageError(
                f"layer {layer}, {name}: no activations were observed. AWQ without them would be rounding to nearest "
                "under another name; run the calibration set first."
            )
        return self._inputs[layer, name]


def count_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """How many tokens of a calibration set will be read: `MAX_TOKENS` at most.

    Raises:
        UsageError: there are fewer than `MIN_TOKENS`.
    """
    total = sum(len(s) for s in sequences)
    if total < MIN_TOKENS:
        raise UsageError(
            f"the calibration set has {total} tokens in {len(sequences)} texts. Expected at least {MIN_TOKENS}: with "
            "fewer the statistics are chance. Give more text like your traffic."
        )
    return min(total, MAX_TOKENS)


def collect(
    decoder: Decoder,
    sequences: Sequence[Sequence[int]],
    *,
    keep: int,
    group_size: int,
    rng: np.random.Generator,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> ActivationStats:
    """Run a calibration set through a model and gather what its layers read.

    Args:
        decoder: the model, in f32.
        sequences: token ids; the first `MAX_TOKENS` tokens are used. A text longer than the model's context goes on in
            a fresh context.
        keep: rows to keep for each layer.
        group_size: neighbouring channels whose products are summed.
        rng: chooses the rows.
        progress: called with (tokens done, tokens in all, what).

    Raises:
        UsageError: fewer than `MIN_TOKENS` tokens.
        NumericsError: an activation is NaN or infinite.
    """
    total = count_tokens(sequences)
    context = min(decoder.config.context_length, total)
    model = CachedModel(decoder, kv_tokens=context, vocab_size=decoder.config.vocab_size, kv=KV_FORMATS["f32"])
    stats = ActivationStats(keep, group_size, rng)
    done = 0
    for text in (s[i : i + context] for s in sequences for i in range(0, len(s), context)):
        window = list(text[: total - done])
        for start in range(0, len(window), _CHUNK):
            ids = window[start : start + _CHUNK]
            model.hidden([Feed(0, ids, start, len(ids))], observe=stats.observe)
            done += len(ids)
            if progress:
                progress(done, total, "calibrating")
        model.release(0)
    return stats
