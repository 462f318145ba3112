"""`bitdraft quantize` with inputs in 16 bits and scales for keys and values, as a user sees it."""

import json
from pathlib import Path

import pytest
from command_line import Run
from model_files import config, write_folder


@pytest.fixture(name="model")
def tiny_folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", config("qwen2", hidden_size=64, mlp_size=128, head_dim=16, num_layers=2))


def test_the_report_names_what_every_layer_keeps(run: Run, model: Path, tmp_path: Path) -> None:
    given = "quantize", model, "--format", "w4a8-out8", "--method", "clip", "--tokens", "512"
    code, out, _ = run(*given, "--kv", "fp8", "-o", tmp_path / "out")
    assert code == 0
    assert "8 inputs in 16 bits" in out
    assert "1.mlp.down_proj" in out
    assert "w4a8-out8-clip, method clip" in out
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"]["num_bits"] == 8
    code, out, _ = run(*given, "--json", "-o", tmp_path / "again")
    found = json.loads(out)["outliers"]["model.layers.1.mlp.down_proj"]
    assert code == 0
    assert len(found["columns"]) == 8
    assert found["nbytes"] == 8 * (4 + 2 * 64)
    assert found["removed"] <= 1
    code, _, said = run("quantize", model, "--format", "w4a8-had-out8", "-o", tmp_path / "refused")
    assert code == 2
    assert "one of the two" in said


def test_formats_says_how_to_ask_for_them(run: Run) -> None:
    code, out, _ = run("formats")
    assert code == 0
    assert "-out8 to -out64" in " ".join(out.split())
    code, out, _ = run("formats", "--json")
    assert json.loads(out)["formats"]
