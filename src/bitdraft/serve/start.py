"""From the options of `bitdraft serve` to a service that can be started."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..engine.controller import DraftLengths, MeasuredLengths
from ..errors import UsageError
from ..quantize.load import Progress, open_source
from .app import Service
from .auto_draft import AUTO_DRAFT, choose_draft
from .drafting import Drafting, choose_lengths, redrafting, time_target
from .info import Runs
from .load import Loading, Opened, load_pair, open_pair
from .memory import MemoryPlan, available_memory, plan_memory
from .server import make_service
from .settings import Defaults, Settings, read_defaults
from .trial import try_draft

LONGEST = 8
"""Longest block where the length follows what is measured."""

_USUAL_CONTEXT = 256
"""Tokens at which a speedup is promised."""

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
        max_rows: rows of tokens in a step with chunks of prompts, about.
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
    max_rows: int
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
        max_rows=config.max_rows,
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
    folder = opened.target.path if opened.target.path.is_dir() else opened.target.path.parent
    defaults = read_defaults(folder) if config.generation_config else Defaults()
    names = config.settings.names or (_name(config.target),)
    settings = replace(config.settings, names=names, defaults=defaults)
    how = Loading(
        config.longest,
        config.confidence,
        plan.context,
        plan.kv_tokens,
        config.kv,
        config.draft_kv,
        calibration,
        config.prefix_cache,
        max_rows=config.max_rows,
    )
    pair = load_pair(opened, how, progress)
    # A target whose draft may be changed is timed now as well, while its cache is empty.
    adapts = config.draft_length is None and (pair.drafter is not None or settings.admin)
    target = time_target(pair) if adapts else config.draft_length or 0
    tried = try_draft(pair, calibration, config.longest) if opened.why and not config.acceptance else None
    lengths = choose_lengths(pair, target, {"": (tried,)} if tried is not None else config.acceptance)
    if opened.why:
        pair = replace(pair, opened=replace(opened, why=" ".join([opened.why, *_expected(tried, lengths, config)])))
        fields = {"draft": pair.opened.why, "not_chosen": dict(opened.refused)}
        _log.info("draft chosen", extra={"fields": fields})
    drafting = Drafting(pair, plan, lengths)
    runs = Runs(config.max_batch, config.max_rows, config.longest, config.confidence, config.prefix_cache)
    service = make_service(drafting, settings, runs)
    if settings.admin:
        service.redraft = redrafting(service, drafting, runs, how, target)
    return service


def _expected(tried: float | None, lengths: DraftLengths | None, config: ServeConfig) -> Iterator[str]:
    """What to expect of a draft that was chosen, in words."""
    if tried is not None:
        yield f"On shipped texts {tried:.0%} of its tokens were accepted."
    if isinstance(lengths, MeasuredLengths):
        k, speedup = lengths.expected(_USUAL_CONTEXT, config.longest)
        yield f"Expected speedup: {speedup:.2f}×, with K = {k}." if k else "It is not expected to pay: K = 0."


def _name(target: str) -> str:
    """A model's name for clients: of a path only its last part, which tells nothing about the machine."""
    path = Path(target)
    return path.name if path.is_absolute() or path.exists() else target
