"""From a model's name and a recipe to a model that runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..formats import KVFormat, Recipe, get_kv_format
from ..models import hub
from ..models.cached import CachedModel
from ..models.checkpoint import Checkpoint, open_checkpoint
from ..models.decoder import Decoder, PreparedModel, prepare_model
from ..models.kv_scales import KVScales, find_scales, folder_scales
from ..models.quantized_folder import QuantizedCheckpoint
from ..models.tokenizer import Tokenizer, check_pair
from ..ops.machine import torch_on_all_cores
from .pipeline import check_layers, quantize
from .store import Store, key_of

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
        use_cache: whether its repacked weights are read from disk where they were kept, and kept there.
    """

    name: str
    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    use_cache: bool = True


def open_source(name: str, progress: Progress | None = None, use_cache: bool = True) -> Source:
    """Find a model by registry name, folder, .gguf file or hub id, fetching it if need be, and open it.

    Args:
        name: the name.
        progress: called while it is fetched.
        use_cache: see `Source`.

    Raises:
        UsageError: an unknown name, or a file that cannot be read.
    """
    path = hub.resolve(name, progress=progress)
    checkpoint = open_checkpoint(path)
    return Source(name, path, checkpoint, checkpoint.tokenizer(), use_cache)


AUTO = "auto"
"""Instead of a format's name: what suits the model's files."""


def recipe_for(name: str, source: Source) -> Recipe:
    """The recipe of a name; of 'auto', `stored` for a folder that is quantised already, and bf16 for everything else.

    Raises:
        FormatError: there is no such format.
    """
    if name != AUTO:
        return Recipe.parse(name)
    return Recipe.parse("stored" if isinstance(source.checkpoint, QuantizedCheckpoint) else "bf16")


def kv_format_of(source: Source, recipe: Recipe, kv: str | None) -> KVFormat:
    """The format of a model's keys and values: `kv`, or where that is None what suits the model.

    That is f32 beside float32 activations, fp8 for a folder that has scales for it, and bf16 otherwise.

    Raises:
        UsageError: there is no such format.
    """
    if kv is None and recipe.format.activation == "f32":
        kv = "f32"  # only the oracle format keeps more of keys and values than bfloat16 does
    return get_kv_format(kv or ("fp8" if folder_scales(source.checkpoint) else "bf16"))


def load_model(
    source: Source,
    recipe: Recipe,
    *,
    kv_tokens: int,
    rng: np.random.Generator,
    target: Source | None = None,
    context_length: int | None = None,
    calibration: Sequence[Sequence[int]] | None = None,
    kv: str | None = None,
    prefix_cache: bool = False,
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
        kv: format of keys and values, see `formats.kv` and `kv_format_of`. fp8 takes its scales from the folder, or
            finds them from `calibration`; `CachedModel.kv_scales_from` says which.
        prefix_cache: keep what requests computed for others that begin alike.
        progress: called while weights are quantised.

    Raises:
        PairError: the vocabularies of draft and target differ in meaning.
        UsageError: an unknown `kv`, or one that needs `calibration` without that.
    """
    kv_format = kv_format_of(source, recipe, kv)
    scales = folder_scales(source.checkpoint) if kv_format.needs_scales else None
    shared = check_pair(target.tokenizer, source.tokenizer) if target else None
    longest = min(context_length or kv_tokens, kv_tokens, source.checkpoint.config.context_length)
    decoder = Decoder(_prepared(source, recipe, rng, calibration, progress), longest)
    if kv_format.needs_scales and scales is None:
        scales = KVScales(find_scales(decoder, [token for ids in calibration or () for token in ids]), "text")
    return CachedModel(
        decoder,
        kv_tokens=kv_tokens,
        vocab_size=(target or source).tokenizer.vocab_size,
        usable=shared,
        context_length=context_length,
        kv=kv_format,
        prefix_cache=prefix_cache,
        kv_scales=scales.layers if scales else None,
        kv_scales_from=scales.origin if scales else None,
    )


def _prepared(
    source: Source,
    recipe: Recipe,
    rng: np.random.Generator,
    calibration: Sequence[Sequence[int]] | None,
    progress: Progress | None,
) -> PreparedModel:
    check_layers(source.checkpoint, recipe)
    store = Store(source.path, recipe, key_of(source.path, recipe, calibration, rng)) if source.use_cache else None
    kept = store.load() if store else None
    if kept:
        return kept
    with torch_on_all_cores():
        made = prepare_model(quantize(source.checkpoint, recipe, calibration=calibration, rng=rng, progress=progress))
    if store:
        store.save(made)
    return made
