"""A target and what drafts for it, found, opened and loaded: the same path for generation in the terminal and serving.

Opening finds out everything that can be known without loading: vocabularies, sizes, formats.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..decoding.lookahead import Confidence, Fixed
from ..decoding.protocols import Drafter
from ..drafters.model import ModelDrafter
from ..drafters.ngram import NGramDrafter
from ..formats import Recipe
from ..models.cached import CachedModel
from ..models.tokenizer import check_pair
from ..quantize.load import AUTO, Progress, Source, load_model, open_source, recipe_for

NGRAM = "ngram"
"""Instead of a model's name: draft by looking the last tokens up in the text so far."""


@dataclass(frozen=True)
class Opened:
    """A pair that was found and opened.

    Attributes:
        target, target_recipe: the target, and the format it is to run in.
        draft, draft_recipe: the draft likewise; None where no model drafts.
        ngram: whether n-grams draft.
        why: why this draft, where nobody named it.
        refused: models that were not chosen, each with the reason.
    """

    target: Source
    target_recipe: Recipe
    draft: Source | None
    draft_recipe: Recipe | None
    ngram: bool
    why: str = ""
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Loading:
    """How a pair is loaded.

    Attributes:
        draft_length: tokens drafted a step, at most.
        confidence: a block ends after a token that the draft gives less probability than this; 0 never.
        context: tokens of prompt and output together, at most.
        kv_tokens: tokens that each model's cache holds.
        kv, draft_kv: formats of keys and values; None for bf16, or f32 beside the format f32.
        calibration: texts for formats that need activation statistics.
        prefix_cache: keep what requests computed for others that begin alike.
        max_rows: tokens of one text that the draft reads in a step, at most; None reads all.
    """

    draft_length: int
    confidence: float
    context: int
    kv_tokens: int
    kv: str | None
    draft_kv: str | None
    calibration: Sequence[str]
    prefix_cache: bool = False
    max_rows: int | None = None

    def calibration_ids(self, source: Source) -> list[list[int]]:
        """The texts as a model reads them."""
        return [source.tokenizer.encode(text) for text in self.calibration]


@dataclass(frozen=True)
class Pair:
    """A loaded pair.

    Attributes:
        opened: what it was loaded from.
        target: the target.
        draft: the draft model, None where no model drafts.
        drafter: what suggests tokens, None where nothing does.
    """

    opened: Opened
    target: CachedModel
    draft: CachedModel | None
    drafter: Drafter | None


def open_pair(
    target: str,
    draft: str | None,
    target_format: str,
    draft_format: str,
    progress: Progress | None = None,
    use_cache: bool = True,
) -> Opened:
    """Find and open a target and a draft.

    Args:
        target: name, folder, .gguf or hub id.
        draft: the same, or 'ngram', or None for no speculation.
        target_format, draft_format: recipes, such as 'bf16' or 'w4a16-awq', or 'auto'.
        progress: called while files are fetched.
        use_cache: read repacked weights from disk where they were kept, and keep them.

    Raises:
        UsageError: anything that cannot be used as given.
    """
    _check_names(target_format, draft_format)
    source = open_source(target, progress, use_cache)
    alone = Opened(source, recipe_for(target_format, source), None, None, ngram=False)
    return open_draft(alone, draft, draft_format, progress)


def open_draft(opened: Opened, draft: str | None, draft_format: str, progress: Progress | None = None) -> Opened:
    """The same target with a draft, in place of the one it has.

    Args:
        opened: the target, and perhaps a draft.
        draft: name, folder, .gguf or hub id, or 'ngram', or None for no speculation.
        draft_format: a recipe, or 'auto'.
        progress: called while files are fetched.

    Raises:
        UsageError: anything that cannot be used as given.
    """
    _check_names(draft_format)
    other = open_source(draft, progress, opened.target.use_cache) if draft and draft != NGRAM else None
    if other:
        check_pair(opened.target.tokenizer, other.tokenizer)
    recipe = recipe_for(draft_format, other) if other else None
    return Opened(opened.target, opened.target_recipe, other, recipe, draft == NGRAM)


def _check_names(*recipes: str) -> None:
    """Refuse a format that there is not, before anything is fetched."""
    for name in {*recipes} - {AUTO}:
        Recipe.parse(name)


def load_pair(opened: Opened, how: Loading, progress: Progress | None = None) -> Pair:
    """Load an opened pair.

    Args:
        opened: the pair.
        how: formats, sizes and limits.
        progress: called while weights are quantised.

    Raises:
        UsageError: a format that does not fit the model.
    """
    source = opened.target
    target = load_model(
        source,
        opened.target_recipe,
        kv_tokens=how.kv_tokens,
        context_length=how.context,
        rng=np.random.default_rng(0),
        calibration=how.calibration_ids(source),
        kv=how.kv,
        prefix_cache=how.prefix_cache,
        progress=progress,
    )
    return load_draft(opened, target, how, progress)


def load_draft(opened: Opened, target: CachedModel, how: Loading, progress: Progress | None = None) -> Pair:
    """Load what drafts in an opened pair whose target is loaded.

    Args:
        opened: the pair.
        target: its target.
        how, progress: as for `load_pair`.

    Raises:
        UsageError: a format that does not fit the model.
    """
    source = opened.target
    if opened.draft is None or opened.draft_recipe is None:
        return Pair(opened, target, None, NGramDrafter() if opened.ngram else None)
    draft = load_model(
        opened.draft,
        opened.draft_recipe,
        kv_tokens=how.kv_tokens,
        rng=np.random.default_rng(0),
        target=source,
        calibration=how.calibration_ids(source),
        kv=how.draft_kv,
        prefix_cache=how.prefix_cache,
        progress=progress,
    )
    policy = Confidence(how.draft_length, how.confidence) if how.confidence else Fixed(how.draft_length)
    return Pair(opened, target, draft, ModelDrafter(draft, policy, source.tokenizer.eos_ids, how.max_rows))
