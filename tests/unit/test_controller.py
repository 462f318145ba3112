"""Draft lengths: the best by the model, against every other choice; and whole runs in made-up time, in which nothing
may be slower than no drafts by more than a little, whatever curve or acceptance was believed beforehand.

Rows of the users' reports: U01 (says why it does not draft), U02 (the chosen length is the best fixed one), U05 and U09
(never below plain, at any concurrency), U12 (the length follows the text).
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from operator import mul
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.engine.acceptance import MOST_DOMAINS, UNKNOWN, Acceptance
from bitdraft.engine.controller import Asked, FixedLengths, MeasuredLengths
from bitdraft.engine.curve import StepCost, StepCurve
from bitdraft.engine.fastest import fastest
from bitdraft.engine.step_time import StepTimes, Tables
from bitdraft.errors import UsageError
from bitdraft.types import StepRecord

ROWS, BATCHES, CONTEXTS = (1, 2, 4, 8), (1, 4, 16, 32), (128, 2048)
LIMIT = 8


def curve(weights: float, row: float, token: float = 1e-6) -> StepCurve:
    """Milliseconds for the weights once, for each row, and for each token of the contexts."""
    return StepCurve(
        tuple(
            StepCost(r, c, b, weights + row * r * b + 1000 * token * c * b)
            for r, c, b in product(ROWS, CONTEXTS, BATCHES)
        )
    )


TARGET, DRAFT = curve(20, 0.4), curve(1.6, 0.05)
SATURATED = curve(20, 10), curve(2, 1)
"""Rows cost nearly as much as steps: on such a machine drafts only pay while they are accepted nearly always."""


class Machine:
    """Steps in made-up time: curves say how long, `hazard(request, output)` how likely a draft is to be accepted."""

    def __init__(
        self,
        target: StepCurve,
        draft: StepCurve,
        hazard: Callable[[int, int], float],
        reading: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.target, self.draft, self.hazard, self.reading = target, draft, hazard, reading
        self.random = Random(seed)
        self.now = 0.0
        self.read: dict[int, int] = {}
        self.chosen: list[tuple[int, ...]] = []

    def step(self, lengths: Sequence[int], outputs: dict[int, int], prompt: int) -> list[StepRecord]:
        n, rows = len(lengths), len(lengths) + sum(lengths)
        context = round(sum(prompt + o for o in outputs.values()) / n)
        drafting = 0.0
        for j in range(1, max(lengths) + 1):
            drafting += self.draft.seconds(1, context, sum(k >= j for k in lengths))
        for (request, output), k in zip(outputs.items(), lengths, strict=True):
            if k:
                unread = prompt + output - self.read.get(request, 0)
                drafting += self.reading * max(unread - 2, 0)
                self.read[request] = prompt + output
        low, share = divmod(rows / n, 1)
        verify = (1 - share) * self.target.seconds(int(low), context, n)
        verify += share * self.target.seconds(int(low) + 1, context, n) if share else 0.0
        self.now += drafting + verify
        self.chosen.append(tuple(lengths))
        records = []
        for (request, output), k in zip(outputs.items(), lengths, strict=True):
            overlap, accepted = [], 0
            for j in range(k):
                overlap.append(self.hazard(request, output + j))
                if self.random.random() >= overlap[-1]:
                    break
                accepted += 1
            at = request, output, k, accepted, accepted + 1, tuple(overlap)
            records.append(StepRecord(*at, n, rows, drafting, verify, 0.0))
        return records


def run(machine: Machine, policy: MeasuredLengths | FixedLengths, batch: int, tokens: int, prompt: int = 64) -> float:
    """Seconds until `tokens` outputs are there, `batch` sequences side by side, 256 tokens each and then a new one."""
    outputs = dict.fromkeys(range(batch), 0)
    following, made = batch, 0
    first = set(outputs)
    while made < tokens:
        asked = [
            Asked(r, "", prompt + o, min(LIMIT, 255 - o), 256 - o, prompt if r in first else 1)
            for r, o in outputs.items()
        ]
        first.clear()
        for record in machine.step(policy.lengths(asked), outputs, prompt):
            policy.observe(record)
            made += record.emitted
            outputs[record.request] += record.emitted
            if outputs[record.request] >= 256:
                policy.forget(record.request)
                del outputs[record.request]
                outputs[following] = 0
                first.add(following)
                following += 1
    return machine.now


def speed(machine: Machine, policy: MeasuredLengths | FixedLengths, batch: int, tokens: int, prompt: int = 64) -> float:
    """How many times as fast as no drafts."""
    plain = Machine(machine.target, machine.draft, machine.hazard)
    return run(plain, FixedLengths(0), batch, tokens, prompt) / run(machine, policy, batch, tokens, prompt)


# The best choice


costs = st.floats(0.01, 3)


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=3), min_size=1, max_size=3),
    st.lists(costs, min_size=9, max_size=9),
    costs,
    costs,
)
def test_no_other_lengths_are_faster(hazards, extra, constant, row):
    """Against every choice. The target's cost is any rising one, the draft's a constant and so much a row."""
    n = len(hazards)
    survival = [list(accumulate(h, mul)) for h in hazards]
    rounds = [0.0, *(constant + row * s for s in range(1, n + 1))]
    tables = Tables(1.0, list(accumulate([1.0, *extra])), rounds, rounds, 0.0)
    best = fastest(survival, tables)
    assert best.tokens == pytest.approx(n + sum(sum(s[:k]) for s, k in zip(survival, best.lengths, strict=True)))
    assert best.seconds == pytest.approx(tables.seconds(best.lengths))
    every = product(*(range(len(s) + 1) for s in survival))
    rates = [(n + sum(sum(s[:k]) for s, k in zip(survival, ks, strict=True))) / tables.seconds(ks) for ks in every]
    assert best.rate >= max(rates) * (1 - 1e-12)


def test_a_ragged_step_is_read_off_the_even_one_with_as_many_rows():
    tables = StepTimes(TARGET, DRAFT).at(4, 128, 3)
    for total in range(0, 13, 4):
        assert tables.verify[total] == pytest.approx(TARGET.seconds(1 + total // 4, 128, 4))
    assert tables.verify[2] == pytest.approx((TARGET.seconds(1, 128, 4) + TARGET.seconds(2, 128, 4)) / 2)
    assert tables.drafting([3, 1, 0, 1]) == pytest.approx(DRAFT.seconds(1, 128, 3) + 2 * DRAFT.seconds(1, 128, 1))


# Acceptance


def test_an_estimate_goes_from_what_was_believed_to_what_is_seen():
    found = Acceptance({"code": (0.9, 0.8)})
    assert found.hazards(1, "code", 3) == [0.9, 0.8, 0.8]
    assert found.hazards(1, "chat", 2) == [UNKNOWN, UNKNOWN]
    for _ in range(100):
        found.observe(1, "code", (0.5, 0.1))
    first, second, third = found.hazards(1, "code", 3)
    assert first == pytest.approx(0.5, abs=0.03)
    assert second == pytest.approx(0.1, abs=0.05)
    assert third < 0.6, "a position that was never reached follows the level of the others"
    newcomer = found.hazards(2, "code", 1)[0]
    assert newcomer == pytest.approx(0.5, abs=0.1), "a new request starts where its domain is"
    found.forget(1)
    assert found.hazards(1, "code", 2) == found.hazards(2, "code", 2)


def test_positions_behind_a_rejection_are_not_touched():
    """U90: only what was reached counts."""
    seen, more = Acceptance({}), Acceptance({})
    for _ in range(20):
        seen.observe(1, "", (0.9, 0.9))
        more.observe(1, "", (0.9, 0.9, 0.2))
    assert more.hazards(1, "", 3)[2] < 0.5 < seen.hazards(1, "", 3)[2]


def test_domains_do_not_grow_without_end():
    found = Acceptance({})
    for i in range(10 * MOST_DOMAINS):
        found.observe(i, f"domain {i}", (0.5,))
        found.forget(i)
    assert len(found._domains) <= MOST_DOMAINS + 1
    assert found._requests == {}


# Whole runs


@pytest.mark.parametrize(("alpha", "batch"), [(0.3, 1), (0.6, 1), (0.8, 1), (0.95, 1), (0.6, 4), (0.8, 4), (0.7, 16)])
def test_it_comes_to_the_best_fixed_length(alpha, batch):
    """U02: within 4% of the best of all fixed lengths, none included, and that with learning and probing."""
    tokens = 1500 if batch == 1 else 600 * batch
    fixed = [run(Machine(TARGET, DRAFT, lambda r, o: alpha), FixedLengths(k), batch, tokens) for k in range(9)]
    machine = Machine(TARGET, DRAFT, lambda r, o: alpha)
    assert run(machine, MeasuredLengths(TARGET, DRAFT), batch, tokens) <= 1.04 * min(fixed)


def wrong(believed: float) -> StepCurve:
    return curve(1.6 * believed, 0.05 * believed)


@pytest.mark.parametrize(("batch", "believed"), [(1, 0.1), (1, 1), (1, 10), (4, 0.1), (4, 1), (32, 0.1), (32, 1)])
@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_never_slower_than_plain(believed, alpha, batch):
    """U01, U05, U09: even where rows are dear, and the draft's curve is ten times wrong to either side."""
    machine = Machine(*SATURATED, lambda r, o: alpha, reading=1e-4)
    policy = MeasuredLengths(SATURATED[0], curve(2 * believed, believed))
    assert speed(machine, policy, batch, 1500 * batch if batch < 8 else 600 * batch) >= 0.98


