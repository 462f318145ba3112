"""Measure: the target writes, every draft is scored on what it wrote, steps are timed, and the best are confirmed.

Each stage appends to the trace and asks it what is there already, so that a run that was interrupted goes on where it
stopped. Nothing here computes a statistic of the report: that is to the right of the trace.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np

from ..decoding.lookahead import Fixed
from ..drafters.model import ModelDrafter
from ..engine.cost import time_draft, time_target
from ..errors import UsageError
from ..formats import Recipe
from ..models.cached import CachedModel
from ..models.config import ModelConfig
from ..models.kv import BLOCK_SIZE
from ..models.tokenizer import check_pair
from ..ops import native
from ..quantize.load import Progress, Source, load_model, open_source, recipe_for
from ..quantize.pipeline import check_layers
from ..types import Feed, SamplingParams
from .config import MeasureConfig
from .confirm import Bench, Candidate
from .figures import Figures, figures
from .machine import this_machine
from .score import score
from .texts import Key, load_hidden, save_hidden, tokenise, write_texts
from .trace import RUN_FILE, Confirmation, CostSample, Run, Sampling, Score, Size, StoredModel, Text, Trace, TraceWriter
from .workload import Prompt, calibration_texts, load_workload

TIMING_CONTEXT = 128
"""Tokens in the cache when a step is timed."""


@dataclass(frozen=True)
class _Job:
    """What the stages share."""

    config: MeasureConfig
    writer: TraceWriter
    target_source: Source
    draft_source: Source
    target: CachedModel
    prompts: Mapping[Key, tuple[int, ...]]
    progress: Progress
    clock: Callable[[], float]

    @property
    def sampling(self) -> SamplingParams:
        return self.config.sampling

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(self.target_source.tokenizer.eos_ids)


def run(
    config: MeasureConfig,
    folder: Path,
    *,
    resume: bool,
    use_cache: bool = True,
    command: str,
    progress: Progress,
    clock: Callable[[], float] = perf_counter,
) -> None:
    """Measure into `folder`, or go on there.

    Args:
        config: what to measure.
        folder: where the trace goes.
        resume: allow a folder that holds an unfinished, or finished, run of the same question.
        use_cache: read repacked weights from disk where they were kept, and keep them.
        command: the command line, kept in the trace.
        progress: called with (done, total, what).
        clock: seconds.

    Raises:
        UsageError: anything that cannot be used as given; everything that can be checked is checked before any work.
    """
    if (folder / RUN_FILE).exists() and not resume:
        raise UsageError(f"{folder} holds a measurement already. Go on with it by --resume, or choose another folder.")
    recipes = {recipe.name: recipe for recipe in map(Recipe.parse, config.formats)}
    prompts = [p for spec in config.workloads for p in load_workload(spec, config.prompts)]
    target_source, draft_source = (open_source(m, progress, use_cache) for m in (config.target, config.draft))
    check_pair(target_source.tokenizer, draft_source.tokenizer)
    target_recipe = recipe_for(config.target_format, target_source)
    config = replace(config, target_format=target_recipe.name)
    check_layers(target_source.checkpoint, target_recipe)
    for recipe in recipes.values():
        check_layers(draft_source.checkpoint, recipe)
    context = min(target_source.checkpoint.config.context_length, draft_source.checkpoint.config.context_length)
    ids = tokenise(prompts, target_source.tokenizer, config.sampling.max_tokens, context)
    writer = TraceWriter(folder)
    writer.begin(_describe(config, recipes, prompts, target_source, draft_source, command))
    target = load_model(
        target_source,
        target_recipe,
        kv_tokens=_cache_size(config, ids),
        rng=np.random.default_rng(config.sampling.seed),
        calibration=[target_source.tokenizer.encode(text) for text in calibration_texts()],
        kv=config.kv,
        progress=progress,
    )
    job = _Job(config, writer, target_source, draft_source, target, ids, progress, clock)
    _write_texts(job)
    _time_target(job)
    kept: dict[str, CachedModel] = {}  # what took long to make is not made again to be confirmed
    for name, recipe in recipes.items():
        if not _scored(job, name):
            draft = _load_draft(job, recipe)
            _judge(job, name, draft)
            if recipe.method != "nearest" or recipe.outliers:
                kept[name] = draft
    _confirm(job, recipes, kept)


def _cache_size(config: MeasureConfig, prompts: Mapping[Key, Sequence[int]]) -> int:
    """KV tokens for a batch of the longest texts, each in whole blocks with its longest draft."""
    longest = max(len(ids) for ids in prompts.values()) + config.sampling.max_tokens + max(config.draft_lengths)
    per_text = (-(-longest // BLOCK_SIZE) + 1) * BLOCK_SIZE
    return max(config.batch * per_text, TIMING_CONTEXT + max(config.draft_lengths) + BLOCK_SIZE)


def _write_texts(job: _Job) -> None:
    missing = {key: ids for key, ids in job.prompts.items() if not job.writer.has(Text, *key)}
    done, total = len(job.prompts) - len(missing), len(job.prompts)
    texts = write_texts(job.target, missing, job.sampling, job.eos_ids, job.config.batch, job.clock)
    job.progress(done, total, "target writes")
    for text, hidden in texts:
        save_hidden(job.writer.folder, (text.workload, text.index), hidden)
        job.writer.append(text)
        done += 1
        job.progress(done, total, "target writes")


def _time_target(job: _Job) -> None:
    widths = sorted({1, *(k + 1 for k in job.config.draft_lengths)})
    rounds = job.config.timings
    if all(job.writer.has(CostSample, "target", None, width, r) for width in widths for r in range(rounds)):
        return
    context = _timing_context(job, max(widths))
    seen = dict.fromkeys(widths, 0)
    for width, seconds in time_target(job.target, context, widths, rounds, job.clock):
        if not job.writer.has(CostSample, "target", None, width, seen[width]):
            job.writer.append(CostSample("target", None, width, seen[width], seconds * 1000))
        seen[width] += 1
        job.progress(sum(seen.values()), rounds * len(widths), "timing the target")


def _timing_context(job: _Job, more: int) -> list[int]:
    """Real text to time steps on: prompts, one after the other."""
    tokens = [token for ids in job.prompts.values() for token in ids]
    context = min(s.checkpoint.config.context_length for s in (job.target_source, job.draft_source))
    need = min(TIMING_CONTEXT + more, context)
    return (tokens * (need // len(tokens) + 1))[:need]


def _load_draft(job: _Job, recipe: Recipe) -> CachedModel:
    calibration = [job.draft_source.tokenizer.encode(text) for text in calibration_texts()]
    longest = max(len(ids) for ids in job.prompts.values()) + job.sampling.max_tokens + max(job.config.draft_lengths)
    return load_model(
        job.draft_source,
        recipe,
        target=job.target_source,
        kv_tokens=max(longest, TIMING_CONTEXT) + 64,
        rng=np.random.default_rng(job.sampling.seed),
        calibration=calibration,
        kv=job.config.kv,
        progress=job.progress,
    )


def _scored(job: _Job, name: str) -> bool:
    costs = all(job.writer.has(CostSample, "draft", name, 1, r) for r in range(job.config.timings))
    return costs and job.writer.has(Size, name) and all(job.writer.has(Score, name, *key) for key in job.prompts)


def _judge(job: _Job, name: str, draft: CachedModel) -> None:
    """Size, scores and costs of one draft."""
    decoder = draft.decoder
    if not job.writer.has(Size, name):
        bits = 8 * decoder.packed_bytes / _parameters(decoder.config)
        job.writer.append(Size(name, decoder.packed_bytes, decoder.resident_bytes, bits))
    _score_texts(job, name, draft)
    _time_draft(job, name, draft)


def _score_texts(job: _Job, name: str, draft: CachedModel) -> None:
    ending = frozenset(job.sampling.stop_ids) | frozenset(job.eos_ids)
    texts = Trace.load(job.writer.folder).texts
    for done, (key, prompt) in enumerate(job.prompts.items()):
        job.progress(done, len(job.prompts), f"scoring {name}")
        if job.writer.has(Score, name, *key):
            continue
        text = texts[key]
        draft_logits = draft.forward([Feed(0, [*prompt, *text.ids[:-1]], 0, len(prompt) - 1)])
        draft.release(0)
        target_logits = job.target.logits(load_hidden(job.writer.folder, key))
        job.writer.append(score(text, name, target_logits, draft_logits, prompt, job.sampling, ending))
    job.progress(len(job.prompts), len(job.prompts), f"scoring {name}")


def _time_draft(job: _Job, name: str, draft: CachedModel) -> None:
    k = max(job.config.draft_lengths)
    context = _timing_context(job, k)[:-k]
    timings = time_draft(
        ModelDrafter(draft, Fixed(k), ()),
        job.target,
        context,
        k,
        job.sampling,
        job.config.rule,
        job.config.timings,
        job.clock,
    )
    for r, (token_seconds, other_seconds) in enumerate(timings):
        if not job.writer.has(CostSample, "draft", name, 1, r):
            job.writer.append(CostSample("draft", name, 1, r, token_seconds * 1000))
        if not job.writer.has(CostSample, "overhead", None, 1, r):
            job.writer.append(CostSample("overhead", None, 1, r, other_seconds * 1000))


def _confirm(job: _Job, recipes: Mapping[str, Recipe], kept: Mapping[str, CachedModel]) -> None:
    """Run the best candidates end to end, each beside the plain run."""
    candidates = choose(figures(Trace.load(job.writer.folder), np.random.default_rng(0)), job.config.confirm)
    indices: dict[str, list[int]] = {}
    for workload, index in job.prompts:
        indices.setdefault(workload, []).append(index)
    todo = [
        (r, (workload, index))
        for r in range(job.config.rounds)
        for position in range(job.config.confirm_prompts)
        for workload, its in indices.items()
        for index in its[position : position + 1]
        if not all(_confirmed(job, c, index, r) for c in candidates if c.workload == workload)
    ]
    if not todo:
        return
    names = dict.fromkeys(c.format for c in candidates)
    drafts = {name: kept.get(name) or _load_draft(job, recipes[name]) for name in names}
    bench = Bench(job.target, drafts, job.sampling, job.config.rule, job.eos_ids, job.clock)
    for done, (r, key) in enumerate(todo):
        job.progress(done, len(todo), "confirming end to end")
        for run in bench.confirm(key, job.prompts[key], [c for c in candidates if c.workload == key[0]], r):
            if not job.writer.has(Confirmation, run.format, run.k, run.workload, run.index, run.round):
                job.writer.append(run)
    job.progress(len(todo), len(todo), "confirming end to end")


def _confirmed(job: _Job, candidate: Candidate, index: int, round_number: int) -> bool:
    key = (candidate.workload, index, round_number)
    speculative = job.writer.has(Confirmation, candidate.format, candidate.k, *key)
    return speculative and job.writer.has(Confirmation, None, 0, *key)


def choose(known: Figures, count: int) -> list[Candidate]:
    """The formats that are predicted to be fastest on each workload, each at its best draft length.

    Predictions only: confirmations that are there already must not change what a resumed run confirms.
    """
    chosen = []
    for workload in known.workloads:
        best = []
        for name in known.formats:
            timed = [p for p in known.cells[name, workload].curve if p.speedup is not None]
            if timed:
                point = max(timed, key=lambda p: p.speedup.value if p.speedup else 0.0)
                best.append((point.speedup.value if point.speedup else 0.0, Candidate(workload, name, point.k)))
        best.sort(key=lambda pair: -pair[0])
        chosen += [candidate for _, candidate in best[:count]]
    return chosen


def _describe(
    config: MeasureConfig,
    recipes: Mapping[str, Recipe],
    prompts: Sequence[Prompt],
    target: Source,
    draft: Source,
    command: str,
) -> Run:
    s = config.sampling
    return Run(
        target=_stored(target),
        draft=_stored(draft),
        target_format=config.target_format,
        formats=tuple(recipes),
        workloads=tuple(dict.fromkeys(p.workload for p in prompts)),
        prompts=config.prompts,
        k_values=config.draft_lengths,
        sampling=Sampling(
            s.temperature,
            s.top_k,
            s.top_p,
            s.min_p,
            s.repetition_penalty,
            s.presence_penalty,
            s.frequency_penalty,
            s.seed,
            s.max_tokens,
        ),
        rule=config.rule,
        backend=native.describe(),
        machine=this_machine(),
        command=command,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        kv=config.kv,
    )


def _stored(source: Source) -> StoredModel:
    checkpoint = source.checkpoint
    return StoredModel(source.name, checkpoint.stored_as, checkpoint.stored_bits, _parameters(checkpoint.config))


def _parameters(config: ModelConfig) -> int:
    """Weights of all matrices, an embedding that is not tied to the head counted too."""
    linear = sum(n * k for n, k in config.linear_shapes().values())
    return linear + (0 if config.tied_head else config.vocab_size * config.hidden_size)
