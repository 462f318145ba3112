"""Budgets, objectives and the choice of a format for every tensor."""

import math

import numpy as np
import pytest
import torch
from model_files import config

from bitdraft.errors import UsageError
from bitdraft.formats import get_format
from bitdraft.quantize.allocate import HEAD, allocate, candidates, packed_bytes, weights_by_tensor
from bitdraft.quantize.mixed import class_rows, layer_rows, load_recipe, save_allocation, summary_rows
from bitdraft.quantize.objective import Budget, Response, Speed
from bitdraft.quantize.sensitivity import Sensitivities

CONFIG = config(hidden_size=128, head_dim=32, mlp_size=256)
FORMATS = candidates()
RESPONSE = Response(0.8, 0.3, 0.8)


def prices(loud=(), config=CONFIG):
    """Every tensor loses alike for each of its weights and 4^-bits of it; loud ones a thousand times more."""
    kl = {}
    for tensor, shapes in weights_by_tensor(config).items():
        size = sum(n * k for n, k in shapes)
        for form in FORMATS:
            group = (form.group_size or 128) ** 0.25 * (0.7 if not form.symmetric else 1)
            kl[tensor, form.name] = 1e-4 * size * 4.0**-form.bits * group * (1000 if tensor in loud else 1)
    return Sensitivities(kl, RESPONSE.full, 100)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_bytes_are_those_of_the_packed_weight(form):
    assert packed_bytes(form, (6, 256)) == form.encode(torch.randn(6, 256)).nbytes


@pytest.mark.parametrize("bits", [2.3, 3.0, 3.5, 4.25, 6.0])
@pytest.mark.parametrize("tied", [True, False])
def test_a_budget_in_bits_is_kept_and_used(bits, tied):
    model = config(hidden_size=128, head_dim=32, mlp_size=256, tied_head=tied)
    found = allocate(model, prices(config=model), FORMATS, Budget.parse(f"{bits}bits"), RESPONSE)
    # One tensor's step between neighbouring formats is what may be left: an eighth of this tiny model at most.
    assert bits - 0.5 < found.expected.bits <= bits
    sizes = [choice.size for choice in found.choices]
    assert found.expected.size == pytest.approx(sum(sizes))
    assert {choice.tensor for choice in found.choices} == set(weights_by_tensor(model))


def test_what_is_loud_gets_the_bits():
    loud = "model.layers.1.self_attn.k_proj"
    found = allocate(CONFIG, prices([loud]), FORMATS, Budget.parse("3.5bits"), RESPONSE)
    by_tensor = {choice.tensor: choice for choice in found.choices}
    assert max(by_tensor.values(), key=lambda choice: choice.bits).tensor == loud
    twin = by_tensor["model.layers.0.self_attn.k_proj"]
    assert by_tensor[loud].bits > twin.bits + 1
    for choice in found.choices:
        assert choice.up is None or (choice.up[1] > 0 > choice.up[2])
        assert choice.down is None or (choice.down[1] < 0 < choice.down[2])


def test_mixed_is_expected_to_beat_every_baseline_of_its_size():
    found = allocate(CONFIG, prices(["model.layers.0.mlp.down_proj"]), FORMATS, Budget.parse("4.5bits"), RESPONSE)
    fair = [b for b in found.baselines if b.size >= found.expected.size - 200 and b.bits <= 4.5]
    assert all(found.expected.kl <= baseline.kl for baseline in fair)
    assert any("kv6" in baseline.name for baseline in found.baselines)


def test_a_head_that_does_not_count_stays_as_it_is():
    budget = Budget.parse("4.25bits", with_head=False)
    found = allocate(CONFIG, prices(), FORMATS, budget, RESPONSE, head="w8a16")
    assert found.formats[HEAD] == "w8a16"
    assert found.expected.bits_without_head <= 4.25 < found.expected.bits
    with pytest.raises(UsageError, match="format for the head"):
        allocate(CONFIG, prices(), FORMATS, budget, RESPONSE)


def speed(ms_per_byte):
    return Speed(lambda size: 0.5 + size * ms_per_byte, lambda rows: 20 + rows)


