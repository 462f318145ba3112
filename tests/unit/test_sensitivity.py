"""Prices of rounding against what rounding does; the probe that it is judged on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import config, write_folder

from bitdraft.errors import UsageError
from bitdraft.formats import get_format
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.quantize import sensitivity
from bitdraft.quantize.probe import AcceptanceProbe, ProbeText, TargetName, mean_overlap
from bitdraft.quantize.sensitivity import least_squares, sensitivities
from bitdraft.quantize.teacher_forced import TeacherForced

FORM = get_format("w4a16")


class Calm:
    """A checkpoint whose random weights are scaled to give logits of order one."""

    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def tensor(self, name):
        tensor = self._source.tensor(name)
        if tensor.ndim == 2:
            return tensor / tensor.shape[1] ** 0.5
        return tensor.abs() * 0.3 + 0.7 if "norm" in name else tensor


def probe_of(source, texts=8, tokens=12):
    rng = np.random.default_rng(1)
    width = source.config.vocab_size
    logits = torch.from_numpy(rng.standard_normal((7, width), dtype=np.float32))
    made = []
    for i in range(texts):
        ids = tuple(int(t) for t in rng.integers(0, width, 4 + tokens))
        hidden = torch.from_numpy(rng.standard_normal((tokens, 7), dtype=np.float32))
        made.append(ProbeText("code" if i % 2 else "chat", i // 2, ids[:4], ids[4:], hidden))
    return AcceptanceProbe(made, TargetName("t", "f32"), lambda x: x @ logits)


@pytest.fixture
def reference(tmp_path: Path) -> TeacherForced:
    source = Calm(open_checkpoint(write_folder(tmp_path / "qwen2", config("qwen2"))))
    return TeacherForced(source, probe_of(source), source.config.vocab_size)


def test_a_price_is_the_kl_that_the_error_makes(reference):
    """Errors of independent direction, small enough for the second order: prices and true KL, both averaged."""
    layers = {"model.layers.0.self_attn.k_proj": 0, "model.layers.1.mlp.up_proj": 1, "lm_head": 2}
    prices, true = [], []
    for seed in range(6):
        noise = torch.from_numpy(np.random.default_rng(seed).standard_normal((400, 64), dtype=np.float32)) * 0.01

        def rounder(weight, _, noise=noise):
            return weight + noise[: weight.shape[0], : weight.shape[1]]

        found = sensitivities(reference, [FORM], rng=np.random.default_rng(seed), draws=6, rounder=rounder)
        # The embedding's share is priced with the head, and left out here: the head as output alone is changed.
        head = sensitivity._head_prices(reference, reference.source.tensor("lm_head.weight"), [FORM], rounder)
        priced = {t: found.kl[t, "w4a16"] for t in layers} | {"lm_head": head["w4a16"]}
        prices.append([priced[t] for t in layers])
        true.append(
            [
                reference.changed(lambda n, w, r=rounder, t=t: r(w, FORM) if n == t else w, layer).kl
                for t, layer in layers.items()
            ]
        )
    # 6 errors of some thousand entries, 6 draws of y for each of 8 texts: measured within 20 %.
    assert np.mean(prices, 0) == pytest.approx(np.mean(true, 0), rel=0.4)


def test_prices_rise_as_bits_fall_and_with_the_square_of_the_error(reference):
    formats = [get_format(f"w{bits}a16-asym") for bits in (2, 3, 4, 6)] + [get_format("w8a16")]
    found = sensitivities(reference, formats, rng=np.random.default_rng(0), draws=2)
    for tensor in {t for t, _ in found.kl}:
        prices = [found.kl[tensor, form.name] for form in formats]
        assert prices == sorted(prices, reverse=True)

    def doubled(weight, form):
        error = least_squares(weight, form) - weight
        return weight + error * (2 if weight.shape[1] == 64 else 1)  # the down projections

    again = sensitivities(reference, formats, rng=np.random.default_rng(0), draws=2, rounder=doubled)
    for (tensor, form), kl in found.kl.items():
        # FP32 sums of differences of neighbouring numbers
        assert again.kl[tensor, form] == pytest.approx(kl * (4 if "down" in tensor else 1), rel=1e-3)


def test_least_squares_never_does_worse_than_nearest(reference):
    weight = reference.source.tensor("model.layers.0.mlp.down_proj.weight")
    for name in ("w3a16", "w2a16-asym", "w8a16"):
        form = get_format(name)
        near, clipped = form.round(weight), least_squares(weight, form)
        assert float((clipped - weight).square().sum()) <= float((near - weight).square().sum()) * (1 + 1e-6)


def test_prices_go_on_from_a_file_and_refuse_another_question(reference, tmp_path, monkeypatch):
    path, formats = tmp_path / "prices.jsonl", [FORM, get_format("w3a16")]
    whole = sensitivities(reference, formats, rng=np.random.default_rng(0), path=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + '\n{"tensor": "model.la')
    again = sensitivities(reference, formats, rng=np.random.default_rng(0), path=path)
    assert again.kl == whole.kl
    monkeypatch.setattr(sensitivity, "_prices", None)  # nothing is priced again when all is there
    assert sensitivities(reference, formats, rng=np.random.default_rng(0), path=path).kl == whole.kl
    with pytest.raises(UsageError, match="another draft, probe"):
        sensitivities(reference, formats, rng=np.random.default_rng(1), path=path)


def test_overlap_is_summed_by_hand(reference):
    text = reference.probe.texts[0]
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((12, 272), dtype=np.float32))
    logits = logits[:, : reference.source.config.vocab_size]
    p = reference.probe.probabilities(text)
    by_hand = [
        sum(min(float(a), float(b)) for a, b in zip(*rows, strict=True))
        for rows in zip(p, logits.softmax(-1), strict=True)
    ]
    # 272 terms added in another order in FP32
    torch.testing.assert_close(reference.probe.overlap(text, logits), torch.tensor(by_hand), rtol=0, atol=1e-5)
    assert mean_overlap([reference.probe.overlap(text, p.log())]) == pytest.approx(1, abs=1e-5)
    with pytest.raises(UsageError, match="Expected"):
        reference.probe.overlap(text, logits[:, 1:])


def test_a_probe_is_read_as_it_was_written(reference, tmp_path):
    probe = reference.probe
    probe.save(tmp_path)
    again = AcceptanceProbe.load(tmp_path, probe._logits)
    assert again.digest == probe.digest
    assert (again.target, again.workloads, again.tokens) == (probe.target, ("chat", "code"), probe.tokens)
    assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(again.texts, probe.texts, strict=True))
    short = probe.short(1, 5)
    assert [(t.workload, len(t.ids), len(t.hidden)) for t in short.texts] == [("chat", 5, 5), ("code", 5, 5)]
    record = tmp_path / "probe.json"
    record.write_text(record.read_text().replace('"temperature": 1.0', '"temperature": 0.5'))
    with pytest.raises(UsageError, match="Make the probe again"):
        AcceptanceProbe.load(tmp_path, probe._logits)
    (tmp_path / "probe.safetensors").unlink()
    with pytest.raises(UsageError, match="make it again"):
        AcceptanceProbe.load(tmp_path, probe._logits)
