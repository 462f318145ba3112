"""Attribution: planted faults are named, sums are sums, and a measured folder is explained."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from test_sensitivity import Calm, probe_of

from bitdraft.errors import UsageError
from bitdraft.formats import Recipe, get_format
from bitdraft.measure.attribution import Swap, attribution, attribution_json, attribution_markdown, is_whole
from bitdraft.measure.swaps import swaps, with_kv
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.models.kv_scales import find_scales
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attribution")
    return Calm(open_checkpoint(write_folder(folder / "m", config("llama", num_layers=3))))


def explain(source, low, kv=None):
    """All swaps of `low`, the 16-bit draft itself being the target, so that every change is a loss.

    Of keys and values in fp8, the scales are a hundred thousand times too large.
    """
    base = quantize(source, Recipe.parse("bf16"), rng=np.random.default_rng(0))
    lines, targets = [], {}
    for kind, name, make, form in with_kv(swaps(source, base, low), kv):
        decoder = Decoder(prepare_model(make()))
        scales = [(k * 1e5, v * 1e5) for k, v in find_scales(decoder, [1, 2, 3])] if form.needs_scales else None
        for text in probe_of(source).texts:
            model = CachedModel(decoder, kv_tokens=64, vocab_size=source.config.vocab_size, kv=form, kv_scales=scales)
            q = model.forward([Feed(0, text.context, 0, len(text.prompt) - 1)]).softmax(-1)
            p = targets.setdefault((text.workload, text.index), q)
            overlap = torch.minimum(p, q).sum(-1).clamp(0, 1).tolist()
            lines.append(Swap("low", kind, name, text.workload, text.index, tuple(overlap)))
    return lines


def planted(source, tensor, name="w8a16"):
    low = quantize(source, Recipe.parse(name), rng=np.random.default_rng(0))
    weight = low.packed[tensor]
    low.packed[tensor] = replace(weight, scales=weight.scales * 2)
    return low


@pytest.mark.parametrize(
    ("tensor", "culprits"),
    [
        ("model.layers.1.mlp.down_proj", ("down_proj", "layer 1")),
        ("model.layers.0.self_attn.v_proj", ("v_proj", "layer 0")),
    ],
)
def test_doubled_scales_of_one_tensor_are_named(source, tensor, culprits):
    found = attribution(explain(source, planted(source, tensor)), np.random.default_rng(0))
    assert found.culprits == culprits
    worst = max(cause.loss.value for cause in found.classes)
    others = [cause.loss.value for cause in found.classes if cause.loss.value < worst]
    # The other classes hold 8-bit weights without fault: a tenth of the planted loss is far above what they cost.
    assert max(others) < 0.1 * worst
    assert found.whole.value == pytest.approx(worst, rel=0.2)
    low = next(cause for cause in found.classes if cause.name == culprits[0]).loss.interval().low
    assert low > 0


def test_a_fault_of_the_head_is_the_heads(source):
    low = planted(source, "lm_head")
    low.packed["model.embed_tokens"] = low.packed["lm_head"]
    found = attribution(explain(source, low), np.random.default_rng(0))
    assert found.culprits[0] == "head"
    assert sum(cause.loss.value for cause in found.layers) < 0.1 * found.whole.value


def test_inputs_and_clipping_are_told_apart(source):
    rng = np.random.default_rng(0)
    near = attribution(explain(source, quantize(source, Recipe.parse("w4a8"), rng=rng)), rng)
    assert near.clipping.value == 0.0  # nothing lies outside of a range that the largest weight set
    assert near.inputs.value != 0.0
    total = near.inputs.value + sum(cause.loss.value for cause in near.classes) + near.unexplained.value
    assert total == pytest.approx(near.whole.value, abs=1e-12)
    assert near.clipping.value + near.resolution.value + near.inputs.value == pytest.approx(near.whole.value, abs=1e-12)

    low, form = quantize(source, Recipe.parse("w6a16"), rng=rng), get_format("w6a16")
    for name in low.packed:
        if "layers" in name:
            low.packed[name] = form.encode(source.tensor(f"{name}.weight"), 0.3)
    harsh = attribution(explain(source, low), rng)
    assert harsh.clipping.value > 5 * abs(harsh.resolution.value)  # 6 bits have steps enough; the range was the fault
    assert harsh.inputs.value == 0.0


def test_keys_and_values_are_a_cause_of_their_own(source):
    """Beside 8-bit weights without fault."""
    low = quantize(source, Recipe.parse("w8a8"), rng=np.random.default_rng(0))
    found = attribution(explain(source, low, "fp8"), np.random.default_rng(0))
    assert found.kv.value > 0
    assert found.kv.value == pytest.approx(found.whole.value, rel=0.3)
    parts = found.inputs.value + found.kv.value + sum(cause.loss.value for cause in found.classes)
    assert parts + found.unexplained.value == pytest.approx(found.whole.value, abs=1e-12)
    assert f"| keys and values | {100 * found.kv.value:.2f} (" in attribution_markdown(found)


@pytest.mark.parametrize("kv", [None, "bf16", "f32"])
def test_keys_and_values_in_16_bits_cost_nothing(source, kv):
    low = quantize(source, Recipe.parse("w4a8"), rng=np.random.default_rng(0))
    base = quantize(source, Recipe.parse("bf16"), rng=np.random.default_rng(0))
    asked = [(kind, name, form.name) for kind, name, _, form in with_kv(swaps(source, base, low), kv)]
    assert asked == [(kind, name, "bf16") for kind, name, _ in swaps(source, base, low)]
    assert attribution(explain(source, low), np.random.default_rng(0)).kv.value == 0


def test_methods_that_fold_scales_are_refused(source):
    base = quantize(source, Recipe.parse("bf16"), rng=np.random.default_rng(0))
    folded = replace(base, tensors={name: tensor * 2 for name, tensor in base.tensors.items()})
    with pytest.raises(UsageError, match="without -awq or -smooth"):
        list(swaps(source, base, folded))


def lines_of(losses, texts=6, tokens=20):
    """Lines with given mean overlaps, the same noise in all of them."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.05, (texts, tokens))
    return [
        Swap("f", kind, name, "code", i, tuple((overlap + noise[i]).tolist()))
        for (kind, name), overlap in losses.items()
        for i in range(texts)
    ]


