"""Whole models of micro-scaled, nested and rotated weights: one call for all layers, and the reference beside it."""

from dataclasses import replace
from pathlib import Path

import model_files
import numpy as np
import pytest
import torch
from torch import Tensor

from bitdraft.formats import KV_FORMATS, Recipe, get_format
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, PreparedModel, prepare_model
from bitdraft.ops import native
from bitdraft.ops.panels import PanelWeight
from bitdraft.quantize.pipeline import quantize
from bitdraft.quantize.store import Store, key_of
from bitdraft.types import Feed

SIZES = model_files.config(hidden_size=256, head_dim=16, mlp_size=288, tied_head=False)
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 256, 40)]
MIXED = "w4a8-had"
"""In the first layer q, k and v are of three formats, which read the same rotated inputs."""


def recipe(name: str) -> Recipe:
    found = Recipe.parse(name)
    if name != MIXED:
        return found
    own = {"k_proj": "w6a8-had", "v_proj": "mxfp4-a8-had"}
    return replace(found, formats={f"model.layers.0.self_attn.{k}": get_format(v) for k, v in own.items()})


def written(folder: Path) -> Path:
    tensors = model_files.weights(SIZES)
    for name in SIZES.linear_shapes():
        tensors[f"{name}.weight"] /= SIZES.hidden_size**0.5
    return model_files.write_gguf(folder / "m.gguf", SIZES, tensors=tensors)


def cached(model: PreparedModel) -> CachedModel:
    return CachedModel(Decoder(model), kv_tokens=128, vocab_size=model.config.vocab_size, kv=KV_FORMATS["f32"])


def logits(model: CachedModel, ids: list[int]) -> Tensor:
    found = model.forward([Feed(0, ids, 0, 0)])
    model.release(0)
    return found


@pytest.mark.parametrize("name", [MIXED, "nvfp4", "nvfp4-a8-had", "mxfp8", "w8n4a8"])
def test_a_model_runs_in_one_call_by_operation_and_by_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The first two, and row by row, to the bit. The reference sums in another order, 1e-5 of the largest logit in rows
    before the first input that lies at a tie. It is rounded to the other side, one step of 127 in one of 256 inputs,
    and later rows read its keys and values: 2e-2.
    """
    path, how = written(tmp_path), recipe(name)
    weights = quantize(open_checkpoint(path), how, rng=np.random.default_rng(0))
    made = prepare_model(weights)
    model = cached(made)
    qkv = made.layers[0].qkv
    assert isinstance(qkv, PanelWeight)
    assert (len(qkv.parts), qkv.rotation) == (3 if name == MIXED else 1, 32 if name.endswith("-had") else None)
    whole = logits(model, IDS)
    hidden = model.hidden([Feed(1, IDS, 0, 0)], observe=lambda *_: None)
    assert torch.equal(model.logits(hidden), whole)
    for at in range(len(IDS)):
        assert torch.equal(model.forward([Feed(2, IDS[at : at + 1], at, 0)])[0], whole[at])
    store = Store(path, how, key_of(path, how, None, np.random.default_rng(0)))
    assert store.save(made)
    back = store.load()
    assert back is not None
    assert torch.equal(logits(cached(back), IDS), whole)
    monkeypatch.setattr(native, "default", lambda: None)
    expected = logits(cached(prepare_model(weights)), IDS)
    errors = (whole - expected).abs().amax(-1) / expected.abs().max()
    assert float(errors[:3].max()) <= 1e-5
    assert float(errors.max()) <= 2e-2
