"""Folders that others quantised: GPTQ's and AWQ's layouts, which layers a config means, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_files
import numpy as np
import pytest
import quantized_models
import torch
from safetensors.torch import load_file, save_file

from bitdraft.errors import ModelFileError
from bitdraft.formats import Recipe
from bitdraft.models import hf_folder, quantized_folder
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.compressed_config import compressed_layout, quantization_config
from bitdraft.models.export import FolderWriter
from bitdraft.models.gptq_awq import decode_older, older_layout
from bitdraft.models.scheme import Scheme
from bitdraft.ops.encoding import dequantize
from bitdraft.quantize.load import AUTO, load_model, open_source, recipe_for
from bitdraft.types import Feed

N, K, SIZE = 32, 96, 32


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, count] codes -> [R, words] int32, bit by bit: the slow way."""
    words = torch.zeros(len(codes), codes.shape[1] * bits // 32, dtype=torch.int64)
    for i in range(codes.shape[1]):
        for b in range(bits):
            at = i * bits + b
            words[:, at // 32] |= (codes[:, i].long() >> b & 1) << at % 32
    return words.to(torch.int32)  # wraps where bit 31 is set


def random_grid(bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [K, N], zero points and float16 scales [G, N]."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (K, N), generator=generator)
    zeros = torch.randint(0, 2**bits, (K // SIZE, N), generator=generator)
    zeros[:, :3] = 0  # which GPTQ's first format stores as -1
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    return codes, zeros, (torch.rand(K // SIZE, N, generator=generator) + 0.1).half()


def values(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] float32: exact, for a float16 times a small integer."""
    spread = [t.repeat_interleave(SIZE, dim=0).float() for t in (zeros, scales)]
    return ((codes.float() - spread[0]) * spread[1]).T


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("storage", ["gptq", "gptq_v2"])
def test_gptq(bits: int, symmetric: bool, storage: str) -> None:
    codes, zeros, scales = random_grid(bits, symmetric)
    stored_zeros = zeros - 1 & 2**bits - 1 if storage == "gptq" else zeros
    parts = {
        "qweight": words_of(codes.T, bits).T.contiguous(),
        "qzeros": words_of(stored_zeros, bits),
        "scales": scales,
        "g_idx": torch.arange(K, dtype=torch.int32) // SIZE,
    }
    raw = {"bits": bits, "group_size": SIZE, "desc_act": False, "sym": symmetric, "checkpoint_format": storage}
    scheme = older_layout("gptq", raw, "config.json").scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    packed = decode_older("layer", parts, scheme, (N, K), "folder")
    assert torch.equal(dequantize(packed), values(codes, zeros, scales))
    assert packed.activation == "bf16"
    if bits < 8:
        assert packed.format == f"w{bits}a16" + "-asym" * (not symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    codes, zeros, scales = random_grid(4, symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def interleaved(rows: torch.Tensor) -> torch.Tensor:
        return words_of(rows.view(len(rows), -1, 8)[:, :, order].reshape(rows.shape), 4)

    parts = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales}
    raw = {
        "bits": 4,
        "group_size": SIZE,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["down_proj"],
    }
    layout = older_layout("awq", raw, "config.json")
    scheme = layout.scheme_of("model.layers.0.mlp.up_proj")
    assert scheme is not None
    assert layout.scheme_of("model.layers.0.mlp.down_proj") is None
    packed = decode_older("layer", parts, scheme, (N, K), "folder")
    assert torch.equal(dequantize(packed), values(codes, zeros, scales))


def test_gptq_with_act_order_is_refused_with_what_to_do() -> None:
    codes, zeros, scales = random_grid(4, True)
    shuffled = (torch.arange(K, dtype=torch.int32) // SIZE).flip(0)
    parts = {"qweight": words_of(codes.T, 4).T, "qzeros": words_of(zeros, 4), "scales": scales, "g_idx": shuffled}
    scheme = Scheme("gptq_v2", "int", 4, SIZE, False)
    with pytest.raises(ModelFileError, match=r"'layer.g_idx' puts inputs into groups .*desc_act false"):
        decode_older("layer", parts, scheme, (N, K), "folder")


@pytest.mark.parametrize(
    ("method", "raw", "said"),
    [
        ("gptq", {"bits": 5}, "GPTQ of 5 bits"),
        ("gptq", {"bits": "4"}, r"'bits' is '4'. Expected int"),
        ("gptq", {"group_size": 0}, "groups of 0 inputs"),
        ("gptq", {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'"),
        ("awq", {"version": "gemv"}, "AWQ of 4 bits in the version 'gemv'"),
        ("awq", {"bits": 3}, "AWQ of 3 bits"),
    ],
)
def test_older_configs_that_are_not_read(method: str, raw: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFileError, match=said):
        older_layout(method, raw, "config.json")


W4, W8 = Scheme("pack-quantized", "int", 4, 32), Scheme("int-quantized", "int", 8, None, True, "int8")


def test_names_decide_before_patterns_and_patterns_before_classes() -> None:
    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": {"num_bits": bits, "strategy": "channel"}}

    raw = {
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*layers\\.3\\."],
        "config_groups": {
            "a": group(2, "Linear"),
            "b": group(3, "re:.*down_proj$", "re:model\\.layers\\.0\\..*v_proj"),
            "c": group(4, "model.layers.0.mlp.down_proj"),
        },
    }
    layout = compressed_layout(raw, "config.json")
    bits = {
        "model.layers.0.mlp.up_proj": 2,
        "model.layers.1.mlp.down_proj": 3,
        "model.layers.0.self_attn.v_proj": 3,
        "model.layers.1.self_attn.v_proj": 2,
        "model.layers.0.mlp.down_proj": 4,
    }
    assert {name: layout.scheme_of(name).bits for name in bits} == bits  # type: ignore[union-attr]
    assert layout.scheme_of("model.layers.3.mlp.up_proj") is None
    assert layout.scheme_of("lm_head") is None


def test_a_config_that_is_written_means_the_same_layers() -> None:
    names = [
        f"model.layers.{i}.{kind}" for i in range(3) for kind in ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    schemes: dict[str, Scheme | None] = dict.fromkeys(names, W4) | {"lm_head": None}
    schemes |= {name: W8 for name in names if "v_proj" in name} | {names[2]: W8, names[4]: None}
    raw = json.loads(json.dumps(quantization_config(schemes)))
    assert {name: compressed_layout(raw, "config.json").scheme_of(name) for name in schemes} == schemes


def _first(raw: dict[str, Any]) -> dict[str, Any]:
    return raw["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: _first(raw)["weights"].update(strategy="block"), "group 'group_0': scales by 'block'"),
        (lambda raw: _first(raw)["weights"].update(num_bits=16), "16-bit int weights"),
        (lambda raw: _first(raw)["weights"].update(num_bits="four"), "'num_bits' is 'four'. Expected int"),
        (lambda raw: _first(raw)["weights"].update(group_size=None), "groups of None inputs"),
        (lambda raw: _first(raw)["weights"].update(actorder="group"), "actorder 'group'"),
        (lambda raw: _first(raw).update(format="marlin-24"), "weights in the format 'marlin-24'"),
        (lambda raw: _first(raw).update(targets=["re:("]), r"the pattern 're:\('"),
        (lambda raw: _first(raw).update(targets="Linear"), "'targets' is 'Linear'. Expected list"),
        (lambda raw: raw.update(config_groups={}), "without config_groups"),
        (lambda raw: raw.update(quant_method="quark"), "quantised by quark. bitdraft reads compressed-tensors, GPTQ"),
        (lambda raw: raw.update(sparsity_config={"format": "sparse-24"}), "sparse weights"),
    ],
)
def test_configs_that_are_not_read(tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str) -> None:
    folder = made(tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    change(settings["quantization_config"])
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelFileError, match=said):
        open_checkpoint(folder)


def made(tmp_path: Path, recipe: str = "w4a16-asym") -> Path:
    source = open_checkpoint(model_files.write_folder(tmp_path / "source", quantized_models.config()))
    quantized_models.write(tmp_path / "made", source, Recipe.parse(recipe))
    return tmp_path / "made"


Q = "model.layers.0.self_attn.q_proj"


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(f"{Q}.weight_packed"), f"tensor '{Q}.weight_packed' is missing"),
        (drop(f"{Q}.weight_scale"), f"tensor '{Q}.weight_scale' is missing"),
        (drop(f"{Q}.weight_zero_point"), f"tensor '{Q}.weight_zero_point' is missing"),
        (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 3)}), f"'{Q}.weight_scale' is torch.float32 of shape"),
        (
            lambda t: t.update({f"{Q}.weight_zero_point": t[f"{Q}.weight_zero_point"][:, :1].clone()}),
            "weight_zero_point",
        ),
        (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 32])}), f"'{Q}.weight_shape' is .64, 32."),
        (
            lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, :1].clone()}),
            r"q_proj.weight' has shape",
        ),
        (lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].long()}), "is torch.int64 of shape"),
        (
            lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64, dtype=torch.int32)}),
            "weight_g_idx puts inputs into",
        ),
        (lambda t: t.update({"model.layers.0.self_attn.weight_scale": torch.ones(1)}), "is unknown to a llama decoder"),
    ],
)
def test_damaged_tensors_are_named(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], said: str) -> None:
    folder = made(tmp_path)
    shard = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    with pytest.raises(ModelFileError, match=said):
        open_checkpoint(folder).packed(f"{Q}.weight")


def test_scales_of_keys_and_values_are_read(tmp_path: Path) -> None:
    folder = made(tmp_path, "fp8_e4m3")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    (folder / "config.json").write_text(json.dumps(settings))
    shard = folder / "model-00001-of-00003.safetensors"
    kept = {"model.layers.0.self_attn.k_scale": torch.tensor([0.5]), "model.layers.0.self_attn.v_scale": torch.ones(1)}
    save_file(load_file(shard) | kept, shard)
    checkpoint = open_checkpoint(folder)
    assert {k: float(v) for k, v in checkpoint.cache_scales(0).items()} == {"k": 0.5, "v": 1.0}  # type: ignore[attr-defined]
    assert checkpoint.cache_scales(1) == {}  # type: ignore[attr-defined]


def test_the_head_that_bitdraft_kept_beside_is_missed(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "bitdraft-head.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"bitdraft-head.safetensors is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("recipe", ["w4a8", "w8a8", "fp8_e4m3", "w4a16-asym", "nvfp4"])
def test_a_quantised_folder_runs_as_it_is_where_nothing_is_said(tmp_path: Path, recipe: str) -> None:
    """The same logits, to the bit, as the weights that the folder was written from."""
    made(tmp_path, recipe)
    folder, plain = (open_source(str(tmp_path / name), use_cache=False) for name in ("made", "source"))
    assert recipe_for(AUTO, plain).name == "bf16"
    assert recipe_for(AUTO, folder).name == "stored"
    runs = [(folder, recipe_for(AUTO, folder)), (plain, Recipe.parse(recipe))]
    models = [load_model(source, form, kv_tokens=64, rng=np.random.default_rng(0)) for source, form in runs]
    logits = [model.forward([Feed(0, list(range(20)), 0, 0)]) for model in models]
    assert torch.equal(logits[0], logits[1])
    assert logits[0].isfinite().any()


def test_a_family_whose_folders_hold_other_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path)
    for module in (quantized_folder, hf_folder):
        monkeypatch.setattr(module, "PLAIN_FAMILIES", ("qwen2",))
    with pytest.raises(ModelFileError, match="a llama model that is quantised"):
        open_checkpoint(folder)
    with pytest.raises(ModelFileError, match="whose folders bitdraft does not write yet"):
        FolderWriter(tmp_path / "other", open_checkpoint(tmp_path / "source"), "w8a8")
