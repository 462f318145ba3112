"""Step-cost curves: what is measured is what is given back, guesses are dear rather than cheap, and files are believed
only when they are about the same thing. Time is a number that a made-up model moves on."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import count, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_files import config

from bitdraft.engine.curve import AT_LOAD, CurveKey, Grid, StepCost, StepCurve, cached_curve, measure_curve
from bitdraft.errors import UsageError
from bitdraft.models.cached import CachedModel
from bitdraft.ops import Ragged
from bitdraft.ops.hardware import Ticks

Price = Callable[[int, int, int], float]


class PricedDecoder:
    """Computes nothing, and moves its own clock on by the price of each step."""

    def __init__(self, price: Price, context_length: int = 4096) -> None:
        self.config = config(context_length=context_length)
        self.price, self.now = price, 0.0
        self.calls: list[tuple[int, int, int]] = []

    def clock(self) -> float:
        return self.now

    def hidden(self, batch: Ragged, kv: object) -> torch.Tensor:
        rows, sequences = batch.row_counts[0], len(batch.row_counts)
        assert set(batch.row_counts) == {rows}
        assert len(batch.ids) == len(batch.positions) == len(set(batch.slots.tolist())) == rows * sequences
        context = batch.lengths[0] - rows
        for s, table in enumerate(batch.tables):
            mine = slice(s * rows, (s + 1) * rows)
            assert batch.positions[mine].tolist() == list(range(context, context + rows))
            places = [table[p // 16] * 16 + p % 16 for p in range(context, context + rows)]
            assert batch.slots[mine].tolist() == places
        assert len({block for table in batch.tables for block in table.tolist()}) == sum(map(len, batch.tables))
        self.calls.append((rows, context, sequences))
        self.now += self.price(rows, context, sequences)
        return torch.zeros(len(batch.ids), self.config.hidden_size)

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x_RD), self.config.vocab_size)


def price(rows: int, context: int, batch: int) -> float:
    """Seconds: weights once, arithmetic by rows, keys and values by sequence."""
    return 0.010 + 0.001 * rows * batch + 1e-6 * context * batch


def priced(
    price: Price = price, kv_tokens: int = 16384, context_length: int = 4096
) -> tuple[CachedModel, PricedDecoder]:
    decoder = PricedDecoder(price, context_length)
    return CachedModel(decoder, kv_tokens=kv_tokens, vocab_size=decoder.config.vocab_size), decoder  # type: ignore[arg-type]


def curve_of(grid: Grid, price: Price = price) -> StepCurve:
    places = product(grid.rows, grid.contexts, grid.batches)
    return StepCurve(tuple(StepCost(*place, price(*place) * 1000) for place in places))


SMALL = Grid((1, 2, 4, 8), (64, 512), (1, 3), 2)


# Between and beyond the points


@st.composite
def measured(draw: st.DrawFn) -> StepCurve:
    def places(most: int) -> st.SearchStrategy[list[int]]:
        return st.lists(st.integers(1, most), min_size=1, max_size=4, unique=True)

    rows, contexts, batches = draw(places(16)), draw(places(4096)), {1, *draw(places(8))}
    every = product(rows, contexts, batches)
    return StepCurve(tuple(StepCost(*place, draw(st.floats(0.01, 1000))) for place in every))


@given(measured())
def test_measured_points_are_given_back(curve):
    for step in curve.steps:
        assert curve.seconds(step.rows, step.context, step.batch) == step.ms / 1000


@given(measured(), st.integers(1, 16), st.integers(0, 4096), st.integers(1, 8))
def test_between_points_the_value_lies_between_theirs(curve, rows, context, batch):
    """Inside of the grid only; a sum of products may round by some units in the last place."""
    for values, place in (
        ({s.rows for s in curve.steps}, rows),
        ({s.context for s in curve.steps}, context),
        ({s.batch for s in curve.steps}, batch),
    ):
        if place > max(values):
            return
    milliseconds = [step.ms for step in curve.steps]
    found = curve.seconds(rows, context, batch) * 1000
    assert min(milliseconds) * (1 - 1e-12) <= found <= max(milliseconds) * (1 + 1e-12)


@given(measured(), st.integers(1, 64), st.integers(1, 16384), st.integers(1, 64))
def test_costs_beyond_the_last_point_never_fall(curve, rows, context, batch):
    """Of the points on the edge the last is what counts, and more is added to it."""
    R, C, B = (max(getattr(s, name) for s in curve.steps) for name in ("rows", "context", "batch"))
    edge = curve.seconds(R, C, B)
    found = curve.seconds(max(rows, R), max(context, C), max(batch, B))
    assert found >= edge * (1 - 1e-12)
    assert math.isfinite(found)


def test_straight_lines_are_followed_exactly():
    curve = curve_of(SMALL)
    for place in ((3, 64, 1), (5, 200, 1), (1, 300, 2), (7, 512, 3), (2, 1500, 1)):
        assert curve.seconds(*place) == pytest.approx(price(*place), rel=1e-9), place


def test_rows_and_sequences_beyond_cost_as_much_as_those_before_on_average():
    """A step can be split into steps of the largest known size, so it costs no more than that; and never less here."""
    curve = curve_of(SMALL)
    assert curve.seconds(16, 64, 1) == pytest.approx(2 * price(8, 64, 1))
    assert curve.seconds(1, 64, 6) == pytest.approx(2 * price(1, 64, 3))
    assert curve.seconds(16, 64, 1) > price(16, 64, 1)


def test_below_the_first_context_and_where_noise_falls_nothing_gets_cheaper():
    curve = curve_of(SMALL, lambda rows, context, batch: 0.02 - 1e-6 * context)
    assert curve.seconds(1, 1) == curve.seconds(1, 64)
    assert curve.seconds(1, 4096) == curve.seconds(1, 512)


def test_one_context_alone_grows_in_proportion():
    curve = StepCurve((StepCost(1, 100, 1, 10.0),))
    assert curve.seconds(1, 400) == pytest.approx(0.04)
    assert curve.seconds(3, 50, 2) == pytest.approx(0.06)


@pytest.mark.parametrize(
    "step", [(0, 1, 1, 1.0), (1, 0, 1, 1.0), (1, 1, True, 1.0), (1, 1, 1, 0), (1, 1, 1, math.nan), (1.5, 1, 1, 1.0)]
)
def test_a_point_that_cannot_be_is_refused(step):
    with pytest.raises(UsageError, match="Expected counts"):
        StepCost(*step)


@pytest.mark.parametrize("steps", [(), (StepCost(1, 64, 2, 1.0),)])
def test_a_curve_needs_a_single_sequence(steps):
    with pytest.raises(UsageError, match="one sequence"):
        StepCurve(steps)


# Measuring


def test_the_curve_is_what_the_steps_took():
    model, decoder = priced()
    curve = measure_curve(model, decoder.clock, 100.0, SMALL)
    assert {(s.rows, s.context, s.batch) for s in curve.steps} == set(
        product(SMALL.rows, SMALL.contexts, SMALL.batches)
    )
    for step in curve.steps:
        assert step.ms / 1000 == pytest.approx(price(step.rows, step.context, step.batch))


def test_the_first_timing_of_a_step_warms_up():
    seen: set[tuple[int, int, int]] = set()

    def first_is_slow(*place: int) -> float:
        slow = place not in seen
        seen.add(place)
        return price(*place) * (50 if slow else 1)

    model, decoder = priced(first_is_slow)
    curve = measure_curve(model, decoder.clock, 1000.0, SMALL)
    for step in curve.steps:
        assert step.ms / 1000 == pytest.approx(price(step.rows, step.context, step.batch))


def test_one_slow_moment_does_not_move_the_median():
    model, decoder = priced(lambda *place: 9.0 if len(decoder.calls) == 40 else price(*place))
    curve = measure_curve(model, decoder.clock, 1000.0, replace(SMALL, repeats=3))
    assert len(decoder.calls) > 40
    assert max(step.ms for step in curve.steps) < 9000


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.2, 0.5, 2.0])
@pytest.mark.parametrize("scale", [0.1, 1, 20])
def test_the_budget_holds_but_for_a_first_step(budget, scale):
    model, decoder = priced(lambda *place: scale * price(*place))
    curve = measure_curve(model, decoder.clock, budget)
    first = scale * (price(1, 2055, 1) + price(1, 128, 1))  # what warms up, and what is always measured
    # The price of a step that was never seen is guessed: a long context may cost a little more than a short one.
    assert decoder.now <= max(budget, first) + scale * 0.002 * 4
    assert curve.seconds(1, 128) == pytest.approx(scale * price(1, 128, 1))


def test_with_little_time_the_corners_come_first_and_guesses_stay_dear():
    model, decoder = priced()
    curve = measure_curve(model, decoder.clock, 0.12)
    assert {(s.rows, s.context) for s in curve.steps} >= {(1, 128), (8, 128), (1, 2048), (8, 2048)}
    for rows in range(1, 9):
        assert curve.seconds(rows, 1000, 1) >= price(rows, 1000, 1) * 0.999
    assert curve.seconds(8, 2048, 4) >= price(8, 2048, 4)


def test_a_batch_that_was_not_reached_whole_is_left_out():
    model, decoder = priced(lambda r, c, b: price(r, c, b) if b == 1 or (r, c) == (1, 128) else 3.0)
    curve = measure_curve(model, decoder.clock, 2.5)
    assert 4 in {batch for _, _, batch in decoder.calls}
    assert {step.batch for step in curve.steps} == {1}


def test_large_batches_are_timed_with_few_rows_and_one_at_least():
    model, decoder = priced()
    curve = measure_curve(model, decoder.clock, 1e9, Grid((1, 2, 4, 8), (64, 512), (1, 4, 16, 32), 1, most=16))
    rows = {batch: {s.rows for s in curve.steps if s.batch == batch} for batch in (1, 4, 16, 32)}
    assert rows == {1: {1, 2, 4, 8}, 4: {1, 2, 4}, 16: {1}, 32: {1}}
    assert curve.seconds(1, 64, 16) == pytest.approx(price(1, 64, 16))


def test_the_cache_is_as_before_and_what_it_holds_is_not_touched():
    model, decoder = priced(kv_tokens=2048)
    held = [model.pool.take() for _ in range(5)]
    for layer in model.pool.layers:
        layer.keys[torch.tensor(held)] = 3
        layer.values[torch.tensor(held)] = 5
    free = model.pool.num_free
    measure_curve(model, decoder.clock, 100.0, SMALL)
    assert model.pool.num_free == free
    for layer in model.pool.layers:
        assert (layer.keys[torch.tensor(held)] == 3).all()
        assert (layer.values[torch.tensor(held)] == 5).all()


def test_the_blocks_come_back_when_a_step_fails():
    def fails(rows: int, context: int, batch: int) -> float:
        if batch == 3:
            raise RuntimeError("broken")
        return price(rows, context, batch)

    model, decoder = priced(fails)
    free = model.pool.num_free
    with pytest.raises(RuntimeError, match="broken"):
        measure_curve(model, decoder.clock, 100.0, SMALL)
    assert model.pool.num_free == free


@pytest.mark.parametrize(
    ("kv_tokens", "context_length", "contexts"),
    [(16384, 4096, (64, 512)), (16384, 300, (64, 292)), (3 * 128, 4096, (64, 120)), (3 * 16, 4096, (8,))],
)
def test_contexts_are_as_long_as_model_and_cache_allow(kv_tokens, context_length, contexts):
    model, decoder = priced(kv_tokens=kv_tokens, context_length=context_length)
    curve = measure_curve(model, decoder.clock, 100.0, SMALL)
    assert {step.context for step in curve.steps} == set(contexts)


@pytest.mark.parametrize(("kv_tokens", "context_length"), [(3 * 16, 8), (32, 4096)])
def test_no_room_for_any_step_is_said(kv_tokens, context_length):
    model, decoder = priced(kv_tokens=kv_tokens, context_length=context_length)
    with pytest.raises(UsageError, match="cannot be timed"):
        measure_curve(model, decoder.clock, 100.0, SMALL)


def test_progress_counts_up():
    seen = []
    model, decoder = priced()
    measure_curve(model, decoder.clock, 100.0, SMALL, lambda done, total, label: seen.append((done, total, label)))
    assert [done for done, _, _ in seen] == list(range(1, 49))
    assert {(total, label) for _, total, label in seen} == {(48, "timing steps")}


# Keeping


KEY = CurveKey("a processor", "avx2", 2, "0.1.0", "model.gguf", 1000, 17, "w4a8", "bf16")


def ticks_of(others: float) -> Callable[[], Ticks]:
    """A machine of which we use a half, and others so much of the rest."""
    times = count(0, 1000)
    return lambda: Ticks(total := next(times), int(total * (0.5 + others)), total // 2)


def kept(
    model: CachedModel,
    decoder: PricedDecoder,
    folder: Path,
    key: CurveKey = KEY,
    grid: Grid = SMALL,
    ticks: Callable[[], Ticks | None] = lambda: None,
) -> bool:
    """Whether the curve came from the file; it is right in any case."""
    before = len(decoder.calls)
    curve = cached_curve(model, key, folder, decoder.clock, 100.0, grid, ticks)
    assert curve.seconds(8, 64, 3) == pytest.approx(price(8, 64, 3))
    return len(decoder.calls) == before


def test_the_same_question_is_measured_once(tmp_path):
    model, decoder = priced()
    assert not kept(model, decoder, tmp_path / "a" / "curves")
    assert kept(model, decoder, tmp_path / "a" / "curves")
    first, again = (
        cached_curve(model, KEY, tmp_path / "b", decoder.clock, 100.0, SMALL, lambda: None) for _ in range(2)
    )
    assert first == again
    assert [path.suffix for path in (tmp_path / "b").iterdir()] == [".json"], "one file, and no half one"


def test_a_curve_of_a_busy_machine_is_not_kept(tmp_path):
    model, decoder = priced()
    assert not kept(model, decoder, tmp_path, ticks=ticks_of(others=0.3))
    assert not kept(model, decoder, tmp_path, ticks=ticks_of(others=0.01))
    assert kept(model, decoder, tmp_path, ticks=ticks_of(others=0.3))


def test_what_others_use_is_read_from_the_system(tmp_path):
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "stat").write_text("7 (a (b) c) S " + " ".join(map(str, range(1, 30))))
    (tmp_path / "proc" / "stat").write_text("cpu  50 0 20 100 10 0 0 20 0 0\ncpu0 1 2\n")
    now = Ticks.now(7, tmp_path)
    assert now == Ticks(total=200, used=90, own=11 + 12)
    assert now.others_since(Ticks(100, 40, 13)) == pytest.approx((50 - 10) / 100)
    assert Ticks.now(8, tmp_path) is None


@pytest.mark.parametrize("name", [field.name for field in fields(CurveKey)])
def test_another_machine_model_or_format_is_measured_anew(tmp_path, name):
    model, decoder = priced()
    kept(model, decoder, tmp_path)
    value = getattr(KEY, name)
    other = replace(KEY, **{name: value + 1 if isinstance(value, int) else value + "x"})
    assert not kept(model, decoder, tmp_path, other)
    assert kept(model, decoder, tmp_path), "and the first is still there"


def test_another_grid_is_measured_anew(tmp_path):
    model, decoder = priced()
    kept(model, decoder, tmp_path)
    assert not kept(model, decoder, tmp_path, grid=replace(SMALL, rows=(1, 2, 8)))
    smaller, other = priced(kv_tokens=3 * 256)
    assert not kept(smaller, other, tmp_path), "its contexts end earlier"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"w4a8"', '"w8a8"'),
        lambda text: text.replace('"rows": 1,', '"rows": -1,'),
        lambda text: text.replace('"rows": 1,', '"rows": "1",'),
        lambda text: text.replace('"ms"', '"msec"'),
        lambda text: text.replace('"ms": 1', '"ms": -1'),
        lambda text: json.dumps({**json.loads(text), "steps": []}),
        lambda text: json.dumps({**json.loads(text), "steps": None}),
        lambda text: json.dumps({**json.loads(text), "steps": [[1, 2, 3, 4]]}),
        lambda text: text.replace('"ms": 1', '"ms": NaN, "a": 1'),
    ],
)
def test_a_damaged_or_foreign_file_is_measured_anew_and_mended(tmp_path, damage):
    model, decoder = priced()
    kept(model, decoder, tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    assert damage(whole) != whole
    for data in (damage(whole).encode(), b"\xff\xfe" + whole.encode()):
        path.write_bytes(data)
        assert not kept(model, decoder, tmp_path)
    assert kept(model, decoder, tmp_path)


def test_where_nothing_can_be_written_it_is_measured_each_time(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model, decoder = priced()
    assert not kept(model, decoder, tmp_path / "file" / "curves")
    assert not kept(model, decoder, tmp_path / "file" / "curves")


def test_a_failed_write_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch):
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model, decoder = priced()
    kept(model, decoder, tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text("damaged")
    monkeypatch.setattr("os.replace", no_space)
    assert not kept(model, decoder, tmp_path)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["damaged"]


def test_a_key_names_machine_model_and_format(tmp_path):
    model, _ = priced()
    file = tmp_path / "m.gguf"
    file.write_bytes(b"12345")
    key = CurveKey.of(model, file, "w4a8")
    assert (key.model, key.model_bytes, key.format, key.kv) == ("m.gguf", 5, "w4a8", "bf16")
    assert key.processor
    assert key.threads >= 1
    assert CurveKey.of(model, file, "w4a8") == key
    file.write_bytes(b"123456")
    assert CurveKey.of(model, file, "w4a8") != key


def test_a_folder_is_known_by_its_config_and_its_weights(tmp_path):
    model, _ = priced()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"123")
    key = CurveKey.of(model, tmp_path, "w4a8")
    assert key.model_bytes == 6
    (tmp_path / "model.safetensors").write_bytes(b"124")
    (tmp_path / "notes.txt").write_text("not a weight")
    later = key.model_modified_ns + 10**9
    os.utime(tmp_path / "model.safetensors", ns=(later, later))
    assert CurveKey.of(model, tmp_path, "w4a8") == replace(key, model_modified_ns=later)


def test_what_is_measured_at_load_is_little():
    """Under two seconds: at the price of a 1.5B model in 4 bits on two cores all of it is reached, twice."""
    model, decoder = priced(lambda rows, context, batch: 0.035 + 0.003 * rows * batch + 2e-6 * context * batch)
    curve = measure_curve(model, decoder.clock, 2.0)
    assert decoder.now <= 2.0
    assert {(s.rows, s.context) for s in curve.steps if s.batch == 1} == set(product(AT_LOAD.rows, AT_LOAD.contexts))