def test_losses_are_differences_paired_by_text():
    overlaps = {("base", ""): 0.8, ("whole", ""): 0.7, ("class", "k"): 0.76, ("class", "head"): 0.79}
    overlaps["layers", "layer 0"] = 0.72
    found = attribution(lines_of(overlaps), np.random.default_rng(0))
    assert found.whole.value == pytest.approx(0.1)
    assert [cause.loss.value for cause in found.classes] == pytest.approx([0.04, 0.01])
    assert found.unexplained.value == pytest.approx(0.05)
    # The noise is the same on both sides of every difference: paired, it is gone.
    interval = found.unexplained.interval()
    assert (interval.low, interval.high) == pytest.approx((0.05, 0.05))
    assert found.base.interval().high - found.base.interval().low > 0.001
    record = json.loads(json.dumps(attribution_json(found)))
    assert record["classes"]["k"]["value"] == pytest.approx(0.04)
    section = attribution_markdown(found)
    assert "| k | 4.00 (4.00 to 4.00) |" in section
    assert "Most by k, and in layer 0" in section


def test_an_unfinished_attribution_is_none():
    overlaps = {("base", ""): 0.8, ("whole", ""): 0.7, ("class", "k"): 0.76, ("layers", "layer 0"): 0.72}
    lines = lines_of(overlaps)
    assert [is_whole(some) for some in (lines, lines[:-1], lines[:12])] == [True, False, False]
    with pytest.raises(UsageError, match="not finished"):
        attribution(lines[:-1], np.random.default_rng(0))
