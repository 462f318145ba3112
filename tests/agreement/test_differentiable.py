"""The differentiable decoder says what the engine's decoder says in FP32."""

import numpy as np
import pytest
import torch
from model_files import config, write_folder

from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.quantize.pipeline import quantize
from bitdraft.quantize.probe import AcceptanceProbe, ProbeText, TargetName
from bitdraft.quantize.teacher_forced import TeacherForced
from bitdraft.types import Feed

FAMILIES = {
    "llama": {},
    "qwen2": {"tied_head": False},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_the_decoders(tmp_path, family):
    rng = np.random.default_rng(0)
    source = open_checkpoint(write_folder(tmp_path / family, config(family, **FAMILIES[family])))
    width, usable = source.config.vocab_size - 5, source.config.vocab_size - 9
    lengths = ((9, 4), (3, 7))
    ids = [tuple(int(i) for i in rng.integers(0, usable, prompt + output)) for prompt, output in lengths]
    texts = [
        ProbeText("code", i, t[:prompt], t[prompt:], torch.zeros(output, 1))
        for i, (t, (prompt, output)) in enumerate(zip(ids, lengths, strict=True))
    ]
    probe = AcceptanceProbe(texts, TargetName("t", "f32"), lambda x: torch.zeros(len(x), width))
    found = TeacherForced(source, probe, usable)
    weights = quantize(source, Recipe.parse("f32"), rng=rng)
    model = CachedModel(
        Decoder(prepare_model(weights)), kv_tokens=128, vocab_size=width, usable=usable, kv=KV_FORMATS["f32"]
    )
    logits = [model.forward([Feed(i, t.context, 0, len(t.prompt) - 1)]) for i, t in enumerate(texts)]
    for i in range(len(texts)):
        model.release(i)
    # Two orders of FP32 sums through two layers: 1e-4 of a probability, measured 2e-6.
    torch.testing.assert_close(found.q_TV, torch.cat(logits).softmax(-1), rtol=1e-3, atol=1e-4)
    assert found.acceptance == pytest.approx(sum(float(o.sum()) for o in probe.judge(model)) / probe.tokens, abs=1e-5)
    same = found.changed(lambda _, weight: weight)
    assert same.kl == pytest.approx(0, abs=1e-6)
    assert same.acceptance == pytest.approx(found.acceptance, abs=1e-6)