@pytest.mark.parametrize("factor", [0.5, 2])
def test_a_target_curve_that_is_wrong_about_plain_steps_is_found_out(factor):
    """Believed: a row more costs next to nothing. True: all of a step. Steps without drafts are seen now and then."""
    machine = Machine(*SATURATED, lambda r, o: 0.5)
    policy = MeasuredLengths(curve(30 * factor, 0.1), DRAFT)
    assert speed(machine, policy, 1, 3000) >= 0.98


@pytest.mark.parametrize("batch", [8, 16, 32])
def test_a_target_curve_of_few_sequences_is_found_out(batch):
    """Of more of them it says too much, without drafts as well, so that drafts look good. Plain steps come first."""
    machine = Machine(*SATURATED, lambda r, o: 0.88, reading=2e-3)
    few = StepCurve(tuple(step for step in SATURATED[0].steps if step.batch <= 4))
    assert speed(machine, MeasuredLengths(few, SATURATED[1], {"": (0.88,)}, reading=2e-3), batch, 300 * batch) >= 0.98


def test_a_long_prompt_is_not_read_for_a_short_output():
    """The draft would read 4000 tokens for the 256 that follow."""
    slow = Machine(TARGET, DRAFT, lambda r, o: 0.8, reading=1e-3)
    assert speed(slow, MeasuredLengths(TARGET, curve(8, 0.8)), 1, 3000, prompt=4000) >= 0.98
    quick = Machine(TARGET, DRAFT, lambda r, o: 0.8, reading=1e-5)
    assert speed(quick, MeasuredLengths(TARGET, DRAFT), 1, 3000, prompt=4000) > 1.2


