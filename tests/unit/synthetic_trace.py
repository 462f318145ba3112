"""Makes traces without a model, with acceptance and costs that are known, so that figures can be checked against truth.

The chance that a draft is accepted follows a latent difficulty that wanders along the text, so hard tokens come in
clusters as they do in real text; formats share it, so they differ as formats do. `spread=0` makes every chance the
same, and every figure exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bitdraft.measure.stats import BlockCounts
from bitdraft.measure.trace import (
    Confirmation,
    CostSample,
    Machine,
    Run,
    Sampling,
    Score,
    Size,
    StoredModel,
    Text,
    Trace,
    TraceWriter,
)


@dataclass(frozen=True)
class Draft:
    """A draft format: how often it is rejected relative to the workload, what a token costs, how large it is."""

    rejection: float
    ms: float
    bits: float

    @property
    def resident_bytes(self) -> int:
        return int(494e6 * self.bits / 8)


DRAFTS = {
    "bf16": Draft(1.0, 6.8, 16.0),
    "fp8": Draft(1.01, 4.6, 8.0),
    "w8a8": Draft(1.02, 4.2, 8.25),
    "w4a16-awq": Draft(1.12, 3.9, 4.5),
    "w4a16": Draft(1.35, 3.9, 4.5),
}


@dataclass(frozen=True)
class Spec:
    """What the trace should be like.

    `acceptance` is the 16-bit draft's, by workload. `target_ms` is one row; each further row adds `row_ms`. `noise` is
    the relative spread of a timing. `slow` scales what end-to-end runs of a format really take.
    """

    acceptance: Mapping[str, float] = field(default_factory=lambda: {"code": 0.9, "chat": 0.76})
    drafts: Mapping[str, Draft] = field(default_factory=lambda: DRAFTS)
    prompts: int = 24
    tokens: int = 96
    spread: float = 0.9
    k_values: tuple[int, ...] = tuple(range(1, 9))
    target_ms: float = 31.0
    row_ms: float = 1.9
    overhead_ms: float = 0.6
    noise: float = 0.02
    rounds: int = 15
    temperature: float = 1.0
    confirm: tuple[tuple[str, int], ...] = ()
    confirm_prompts: int = 10
    confirm_rounds: int = 2
    slow: Mapping[str, float] = field(default_factory=dict)
    stored_bits: float = 5.0
    draft_name: str = "qwen2.5-coder-0.5b"


def describe(spec: Spec) -> Run:
    return Run(
        target=StoredModel("qwen2.5-coder-1.5b", "GGUF Q4_K_M", spec.stored_bits, 1_540_000_000),
        draft=StoredModel(spec.draft_name, "GGUF Q5_K_M", spec.stored_bits, 494_000_000),
        target_format="bf16",
        formats=tuple(spec.drafts),
        workloads=tuple(spec.acceptance),
        prompts=spec.prompts,
        k_values=spec.k_values,
        sampling=Sampling(spec.temperature, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 1, spec.tokens),
        rule="token",
        backend="reference (plain PyTorch, FP32)",
        machine=Machine("AMD EPYC 9R14", 2, 24 * 2**30, "Linux 6.1", "3.11.7", "2.13.0", "0.1.0"),
        command="bitdraft measure --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --formats bf16,fp8,w8a8 "
        "--workload code,chat --prompts 24 --max-tokens 96 --k 1..8 -o report",
        started="2026-11-29T10:15:00+00:00",
    )


def synthetic_trace(spec: Spec, seed: int = 0) -> Trace:
    """A finished trace in memory."""
    rng = np.random.default_rng(seed)
    texts: dict[tuple[str, int], Text] = {}
    scores: dict[tuple[str, str, int], Score] = {}
    for workload, acceptance in spec.acceptance.items():
        for index in range(spec.prompts):
            length = int(rng.integers(spec.tokens // 2, spec.tokens + 1)) if spec.spread else spec.tokens
            difficulty = _wander(length, rng) * spec.spread
            ids = tuple(int(i) for i in rng.integers(0, 5000, length))
            finish = "length" if length == spec.tokens else "stop"
            texts[workload, index] = Text(workload, index, 40, ids, finish, length * spec.target_ms / 1000)
            for name, draft in spec.drafts.items():
                scores[name, workload, index] = _score(name, workload, index, acceptance, draft, difficulty, rng)
    return Trace(
        run=describe(spec),
        texts=texts,
        scores=scores,
        costs=_costs(spec, rng),
        sizes={n: Size(n, int(d.resident_bytes * 0.98), d.resident_bytes, d.bits) for n, d in spec.drafts.items()},
        confirmations=_confirmations(spec, scores, rng),
        digest="0" * 64,
    )


def write(folder: Path, trace: Trace) -> None:
    """Put a trace on disk, line by line."""
    writer = TraceWriter(folder)
    writer.begin(trace.run)
    for line in (*trace.texts.values(), *trace.scores.values(), *trace.costs, *trace.sizes.values()):
        writer.append(line)
    for run in trace.confirmations:
        writer.append(run)


def _wander(length: int, rng: np.random.Generator) -> np.ndarray:
    steps = rng.normal(size=length)
    for i in range(1, length):
        steps[i] = 0.6 * steps[i - 1] + 0.8 * steps[i]
    return steps + 0.25 * rng.normal()


def _score(
    name: str,
    workload: str,
    index: int,
    acceptance: float,
    draft: Draft,
    difficulty: np.ndarray,
    rng: np.random.Generator,
) -> Score:
    rejection = np.clip(draft.rejection * (1 - acceptance) * np.exp(difficulty - difficulty.std() ** 2 / 2), 0, 0.999)
    overlap = 1 - rejection
    surely = rng.random(len(overlap)) < overlap / 2  # a chance with the mean `overlap`, as one token's has
    ratio = np.where(surely, 1.0, (overlap / 2) / (1 - overlap / 2)) if difficulty.any() else overlap
    kl = rejection * 1.6
    return Score(
        format=name,
        workload=workload,
        index=index,
        overlap=tuple(overlap.tolist()),
        ratio=tuple(ratio.tolist()),
        overlap_t1=tuple((1 - 0.9 * rejection).tolist()),
        kl_pq=tuple(kl.tolist()),
        kl_qp=tuple((1.1 * kl).tolist()),
        top1=tuple(bool(x) for x in rng.random(len(overlap)) > rejection),
    )


def _costs(spec: Spec, rng: np.random.Generator) -> tuple[CostSample, ...]:
    samples = []
    for r in range(spec.rounds):
        drift = float(np.exp(spec.noise * rng.normal()))

        def timed(ms: float, drift: float = drift) -> float:
            return ms * drift * (1 + 0.5 * spec.noise * abs(rng.normal()))

        samples += [
            CostSample("target", None, m, r, timed(spec.target_ms + (m - 1) * spec.row_ms))
            for m in range(1, spec.k_values[-1] + 2)
        ]
        samples += [CostSample("draft", name, 1, r, timed(draft.ms)) for name, draft in spec.drafts.items()]
        samples.append(CostSample("overhead", None, 1, r, timed(spec.overhead_ms)))
    return tuple(samples)


def _confirmations(
    spec: Spec, scores: Mapping[tuple[str, str, int], Score], rng: np.random.Generator
) -> tuple[Confirmation, ...]:
    runs = []
    for workload in spec.acceptance:
        for index in range(min(spec.confirm_prompts, spec.prompts)):
            for r in range(spec.confirm_rounds):
                runs.append(_plain(spec, scores[next(iter(spec.drafts)), workload, index], r, rng))
                runs += [_speculative(spec, scores[name, workload, index], k, r, rng) for name, k in spec.confirm]
    return tuple(runs) if spec.confirm else ()


def _plain(spec: Spec, score: Score, round_: int, rng: np.random.Generator) -> Confirmation:
    tokens, prompt = len(score.ratio), 4 * spec.target_ms / 1000
    decode = (tokens - 1) * spec.target_ms / 1000 * float(np.exp(spec.noise * rng.normal()))
    return Confirmation(
        None, 0, score.workload, score.index, round_, prompt + decode, tokens, prompt, 1, tokens, (), (), (), 0.0,
        prompt + decode, 0.0,
    )  # fmt: skip


def _speculative(spec: Spec, score: Score, k: int, round_: int, rng: np.random.Generator) -> Confirmation:
    """Throw the coins of one run along the text."""
    blocks, at, first = [], 0, 0
    while at < len(score.ratio):
        budget = min(k, len(score.ratio) - at - 1)
        accepted = 0
        while accepted < budget and rng.random() < score.ratio[at + accepted]:
            accepted += 1
        blocks.append((budget, accepted))
        at += accepted + 1
        first = first or at
    counts = BlockCounts.of_blocks(blocks)
    draft = sum(n for n, _ in blocks) * spec.drafts[score.format].ms / 1000
    verify = sum(spec.target_ms + n * spec.row_ms for n, _ in blocks) / 1000
    scale = spec.slow.get(score.format, 1.0) * float(np.exp(spec.noise * rng.normal()))
    steps = (draft + verify + len(blocks) * spec.overhead_ms / 1000) * scale
    prompt = 4 * spec.target_ms / 1000
    n, _ = blocks[0]
    one = (n * spec.drafts[score.format].ms + spec.target_ms + n * spec.row_ms + spec.overhead_ms) / 1000 * scale
    return Confirmation(
        score.format, k, score.workload, score.index, round_, prompt + steps, len(score.ratio), prompt + one, first,
        len(blocks), counts.proposed, counts.tested, counts.accepted, draft, verify + prompt,
        len(blocks) * spec.overhead_ms / 1000, None if spec.temperature else True,
    )  # fmt: skip
