"""Folders that are written layer by layer: the same weights come back, and what is interrupted goes on."""

import json
from pathlib import Path
from typing import Any

import model_files
import pytest
import quantized_models
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from bitdraft.errors import FormatError, ModelFileError, UsageError
from bitdraft.formats import Recipe
from bitdraft.models import export
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.config import ModelConfig
from bitdraft.models.export import FolderWriter
from bitdraft.models.hf_config import config_from_hf
from bitdraft.models.hf_folder import hf_config
from bitdraft.models.tensor_names import tensor_shapes
from bitdraft.ops.encoding import dequantize

RECIPES = [
    "bf16",
    "f32",
    "w4a16",
    "w4a8",
    "w4a8-ag32",
    "w8a8-ag32",
    "w3a16-asym",
    "w6a8-asym-h6",
    "w2a16-g64-h4",
    "w8a8",
    "w8a16",
    "fp8_e4m3",
    "mxfp4",
    "mxfp4-a8",
    "nvfp4",
]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_very_same_weights_come_back(tmp_path: Path, recipe: str, tied: bool) -> None:
    config = quantized_models.config("qwen2", tied_head=tied)
    source = open_checkpoint(model_files.write_folder(tmp_path / "source", config))
    made = quantized_models.write(tmp_path / "made", source, Recipe.parse(recipe))
    got = open_checkpoint(tmp_path / "made")
    assert quantized_models.all_same(made, {name: got.packed(f"{name}.weight") for name in made})
    for name in tensor_shapes(config):
        layer = name.removesuffix(".weight")
        expected = dequantize(made[layer]) if layer in made else source.tensor(name)
        assert torch.equal(got.tensor(name), expected), name
    assert got.config == source.config
    assert got.holds_floats("model.layers.0.mlp.up_proj.weight") == (recipe in ("bf16", "f32"))
    assert not (tmp_path / "made.partial").exists()


@pytest.mark.parametrize("recipe", ["w4a8", "w3a16-asym", "bf16"])
def test_a_layer_that_was_written_is_read_back(tmp_path: Path, recipe: str) -> None:
    source = open_checkpoint(model_files.write_folder(tmp_path / "source", quantized_models.config("qwen3")))
    writer = FolderWriter(tmp_path / "made", source, recipe)
    for i in range(2):
        packed, tensors = quantized_models.layer_parts(source, Recipe.parse(recipe), i)
        writer.write_layer(i, packed, tensors)
        got, others = writer.read_layer(i)
        assert quantized_models.all_same(packed, got)
        assert others.keys() == tensors.keys()
        assert all(torch.equal(others[name], tensor) for name, tensor in tensors.items())


def begun(tmp_path: Path, recipe: str = "w4a16") -> tuple[FolderWriter, Any]:
    """A writer with its first layer written."""
    source = open_checkpoint(model_files.write_folder(tmp_path / "source", quantized_models.config()))
    writer = FolderWriter(tmp_path / "made", source, recipe)
    writer.write_layer(0, *quantized_models.layer_parts(source, Recipe.parse(recipe), 0))
    return writer, source


class TestInterruption:
    def test_another_writer_goes_on_to_the_same_folder(self, tmp_path: Path) -> None:
        _, source = begun(tmp_path)
        again = FolderWriter(tmp_path / "made", source, "w4a16")
        assert again.layers_done == 1
        again.write_layer(1, *quantized_models.layer_parts(source, Recipe.parse("w4a16"), 1))
        again.finish(*quantized_models.outer_parts(source, Recipe.parse("w4a16").format_of("lm_head")))
        quantized_models.write(tmp_path / "whole", source, Recipe.parse("w4a16"))
        assert {file.name for file in (tmp_path / "made").iterdir()} == {f.name for f in (tmp_path / "whole").iterdir()}
        for file in (tmp_path / "whole").iterdir():
            twin = tmp_path / "made" / file.name
            if file.suffix == ".safetensors":  # whose headers come in any order
                expected, got = load_file(file), load_file(twin)
                assert expected.keys() == got.keys()
                assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
            else:
                assert twin.read_bytes() == file.read_bytes(), file.name

    def test_a_file_that_was_not_finished_does_not_count(self, tmp_path: Path) -> None:
        writer, _ = begun(tmp_path)
        (writer.partial / ".model-00002-of-00003.safetensors").write_bytes(b"half")
        assert writer.layers_done == 1

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left")])
    def test_a_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        writer, source = begun(tmp_path)

        def full(tensors: object, place: Path, metadata: object) -> None:
            place.write_bytes(b"half")
            raise error

        monkeypatch.setattr(export, "save_file", full)
        with pytest.raises(UsageError, match=r"made.partial: cannot be written .*No space left.*free some space"):
            writer.write_layer(1, *quantized_models.layer_parts(source, Recipe.parse("w4a16"), 1))
        assert writer.layers_done == 1
        assert not list(writer.partial.glob(".model*"))

    def test_a_folder_without_all_layers_is_not_finished(self, tmp_path: Path) -> None:
        writer, source = begun(tmp_path)
        with pytest.raises(UsageError, match="layer 1 is not written yet"):
            writer.finish(*quantized_models.outer_parts(source, Recipe.parse("w8a16").format))
        assert not (tmp_path / "made").exists()

    def test_another_recipe_under_the_same_name(self, tmp_path: Path) -> None:
        _, source = begun(tmp_path)
        with pytest.raises(UsageError, match="was begun with recipe 'w4a16', not 'w8a8'"):
            FolderWriter(tmp_path / "made", source, "w8a8")

    def test_a_folder_that_is_there_is_not_overwritten(self, tmp_path: Path) -> None:
        source = open_checkpoint(model_files.write_folder(tmp_path / "source", quantized_models.config()))
        quantized_models.write(tmp_path / "made", source, Recipe.parse("w8a8"))
        before = {file: file.read_bytes() for file in (tmp_path / "made").iterdir()}
        with pytest.raises(UsageError, match="is there already, and is not overwritten"):
            FolderWriter(tmp_path / "made", source, "w8a8")
        assert {file: file.read_bytes() for file in (tmp_path / "made").iterdir()} == before

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        source = open_checkpoint(model_files.write_folder(tmp_path / "source", quantized_models.config()))
        (tmp_path / "closed").write_text("a file, where a folder would have to be")
        with pytest.raises(UsageError, match="cannot be written"):
            FolderWriter(tmp_path / "closed" / "made", source, "w8a8")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("fp8_e5m2", r"q_proj: 8-bit floats of kind E5M2 \(fp8_e5m2\) have no counterpart.*Use fp8_e4m3"),
        ("stored", r"q_proj: Q4_0 blocks \(stored\) have no counterpart in compressed-tensors.*Use w4a16"),
    ],
)
def test_a_format_that_others_cannot_read_is_refused_by_name(tmp_path: Path, recipe: str, said: str) -> None:
    import gguf

    config = quantized_models.config()
    names = [f"{n}.weight" for n in config.linear_shapes() if n != "lm_head"]
    types = dict.fromkeys(names, gguf.GGMLQuantizationType.Q4_0)
    source = open_checkpoint(model_files.write_gguf(tmp_path / "m.gguf", config, types=types))
    form = Recipe.parse(recipe).format
    packed = {
        n.removesuffix(".weight"): form.keep(source.packed(n)) if recipe == "stored" else form.encode(source.tensor(n))
        for n in names
        if ".0." in n
    }
    writer = FolderWriter(tmp_path / "made", source, recipe)
    with pytest.raises(FormatError, match=said):
        writer.write_layer(0, packed, {})
    assert writer.layers_done == 0


