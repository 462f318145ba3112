"""From the options of `bitdraft serve` to a service that can be started."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from ..engine.controller import DraftLengths, FixedLengths, MeasuredLengths
from ..engine.curve import AT_READING, AT_SERVE, CurveKey, Grid, StepCurve, cached_curve
from ..errors import UsageError
from ..models.cached import CachedModel
from ..models.hub import cache_folder
from ..quantize.load import Progress, Source, open_source
from .app import Service
from .auto_draft import AUTO_DRAFT, choose_draft
from .load import Opened, Pair, load_pair, open_pair
from .memory import ROWS, MemoryPlan, available_memory, plan_memory
from .server import make_service
from .settings import Defaults, Settings, read_defaults

LONGEST = 8
"""Longest block where the length follows what is measured."""
TIMING_SECONDS = 4.0
"""How long a model's steps are timed at the first start with it."""
FEWEST_TOKENS = 64
"""Tokens of cache that each sequence of a timed step has at least."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeConfig:
    """What to serve, and how.

    Attributes:
        target: name, folder, .gguf or hub id.
        draft: the same, or 'ngram', or 'auto' for one that is chosen, or None for no speculation.
        target_format, draft_format: recipes, or 'auto'.
        kv, draft_kv: formats of keys and values; None for the default.
        draft_length: tokens drafted a step, at most; None follows what is measured.
        confidence: a block ends after a token that the draft gives less probability than this; 0 never.
        max_batch: requests that run at once.
        max_model_len: tokens of prompt and output; None for as many as model and memory allow.
        kv_memory: bytes of keys and values of both models; None for a share of what is free.
        prefix_cache: share what prompts have in common.
        generation_config: take sampling defaults from the model's folder.
        settings: how requests are treated. Without names it gets the target's; its defaults are read, see above.
        acceptance: of the draft, as it was measured: what a draft length that follows what is measured begins with.
        draft_folders: where a draft is looked for beside the cache, if it is chosen.
    """

    target: str
    draft: str | None
    target_format: str
    draft_format: str
    kv: str | None
    draft_kv: str | None
    draft_length: int | None
    confidence: float
    max_batch: int
    max_model_len: int | None
    kv_memory: int | None
    prefix_cache: bool
    generation_config: bool
    settings: Settings
    acceptance: Mapping[str, Sequence[float]] | None = None
    draft_folders: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.draft_folders and self.draft != AUTO_DRAFT:
            raise UsageError("--draft-folder says where to choose a draft from. Expected --draft auto with it.")

    @property
    def longest(self) -> int:
        """Longest block."""
        return LONGEST if self.draft_length is None else self.draft_length


def open_and_plan(
    config: ServeConfig, progress: Progress | None = None, use_cache: bool = True
) -> tuple[Opened, MemoryPlan]:
    """Find the models, and share the memory out, before anything is loaded.

    Raises:
        UsageError: anything that cannot be used as given.
    """
    draft, chosen = config.draft, None
    if draft == AUTO_DRAFT:
        chosen = choose_draft(open_source(config.target, progress, use_cache), config.draft_folders)
        draft = chosen.draft
    opened = open_pair(config.target, draft, config.target_format, config.draft_format, progress, use_cache)
    if chosen:
        opened = replace(opened, why=chosen.why, refused=chosen.refused)
    plan = plan_memory(
        opened,
        kv=config.kv,
        draft_kv=config.draft_kv,
        max_batch=config.max_batch,
        draft_length=config.longest,
        max_model_len=config.max_model_len,
        kv_memory=config.kv_memory,
        available=available_memory(),
    )
    return opened, plan


def load_service(
    config: ServeConfig,
    opened: Opened,
    plan: MemoryPlan,
    calibration: Sequence[str],
    progress: Progress | None = None,
) -> Service:
    """Load the models and put them under a service.

    Raises:
        UsageError: a format that does not fit a model, or a generation_config.json that cannot be used.
    """
    if opened.why:
        fields = {"draft": opened.why, "not_chosen": dict(opened.refused)}
        _log.info("draft chosen", extra={"fields": fields})
    folder = opened.target.path if opened.target.path.is_dir() else opened.target.path.parent
    defaults = read_defaults(folder) if config.generation_config else Defaults()
    names = config.settings.names or (_name(config.target),)
    settings = replace(config.settings, names=names, defaults=defaults)
    pair = load_pair(
        opened,
        draft_length=config.longest,
        confidence=config.confidence,
        context=plan.context,
        kv_tokens=plan.kv_tokens,
        kv=config.kv,
        draft_kv=config.draft_kv,
        calibration=calibration,
        prefix_cache=config.prefix_cache,
        max_rows=ROWS,
        progress=progress,
    )
    return make_service(
        pair,
        plan,
        settings,
        lengths=_lengths(config, pair),
        max_batch=config.max_batch,
        max_draft=config.longest,
        confidence=config.confidence,
        prefix_cache=config.prefix_cache,
    )


def _lengths(config: ServeConfig, pair: Pair) -> DraftLengths | None:
    """How the draft length is chosen: by what steps cost here, timed now or at an earlier start, unless it is given."""
    if config.draft_length is not None:
        return FixedLengths(config.draft_length)
    if pair.drafter is None:
        return None
    opened, folder = pair.opened, cache_folder() / "curves"
    target = _curve(pair.target, opened.target, opened.target_recipe.name, folder)
    if pair.draft is None or opened.draft is None or opened.draft_recipe is None:
        return MeasuredLengths(target, None, config.acceptance)
    draft = _curve(pair.draft, opened.draft, opened.draft_recipe.name, folder)
    (step,) = _timed(pair.draft, opened.draft, opened.draft_recipe.name, folder, _reading(pair.draft)).steps
    return MeasuredLengths(target, draft, config.acceptance, reading=step.ms / 1000 / step.rows)


def _curve(model: CachedModel, source: Source, recipe: str, folder: Path) -> StepCurve:
    batches = tuple(n for n in AT_SERVE.batches if n * FEWEST_TOKENS <= model.pool.num_blocks * model.pool.block_size)
    return _timed(model, source, recipe, folder, replace(AT_SERVE, batches=batches or (1,)))


def _reading(model: CachedModel) -> Grid:
    """As many rows as `AT_READING` says, fewer where the context is short."""
    return replace(AT_READING, rows=(min(*AT_READING.rows, model.context_length // 2),))


def _timed(model: CachedModel, source: Source, recipe: str, folder: Path, grid: Grid) -> StepCurve:
    return cached_curve(model, CurveKey.of(model, source.path, recipe), folder, perf_counter, TIMING_SECONDS, grid)


def _name(target: str) -> str:
    """A model's name for clients: of a path only its last part, which tells nothing about the machine."""
    path = Path(target)
    return path.name if path.is_absolute() or path.exists() else target
