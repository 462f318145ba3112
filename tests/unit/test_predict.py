"""Predictions against enumeration, against simulation, and against figures that are known."""

import itertools

import numpy as np
import pytest
from synthetic_trace import DRAFTS, Spec, synthetic_trace

from bitdraft.measure.figures import figures
from bitdraft.measure.predict import (
    CAUSES,
    Costs,
    StepCost,
    Texts,
    break_even_acceptance,
    expected_tokens,
    hazards,
    loss,
    tokens_per_step,
)
from bitdraft.measure.stats import Estimate, combine, resample
from bitdraft.measure.trace import CostSample


def sure(value: float) -> Estimate:
    return Estimate(value, np.full(10, value))


def texts(*ratios: list[float]) -> Texts:
    return Texts.of(ratios, ratios)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("a", [0.0, 0.3, 0.612, 0.95, 1.0])
def test_constant_acceptance_gives_the_closed_form(a: float, k: int) -> None:
    closed = k + 1 if a == 1 else (1 - a ** (k + 1)) / (1 - a)
    assert expected_tokens([a] * k) == pytest.approx(closed)
    found = tokens_per_step(texts([a] * 40, [a] * 23), k, np.ones((1, 2)))
    assert found.value == pytest.approx(closed)
    for hazard in hazards(texts([a] * 40), k, np.ones((1, 1))):
        assert hazard.value == pytest.approx(a) or (a == 0 and np.isnan(hazard.value))


def test_figures_of_the_source_articles() -> None:
    """The decay matrix that started it: K = 5, conditional acceptance 78.4, 76.9 and 61.2%."""
    assert [round(expected_tokens([a] * 5), 2) for a in (0.784, 0.769, 0.612)] == [3.55, 3.43, 2.44]


def test_a_text_shorter_than_a_block_tells_nothing() -> None:
    assert np.isnan(tokens_per_step(texts([0.5] * 3), 3, np.ones((1, 1))).value)
    assert tokens_per_step(texts([0.5] * 4), 3, np.ones((1, 1))).value == pytest.approx(expected_tokens([0.5] * 3))


