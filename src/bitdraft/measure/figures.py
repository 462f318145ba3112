"""From a trace to figures: one `Cell` per draft format and workload, and each format over all workloads.

Letters: P prompts, B bootstrap resamples.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .predict import Costs, StepCost, Texts, hazards, tokens_per_step
from .stats import (
    DEGENERATE_BELOW,
    RESAMPLES,
    Agreement,
    BlockCounts,
    Estimate,
    Floats,
    agreement,
    combine,
    distinct_bigram_ratio,
    median,
    ratio_of_sums,
    resample,
)
from .trace import Confirmation, Run, Size, Trace

SIXTEEN_BIT = ("bf16", "f16", "fp16")
"""Formats that lower ones are compared with, the first that was measured."""


@dataclass(frozen=True, eq=False)
class Point:
    """What is predicted for one draft length.

    Attributes:
        k: drafted tokens a step. tokens_per_step: emitted, the target's own included.
        accepted_per_drafted: accepted over drafted tokens; smaller than the conditional acceptance.
        cost, speedup: None if the parts of such a step were not timed.
    """

    k: int
    tokens_per_step: Estimate
    accepted_per_drafted: Estimate
    cost: StepCost | None
    speedup: Estimate | None


@dataclass(frozen=True, eq=False)
class Confirmed:
    """What runs from end to end showed for one draft length.

    Attributes:
        k: drafted tokens a step.
        speedup: seconds per token of the plain run over those with speculation, whole requests; median of the pairs
            that were run one beside the other.
        decode_speedup: likewise without each run's first step, which reads the prompt.
        predicted: the decode speedup that was predicted for just these texts; None without timings.
        tokens_per_step: emitted tokens over steps. counts: drafted tokens by position.
        time_shares: of all seconds, those spent drafting, verifying and on the rest.
        prompts, pairs: how many. differing: greedy outputs that were not the plain run's.
        margin: the largest top-2 margin of the target, in nats, at a first difference.
    """

    k: int
    speedup: Estimate
    decode_speedup: Estimate
    predicted: float | None
    tokens_per_step: Estimate
    counts: BlockCounts
    time_shares: tuple[float, float, float]
    prompts: int
    pairs: int
    differing: int
    margin: float | None


@dataclass(frozen=True, eq=False)
class Cell:
    """One draft format on one workload.

    Attributes:
        format, workload: which. prompts, tokens: measured on so many.
        agreement: how near the draft's distributions are to the target's.
        share: its conditional acceptance over that of the 16-bit draft on the same texts; None without one.
        hazards: conditional acceptance by position, in blocks of the longest draft length.
        curve: predictions by draft length. confirmed: end-to-end runs by draft length.
        k: the best draft length, by end-to-end runs if there are any, else by prediction, else the middle one.
    """

    format: str
    workload: str
    prompts: int
    tokens: int
    agreement: Agreement
    share: Estimate | None
    hazards: tuple[Estimate, ...]
    curve: tuple[Point, ...]
    confirmed: tuple[Confirmed, ...]
    k: int

    @property
    def best(self) -> Point:
        """The prediction at the best draft length."""
        return next(point for point in self.curve if point.k == self.k)

    @property
    def confirmation(self) -> Confirmed | None:
        """The end-to-end runs at the best draft length, if there are any."""
        return next((c for c in self.confirmed if c.k == self.k), None)

    @property
    def speedup(self) -> Estimate | None:
        """The best evidence at the best draft length: confirmed, else predicted, else none."""
        return self.confirmation.speedup if self.confirmation else self.best.speedup


@dataclass(frozen=True, eq=False)
class Overall:
    """One format over all workloads, equal numbers of tokens of each, every one at its best draft length.

    Attributes:
        k: by workload. conditional_acceptance, share: means. predicted, confirmed: None unless known for all.
    """

    k: Mapping[str, int]
    conditional_acceptance: Estimate
    share: Estimate | None
    tokens_per_step: Estimate
    accepted_per_drafted: Estimate
    predicted: Estimate | None
    confirmed: Estimate | None


@dataclass(frozen=True, eq=False)
class Figures:
    """All that a trace tells.

    Attributes:
        run: what was asked, and where. digest: names the evidence.
        workloads: those with headline figures. formats: those measured on all of them.
        reference: the 16-bit format, if one was measured.
        cells: by format and workload. overall: by format. sizes: by format. costs: None if nothing was timed.
        looping: by workload, the prompts whose texts are loops. only_loops: workloads that have no other text.
        left_out: sentences on what the figures do not cover.
    """

    run: Run
    digest: str
    workloads: tuple[str, ...]
    formats: tuple[str, ...]
    reference: str | None
    cells: Mapping[tuple[str, str], Cell]
    overall: Mapping[str, Overall]
    sizes: Mapping[str, Size]
    costs: Costs | None
    looping: Mapping[str, tuple[int, ...]]
    only_loops: tuple[str, ...]
    left_out: tuple[str, ...]


def figures(trace: Trace, rng: np.random.Generator, resamples: int = RESAMPLES) -> Figures:
    """Compute every figure with its bootstrap distribution. Works on an unfinished trace, with what is there."""
    run, left_out = trace.run, list[str]()
    costs = Costs.of(trace.costs, rng, resamples) if trace.costs else None
    reference = next((name for name in SIXTEEN_BIT if name in run.formats), None)
    cells: dict[tuple[str, str], Cell] = {}
    looping = {workload: _loops(trace, workload) for workload in run.workloads}
    only_loops = []
    for workload in run.workloads:
        prompts = _Prompts.of(trace, workload, looping[workload], left_out)
        if prompts is None:
            continue
        if prompts.only_loops:
            only_loops.append(workload)
        cells |= _cells(trace, prompts, costs, reference, rng, resamples)
    measured = [w for w in run.workloads if any(w == workload for _, workload in cells)]
    headline = tuple(w for w in measured if w not in only_loops) or tuple(measured)
    formats = tuple(f for f in run.formats if headline and all((f, w) in cells for w in headline))
    return Figures(
        run=run,
        digest=trace.digest,
        workloads=headline,
        formats=formats,
        reference=reference if reference in formats else None,
        cells=cells,
        overall={name: _overall([cells[name, workload] for workload in headline]) for name in formats},
        sizes=trace.sizes,
        costs=costs,
        looping={workload: found for workload, found in looping.items() if found},
        only_loops=tuple(only_loops),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True)
class _Prompts:
    """The prompts of one workload that its figures are made from: all formats are judged on the same ones."""

    workload: str
    indices: tuple[int, ...]
    formats: tuple[str, ...]
    only_loops: bool

    @classmethod
    def of(cls, trace: Trace, workload: str, loops: Sequence[int], left_out: list[str]) -> "_Prompts | None":
        written = [index for name, index in sorted(trace.texts) if name == workload and trace.texts[name, index].ids]
        usable = [index for index in written if index not in loops] or written
        scored = {f: [i for i in usable if (f, workload, i) in trace.scores] for f in trace.run.formats}
        most = max(map(len, scored.values()))
        if not most:
            left_out.append(f"{workload} has no scored text yet, so it has no figures.")
            return None
        formats = [name for name, found in scored.items() if 2 * len(found) >= most]
        for name in scored:
            if name not in formats:
                left_out.append(
                    f"{name} was scored on {len(scored[name])} of {most} texts of {workload}: left out there."
                )
        common = [i for i in usable if all(i in scored[name] for name in formats)]
        if not any(len(trace.texts[workload, i].ids) > trace.run.k_values[0] for i in common):
            left_out.append(f"The texts of {workload} are shorter than one block, so it has no figures.")
            return None
        if len(common) < len(usable):
            left_out.append(
                f"Of {len(usable)} texts of {workload}, {len(common)} were scored with every format: only those count."
            )
        return cls(workload, tuple(common), tuple(formats), only_loops=bool(loops) and len(loops) == len(written))


def _loops(trace: Trace, workload: str) -> tuple[int, ...]:
    texts = [text for (name, _), text in sorted(trace.texts.items()) if name == workload]
    return tuple(text.index for text in texts if distinct_bigram_ratio(text.ids) < DEGENERATE_BELOW)


def _cells(
    trace: Trace,
    prompts: _Prompts,
    costs: Costs | None,
    reference: str | None,
    rng: np.random.Generator,
    resamples: int,
) -> dict[tuple[str, str], Cell]:
    """The cells of one workload, all with the same weights so that formats are paired."""
    weights = resample(len(prompts.indices), rng, resamples)
    runs = _ConfirmRuns.of(trace, prompts, rng, resamples)
    cells = {}
    for name in prompts.formats:
        scores = [trace.scores[name, prompts.workload, i] for i in prompts.indices]
        texts = Texts.of([s.ratio for s in scores], [s.overlap for s in scores])
        curve = tuple(
            point for k in trace.run.k_values if (point := _point(texts, name, k, costs, weights)) is not None
        )
        confirmed = tuple(runs.confirmed(name, point, texts) for point in curve if runs.has(name, point.k))
        cells[name, prompts.workload] = Cell(
            format=name,
            workload=prompts.workload,
            prompts=len(prompts.indices),
            tokens=int(texts.lengths_P.sum()),
            agreement=agreement(scores, weights),
            share=None,
            hazards=hazards(texts, curve[-1].k, weights),
            curve=curve,
            confirmed=confirmed,
            k=_best_k(curve, confirmed),
        )
    if reference is None or reference not in prompts.formats:
        return cells
    base = cells[reference, prompts.workload].agreement.conditional_acceptance
    return {
        key: replace(cell, share=combine(lambda a, b: a / b, cell.agreement.conditional_acceptance, base))
        for key, cell in cells.items()
    }


def _point(texts: Texts, name: str, k: int, costs: Costs | None, weights: Floats) -> Point | None:
    """None if every text is shorter than a block of k drafts."""
    tokens = tokens_per_step(texts, k, weights)
    if not np.isfinite(tokens.value):
        return None
    cost = costs.step(name, k) if costs and costs.covers(name, k) else None
    per_drafted = combine(lambda t: (t - 1) / k, tokens)
    return Point(k, tokens, per_drafted, cost, cost.speedup(tokens) if cost else None)


def _best_k(curve: Sequence[Point], confirmed: Sequence[Confirmed]) -> int:
    if confirmed:
        return max(confirmed, key=lambda c: c.speedup.value).k
    timed = [(point.speedup.value, point.k) for point in curve if point.speedup]
    return max(timed)[1] if timed else curve[len(curve) // 2].k


@dataclass(frozen=True)
class _ConfirmRuns:
    """The end-to-end runs of one workload, each speculative one beside its plain twin."""

    prompts: tuple[int, ...]
    indices: tuple[int, ...]
    pairs: Mapping[tuple[str, int], Sequence[tuple[Confirmation, Confirmation]]]
    weights: Floats

    @classmethod
    def of(cls, trace: Trace, prompts: _Prompts, rng: np.random.Generator, resamples: int) -> "_ConfirmRuns":
        runs = [c for c in trace.confirmations if c.workload == prompts.workload and c.index in prompts.indices]
        plain = {(c.index, c.round): c for c in runs if c.format is None}
        pairs = defaultdict(list)
        for run in runs:
            if run.format is not None and (run.index, run.round) in plain:
                pairs[run.format, run.k].append((plain[run.index, run.round], run))
        found = tuple(sorted({run.index for both in pairs.values() for _, run in both}))
        return cls(prompts.indices, found, pairs, resample(max(len(found), 1), rng, resamples))

    def has(self, name: str, k: int) -> bool:
        return (name, k) in self.pairs

    def confirmed(self, name: str, point: Point, texts: Texts) -> Confirmed:
        pairs = self.pairs[name, point.k]
        runs = [run for _, run in pairs]
        owner = np.array([self.indices.index(run.index) for run in runs])

        def by_prompt(values: Sequence[float]) -> Floats:
            return np.bincount(owner, values, minlength=len(self.indices)).astype(np.float64)

        def faster(seconds: list[tuple[float, float]]) -> Estimate:
            kept = [i for i, pair in enumerate(seconds) if min(pair) > 0]
            return median(np.array([seconds[i][0] / seconds[i][1] for i in kept]), owner[kept], self.weights)

        seconds = np.array([(run.draft_seconds, run.verify_seconds, run.other_seconds) for run in runs]).sum(axis=0)
        margins = [run.margin for run in runs if run.margin is not None]
        return Confirmed(
            k=point.k,
            speedup=faster([(p.seconds / p.tokens, r.seconds / r.tokens) for p, r in pairs]),
            decode_speedup=faster([(_decode_pace(p), _decode_pace(r)) for p, r in pairs]),
            predicted=self._predicted(point, texts, {run.index for run in runs}),
            tokens_per_step=ratio_of_sums(
                by_prompt([run.tokens for run in runs]), by_prompt([run.steps for run in runs]), self.weights
            ),
            counts=sum((_counts(run) for run in runs), BlockCounts(0, (), (), ())),
            time_shares=tuple(seconds / seconds.sum()),
            prompts=len({run.index for run in runs}),
            pairs=len(pairs),
            differing=sum(run.same_ids is False for run in runs),
            margin=max(margins, default=None),
        )

    def _predicted(self, point: Point, texts: Texts, ran: set[int]) -> float | None:
        """The decode speedup of the texts that ran, their cut last blocks included; None if it cannot be known."""
        tokens, steps = texts.run_sums(point.k)
        chosen = np.isin(self.prompts, list(ran))
        if point.cost is None or not steps[chosen].sum() > 0:
            return None
        return float(tokens[chosen].sum() / steps[chosen].sum()) / point.cost.break_even().value


def _decode_pace(run: Confirmation) -> float:
    """Seconds per token behind the first step; 0 if there was no second."""
    rest = run.tokens - run.first_tokens
    return (run.seconds - run.first_seconds) / rest if rest > 0 else 0.0


def _counts(run: Confirmation) -> BlockCounts:
    return BlockCounts(run.steps, run.proposed, run.tested, run.accepted)


def harmonic(speedups: Sequence[Estimate]) -> Estimate:
    """The speedup of equal numbers of tokens of each kind: times add, speeds do not."""
    return combine(lambda *each: len(each) / sum(1 / one for one in each), *speedups)


def _overall(cells: Sequence[Cell]) -> Overall:
    def mean(estimates: Sequence[Estimate]) -> Estimate:
        return combine(lambda *each: sum(each) / len(each), *estimates)

    shares = [cell.share for cell in cells if cell.share]
    predicted = [cell.best.speedup for cell in cells if cell.best.speedup]
    confirmed = [cell.confirmation.speedup for cell in cells if cell.confirmation]
    tokens = [cell.best.tokens_per_step for cell in cells]
    drafted = [combine(lambda t, k=cell.k: k / t, cell.best.tokens_per_step) for cell in cells]
    accepted = [combine(lambda t: 1 - 1 / t, t) for t in tokens]
    return Overall(
        k={cell.workload: cell.k for cell in cells},
        conditional_acceptance=mean([cell.agreement.conditional_acceptance for cell in cells]),
        share=mean(shares) if len(shares) == len(cells) else None,
        tokens_per_step=harmonic(tokens),
        accepted_per_drafted=combine(lambda a, d: a / d, mean(accepted), mean(drafted)),
        predicted=harmonic(predicted) if len(predicted) == len(cells) else None,
        confirmed=harmonic(confirmed) if len(confirmed) == len(cells) else None,
    )
