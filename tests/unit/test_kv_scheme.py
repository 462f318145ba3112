"""A folder that asks for 8-bit float keys and values: its scales, and where a model's scales came from (U70)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from safetensors.torch import load_file, save_file

from bitdraft.errors import ModelFileError, UsageError
from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.kv_scales import LARGEST
from bitdraft.quantize.command import quantize_folder
from bitdraft.quantize.load import Source, load_model, open_source
from bitdraft.types import Feed

TEXTS = [f"hello world {i} " * 6 for i in range(30)]


def encoded(source: Source) -> list[list[int]]:
    return [source.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(name="source")
def opened(tmp_path: Path) -> Source:
    sizes = {"hidden_size": 64, "mlp_size": 128, "head_dim": 16, "num_layers": 3}
    return open_source(str(write_folder(tmp_path / "model", config("qwen2", **sizes))))


@pytest.fixture(name="folder")
def written(source: Source, tmp_path: Path) -> Path:
    quantize_folder(source, Recipe.parse("w8a16"), tmp_path / "out", seed=0, calibration=encoded(source), kv="fp8")
    return tmp_path / "out"


def loaded(folder: Path, recipe: str = "stored", kv: str | None = None, texts: bool = False) -> CachedModel:
    source = open_source(str(folder))
    ids = encoded(source) if texts else None
    return load_model(source, Recipe.parse(recipe), kv_tokens=640, rng=np.random.default_rng(0), kv=kv, calibration=ids)


def change(folder: Path, value: float | None) -> None:
    """Set all scales of keys and values of a folder, or remove them."""
    shard = next(path for path in folder.glob("model-*") if "k_scale" in str(load_file(path).keys()))
    tensors = load_file(shard)
    kept = {n: t if not n.endswith("_scale") else torch.full_like(t, value or 0.0) for n, t in tensors.items()}
    save_file({n: t for n, t in kept.items() if value is not None or not n.endswith("_scale")}, shard)


def test_scales_put_the_largest_number_that_was_seen_in_the_middle_of_the_range(folder: Path) -> None:
    """One scale for a layer's keys and one for its values: those of all heads, as a run of the same text shows them."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (settings["num_bits"], settings["type"], settings["strategy"]) == (8, "float", "tensor")
    checkpoint = open_checkpoint(folder)
    model = loaded(folder, kv="f32")
    source = open_source(str(folder))
    largest = torch.zeros(3, 2)
    for text in TEXTS:
        ids = source.tokenizer.encode(text)
        model.hidden([Feed(0, ids, 0, len(ids))])
        for i, layer in enumerate(model.pool.layers):
            largest[i] = torch.maximum(largest[i], torch.tensor([layer.keys.abs().max(), layer.values.abs().max()]))
        model.release(0)
    for i in range(3):
        scales = checkpoint.cache_scales(i)  # type: ignore[attr-defined]
        assert all(scale.shape == (1,) for scale in scales.values())
        found = torch.cat([scales["k"], scales["v"]]) * LARGEST
        assert torch.allclose(found, largest[i], rtol=1e-4)


@pytest.mark.parametrize("kv", [None, "fp8"])
def test_a_folders_scales_are_used_without_being_asked_for(folder: Path, kv: str | None) -> None:
    model = loaded(folder, kv=kv)  # without a text to find others from
    assert model.pool.format.name == "fp8"
    assert model.kv_scales_from == "folder"
    scales = open_checkpoint(folder).cache_scales(1)  # type: ignore[attr-defined]
    key_scales = model.pool.layers[1].key_scales
    assert key_scales is not None
    assert torch.equal(key_scales, scales["k"].expand_as(key_scales))


def test_another_format_of_keys_and_values_can_still_be_asked_for(folder: Path) -> None:
    assert loaded(folder, kv="bf16").kv_scales_from is None
    assert loaded(folder, "f32").pool.format.name == "f32"
    assert loaded(folder, kv="int8").pool.format.name == "int8"


def test_u70_scales_of_one_are_not_called_calibrated(folder: Path) -> None:
    change(folder, 1.0)
    assert loaded(folder).pool.format.name == "bf16"  # not by default
    assert loaded(folder, kv="fp8", texts=True).kv_scales_from == "text"
    with pytest.raises(UsageError, match="without a text"):
        loaded(folder, kv="fp8")
    decoder = loaded(folder).decoder
    plain = CachedModel(decoder, kv_tokens=64, vocab_size=300, kv=KV_FORMATS["fp8"])
    assert plain.kv_scales_from == "none"
    ones = [(torch.ones(heads), torch.ones(heads)) for heads in [decoder.config.num_kv_heads] * 3]
    for given in (None, "folder"):
        model = CachedModel(
            decoder, kv_tokens=64, vocab_size=300, kv=KV_FORMATS["fp8"], kv_scales=ones, kv_scales_from=given
        )
        assert model.kv_scales_from == "none"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_u70_scales_that_are_none_are_refused_by_name(folder: Path, value: float) -> None:
    change(folder, value)
    with pytest.raises(ModelFileError, match=r"k_scale' is \[.*--kv bf16"):
        loaded(folder)


def test_u70_a_folder_that_lost_its_scales_falls_back_and_says_so(folder: Path) -> None:
    change(folder, None)
    assert loaded(folder).pool.format.name == "bf16"
    assert loaded(folder, kv="fp8", texts=True).kv_scales_from == "text"


def test_what_no_folder_can_ask_for_is_refused_before_any_work(source: Source, tmp_path: Path) -> None:
    recipe = Recipe.parse("w8a16")
    with pytest.raises(UsageError, match="no words for it"):
        quantize_folder(source, recipe, tmp_path / "out", seed=0, calibration=encoded(source), kv="int4")
    with pytest.raises(UsageError, match="calibration set has"):
        quantize_folder(source, recipe, tmp_path / "out", seed=0, calibration=encoded(source)[:1], kv="fp8")
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_in_16_bits_can_ask_for_it_too(source: Source, tmp_path: Path) -> None:
    quantize_folder(source, Recipe.parse("bf16"), tmp_path / "plain", seed=0, calibration=encoded(source), kv="fp8")
    assert loaded(tmp_path / "plain", "bf16").kv_scales_from == "folder"


def test_an_interrupted_run_is_resumed_with_the_same_kv(source: Source, tmp_path: Path) -> None:
    def run(folder: str, kv: str | None, **more: bool) -> None:
        quantize_folder(
            source, Recipe.parse("w8a16"), tmp_path / folder, seed=0, calibration=encoded(source), kv=kv, **more
        )

    run("whole", "fp8")
    (tmp_path / "whole").rename(tmp_path / "kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bitdraft.quantize.command.quantize_ends", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run("again", "fp8")
    with pytest.raises(UsageError, match="kv"):
        run("again", None, resume=True)
    run("again", "fp8", resume=True)
    for i in range(3):
        a, b = (open_checkpoint(tmp_path / name).cache_scales(i) for name in ("kept", "again"))  # type: ignore[attr-defined]
        assert a == b