def lengths_by_phase(machine: Machine, policy: MeasuredLengths, phases: int, steps: int) -> list[float]:
    """Mean length of the second half of each phase, of one endless request; phase p has outputs from p * 10^6 on."""
    means = []
    for phase in range(phases):
        output, chosen = 1_000_000 * phase, []
        for _ in range(steps):
            asked = [Asked(0, "", 64 + output % 1_000_000, LIMIT, 10_000)]
            lengths = policy.lengths(asked)
            chosen.append(lengths[0])
            for record in machine.step(lengths, {0: output}, 64 - 1_000_000 * phase):
                policy.observe(record)
                output += record.emitted
        means.append(sum(chosen[steps // 2 :]) / (steps - steps // 2))
    return means


def test_the_length_follows_the_text_and_recovers():
    """Row A6 and U12: acceptance falls from 80% below 60%, lengths from 5 to 2 or 3; and back again."""
    alphas = (0.8, 0.5, 0.8)
    machine = Machine(curve(20, 0.4), curve(1.6, 0.05), lambda r, o: alphas[o // 1_000_000])
    high, low, again = lengths_by_phase(machine, MeasuredLengths(machine.target, machine.draft), 3, 200)
    assert 4.5 <= high <= 6.5
    assert 1.5 <= low <= 3.5
    assert again == pytest.approx(high, abs=0.7)


def test_a_request_that_was_given_up_gets_drafts_again():
    """Acceptance of a tenth: no drafts. When the text becomes easy a probe finds out, and drafts are back."""
    alphas = (0.1, 0.95)
    machine = Machine(*SATURATED, lambda r, o: alphas[o // 1_000_000], reading=1e-6)
    low, again = lengths_by_phase(machine, MeasuredLengths(*SATURATED), 2, 600)
    assert low < 0.1
    assert again > 2


def test_probes_take_a_hundredth_of_the_time():
    machine = Machine(SATURATED[0], curve(2, 0.01), lambda r, o: 0.1)
    policy = MeasuredLengths(machine.target, machine.draft, prior={"": (0.1,)})
    plain = Machine(machine.target, machine.draft, lambda r, o: 0.1)
    lengths_by_phase(machine, policy, 1, 3000)
    for output in range(3000):
        plain.step([0], {0: output}, 64)
    assert sum(any(step) for step in machine.chosen) >= 5
    assert machine.now <= 1.012 * plain.now, "and that although some tokens of the probes were accepted"


def test_nothing_is_drafted_where_not_even_a_perfect_draft_pays():
    machine = Machine(*SATURATED, lambda r, o: 0.9)
    hopeless = curve(1, 20), curve(1, 19)
    policy = MeasuredLengths(*hopeless, prior={"": (0.9,)})
    machine.target, machine.draft = hopeless
    lengths_by_phase(machine, policy, 1, 500)
    assert not any(any(step) for step in machine.chosen)


def test_drafts_that_are_looked_up_need_no_curve():
    """U01: text in which nothing repeats. Drafting costs nothing, verifying does."""
    free = curve(1e-6, 1e-9, 1e-15)
    machine = Machine(SATURATED[0], free, lambda r, o: 0.1)
    assert speed(machine, MeasuredLengths(SATURATED[0], None), 1, 3000) >= 0.98
    machine = Machine(TARGET, free, lambda r, o: 0.9)
    assert speed(machine, MeasuredLengths(TARGET, None), 1, 3000) > 3


def test_limits_are_kept():
    policy = MeasuredLengths(TARGET, DRAFT, prior={"": (0.99,)})
    asked = [Asked(i, "", 100, limit, 50) for i, limit in enumerate((0, 1, 3, 8))]
    for chosen in (policy.lengths(asked), FixedLengths(4).lengths(asked)):
        assert all(0 <= k <= one.limit for k, one in zip(chosen, asked, strict=True))
    assert FixedLengths(4).lengths(asked) == [0, 1, 3, 4]
    assert policy.lengths([]) == []
    with pytest.raises(UsageError, match="draft length"):
        FixedLengths(-1)


def test_the_reason_for_no_drafts_is_said():
    """U01."""
    policy = MeasuredLengths(*SATURATED, prior={"": (0.1,)})
    assert policy.reasons() == "Nothing was decided yet."
    policy.lengths([Asked(0, "", 64, 8, 100)])
    reason = policy.reasons()
    assert reason.startswith("K = 0 for 1 sequence: ")
    assert "tokens/s" in reason
    assert "0.10 at position 1" in reason
    policy = MeasuredLengths(TARGET, DRAFT, prior={"": (0.9,)})
    policy.lengths([Asked(i, "", 64, 8, 100) for i in range(3)])
    assert "without drafts" in policy.reasons()
    assert "\n" not in policy.reasons()


def test_nothing_is_kept_of_what_has_ended():
    policy = MeasuredLengths(TARGET, DRAFT)
    run(Machine(TARGET, DRAFT, lambda r, o: 0.8), policy, 4, 4000)
    assert len(policy._requests) <= 8
    assert len(policy.acceptance._requests) <= 8


def test_what_a_client_predicted_teaches_nothing_about_the_draft() -> None:
    """Neither its acceptance nor the step's time: it was not drafted by what the lengths are decided for."""
    curve = StepCurve(tuple(StepCost(rows, 1, 1, 10.0 + rows) for rows in (1, 2, 4)))
    asked = [Asked(0, "", 10, 3, 50)]

    def hazards(predicted: bool) -> list[float]:
        lengths = MeasuredLengths(curve, StepCurve((StepCost(1, 1, 1, 1.0),)), {"": (0.5,)})
        for start in range(20):
            lengths.lengths(asked)
            lengths.observe(StepRecord(0, start, 3, 0, 1, (0.0,), 1, 4, 1.0, 12.0, 0.0, predicted))
        lengths.lengths(asked)
        return lengths.acceptance.hazards(0, "", 3)

    unread = MeasuredLengths(curve, None, {"": (0.5,)}).acceptance.hazards(0, "", 3)
    assert hazards(True) == unread
    assert hazards(False)[0] < unread[0]
