"""Quantisation: statistics, AWQ's scales and clipping, and whole checkpoints."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from torch import Tensor

from bitdraft.errors import FormatError, ModelFileError, NumericsError, UsageError
from bitdraft.formats import KV_FORMATS, Recipe, get_format
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import Checkpoint, Weights, open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.quantize import awq, calibrate
from bitdraft.quantize.awq import READERS, fold_layer
from bitdraft.quantize.calibrate import MAX_TOKENS, MIN_TOKENS, ActivationStats, collect, count_tokens
from bitdraft.quantize.pipeline import check_layers, quantize
from bitdraft.quantize.rounding import best_scale, clipped, nearest
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


def test_statistics_are_those_of_all_rows_however_they_arrive() -> None:
    x = normal(100, 64)
    for pieces in ([100], [1] * 100, [37, 0, 63]):
        stats = ActivationStats(200, 32, rng())
        for part in torch.split(x, pieces):
            stats.observe(3, "down", part)
        torch.testing.assert_close(stats.mean_magnitude(3, "down"), x.abs().mean(0))
        torch.testing.assert_close(stats.products(3, "down"), products(x, 32), rtol=1e-4, atol=1e-4)
        assert torch.equal(stats.rows(3, "down"), x)


def test_kept_rows_do_not_depend_on_the_pieces_they_arrive_in() -> None:
    x = normal(100, 32)
    kept = []
    for pieces in ([100], [1] * 100, [50, 50]):
        stats = ActivationStats(20, 32, rng(4))
        for part in torch.split(x, pieces):
            stats.observe(0, "o", part)
        kept.append(stats.rows(0, "o"))
    assert kept[0].shape == (20, 32)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept[0], kept[2])


def test_every_row_is_kept_equally_often() -> None:
    """40 rows in pieces of 7, 10 kept, 400 times: each is kept 100 times in the mean, with a deviation of 8.7."""
    x = torch.arange(40.0)[:, None].expand(40, 32).contiguous()
    counts = torch.zeros(40)
    for seed in range(400):
        stats = ActivationStats(10, 32, rng(seed))
        for part in torch.split(x, 7):
            stats.observe(0, "qkv", part)
        kept = stats.rows(0, "qkv")[:, 0].long()
        assert len(kept.unique()) == 10
        counts[kept] += 1
    assert counts.min() > 100 - 4 * 8.7
    assert counts.max() < 100 + 4 * 8.7


def test_what_was_not_observed_is_an_error_not_a_rounding_to_nearest() -> None:
    stats = ActivationStats(10, 32, rng())
    stats.observe(0, "qkv", normal(5, 32))
    for ask in (stats.mean_magnitude, stats.products, stats.rows):
        with pytest.raises(UsageError, match="layer 1, qkv: no activations were observed"):
            ask(1, "qkv")


def test_activations_that_are_not_numbers_are_an_error() -> None:
    x = normal(5, 32)
    x[2, 3] = torch.nan
    with pytest.raises(NumericsError, match="layer 7, down: the model's activations are NaN"):
        ActivationStats(10, 32, rng()).observe(7, "down", x)


def test_a_calibration_set_is_read_up_to_its_limit() -> None:
    assert count_tokens([[1] * MIN_TOKENS]) == MIN_TOKENS
    assert count_tokens([[1] * MAX_TOKENS, [2] * 10]) == MAX_TOKENS
    for short in ([], [[]], [[1] * (MIN_TOKENS - 1)]):
        with pytest.raises(UsageError, match=f"has {sum(map(len, short))} tokens.*at least {MIN_TOKENS}"):
            count_tokens(short)


def test_collecting_sees_every_token_once_in_its_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in chunks, texts longer than the context and a set longer than the limit: as if each window ran alone."""
    source = checkpoint(tmp_path)
    decoder = Decoder(prepare_model(quantize(source, Recipe.parse("f32"), rng=rng())))
    long = [int(i) for i in rng(9).integers(0, 256, 300)]
    windows = [TEXTS[0], long[:128], long[128:256], long[256:], TEXTS[1][:20]]
    monkeypatch.setattr(calibrate, "MAX_TOKENS", sum(map(len, windows)))
    monkeypatch.setattr(calibrate, "MIN_TOKENS", 64)
    monkeypatch.setattr(calibrate, "_CHUNK", 50)
    calls: list[tuple[int, int | None]] = []
    stats = collect(
        decoder,
        [TEXTS[0], [], long, TEXTS[1], TEXTS[2]],
        keep=1000,
        group_size=32,
        rng=rng(),
        progress=lambda done, total, _: calls.append((done, total)),
    )
    assert calls[-1] == (410, 410)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    alone = ActivationStats(1000, 32, rng())
    for window in windows:
        model = CachedModel(decoder, kv_tokens=128, vocab_size=300, kv=KV_FORMATS["f32"])
        model.hidden([Feed(0, window, 0, 0)], observe=alone.observe)
    for layer in (0, 1):
        for name in READERS:
            torch.testing.assert_close(stats.rows(layer, name), alone.rows(layer, name), rtol=1e-4, atol=1e-4)


