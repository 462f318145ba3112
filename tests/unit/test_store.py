"""Repacked weights on disk: what comes back is what was kept, or nothing does."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import config, write_folder, write_gguf

from bitdraft.formats import Recipe
from bitdraft.models.cached import CachedModel
from bitdraft.models.decoder import Decoder, PreparedModel
from bitdraft.ops.machine import Slab
from bitdraft.quantize.load import Source, load_model, open_source
from bitdraft.quantize.store import Store, key_of
from bitdraft.types import Feed

FORMATS = ["bf16", "fp8_e4m3", "w8a8", "w4a8", "w4a16-g64-asym", "w3a8", "w2a16"]


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(name="source")
def opened(tmp_path: Path) -> Source:
    return open_source(
        str(write_folder(tmp_path / "model", config("qwen2", hidden_size=128, mlp_size=128, num_heads=16)))
    )


def loaded(source: Source, name: str = "w4a8") -> CachedModel:
    return load_model(source, Recipe.parse(name), kv_tokens=64, rng=rng())


def logits(model: CachedModel) -> torch.Tensor:
    try:
        return model.forward([Feed(0, [1, 2, 3], 0, 0)])
    finally:
        model.release(0)


def files(source: Source) -> list[Path]:
    return sorted((source.path / "repacked").glob("*.safetensors"))


@pytest.mark.parametrize("name", FORMATS)
def test_the_second_load_reads_what_the_first_kept(source: Source, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded(source, name)
    assert len(files(source)) == 1
    monkeypatch.setattr("bitdraft.quantize.load.quantize", lambda *_, **__: pytest.fail("made anew"))
    second = loaded(source, name)
    assert torch.equal(logits(first), logits(second))
    assert second.decoder.packed_bytes == first.decoder.packed_bytes
    assert second.decoder.resident_bytes == first.decoder.resident_bytes
    assert second.decoder.config == first.decoder.config
    assert (second.decoder.head is second.decoder.embedding) == (first.decoder.head is first.decoder.embedding)


def test_no_cache_neither_reads_nor_keeps(source: Source) -> None:
    loaded(dataclasses.replace(source, use_cache=False))
    assert files(source) == []
    loaded(source)
    (kept,) = files(source)
    kept.write_bytes(b"not read")
    loaded(dataclasses.replace(source, use_cache=False))
    assert kept.read_bytes() == b"not read"


def spoil_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def spoil_by_cutting(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def spoil_whole(path: Path) -> None:
    path.write_bytes(b"\0" * 100)


def spoil_key(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(b'key\\": \\"') + 9
    path.write_bytes(content[:at] + b"0" * 8 + content[at + 8 :])


@pytest.mark.parametrize("spoil", [spoil_a_byte, spoil_by_cutting, spoil_whole, spoil_key])
def test_a_file_that_is_not_what_was_kept_is_made_anew(source: Source, spoil: object) -> None:
    expected = logits(loaded(source))
    (kept,) = files(source)
    whole = kept.read_bytes()
    spoil(kept)  # type: ignore[operator]
    assert torch.equal(logits(loaded(source)), expected)
    assert kept.read_bytes() == whole


def test_another_model_file_has_another_key_and_replaces_the_older(source: Source) -> None:
    loaded(source)
    (old,) = files(source)
    weights = source.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x10
    weights.write_bytes(content)
    loaded(open_source(str(source.path)))
    (new,) = files(source)
    assert new != old


def test_recipes_are_kept_side_by_side(source: Source) -> None:
    loaded(source, "w4a8")
    loaded(source, "w4a8-g64")
    loaded(source, "w8a8")
    assert len(files(source)) == 3


def test_calibration_and_its_seed_are_part_of_the_key_of_a_calibrated_method_only(source: Source) -> None:
    gptq, plain = Recipe.parse("w4a8-gptq"), Recipe.parse("w4a8-clip")
    texts, others = [[1, 2, 3]], [[1, 2, 4]]
    assert key_of(source.path, gptq, texts, rng()) == key_of(source.path, gptq, texts, rng())
    assert key_of(source.path, gptq, texts, rng()) != key_of(source.path, gptq, others, rng())
    assert key_of(source.path, gptq, texts, rng()) != key_of(source.path, gptq, texts, np.random.default_rng(1))
    assert key_of(source.path, plain, texts, rng()) == key_of(source.path, plain, others, np.random.default_rng(1))


def test_formats_of_single_layers_are_part_of_a_key(source: Source) -> None:
    plain = Recipe.parse("w4a8")
    mixed = [
        dataclasses.replace(plain, formats={layer: Recipe.parse(form).format})
        for layer in ("lm_head", "model.layers.0.mlp.up_proj")
        for form in ("w6a8", "w3a8")
    ]
    assert len({key_of(source.path, recipe, None, rng()) for recipe in (plain, *mixed)}) == 5


def test_another_version_of_bitdraft_has_another_key(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer version may round better; what an older one kept must not hide that."""
    recipe = Recipe.parse("w4a8")
    before = key_of(source.path, recipe, None, rng())
    monkeypatch.setattr("bitdraft.quantize.store.__version__", "999")
    assert key_of(source.path, recipe, None, rng()) != before


def test_a_disk_that_does_not_take_the_file_is_no_error(source: Source) -> None:
    (source.path / "repacked").write_text("a file where the folder should be")
    assert logits(loaded(source)).isfinite().all()


def test_nothing_half_written_is_left_behind(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("bitdraft.quantize.store.os.replace", full)
    loaded(source)
    assert list((source.path / "repacked").iterdir()) == []


def test_prepared_models_are_what_decoders_are_made_of(source: Source) -> None:
    first = loaded(source)
    store = Store(source.path, Recipe.parse("w4a8"), key_of(source.path, Recipe.parse("w4a8"), None, rng()))
    kept = store.load()
    assert isinstance(kept, PreparedModel)
    assert Decoder(kept).resident_bytes == first.decoder.resident_bytes


def test_layers_that_differ_are_restored_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3: norms after o and down, the gate, and which layers see all, past the window of 16."""
    write_gguf(tmp_path / "m.gguf", config("gemma3"))
    source = open_source(str(tmp_path / "m.gguf"))
    feed = Feed(0, [i % 250 for i in range(40)], 0, 0)
    first = loaded(source).forward([feed])
    monkeypatch.setattr("bitdraft.quantize.load.quantize", None)
    assert torch.equal(loaded(source).forward([feed]), first)


def test_memory_that_was_cut_in_inference_mode_is_written_outside_of_it_too() -> None:
    slab = Slab()
    with torch.inference_mode():
        slab.take(100).fill_(1)
    slab.take(100).fill_(2)
