"""From a model's name and a recipe to a model that runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..formats import Recipe
from ..models import hub
from ..models.cached import CachedModel
from ..models.checkpoint import Checkpoint, open_checkpoint
from ..models.decoder import Decoder
from ..models.tokenizer import Tokenizer, check_pair
from .pipeline import quantize

Progress = Callable[[int, int | None, str], None]
"""Called with (done, total or None, what is being done)."""


@dataclass(frozen=True)
class Source:
    """A model file that was found and opened, not yet in any format.

    Attributes:
        name: what the user called it.
        path: where it lies.
        checkpoint: its tensors.
        tokenizer: its tokenizer.
    """

    name: str
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer


def open_source(name: str, progress: Progress | None = None) -> Source:
    """Find a model by registry name, folder, .gguf file or hub id, fetching it if need be, and open it.

    Raises:
        UsageError: an unknown name, or a file that cannot be read.
    """
    path = hub.resolve(name, progress=progress)
    checkpoint = open_checkpoint(path)
    return Source(name, path, checkpoint, checkpoint.tokenizer())


def load_target(
    source: Source,
    recipe: Recipe,
    *,
    kv_tokens: int,
    rng: np.random.Generator,
    context_length: int | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> CachedModel:
    """The target in `recipe`, with a KV cache; ids that its tokenizer does not know are never emitted."""
    weights = quantize(source.checkpoint, recipe, calibration=calibration, rng=rng, progress=progress)
    return CachedModel(
        Decoder(weights),
        kv_tokens=kv_tokens,
        vocab_size=source.tokenizer.vocab_size,
        context_length=context_length,
        kv_dtype=kv_dtype(recipe),
    )


def load_draft(
    source: Source,
    target: Source,
    recipe: Recipe,
    *,
    kv_tokens: int,
    rng: np.random.Generator,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> CachedModel:
    """The draft in `recipe`, with logits as wide as the target's and -inf on ids that the two do not share.

    Raises:
        PairError: if the vocabularies differ in meaning.
    """
    shared = check_pair(target.tokenizer, source.tokenizer)
    weights = quantize(source.checkpoint, recipe, calibration=calibration, rng=rng, progress=progress)
    return CachedModel(
        Decoder(weights),
        kv_tokens=kv_tokens,
        vocab_size=target.tokenizer.vocab_size,
        usable=shared,
        kv_dtype=kv_dtype(recipe),
    )


def kv_dtype(recipe: Recipe) -> torch.dtype:
    """Keys and values are bfloat16; float32 only in the oracle format."""
    return torch.float32 if recipe.format.activation == "f32" else torch.bfloat16