# --- AWQ on one weight ---


def test_scales_lower_the_error_of_salient_channels() -> None:
    form = get_format("w4a16")
    weight, x = salient_problem()
    scale = best_scale([weight], x, x.abs().mean(0), form)
    before = (x @ (form.round(weight) - weight).T).square().mean()
    after = (x / scale @ (form.round(weight * scale) - weight * scale).T).square().mean()
    assert after < before / 4
    assert scale[::30].min() > scale[1::30].max()


def test_even_channels_are_left_as_they_are() -> None:
    x = normal(300, 128)
    scale = best_scale([normal(64, 128, seed=1)], x, torch.ones(128), get_format("w4a16"))
    assert torch.equal(scale, torch.ones(128))


def test_a_dead_channel_gives_finite_scales() -> None:
    x = normal(50, 64)
    x[:, 5] = 0
    scale = best_scale([normal(8, 64, seed=1)], x, x.abs().mean(0), get_format("w4a16-asym"))
    assert bool((scale.isfinite() & (scale > 0)).all())


@pytest.mark.parametrize("name", ["w4a16", "w4a16-asym", "w4a8-g64", "w3a16", "w2a16-asym"])
def test_clipping_never_costs_and_mostly_gains(name: str) -> None:
    """Of every group's error `d^T X^T X d`, which is what clipping is about: range 1.0 is among the tried."""
    form = get_format(name)
    weight, x = salient_problem()
    moments = products(x, form.group_size or 0)

    def errors(values: Tensor) -> Tensor:
        off = (values - weight).view(64, -1, form.group_size or 0).transpose(0, 1)
        return ((off @ moments) * off).sum(-1)

    before, after = errors(form.round(weight)), errors(form.decode(clipped(weight, moments, form)))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert after.sum() < 0.97 * before.sum()


def test_clipping_in_blocks_is_clipping_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    form = get_format("w4a16")
    weight, x = salient_problem()
    whole = clipped(weight, products(x, 32), form)
    monkeypatch.setattr("bitdraft.quantize.rounding._BLOCK", 7 * 128)
    parts = clipped(weight, products(x, 32), form)
    assert torch.equal(whole.codes, parts.codes)
    assert whole.scales is not None
    assert parts.scales is not None
    assert torch.equal(whole.scales, parts.scales)


