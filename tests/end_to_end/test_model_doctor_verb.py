"""`bitdraft doctor MODEL` as a user runs it: exit codes, text and JSON; and on a real model."""

import json
from pathlib import Path

import pytest
import torch
from command_line import Run
from model_files import TEMPLATE
from planted_models import K, V, checkpoint, sizes, swapped, trained
from safetensors.torch import save_file

from bitdraft.measure.model_doctor import examine_model, open_model
from bitdraft.measure.workload import calibration_texts
from bitdraft.models.tokenizer_folder import read_json
from bitdraft.quantize.load import open_source


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return folder(tmp_path / "original")


def folder(path: Path) -> Path:
    checkpoint(path, sizes())
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_a_sound_model_passes_its_check(run: Run, original: Path) -> None:
    code, out, _ = run("doctor", original, "--format", "w8a8", "--check")
    assert code == 0
    assert "All is well" in out
    assert "w8a8" in out


def test_a_broken_model_fails_its_check_and_only_then(run: Run, original: Path, tmp_path: Path) -> None:
    broken = folder(tmp_path / "broken")
    tensors = trained(sizes())
    tensors[f"{K}.weight"], tensors[f"{V}.weight"] = tensors[f"{V}.weight"], tensors[f"{K}.weight"]
    save_file(tensors, broken / "model.safetensors")
    config = read_json(broken / "config.json")
    (broken / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    given = "doctor", broken, "--against", original
    code, out, _ = run(*given)
    assert code == 0
    assert "problem: layer 1: self_attn.k_proj, self_attn.v_proj: k_proj and v_proj are swapped" in out
    assert "problem: tokenizer: eos_token_id: it does not end at '<|im_end|>'" in out
    code, out, _ = run(*given, "--check", "--json")
    assert code == 1
    said = json.loads(out)
    assert not said["well"]
    assert [f["grave"] for f in said["findings"]] == [True, True]
    assert said["findings"][0].keys() == {"what", "where", "costs", "remedy", "grave", "size", "tensors"}


def test_a_model_is_examined_as_a_draft(run: Run, original: Path) -> None:
    code, out, _ = run("doctor", original, "--format", "bf16", "--draft-of", original, "--json")
    assert code == 0
    # bfloat16 keeps 8 bits of these weights and inputs.
    assert json.loads(out)["draft"]["acceptance"] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("option", [("--check",), ("--against", "x"), ("--format", "w8a8"), ("--draft-of", "x")])
def test_options_about_a_model_need_one(run: Run, option: tuple[str, ...]) -> None:
    code, _, err = run("doctor", *option)
    assert code == 2
    assert "none was given" in err


def test_one_swap_in_a_real_model_is_found_in_its_layer(smollm2: Path) -> None:
    """The file's own blocks of 4 to 8 bits; the fault is planted in layer 12."""
    sound = open_model(open_source(str(smollm2)))
    k, v = (name.replace(".1.", ".12.") for name in (K, V))
    broken = open_model(open_source(str(smollm2)))
    broken.weights.packed.update(swapped(broken.weights, k, v).packed)
    found = examine_model(broken, sound, None, [calibration_texts()[0][:150]])
    (finding,) = found.findings
    assert finding.where == "layer 12: self_attn.k_proj, self_attn.v_proj"
    assert finding.what == "k_proj and v_proj are swapped"
    assert finding.grave
    assert found.text_tokens < 64
    assert {layer.stream_error for layer in found.layers[:12]} == {0.0}
    assert all(layer.own_error == 0 or layer.layer == 12 for layer in found.layers)
    assert found.layers[12].own_error > 0.5
    assert torch.tensor([layer.stream_error for layer in found.layers[12:]]).min() > 0
