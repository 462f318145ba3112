"""Formats of keys and values from their name to a loaded model."""

from pathlib import Path

import model_files
import numpy as np
import pytest
import torch

from bitdraft.engine.curve import CurveKey
from bitdraft.errors import FormatError, UsageError
from bitdraft.formats import KV_FORMATS, Recipe, get_kv_format
from bitdraft.measure.config import MeasureConfig
from bitdraft.models.cached import CachedModel
from bitdraft.quantize.load import load_model, open_source
from bitdraft.serve.generate import GenerateConfig, load
from bitdraft.types import Feed, SamplingParams

TEXT = [list(range(40)), list(range(100, 140))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_files.write_folder(tmp_path_factory.mktemp("models") / "tiny", model_files.config())


def loaded(
    folder: Path, kv: str | None, calibration: list[list[int]] | None = None, recipe: str = "bf16"
) -> CachedModel:
    source = open_source(str(folder), use_cache=False)
    rng = np.random.default_rng(0)
    return load_model(source, Recipe.parse(recipe), kv_tokens=128, rng=rng, calibration=calibration, kv=kv)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(FormatError, match=r"'int5'\. Expected one of: f32, bf16, int8, fp8, int8-kc, int4"):
        get_kv_format("int5")
    with pytest.raises(FormatError, match="Expected one of"):
        MeasureConfig("a", "b", "bf16", ("bf16",), ("code",), 1, (1,), SamplingParams(max_tokens=8), kv="int5")


@pytest.mark.parametrize("kind", KV_FORMATS)
def test_a_model_is_loaded_with_it_and_its_step_costs_are_its_own(kind: str, folder: Path) -> None:
    model = loaded(folder, kind, TEXT)
    assert model.pool.format == KV_FORMATS[kind]
    assert bool(model.forward([Feed(0, TEXT[0], 0, 0)]).isfinite().all())
    assert CurveKey.of(model, folder, "bf16").kv == kind


def test_without_a_name_it_follows_the_weights(folder: Path) -> None:
    assert loaded(folder, None).pool.format.name == "bf16"
    assert loaded(folder, None, recipe="f32").pool.format.name == "f32"


def test_fp8_finds_its_scales_in_a_text_and_says_if_there_is_none(folder: Path) -> None:
    with pytest.raises(UsageError, match="without a text"):
        loaded(folder, "fp8")
    model = loaded(folder, "fp8", TEXT)
    exact = loaded(folder, "f32")
    exact.forward([Feed(0, TEXT[0] + TEXT[1], 0, 80)])
    for kv, plain in zip(model.pool.layers, exact.pool.layers, strict=True):
        for scale_J, written in ((kv.key_scales, plain.keys), (kv.value_scales, plain.values)):
            assert scale_J is not None
            torch.testing.assert_close(scale_J * 224, written.abs().amax((0, 2, 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_generate_runs_target_and_draft_in_it(kind: str, folder: Path) -> None:
    config = GenerateConfig(str(folder), str(folder), "bf16", "w4a16", 3, 0.0, 128, kv=kind)
    generator = load(config, ["some text to calibrate on"], None, False)
    assert generator.engine.target.pool.format.name == kind
    assert generator.engine.drafter._model.pool.format.name == kind
    assert len(list(generator.run([1, 2, 3], SamplingParams(temperature=0, max_tokens=5)))) > 0
