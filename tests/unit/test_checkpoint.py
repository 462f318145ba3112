"""Checkpoints: the same tensors from GGUF and safetensors, and clear errors for files that are not whole."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import model_files
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bitdraft.errors import ModelFileError
from bitdraft.models.checkpoint import Weights, open_checkpoint
from bitdraft.models.config import ModelConfig
from bitdraft.ops.packed import Packed

FAMILIES = [
    model_files.config("llama"),
    model_files.config("llama", tied_head=False, head_dim=16),
    model_files.config("qwen2"),
    model_files.config("qwen3", head_dim=16),
    model_files.config("qwen2", num_kv_heads=4, tied_head=False),
]
MISTRAL = model_files.config("mistral")


def same_tensors(path: Path, config: ModelConfig) -> None:
    checkpoint = open_checkpoint(path)
    for name, expected in model_files.weights(config).items():
        assert checkpoint.has(name)
        got = checkpoint.tensor(name)
        assert got.dtype == torch.float32
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.family)
class TestGguf:
    def test_tensors_under_their_hugging_face_names(self, tmp_path: Path, config: ModelConfig) -> None:
        same_tensors(model_files.write_gguf(tmp_path / "m.gguf", config), config)

    def test_config(self, tmp_path: Path, config: ModelConfig) -> None:
        got = open_checkpoint(model_files.write_gguf(tmp_path / "m.gguf", config)).config
        assert got.norm_eps == pytest.approx(config.norm_eps)
        for name in ("rope_theta", "context_length", "rope_factors", "sliding_window", "attention_bias", "qk_norm"):
            assert getattr(got, name) == getattr(config, name)
        assert got.tied_head == config.tied_head
        assert got.linear_shapes() == config.linear_shapes()

    def test_a_tied_head_is_the_embedding(self, tmp_path: Path, config: ModelConfig) -> None:
        checkpoint = open_checkpoint(model_files.write_gguf(tmp_path / "m.gguf", config))
        assert checkpoint.has("lm_head.weight")
        same = torch.equal(checkpoint.tensor("lm_head.weight"), checkpoint.tensor("model.embed_tokens.weight"))
        assert same == config.tied_head

    def test_an_unknown_tensor_is_named(self, tmp_path: Path, config: ModelConfig) -> None:
        checkpoint = open_checkpoint(model_files.write_gguf(tmp_path / "m.gguf", config))
        assert not checkpoint.has("model.layers.0.self_attn.o_proj.bias")
        with pytest.raises(ModelFileError, match=r"m.gguf: there is no tensor 'model.layers.9"):
            checkpoint.tensor("model.layers.9.mlp.up_proj.weight")


class TestGgufDetails:
    def test_biases_of_a_llama_are_put_in_order_like_its_rows(self, tmp_path: Path) -> None:
        config = model_files.config("llama", attention_bias=True)
        same_tensors(model_files.write_gguf(tmp_path / "m.gguf", config), config)

    def test_stored_bits_are_the_mean_over_the_linear_layers(self, tmp_path: Path) -> None:
        config = model_files.config("llama", num_layers=1)
        names = [f"{n}.weight" for n in config.linear_shapes() if n != "lm_head"]
        types = dict.fromkeys(names, Kind.Q4_0) | {"model.embed_tokens.weight": Kind.Q8_0}
        checkpoint = open_checkpoint(model_files.write_gguf(tmp_path / "m.gguf", config, types=types))
        head = config.vocab_size * 32
        rest = sum(n * k for n, k in config.linear_shapes().values()) - head
        assert checkpoint.stored_bits == pytest.approx((4.5 * rest + 8.5 * head) / (rest + head))
        assert checkpoint.stored_as == f"Q4_0/Q8_0, {checkpoint.stored_bits:.1f} bits a weight"

    def test_llama_3_factors(self, tmp_path: Path) -> None:
        factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
        path = model_files.write_gguf(
            tmp_path / "m.gguf",
            model_files.config("llama"),
            change=lambda w: w.add_tensor("rope_freqs.weight", factors.numpy()),
        )
        assert open_checkpoint(path).config.rope_factors == (1.0, 2.0, 4.0, 8.0)

    def test_linear_scaling(self, tmp_path: Path) -> None:
        def change(w: gguf.GGUFWriter) -> None:
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(2.0)

        path = model_files.write_gguf(tmp_path / "m.gguf", model_files.config("qwen2"), change=change)
        assert open_checkpoint(path).config.rope_factors == (2.0,) * 4

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rotary scaling of kind 'yarn'"),
            (lambda w: w.add_expert_count(8), "a mixture of experts"),
            (lambda w: w.add_rope_dimension_count(4), "rotary positions on 4 of 8 channels"),
            (lambda w: w.add_value_length(4), "values of 4 channels beside keys of 8"),
            (lambda w: w.add_tensor("rope_freqs.weight", torch.ones(3).numpy()), "3 rotary factors. Expected 4"),
            (lambda w: w.add_tensor("rope_freqs.weight", torch.zeros(4).numpy()), "Expected 4 positive numbers"),
            (lambda w: w.add_tensor("blk.0.attn_sub_norm.weight", torch.ones(8).numpy()), "unknown to a llama decoder"),
            (lambda w: w.add_tensor("blk.0.attn_output.bias", torch.ones(32).numpy()), "o_proj.bias' is unknown"),
            (lambda w: w.add_tensor("blk.2.attn_norm.weight", torch.ones(32).numpy()), "unknown to a llama decoder"),
        ],
    )
    def test_what_the_decoder_does_not_know(
        self, tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], said: str
    ) -> None:
        path = model_files.write_gguf(tmp_path / "m.gguf", model_files.config("llama"), change=change)
        with pytest.raises(ModelFileError, match=said):
            open_checkpoint(path)

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
    def test_a_missing_tensor_is_named(self, tmp_path: Path, name: str) -> None:
        config = model_files.config("llama")
        tensors = model_files.weights(config)
        del tensors[name]
        path = model_files.write_gguf(tmp_path / "m.gguf", config, tensors=tensors)
        with pytest.raises(ModelFileError, match=rf"m.gguf: tensor '{name}' is missing"):
            open_checkpoint(path)

    def test_another_family_is_named(self, tmp_path: Path) -> None:
        path = model_files.write_gguf(tmp_path / "m.gguf", model_files.config("gemma3"))
        with pytest.raises(ModelFileError, match=r"family 'gemma3', which bitdraft does not decode yet"):
            open_checkpoint(path)


@pytest.mark.parametrize("config", [*FAMILIES, MISTRAL], ids=lambda c: c.family)
@pytest.mark.parametrize("shards", [1, 3])
class TestSafetensors:
    def test_tensors(self, tmp_path: Path, config: ModelConfig, shards: int) -> None:
        same_tensors(model_files.write_folder(tmp_path / "m", config, shards=shards), config)

    def test_config(self, tmp_path: Path, config: ModelConfig, shards: int) -> None:
        checkpoint = open_checkpoint(model_files.write_folder(tmp_path / "m", config, shards=shards))
        assert checkpoint.config.linear_shapes() == config.linear_shapes()
        assert (checkpoint.stored_as, checkpoint.stored_bits) == ("f32", 32)


class TestSafetensorsDetails:
    @pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
    def test_half_precision_becomes_float32(self, tmp_path: Path, dtype: torch.dtype, name: str) -> None:
        config = model_files.config("qwen2")
        checkpoint = open_checkpoint(model_files.write_folder(tmp_path / "m", config, dtype=dtype))
        assert (checkpoint.stored_as, checkpoint.stored_bits) == (name, 16)
        for key, tensor in model_files.weights(config).items():
            assert torch.equal(checkpoint.tensor(key), tensor.to(dtype).float())

    def test_a_tensor_is_fresh(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(model_files.write_folder(tmp_path / "m", model_files.config()))
        checkpoint.tensor("model.norm.weight").zero_()
        assert checkpoint.tensor("model.norm.weight").abs().max() > 0

    def test_an_embedding_that_is_stored_twice_is_no_fault(self, tmp_path: Path) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config())
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, folder / "model.safetensors")
        assert torch.equal(open_checkpoint(folder).tensor("lm_head.weight"), tensors["lm_head.weight"])


def folder_with(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    folder = model_files.write_folder(tmp_path / "m", model_files.config())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


class TestFaultyFolders:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"absent: no such file or folder"):
            open_checkpoint(tmp_path / "absent")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"there is no config.json. Expected a model folder"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\ufffe{}", "[" * 100_000])
    def test_config_that_is_no_json_object(self, tmp_path: Path, text: str) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config())
        (folder / "config.json").write_text(text, encoding="utf-16" if text[0] == "\ufffe" else "utf-8")
        with pytest.raises(ModelFileError, match=r"config.json: (cannot be read as JSON|holds no JSON object)"):
            open_checkpoint(folder)

    @pytest.mark.parametrize(
        ("field", "value", "said"),
        [
            ("model_type", "gpt_neox", "model_type is 'gpt_neox'"),
            ("rope_theta", "many", "a field is of the wrong kind"),
            ("num_attention_heads", 0, "num_heads = 0, where a positive integer is expected"),
            ("hidden_size", "many", "hidden_size = 'many', where a positive integer is expected"),
            ("num_hidden_layers", -1, "num_layers = -1, where a positive integer is expected"),
            ("num_key_value_heads", 3, "4 heads over 3 KV heads"),
            ("head_dim", 7, "heads of 7 channels"),
            ("rms_norm_eps", float("nan"), "norm_eps = nan, where a positive number is expected"),
            ("hidden_act", "gelu", "an activation called 'gelu'"),
            ("rope_scaling", {"rope_type": "yarn"}, "rotary scaling of kind 'yarn'"),
            ("quantization_config", {"quant_method": "gptq"}, r"q_proj.qweight' is missing"),
            ("num_hidden_layers", 10**9, "1000000000 layers are announced, but there are"),
            ("vocab_size", 7, r"shape \[272, 32\]. The model's own settings call for \[7, 32\]"),
        ],
    )
    def test_config_that_cannot_be_used(self, tmp_path: Path, field: str, value: object, said: str) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config(), **{field: value})
        with pytest.raises(ModelFileError, match=said):
            open_checkpoint(folder)

    def test_no_weights(self, tmp_path: Path) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config())
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelFileError, match=r"neither model.safetensors nor model.safetensors.index.json"):
            open_checkpoint(folder)

    def test_a_missing_shard_is_named(self, tmp_path: Path) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config(), shards=3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(ModelFileError, match=r"1 of 3 files of the model are missing: model-00002-of-00003"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("index", [{}, {"weight_map": ["a"]}, {"weight_map": {"x": "../m/model.safetensors"}}])
    def test_an_index_that_names_no_files(self, tmp_path: Path, index: object) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config(), shards=2)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFileError, match=r"'weight_map' names no files beside it"):
            open_checkpoint(folder)

    def test_missing_tensors_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"tensor 'model.norm.weight' is missing"):
            open_checkpoint(folder_with(tmp_path, lambda t: t.pop("model.norm.weight")))

    def test_many_missing_tensors_are_counted(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, lambda t: [t.pop(k) for k in list(t) if ".layers.1." in k])
        with pytest.raises(ModelFileError, match=r"and 5 more are missing"):
            open_checkpoint(folder)

    def test_a_wrong_shape_is_named(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
        with pytest.raises(ModelFileError, match=r"'model.norm.weight' has shape \[31\]. .* call for \[32\]"):
            open_checkpoint(folder)

    def test_an_unknown_tensor_is_named(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(64)}))
        with pytest.raises(ModelFileError, match=r"'model.layers.0.mlp.up_proj.bias' is unknown to a llama decoder"):
            open_checkpoint(folder)

    def test_integers_are_no_weights(self, tmp_path: Path) -> None:
        folder = folder_with(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
        with pytest.raises(ModelFileError, match=r"'model.norm.weight' is stored as I8. bitdraft reads F32, F16, BF16"):
            open_checkpoint(folder)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        folder = model_files.write_folder(tmp_path / "m", model_files.config())
        (folder / "tokenizer.json").unlink()
        with pytest.raises(ModelFileError, match=r"there is no tokenizer.json.*save_pretrained"):
            open_checkpoint(folder).tokenizer()

    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_weights_cut_anywhere(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        folder = model_files.write_folder(tmp_path_factory.getbasetemp() / "cut", model_files.config())
        file = folder / "model.safetensors"
        raw = file.read_bytes()
        file.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        with pytest.raises(ModelFileError, match=r"model.safetensors: cannot be read.*truncated or damaged"):
            open_checkpoint(folder)

    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_header_bytes_changed(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        folder = model_files.write_folder(tmp_path_factory.getbasetemp() / "changed", model_files.config())
        file = folder / "model.safetensors"
        raw = bytearray(file.read_bytes())
        before = bytes(raw)
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
        file.write_bytes(raw)
        try:
            checkpoint = open_checkpoint(folder)
        except ModelFileError:
            assert raw != before
        else:
            for name in model_files.weights(model_files.config()):
                checkpoint.tensor(name)


class TestWeights:
    def test_bytes_on_disk_count_a_tied_table_once(self) -> None:
        def packed(rows: int) -> Packed:
            return Packed("bf16", (rows, 8), 16, "bf16", torch.zeros(rows, 8, dtype=torch.bfloat16))

        table, layer = packed(10), packed(4)
        norm = torch.ones(8)
        tied = Weights(
            model_files.config(),
            {"model.layers.0.mlp.up_proj": layer, "lm_head": table, "model.embed_tokens": table},
            {"model.norm.weight": norm},
        )
        assert tied.nbytes == 2 * (10 * 8 + 4 * 8) + 4 * 8
        untied = Weights(tied.config, tied.packed | {"model.embed_tokens": packed(10)}, tied.tensors)
        assert untied.nbytes == tied.nbytes + 2 * 10 * 8