# --- AWQ on a model ---


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_folding_changes_nothing_but_the_rounding(
    family: str, kv_heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32 the folded model says what the original says: through norms, shared value heads, biases and the gate."""
    monkeypatch.setattr(awq, "best_scale", lambda weights, rows, magnitude, form: magnitude.pow(0.7))
    source = Altered(checkpoint(tmp_path, family, num_kv_heads=kv_heads), with_salient_channels)
    plain = quantize(source, Recipe.parse("f32"), rng=rng())
    stats = collect(Decoder(prepare_model(plain)), TEXTS, keep=64, group_size=32, rng=rng())
    folded = Weights(plain.config, dict(plain.packed), dict(plain.tensors))
    for layer in range(plain.config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors = {name.removeprefix(prefix): t for name, t in plain.tensors.items() if name.startswith(prefix)}
        for readers in READERS.values():
            tensors |= {f"{r}.weight": plain.packed[prefix + r].codes for r in readers}
        scales = fold_layer(tensors, stats, layer, plain.config, get_format("w4a16"))
        assert set(scales) == set(READERS)
        assert all(scale.max() > 1.5 * scale.min() for scale in scales.values())
        for name, tensor in tensors.items():
            linear = prefix + name.removesuffix(".weight")
            if linear in folded.packed:
                folded.packed[linear] = nearest(tensor, get_format("f32"))
            else:
                folded.tensors[prefix + name] = tensor
    expected = logits(plain)
    torch.testing.assert_close(logits(folded), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_clipping_sees_the_inputs_as_they_are_after_scaling() -> None:
    """With scales that are powers of two everything is exact: products / (s s') are the products of x / s."""
    form, stats = get_format("w4a16"), ActivationStats(8, 32, rng())
    shapes = {"self_attn.k_proj": 32, "self_attn.v_proj": 32, "mlp.gate_proj": 96, "mlp.up_proj": 96}
    tensors, scales, inputs = {}, {}, {}
    for i, (name, readers) in enumerate(READERS.items()):
        K = 96 if name == "down" else 64
        inputs[name] = normal(50, K, seed=i)
        stats.observe(0, name, inputs[name])
        scales[name] = 2.0 ** torch.from_numpy(rng(i).integers(-4, 5, K)).float()
        tensors |= {f"{r}.weight": normal(shapes.get(r, 64), K, seed=j) for j, r in enumerate(readers)}
    packed = awq.round_layer(tensors, scales, stats, 0, form)
    for name, readers in READERS.items():
        moments = products(inputs[name] / scales[name], 32)
        for reader in readers:
            weight = tensors[f"{reader}.weight"]
            expected = nearest(weight, form) if reader in awq.UNCLIPPED else clipped(weight, moments, form)
            assert torch.equal(packed[reader].codes, expected.codes), reader


def test_awq_beats_nearest_on_a_model_with_salient_channels(tmp_path: Path) -> None:
    """Mean squared error of the logits, on ids that calibration did not see."""
    source = Altered(checkpoint(tmp_path), with_salient_channels)
    exact = logits(quantize(source, Recipe.parse("f32"), rng=rng()))

    def error(recipe: str) -> float:
        weights = quantize(source, Recipe.parse(recipe), calibration=TEXTS, rng=rng())
        return float((logits(weights) - exact).square().mean())

    assert error("w4a16-awq") < 0.4 * error("w4a16")


def test_awq_is_repeatable_and_packs_in_its_format(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)
    recipe = Recipe.parse("w4a16-asym-awq")
    first, second = (quantize(source, recipe, calibration=TEXTS, rng=rng(3)) for _ in range(2))
    plain = quantize(source, Recipe.parse("w4a16-asym"), rng=rng())
    assert first.nbytes == plain.nbytes
    assert list(first.packed) == list(plain.packed)
    for name, packed in first.packed.items():
        assert torch.equal(packed.codes, second.packed[name].codes)
        assert packed.format == plain.packed[name].format
    assert not torch.equal(
        first.packed["model.layers.0.mlp.down_proj"].codes, plain.packed["model.layers.0.mlp.down_proj"].codes
    )


def test_awq_without_texts_or_with_too_few_is_refused_before_any_work(tmp_path: Path) -> None:
    source = Altered(checkpoint(tmp_path))
    with pytest.raises(UsageError, match="w4a16-awq needs a calibration set"):
        quantize(source, Recipe.parse("w4a16-awq"), rng=rng())
    with pytest.raises(UsageError, match=r"20 tokens in 2 texts\. Expected at least 512"):
        quantize(source, Recipe.parse("w4a16-awq"), rng=rng(), calibration=[[1] * 10] * 2)
    assert source.read == []


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
    for layer, shape in shapes.items():
        form = head if layer == "lm_head" else recipe.format
        assert weights.packed[layer].shape == shape
        assert torch.equal(form.decode(weights.packed[layer]), form.round(source.tensor(f"{layer}.weight")))
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
    for name in ("bf16", "w8a8", "w4a16", "w4a16-g32-asym-awq"):
        check_layers(checkpoint(tmp_path), Recipe.parse(name))