class Pair:
    """A target and a draft over three tokens, each token's distribution depending on the one before."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.p = rng.dirichlet([1.0] * 3, 3)
        self.q = rng.dirichlet([1.0] * 3, 3)
        self.both = np.minimum(self.p, self.q)

    def texts(self, length: int) -> tuple[Texts, np.ndarray]:
        """All texts of a length, and their probabilities."""
        ratios, overlaps, chances = [], [], []
        for words in itertools.product(range(3), repeat=length):
            before = (0, *words[:-1])
            chances.append(np.prod([self.p[b, w] for b, w in zip(before, words, strict=True)]))
            ratios.append([min(1.0, self.q[b, w] / self.p[b, w]) for b, w in zip(before, words, strict=True)])
            overlaps.append([self.both[b].sum() for b in before])
        return Texts.of(ratios, overlaps), np.array(chances)


def test_target_texts_tell_what_drafts_would_do() -> None:
    """Exactly: averaged over all texts of the target, the first block is what drafting from q gives.

    P(the first j drafts are accepted) is the mass of min(p, q) along paths of j tokens, whatever the target wrote.
    """
    pair, k = Pair(), 4
    found, chances = pair.texts(k + 1)
    mass, survival = np.array([1.0, 0.0, 0.0]), [1.0]
    for _ in range(k):
        mass = mass @ pair.both
        survival.append(mass.sum())
    assert chances @ found.survival(k)[:, 0] == pytest.approx(survival, abs=1e-12)
    tokens, blocks = found.block_sums(k)
    assert chances @ tokens / (chances @ blocks) == pytest.approx(sum(survival), abs=1e-12)


def test_hazards_are_conditional_acceptance() -> None:
    """Exactly, at every position of the first block: accepted, given that all before it were."""
    pair, k = Pair(), 4
    found, chances = pair.texts(k)  # one block and no second
    accepted, tested = found.hazard_sums(k)
    mass = np.array([1.0, 0.0, 0.0])
    first_block = [chances @ found.survival(k)[:, 0, j] * 1.0 for j in range(k)]
    for j in range(k):
        after = mass @ pair.both
        reached = found.survival(k)[:, 0, j]
        assert chances @ (reached * found.overlap_PN[:, j]) / (chances @ reached) == pytest.approx(
            after.sum() / mass.sum(), abs=1e-12
        )
        assert first_block[j] == pytest.approx(mass.sum(), abs=1e-12)
        mass = after
    assert np.all(accepted <= tested + 1e-12)


def simulate(ratio: list[float], k: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """(start, drafted, accepted) of each block of one run along a text."""
    blocks, at = [], 0
    while at < len(ratio):
        accepted = 0
        while accepted < k and at + accepted < len(ratio) and rng.random() < ratio[at + accepted]:
            accepted += 1
        blocks.append((at, k, accepted))
        at += accepted + 1
    return blocks


def test_simulation_of_one_text_agrees() -> None:
    """4,000 runs along one text with hard and easy stretches: within 4 standard errors."""
    rng = np.random.default_rng(7)
    ratio = np.repeat([0.95, 0.3, 0.8, 0.1, 1.0], 8).tolist()
    k, length = 4, len(ratio)
    runs = [simulate(ratio, k, rng) for _ in range(4000)]
    found = texts(ratio)
    whole = [[b for b in run if b[0] + k < length] for run in runs]
    tokens, blocks = found.block_sums(k)
    assert abs(np.mean([len(w) for w in whole]) - blocks[0]) < 4 * np.std([len(w) for w in whole]) / 4000**0.5
    emitted = [sum(a + 1 for _, _, a in w) for w in whole]
    assert abs(np.mean(emitted) - tokens[0]) < 4 * np.std(emitted) / 4000**0.5
    behind, steps = found.run_sums(k)
    assert abs(np.mean([len(run) - 1 for run in runs]) - steps[0]) < 4 * np.std([len(r) for r in runs]) / 4000**0.5
    first = [min(run[0][2] + 1, length) for run in runs]
    assert abs(np.mean(first) - (length - behind[0])) < 4 * np.std(first) / 4000**0.5
    starts = np.zeros(length)
    for run in runs:
        for start, _, _ in run:
            starts[start] += 1 / 4000
    assert np.abs(starts - found.block_starts(k)[0]).max() < 4 * 0.5 / 4000**0.5


def test_clusters_cost_what_they_cost() -> None:
    """Half the tokens hopeless: in one stretch, that is far better than spread over the text."""
    together = tokens_per_step(texts([1.0] * 200 + [0.0] * 200), 4, np.ones((1, 1))).value
    apart = tokens_per_step(texts([1.0, 0.0] * 200), 4, np.ones((1, 1))).value
    assert apart == pytest.approx(2.0)
    assert together < apart  # the hopeless stretch takes a step a token
    assert together == pytest.approx(400 / (40 + 200), rel=0.02)


def test_costs_are_medians_and_rounds_stay_together() -> None:
    rng = np.random.default_rng(0)
    samples = []
    for r in range(12):
        drift = rng.uniform(1, 2)
        samples += [CostSample("target", None, m, r, 10.0 * m * drift) for m in (1, 2)]
        samples.append(CostSample("draft", "fp8", 1, r, 3.0 * drift))
    costs = Costs.of(samples, rng, 200)
    assert costs.target[1].value == pytest.approx(
        np.median([s.ms for s in samples if (s.kind, s.rows) == ("target", 1)])
    )
    alone = costs.target[1].interval()
    ratio = combine(lambda a, b: a / b, costs.draft["fp8"], costs.target[1]).interval()
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high - alone.low > 1
    assert ratio.low == pytest.approx(0.3)
    assert ratio.high == pytest.approx(0.3)
    assert costs.covers("fp8", 1)
    assert not costs.covers("fp8", 2)
    assert not costs.covers("bf16", 1)
    assert costs.overhead.value == 0.0


def test_one_timing_has_no_interval() -> None:
    costs = Costs.of([CostSample("target", None, 1, 0, 10.0)], np.random.default_rng(0), 50)
    assert costs.target[1].value == 10.0
    assert costs.target[1].interval().low is None


def test_speedup_and_break_even() -> None:
    cost = StepCost(plain=sure(10.0), draft=sure(4.0), verify=sure(12.0), overhead=sure(1.0))
    assert cost.total().value == 17.0
    assert cost.break_even().value == 1.7
    assert cost.speedup(sure(3.4)).value == pytest.approx(2.0)
    alpha = break_even_acceptance(1.7, 3)
    assert expected_tokens([alpha] * 3) == pytest.approx(1.7)
    assert break_even_acceptance(0.9, 3) == 0.0
    assert break_even_acceptance(4.0, 3) == pytest.approx(1.0)
    assert np.isnan(break_even_acceptance(4.1, 3))


def test_where_the_ideal_goes() -> None:
    cost = StepCost(plain=sure(10.0), draft=sure(4.0), verify=sure(12.0), overhead=sure(0.0))
    found = loss(2.5, 3, cost)
    assert found.without["acceptance"] == pytest.approx(4 / 1.6)
    assert found.without["drafting"] == pytest.approx(2.5 / 1.2)
    assert found.without["extra rows"] == pytest.approx(2.5 / 1.4)
    assert found.without["overhead"] == pytest.approx(2.5 / 1.6)
    assert set(found.shares) == set(CAUSES)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["drafting"] == pytest.approx(2 * found.shares["extra rows"])
    ideal = loss(4.0, 3, StepCost(sure(10.0), sure(0.0), sure(10.0), sure(0.0)))
    assert all(share == 0.0 for share in ideal.shares.values())


def test_a_trace_with_one_acceptance_gives_the_textbook_speedup() -> None:
    spec = Spec(acceptance={"code": 0.8}, drafts={"bf16": DRAFTS["bf16"]}, spread=0.0, noise=0.0, prompts=4)
    cell = figures(synthetic_trace(spec), np.random.default_rng(0), 100).cells["bf16", "code"]
    assert cell.agreement.conditional_acceptance.value == pytest.approx(0.8)
    for point in cell.curve:
        tokens = (1 - 0.8 ** (point.k + 1)) / 0.2
        step = point.k * 6.8 + 31.0 + point.k * 1.9 + 0.6
        assert point.tokens_per_step.value == pytest.approx(tokens)
        assert point.accepted_per_drafted.value == pytest.approx((tokens - 1) / point.k)
        assert point.speedup is not None
        assert point.speedup.value == pytest.approx(tokens * 31.0 / step)
    assert cell.k == max(cell.curve, key=lambda p: p.speedup.value if p.speedup else 0.0).k


def test_the_interval_holds_both_kinds_of_noise() -> None:
    """Texts alone, timings alone and both: the last is the widest."""

    def width(spread: float, noise: float) -> float:
        spec = Spec(acceptance={"code": 0.8}, drafts={"bf16": DRAFTS["bf16"]}, spread=spread, noise=noise)
        cell = figures(synthetic_trace(spec), np.random.default_rng(0), 300).cells["bf16", "code"]
        assert cell.curve[2].speedup is not None
        bounds = cell.curve[2].speedup.interval()
        assert bounds.low is not None
        assert bounds.high is not None
        return bounds.high - bounds.low

    texts_only, timings_only, both = width(0.9, 0.0), width(0.0, 0.1), width(0.9, 0.1)
    assert width(0.0, 0.0) < 1e-9
    assert both > texts_only > 0.01
    assert both > timings_only > 0.005


def test_prediction_and_end_to_end_runs_agree_on_the_same_texts() -> None:
    spec = Spec(confirm=(("w8a8", 3),), noise=0.0, prompts=30, confirm_prompts=30, confirm_rounds=4, k_values=(1, 2, 3))
    found = figures(synthetic_trace(spec), np.random.default_rng(0), 50)
    for workload in found.workloads:
        (run,) = found.cells["w8a8", workload].confirmed
        assert run.predicted is not None
        assert run.decode_speedup.value == pytest.approx(run.predicted, rel=0.05)
        assert run.speedup.value < run.decode_speedup.value  # reading the prompt gains nothing
        for seen, hazard in zip(run.counts.conditional_acceptance, found.cells["w8a8", workload].hazards, strict=False):
            assert seen == pytest.approx(hazard.value, abs=0.04)


def test_weights_are_draws_of_prompts() -> None:
    weights = resample(7, np.random.default_rng(0), 30)
    assert weights.shape == (30, 7)
    assert np.all(weights.sum(axis=1) == 7)