CONFIGS = [
    model_files.config("llama"),
    model_files.config("llama", rope_factors=(2.0,) * 4),
    model_files.config("mistral", sliding_window=64, tied_head=False),
    model_files.config("qwen2", tied_head=False),
    model_files.config("qwen3", head_dim=16),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.family)
def test_a_config_that_is_written_says_the_same(tmp_path: Path, config: ModelConfig) -> None:
    tokenizer = open_checkpoint(model_files.write_folder(tmp_path / "m", model_files.config())).tokenizer()
    raw = hf_config(config, tokenizer)
    assert config_from_hf(raw, "config.json") == config
    known = transformers.AutoConfig.for_model(**raw)
    assert known.rope_parameters["rope_theta"] == config.rope_theta
    assert (known.head_dim if config.family != "qwen2" else 8) == config.head_dim
    assert raw["architectures"] == [type(transformers.AutoModelForCausalLM.from_config(known)).__name__]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama_3_are_named(tmp_path: Path, factor: float) -> None:
    tokenizer = open_checkpoint(model_files.write_folder(tmp_path / "m", model_files.config())).tokenizer()
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = hf_config(model_files.config("llama", rope_theta=500000.0, head_dim=64), tokenizer)
    config = config_from_hf(plain | {"rope_parameters": scaling}, "config.json")
    as_stored = tuple(torch.tensor(config.rope_factors).tolist())  # float32, as a GGUF file has them
    changed = hf_config(
        model_files.config("llama", rope_theta=500000.0, head_dim=64, rope_factors=as_stored), tokenizer
    )
    assert changed["rope_parameters"] == scaling | {"rope_theta": 500000.0}


@pytest.mark.parametrize(
    "changes",
    [{"rope_factors": (1.0, 2.0, 3.0, 4.0)}, {"attention_bias": True}, {"family": "unheard"}],
    ids=lambda c: next(iter(c)),
)
def test_a_model_that_no_config_describes(tmp_path: Path, changes: dict[str, Any]) -> None:
    tokenizer = open_checkpoint(model_files.write_folder(tmp_path / "m", model_files.config())).tokenizer()
    with pytest.raises(ModelFileError, match="Start from the model's folder with safetensors"):
        hf_config(model_files.config(**{"family": "llama"} | changes), tokenizer)


TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\n\tand 12345 digits",
    "naïve café 日本語 😀",
    "<|im_start|>user\nhi<|im_end|>",
]


def test_a_folder_made_from_a_gguf_has_its_tokenizer(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2's own vocabulary, by transformers: the same ids, template and special tokens."""
    source = open_checkpoint(smollm2)
    writer = FolderWriter(tmp_path / "made", source, "bf16")
    export.write_tokenizer_files(source.origin, source.tokenizer(), 2048, writer.partial)
    export.write_json(writer.partial / "config.json", hf_config(source.config, source.tokenizer()))
    theirs = transformers.AutoTokenizer.from_pretrained(writer.partial)
    ours = source.tokenizer()
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text, parse_special=True)
    messages = [{"role": "user", "content": "Hi"}]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == ours.chat(messages)
    generation = json.loads((writer.partial / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(ours.eos_ids)
    assert transformers.AutoConfig.from_pretrained(writer.partial).num_hidden_layers == 30
