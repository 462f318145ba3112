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


def load_model(
    source: Source,
    recipe: Recipe,
    *,
    kv_tokens: int,
    rng: np.random.Generator,
    target: Source | None = None,
    context_length: int | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> CachedModel:
    """A model in `recipe` with a KV cache, for a target or a draft.

    Args:
        source: the model to load.
        recipe: the format it runs in, and how it is brought there.
        kv_tokens: tokens that the cache holds.
        rng: chooses what calibration keeps.
        target: given for a draft: logits become as wide as the target's, with -inf on ids that the two do not share.
            Ids that the target's tokenizer does not know are never emitted.
        context_length: a smaller limit than the model's own.
        calibration: token ids of texts, for recipes that need them.
        progress: called while weights are quantised.

    Raises:
        PairError: the vocabularies of draft and target differ in meaning.
    """
    shared = check_pair(target.tokenizer, source.tokenizer) if target else None
    weights = quantize(source.checkpoint, recipe, calibration=calibration, rng=rng, progress=progress)
    return CachedModel(
        Decoder(weights),
        kv_tokens=kv_tokens,
        vocab_size=(target or source).tokenizer.vocab_size,
        usable=shared,
        context_length=context_length,
        # Only the oracle format keeps more of keys and values than bfloat16 does.
        kv_dtype=torch.float32 if recipe.format.activation == "f32" else torch.bfloat16,
    )
