"""What drafts on a server and how much, and the change to another draft while it runs.

Requests go on through a change: what drafts has no say in an answer's law, so each ends as it would have (decision 0011
for those with a seed). The other draft is read while the first still drafts; then the engine pauses while weights are
packed and, the first time, its steps are timed, for the kernels have one pool of threads.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from ..drafters.predicted import PredictedDrafter
from ..engine.controller import DraftLengths, FixedLengths, MeasuredLengths
from ..engine.curve import AT_READING, AT_SERVE, CurveKey, Grid, StepCurve, cached_curve
from ..engine.engine import Engine
from ..models.cached import CachedModel
from ..models.hub import cache_folder
from ..quantize.load import Source
from . import info
from .app import Redraft, Service
from .load import Loading, Pair, load_draft, open_draft
from .memory import MemoryPlan, available_memory, plan_draft

TIMING_SECONDS = 6.0
"""How long a model's steps are timed at the first start with it."""
FEWEST_TOKENS = 64
"""Tokens of cache that each sequence of a timed step has at least."""


@dataclass(frozen=True)
class Drafting:
    """A target, and what drafts for it.

    Attributes:
        pair: both.
        plan: how their memory was planned.
        lengths: chooses draft lengths; None where nothing drafts.
    """

    pair: Pair
    plan: MemoryPlan
    lengths: DraftLengths | None

    def reasons(self) -> str:
        """How long blocks are now, and why."""
        return self.lengths.reasons() if self.lengths and self.pair.drafter else "K = 0: there is no draft."


def time_target(pair: Pair) -> StepCurve:
    """What steps of the target cost here, timed now or at an earlier start; for a cache that nobody uses yet."""
    return _curve(pair.target, pair.opened.target, pair.opened.target_recipe.name, cache_folder() / "curves")


def choose_lengths(
    pair: Pair, target: StepCurve | int, acceptance: Mapping[str, Sequence[float]] | None = None
) -> DraftLengths | None:
    """What chooses draft lengths; None where nothing drafts.

    Args:
        pair: a target and a draft that nobody uses yet, whose steps are timed.
        target: what the target's steps cost; or the length, if it is given.
        acceptance: of the draft, as it was measured.
    """
    if isinstance(target, int):
        return FixedLengths(target)
    if pair.drafter is None:
        return None
    opened, folder = pair.opened, cache_folder() / "curves"
    if pair.draft is None or opened.draft is None or opened.draft_recipe is None:
        return MeasuredLengths(target, None, acceptance)
    draft = _curve(pair.draft, opened.draft, opened.draft_recipe.name, folder)
    (step,) = _timed(pair.draft, opened.draft, opened.draft_recipe.name, folder, _reading(pair.draft)).steps
    return MeasuredLengths(target, draft, acceptance, reading=step.ms / 1000 / step.rows)


def show(service: Service, drafting: Drafting, runs: info.Runs) -> None:
    """Let a service say what drafts from now on, and begin to count acceptance."""
    fixed = info.describe(drafting.pair, drafting.plan, service.settings, runs)
    metrics = service.metrics
    service.info = lambda: info.current(fixed, drafting.reasons(), service.worker.load, metrics.acceptance())
    service.model = replace(service.model, max_draft=runs.max_draft if drafting.pair.drafter else 0)
    metrics.forget_acceptance()


def redrafting(service: Service, drafting: Drafting, runs: info.Runs, how: Loading, target: StepCurve | int) -> Redraft:
    """What changes the draft of a service.

    Args:
        service: whose.
        drafting: what drafts now.
        runs: how the engine was set up.
        how: the pair was loaded.
        target: as for `choose_lengths`.
    """
    one_at_a_time = asyncio.Lock()

    async def redraft(draft: str | None, draft_format: str) -> None:
        nonlocal drafting
        async with one_at_a_time:
            opened = await asyncio.to_thread(open_draft, drafting.pair.opened, draft, draft_format)
            plan = plan_draft(drafting.plan, opened, how.draft_kv, available_memory())

            def change(engine: Engine) -> Drafting:
                pair = load_draft(opened, drafting.pair.target, how)
                lengths = choose_lengths(pair, target)
                engine.draft_by(PredictedDrafter(pair.drafter), lengths)
                return Drafting(pair, plan, lengths)

            drafting = await service.worker.change(change)
            show(service, drafting, runs)

    return redraft


def _curve(model: CachedModel, source: Source, recipe: str, folder: Path) -> StepCurve:
    batches = tuple(n for n in AT_SERVE.batches if n * FEWEST_TOKENS <= model.pool.num_blocks * model.pool.block_size)
    return _timed(model, source, recipe, folder, replace(AT_SERVE, batches=batches or (1,)))


def _reading(model: CachedModel) -> Grid:
    """As many rows as `AT_READING` says, fewer where the context is short."""
    return replace(AT_READING, rows=(min(*AT_READING.rows, model.context_length // 2),))


def _timed(model: CachedModel, source: Source, recipe: str, folder: Path, grid: Grid) -> StepCurve:
    return cached_curve(model, CurveKey.of(model, source.path, recipe), folder, perf_counter, TIMING_SECONDS, grid)
