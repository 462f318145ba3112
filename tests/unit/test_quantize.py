"""Quantisation: statistics, scales and clipping, and whole checkpoints."""

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from torch import Tensor

from bitdraft.errors import FormatError, ModelFileError, NumericsError, UsageError
from bitdraft.formats import KV_FORMATS, METHODS, Recipe, get_format
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import Checkpoint, Weights, open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.quantize import calibrate, layer, pipeline
from bitdraft.quantize.awq import awq_scale
from bitdraft.quantize.calibrate import MIN_TOKENS, Calibration, LayerInputs, count_tokens, windows
from bitdraft.quantize.fold import READERS, best_scale
from bitdraft.quantize.pipeline import check_layers, quantize, quantize_layers
from bitdraft.quantize.rounding import clipped, nearest
from bitdraft.quantize.smooth import smooth_scale
from bitdraft.types import Feed

IDS = [int(i) for i in np.random.default_rng(0).integers(0, 256, 100)]
TEXTS = [[int(i) for i in np.random.default_rng(seed).integers(0, 256, 90)] for seed in range(8)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(rng(seed).standard_normal(shape, dtype=np.float32))


class Altered:
    """A checkpoint whose tensors pass through a function first, and which remembers what was read."""

    def __init__(self, source: Checkpoint, change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor) -> None:
        self._source, self._change = source, change
        self.read: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return self._change(name, self._source.tensor(name))


def checkpoint(folder: Path, family: str = "llama", **changes: Any) -> Checkpoint:
    return open_checkpoint(write_folder(folder / family, config(family, **changes)))


def with_salient_channels(name: str, tensor: Tensor) -> Tensor:
    """Numbers of the sizes that real models have: norms with a few channels ten times larger, sums of order one."""
    if name.endswith("layernorm.weight"):
        tensor = tensor.abs() + 0.1
        tensor[::11] *= 10
    elif tensor.ndim == 2:
        tensor = tensor / (4 * tensor.shape[1] ** 0.5)
    return tensor


def logits(weights: Weights, ids: Sequence[int] = IDS) -> Tensor:
    model = CachedModel(
        Decoder(prepare_model(weights)), kv_tokens=128, vocab_size=weights.config.vocab_size, kv=KV_FORMATS["f32"]
    )
    return model.forward([Feed(0, ids, 0, 0)])


def salient_problem() -> tuple[Tensor, Tensor]:
    """A weight [64, 128] and inputs [300, 128] with one channel in thirty that carries thirty times more."""
    x = normal(300, 128, seed=1)
    x[:, ::30] *= 30
    return normal(64, 128, seed=2), x


def products(x: Tensor, group_size: int) -> Tensor:
    grouped = x.view(len(x), -1, group_size).transpose(0, 1)
    return grouped.transpose(1, 2) @ grouped


# --- statistics ---


def all_rows(count: int) -> Tensor:
    return torch.arange(count)


def test_statistics_are_those_of_all_rows_however_they_arrive() -> None:
    x = normal(100, 64)
    chosen = torch.tensor([0, 7, 36, 37, 99])
    for pieces in ([100], [1] * 100, [37, 0, 63]):
        stats = LayerInputs(3, {"down": 32}, chosen)
        for part in torch.split(x, pieces):
            stats.observe("down", part)
        torch.testing.assert_close(stats.mean_magnitude("down"), x.abs().mean(0))
        assert torch.equal(stats.largest("down"), x.abs().amax(0))
        torch.testing.assert_close(stats.products("down", 32), products(x, 32), rtol=1e-4, atol=1e-4)
        assert torch.equal(stats.rows("down"), x[chosen])


@pytest.mark.parametrize("size", [8, 32, 64])
def test_products_of_smaller_groups_are_parts_of_those_of_larger_ones(size: int) -> None:
    x = normal(50, 64)
    stats = LayerInputs(0, {"o": 64}, all_rows(50))
    stats.observe("o", x)
    torch.testing.assert_close(stats.products("o", size), products(x, size), rtol=1e-4, atol=1e-4)


def test_activations_that_are_not_numbers_are_an_error() -> None:
    x = normal(5, 32)
    x[2, 3] = torch.nan
    with pytest.raises(NumericsError, match="layer 7, down: the model's activations are NaN"):
        LayerInputs(7, {"down": 32}, all_rows(5)).observe("down", x)


def test_a_calibration_set_is_read_up_to_its_limit() -> None:
    assert count_tokens([[1] * MIN_TOKENS]) == MIN_TOKENS
    assert count_tokens([[1] * 600, [2] * 10], 605) == 605
    for empty in ([], [[]]):
        with pytest.raises(UsageError, match=r"the calibration set is empty\. Expected 512 tokens, 512 more"):
            count_tokens(empty)
    with pytest.raises(UsageError, match=r"has 500 tokens in 2 texts\. Expected 512 tokens, 12 more"):
        count_tokens([[1] * 400, [2] * 100])
    with pytest.raises(UsageError, match="100 calibration tokens were asked for"):
        count_tokens([[1] * 1000], 100)


def test_windows_are_whole_parts_of_all_texts_up_to_the_limit() -> None:
    texts = [list(range(i, i + 90)) for i in range(0, 3000, 100)]
    every = windows(texts, 10**6, 40, rng())
    assert [len(w) for w in every[:6]] == [40, 40, 10] * 2
    assert [token for w in every for token in w] == [token for text in texts for token in text]
    some = windows(texts, 500, 40, rng())
    assert sum(map(len, some)) == 500
    assert [w[0] for w in some] == sorted(w[0] for w in some)
    assert max(w[0] for w in some) > 1500
    assert sum(w in every for w in some) >= len(some) - 1
    assert some != windows(texts, 500, 40, rng(1))


@pytest.mark.parametrize("chunk", [64, 100, 10**6])
def test_every_layer_is_observed_on_what_the_model_below_it_says(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of several lengths, in chunks or all at once: as if each ran alone through the whole model."""
    monkeypatch.setattr(calibrate, "_CHUNK", chunk)
    source = checkpoint(tmp_path, "qwen2")
    weights = quantize(source, Recipe.parse("f32"), rng=rng())
    texts = [TEXTS[0], TEXTS[1][:20], TEXTS[2][:45], TEXTS[3][:1]]
    total = sum(map(len, texts))
    rows = Calibration(source, texts, get_format("f32"))
    assert rows.tokens == total
    alone: dict[tuple[int, str], list[Tensor]] = {}
    for text in texts:
        model = CachedModel(Decoder(prepare_model(weights)), kv_tokens=128, vocab_size=300, kv=KV_FORMATS["f32"])
        model.hidden([Feed(0, text, 0, 0)], observe=lambda i, name, x: alone.setdefault((i, name), []).append(x))
    for i in (0, 1):
        stats = LayerInputs(i, dict.fromkeys(READERS, 32), all_rows(total))
        rows.observe(i, weights, stats)
        rows.advance(i, weights)
        for name in READERS:
            torch.testing.assert_close(stats.rows(name), torch.cat(alone[i, name]), rtol=1e-4, atol=1e-4)


def test_a_pass_ends_when_its_observer_wants_no_more(tmp_path: Path) -> None:
    weights = quantize(checkpoint(tmp_path, "qwen2"), Recipe.parse("f32"), rng=rng())
    model = CachedModel(Decoder(prepare_model(weights)), kv_tokens=128, vocab_size=300, kv=KV_FORMATS["f32"])
    seen: list[tuple[int, str]] = []

    def observe(layer: int, name: str, _: Tensor) -> bool:
        seen.append((layer, name))
        return name == "down"

    model.hidden([Feed(0, TEXTS[0], 0, 0)], observe=observe)
    assert seen == [(0, name) for name in ("qkv", "o", "gate_up", "down")]


# --- scales and clipping of one weight ---


def test_scales_lower_the_error_of_salient_channels() -> None:
    form = get_format("w4a16")
    weight, x = salient_problem()
    scale = best_scale(awq_scale(x.abs().mean(0)), [(weight, form)], x)
    before = (x @ (form.round(weight) - weight).T).square().mean()
    after = (x / scale @ (form.round(weight * scale) - weight * scale).T).square().mean()
    assert after < before / 4
    assert scale[::30].min() > scale[1::30].max()


def test_smoothing_lowers_the_error_of_inputs_in_8_bits() -> None:
    form = get_format("w8a8")
    weight, x = salient_problem()
    scale = best_scale(smooth_scale(x.abs().amax(0), weight.abs().amax(0)), [(weight, form)], x)

    def error(scale: Tensor) -> Tensor:
        step = (x / scale).abs().amax(1, keepdim=True) / 127
        inputs = (x / scale / step).round() * step
        return (inputs @ form.round(weight * scale).T - x @ weight.T).square().mean()

    assert error(scale) < error(torch.ones(128)) / 4


def test_even_channels_are_left_as_they_are() -> None:
    x = normal(300, 128)
    scale = best_scale(awq_scale(torch.ones(128)), [(normal(64, 128, seed=1), get_format("w4a16"))], x)
    assert torch.equal(scale, torch.ones(128))


def test_a_scale_that_only_costs_is_not_taken() -> None:
    weight, x = salient_problem()
    scale = best_scale(lambda alpha: 1000.0 ** torch.arange(128) ** alpha, [(weight, get_format("w4a16"))], x)
    assert torch.equal(scale, torch.ones(128))


def test_a_dead_channel_gives_finite_scales() -> None:
    x, weight = normal(50, 64), normal(8, 64, seed=1)
    x[:, 5] = 0
    weight[:, 7] = 0
    for scale_of in (awq_scale(x.abs().mean(0)), smooth_scale(x.abs().amax(0), weight.abs().amax(0))):
        scale = best_scale(scale_of, [(weight, get_format("w4a8-asym"))], x)
        assert bool((scale.isfinite() & (scale > 0)).all())


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w4a8-g64", "w3a16", "w2a16-asym", "w8a8"])
@pytest.mark.parametrize("data", [True, False])
def test_clipping_never_costs_and_mostly_gains(name: str, data: bool) -> None:
    """Of every group's error `d^T X^T X d`, or `d^T d`, which clipping is about: range 1.0 is among the tried."""
    form = get_format(name)
    size = form.group_size or 128
    weight, x = salient_problem()
    moments = products(x, size) if data else None

    def errors(values: Tensor) -> Tensor:
        off = (values - weight).view(64, -1, size).transpose(0, 1)
        return ((off @ moments if moments is not None else off) * off).sum(-1)

    before, after = errors(form.round(weight)), errors(form.decode(clipped(weight, form, moments)))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert after.sum() < (0.97 if form.bits < 8 else 1.0001) * before.sum()


def test_clipping_in_blocks_is_clipping_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    form = get_format("w4a16")
    weight, x = salient_problem()
    whole = clipped(weight, form, products(x, 32))
    monkeypatch.setattr("bitdraft.quantize.rounding._BLOCK", 7 * 128)
    parts = clipped(weight, form, products(x, 32))
    assert torch.equal(whole.codes, parts.codes)
    assert whole.scales is not None
    assert parts.scales is not None
    assert torch.equal(whole.scales, parts.scales)


# --- methods on a model ---


CALIBRATED = [method for method in METHODS if method not in ("nearest", "clip")]


def named(method: str, width: str = "w4a8") -> Recipe:
    return Recipe.parse(width if method == "nearest" else f"{width}-{method}")


@pytest.mark.parametrize("method", ["awq", "smooth"])
@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 4), ("qwen2", 2), ("qwen3", 1)])
def test_folding_changes_nothing_but_the_rounding(
    method: str, family: str, kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing rounded the folded model says what the original says: through norms, value heads, biases, gate."""
    f32 = get_format("f32")
    monkeypatch.setattr(layer, "best_scale", lambda scale_of, *_: scale_of(0.7))
    monkeypatch.setattr(layer, "_output_error", lambda packed, *_: 0.0)
    source = Altered(checkpoint(tmp_path, family, num_kv_heads=kv_heads), with_salient_channels)
    plain = quantize(source, Recipe.parse("f32"), rng=rng())
    folded = quantize(source, Recipe("f32-folded", f32, method), calibration=TEXTS, rng=rng())  # type: ignore[arg-type]
    for name in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"):
        ratio = folded.packed[f"model.layers.1.{name}"].codes / plain.packed[f"model.layers.1.{name}"].codes
        assert ratio.max() > 1.2 * ratio.min()
    expected = logits(plain)
    torch.testing.assert_close(logits(folded), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("width", ["w3a8-asym"])
def test_outputs_on_the_calibration_set_are_never_worse_than_to_nearest(
    method: str, width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's inputs are those that its own method gives; of the same inputs and all rows of them.

    GPTQ's products are of inputs that are not rounded; with 8 bits those are near enough, 2 % say.
    """
    seen: list[tuple[dict[str, float], dict[str, float]]] = []
    original = layer.round_layer

    def both(tensors: dict[str, Tensor], forms: Any, recipe: Recipe, stats: LayerInputs, *rest: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(layer, "clipped", lambda weight, form, _: nearest(weight, form))
            plain = original(dict(tensors), forms, Recipe("plain", recipe.format, "nearest"), stats, *rest)
        made = original(tensors, forms, recipe, stats, *rest)
        seen.append((plain[1], made[1]))
        return made

    monkeypatch.setattr(pipeline, "round_layer", both)
    monkeypatch.setattr(pipeline, "KEPT_ROWS", 10**6)
    source = Altered(checkpoint(tmp_path), with_salient_channels)
    quantize(source, named(method, width), calibration=TEXTS, rng=rng())
    assert len(seen) == 2
    for plain, made in seen:
        for readers in READERS.values():
            before, after = (sum(errors[r] ** 2 for r in readers) for errors in (plain, made))
            assert after <= before * 1.02
        assert sum(made.values()) < sum(plain.values())


@pytest.mark.parametrize("method", ["clip", *CALIBRATED])
def test_every_method_beats_nearest_on_a_model_with_salient_channels(method: str, tmp_path: Path) -> None:
    """Mean squared error of the logits, on ids that calibration did not see. Measured: see the limits."""
    source = Altered(checkpoint(tmp_path), with_salient_channels)
    exact = logits(quantize(source, Recipe.parse("f32"), rng=rng()))

    def error(recipe: Recipe) -> float:
        weights = quantize(source, recipe, calibration=TEXTS, rng=rng())
        return float((logits(weights) - exact).square().mean())

    limit = {"clip": 1.0, "gptq": 0.6, "awq": 0.4, "awq-gptq": 0.4, "smooth": 0.6, "smooth-gptq": 0.5}[method]
    assert error(named(method)) < limit * error(named("nearest"))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_layers_of_different_widths_side_by_side(method: str, tmp_path: Path) -> None:
    """q, k and v of three widths and groups, a float among them, a head of its own: each is in its format."""
    source = Altered(checkpoint(tmp_path, "qwen2", hidden_size=64, head_dim=16), with_salient_channels)
    own = {
        "model.layers.0.self_attn.q_proj": "w3a8-asym",
        "model.layers.0.self_attn.k_proj": "w8a8",
        "model.layers.0.self_attn.v_proj": "w6a8-g64",
        "model.layers.0.mlp.up_proj": "bf16",
        "model.layers.1.mlp.down_proj": "stored",
        "lm_head": "w6a8",
    }
    base = named(method)
    recipe = Recipe(base.name, base.format, base.method, {name: get_format(form) for name, form in own.items()})
    weights = quantize(source, recipe, calibration=TEXTS, rng=rng())
    for name, packed in weights.packed.items():
        key = "lm_head" if name == "model.embed_tokens" else name
        assert packed.format == own.get(key, "w4a8"), name
    assert logits(weights).isfinite().all()
    stored = weights.packed["model.layers.1.mlp.down_proj"]
    assert torch.equal(stored.codes, source.packed("model.layers.1.mlp.down_proj.weight").codes)


@pytest.mark.parametrize("method", ["awq", "smooth-gptq"])
def test_a_method_is_repeatable_and_packs_as_its_format_says(method: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    recipe = named(method, "w4a8-asym")
    first, second = (quantize(source, recipe, calibration=TEXTS, rng=rng(3)) for _ in range(2))
    plain = quantize(source, Recipe.parse("w4a8-asym"), rng=rng())
    assert first.nbytes == plain.nbytes
    assert list(first.packed) == list(plain.packed)
    for name, packed in first.packed.items():
        other = plain.packed[name]
        assert torch.equal(packed.codes, second.packed[name].codes)
        assert (packed.format, packed.codes.shape, packed.codes.dtype) == (
            other.format,
            other.codes.shape,
            other.codes.dtype,
        )
        for ours, theirs in ((packed.scales, other.scales), (packed.zeros, other.zeros)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    assert not torch.equal(
        first.packed["model.layers.0.mlp.down_proj"].codes, plain.packed["model.layers.0.mlp.down_proj"].codes
    )


@pytest.mark.parametrize("method", CALIBRATED)
def test_a_method_without_texts_or_with_too_few_is_refused_before_any_work(method: str, tmp_path: Path) -> None:
    source = Altered(checkpoint(tmp_path))
    with pytest.raises(UsageError, match=f"w4a8-{method} needs a calibration set"):
        quantize(source, named(method), rng=rng())
    with pytest.raises(UsageError, match=r"20 tokens in 2 texts\. Expected 512 tokens, 492 more"):
        quantize(source, named(method), rng=rng(), calibration=[[1] * 10] * 2)
    with pytest.raises(UsageError, match="set is empty"):
        quantize_layers(source, named(method), rng=rng(), calibration=[])
    assert source.read == []


@pytest.mark.parametrize("method", ["clip", "awq", "smooth-gptq"])
def test_going_on_at_a_layer_gives_the_same_layers(method: str, tmp_path: Path) -> None:
    source = Altered(checkpoint(tmp_path, num_layers=3), with_salient_channels)
    whole = list(quantize_layers(source, named(method), rng=rng(5), calibration=TEXTS))
    source.read.clear()
    rest = list(
        quantize_layers(
            source,
            named(method),
            rng=rng(5),
            calibration=TEXTS,
            first=2,
            finished=lambda i: (whole[i].packed, whole[i].tensors),
        )
    )
    assert [done.number for done in rest] == [2]
    assert {name.split(".")[2] for name in source.read if ".layers." in name} == {"2"}
    for name, packed in rest[0].packed.items():
        assert torch.equal(packed.codes, whole[2].packed[name].codes)
    for name, tensor in rest[0].tensors.items():
        assert torch.equal(tensor, whole[2].tensors[name])
    assert rest[0].errors == whole[2].errors


@pytest.mark.parametrize("method", ["nearest", "awq", "gptq"])
def test_one_layer_at_a_time_is_in_memory(method: str, tmp_path: Path) -> None:
    """No float32 weight of a layer is alive when the next layer is read, however many there are."""
    alive: dict[str, weakref.ref[Tensor]] = {}
    most = 0

    def watched(name: str, tensor: Tensor) -> Tensor:
        nonlocal most
        if ".layers." in name:
            layers = {other.split(".")[2] for other, ref in alive.items() if ref() is not None}
            most = max(most, len(layers | {name.split(".")[2]}))
            alive[name] = weakref.ref(tensor)
        return tensor

    source = Altered(checkpoint(tmp_path, num_layers=4), watched)
    for done in quantize_layers(source, named(method), rng=rng(), calibration=TEXTS):
        assert all("proj.weight" not in name for name in done.tensors)
    matrices = [name for name, ref in alive.items() if ref() is not None and "proj.weight" in name]
    assert len({name.split(".")[2] for name in matrices}) <= 1
    # Norms that go into the result are tensors of the file themselves, and stay as long as their layer does.
    assert most <= 2


# --- whole checkpoints ---


@pytest.mark.parametrize("name", ["f32", "bf16", "fp8_e5m2", "w8a8", "w4a16", "w3a8-asym"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_layer_is_rounded_by_its_format(name: str, tied: bool, tmp_path: Path) -> None:
    source, recipe = checkpoint(tmp_path, "qwen2", tied_head=tied), Recipe.parse(name)
    calls: list[tuple[int, int | None, str]] = []
    weights = quantize(source, recipe, rng=rng(), progress=lambda *call: calls.append(call))
    head = get_format(recipe.format.head)
    shapes = source.config.linear_shapes()
    assert set(weights.packed) == {*shapes, "model.embed_tokens"}
    for linear, shape in shapes.items():
        form = head if linear == "lm_head" else recipe.format
        assert weights.packed[linear].shape == shape
        assert torch.equal(form.decode(weights.packed[linear]), form.round(source.tensor(f"{linear}.weight")))
    assert (weights.packed["model.embed_tokens"] is weights.packed["lm_head"]) == tied
    table = source.tensor("model.embed_tokens.weight")
    assert torch.equal(head.decode(weights.packed["model.embed_tokens"]), head.round(table))
    assert len(weights.tensors) == 2 * 5 + 1  # two layers: two norms, three biases; and the last norm
    assert all(torch.equal(tensor, source.tensor(key)) for key, tensor in weights.tensors.items())
    assert calls == [(i, 3, f"quantising to {recipe.name}") for i in (1, 2, 3)]


def test_layers_that_do_not_fit_are_all_named_before_any_work(tmp_path: Path) -> None:
    source = Altered(checkpoint(tmp_path))
    with pytest.raises(FormatError) as refused:
        quantize(source, Recipe.parse("w4a16-g64"), rng=rng())
    lines = str(refused.value).splitlines()
    reads_hidden = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    assert len(lines) == len(reads_hidden)  # down_proj reads 64 inputs, and the head is 8-bit
    for line, kind in zip(lines, reads_hidden, strict=True):
        assert f"model.layers.0.{'mlp' if kind in ('gate_proj', 'up_proj') else 'self_attn'}.{kind}" in line
        assert "(2 layers): 32 inputs do not divide into groups of 64" in line
        assert line.endswith("use -g32.")
    assert source.read == []


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"]
)
def test_a_weight_that_is_not_a_number_is_named(bad: float, name: str, tmp_path: Path) -> None:
    def broken(read: str, tensor: Tensor) -> Tensor:
        if read == name:
            tensor.view(-1)[5:7] = bad
        return tensor

    with pytest.raises(ModelFileError, match=f"{name} holds 2 values that are NaN or infinite"):
        quantize(Altered(checkpoint(tmp_path), broken), Recipe.parse("w8a8"), rng=rng())


def test_weights_too_large_to_be_summed_are_still_numbers(tmp_path: Path) -> None:
    source = Altered(checkpoint(tmp_path), lambda name, t: t.abs() * 1e36 if "up_proj" in name else t)
    assert bool(source.tensor("model.layers.0.mlp.up_proj.weight").sum().isinf())
    quantize(source, Recipe.parse("w8a8"), rng=rng())


def test_check_layers_accepts_what_fits(tmp_path: Path) -> None:
    for name in ("bf16", "w8a8", "w4a16", "w4a16-g32-asym-awq", "w8a8-smooth-gptq"):
        check_layers(checkpoint(tmp_path), Recipe.parse(name))


def test_a_format_for_a_layer_that_is_not_there_is_refused(tmp_path: Path) -> None:
    form = get_format("w4a16")
    for name in ("model.layers.2.mlp.up_proj", "model.layers.0.mlp.up_proj.weight", "head"):
        recipe = Recipe("mixed", form, "nearest", {name: form, "lm_head": form})
        with pytest.raises(FormatError, match=f"mixed has a format for '{name}', and the model has no such"):
            check_layers(checkpoint(tmp_path), recipe)