def test_dear_bytes_are_not_bought_and_cheap_ones_are():
    """Where bytes cost next to nothing all of the budget is used; where they cost much, less than that."""
    budget = Budget.parse("6bits")
    cheap, dear = (allocate(CONFIG, prices(), FORMATS, budget, RESPONSE, speed(x)) for x in (1e-9, 1e-3))
    plain = allocate(CONFIG, prices(), FORMATS, budget, RESPONSE)
    assert cheap.formats == plain.formats
    assert dear.expected.size < 0.7 * cheap.expected.size
    for found, at in ((cheap, 1e-9), (dear, 1e-3)):
        other = dear if found is cheap else cheap
        rate = speed(at).tokens_per_second(other.expected.acceptance, other.expected.size)
        assert found.expected.tokens_per_second >= rate


def test_a_budget_in_milliseconds_is_the_largest_draft_that_keeps_it():
    size = Budget.parse("12ms").bytes_of(0, speed(1e-6))
    assert size == pytest.approx(11.5e6, rel=1e-9)
    for missing in (None, Speed(lambda size: 13 + size, lambda rows: 1.0)):
        with pytest.raises(UsageError, match="step costs"):
            Budget.parse("12ms").bytes_of(0, missing)


@pytest.mark.parametrize(
    ("text", "unit", "amount"),
    [("4.25bits", "bits", 4.25), ("0.35GB", "bytes", 3.5e8), ("350MB", "bytes", 3.5e8), (" 12ms", "ms", 12)],
)
def test_budgets_are_read(text, unit, amount):
    found = Budget.parse(text)
    assert (found.unit, found.amount) == (unit, pytest.approx(amount))


@pytest.mark.parametrize("text", ["", "4", "bits", "-1bits", "nanMB", "4.25 bites"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(UsageError, match=r"4\.25bits, 350MB, 12ms"):
        Budget.parse(text)


def test_a_budget_too_small_says_what_the_smallest_is():
    with pytest.raises(UsageError, match="smallest choice costs"):
        allocate(CONFIG, prices(), FORMATS, Budget.parse("1bits"), RESPONSE)


def test_the_response_goes_through_its_points_and_falls():
    found = Response.fit(0.8, [(0.1, 0.8 - 0.2 * 0.1**0.7), (0.4, 0.8 - 0.2 * 0.4**0.7)])
    assert (found.scale, found.power) == (pytest.approx(0.2), pytest.approx(0.7))
    at = [found.acceptance(kl) for kl in np.linspace(0, 100, 50)]
    assert (at[0], at) == (0.8, sorted(at, reverse=True))
    assert at[-1] >= 0
    assert Response.fit(0.8, [(0.1, 0.81), (0.4, 0.3)]).power == 1.0  # noise above the full draft is no gain
    with pytest.raises(UsageError, match="at least one point"):
        Response.fit(0.8, [])


def test_tokens_per_second_is_the_best_length_by_hand():
    pace = Speed(lambda size: size, lambda rows: 10.0 * rows)
    expected = max(1000 * sum(0.6**j for j in range(k + 1)) / (k * 3 + 10 * (k + 1)) for k in range(1, 9))
    assert pace.tokens_per_second(0.6, 3) == pytest.approx(expected)


def test_a_choice_is_read_as_it_was_written_and_named_by_its_formats(tmp_path):
    found, other = (
        allocate(CONFIG, prices(loud), FORMATS, Budget.parse("4bits"), RESPONSE)
        for loud in ((), ("model.layers.0.mlp.up_proj",))
    )
    save_allocation(found, tmp_path / "allocation.json")
    recipe = load_recipe(tmp_path / "allocation.json")
    assert recipe == found.recipe()
    assert recipe.name != other.recipe().name
    assert recipe.format_of("lm_head") == get_format(found.formats[HEAD])
    (tmp_path / "allocation.json").write_text('{"tensors": []}')
    with pytest.raises(UsageError, match=r"allocation\.json"):
        load_recipe(tmp_path / "allocation.json")


def test_tables_name_every_layer_and_class_and_add_up():
    found = allocate(CONFIG, prices(), FORMATS, Budget.parse("4bits"), RESPONSE, speed(1e-6))
    headings, layers = layer_rows(found)
    assert headings == ("layer", "q", "k", "v", "o", "gate", "up", "down", "bits", "KL")
    assert [row[0] for row in layers] == ["0", "1", "head"]
    _, classes = class_rows(found)
    assert {row[0] for row in classes} >= {"k_proj", "down_proj", "lm_head"}
    # Printed with four digits behind the point, eight classes.
    assert sum(float(row[3]) for row in classes) == pytest.approx(found.expected.kl, abs=8e-4)
    headings, rows = summary_rows(found)
    assert all(len(row) == len(headings) for row in rows)
    assert math.isclose(float(rows[0][1]), found.expected.bits, abs_tol=0.006)
