"""Mixed precision from end to end, on a tiny random pair: texts, prices, choice, and the draft that comes of it."""

import json

import numpy as np
import pytest
from model_files import config, write_folder

from bitdraft.errors import UsageError
from bitdraft.formats import Recipe
from bitdraft.measure.probe_texts import write_probe
from bitdraft.models.cached import CachedModel
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.quantize.load import Source, open_source
from bitdraft.quantize.mixed import allocate_for
from bitdraft.quantize.pipeline import quantize
from bitdraft.quantize.probe import AcceptanceProbe
from bitdraft.types import SamplingParams


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Source, AcceptanceProbe]:
    folder = tmp_path_factory.mktemp("mixed")
    write_folder(folder / "target", config())
    write_folder(folder / "draft", config("qwen2", num_layers=2))
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "hello world", "one two")))
    draft, target = (open_source(str(folder / name), use_cache=False) for name in ("draft", "target"))
    sampling = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)
    probe = write_probe(target, Recipe.parse("bf16"), [str(prompts)], 3, sampling, lambda: 0.0)
    return draft, target, probe


def test_a_budget_becomes_a_draft(pair: tuple[Source, Source, AcceptanceProbe]) -> None:
    draft, target, probe = pair
    assert (len(probe.texts), probe.tokens) == (3, 18)
    found = allocate_for(draft, target, probe, "4.5bits", rng=np.random.default_rng(0))
    assert found.expected.bits <= 4.5
    weights = quantize(draft.checkpoint, found.recipe(), rng=np.random.default_rng(0))
    for tensor, form in found.formats.items():
        assert weights.packed[tensor].format == form
    packed = {id(w): w.nbytes for w in weights.packed.values()}
    assert sum(packed.values()) == pytest.approx(found.expected.size)
    model = CachedModel(Decoder(prepare_model(weights)), kv_tokens=64, vocab_size=target.tokenizer.vocab_size)
    assert [len(overlap) for overlap in probe.judge(model)] == [6, 6, 6]


def test_inputs_of_8_bits_and_a_head_apart(pair: tuple[Source, Source, AcceptanceProbe]) -> None:
    draft, target, probe = pair
    rng = np.random.default_rng(0)
    found = allocate_for(draft, target, probe, "4bits", rng=rng, activation="8", with_head=False)
    assert found.expected.bits_without_head <= 4

    assert all(name.split("-")[0].endswith("a8") for name in found.formats.values())
    assert found.formats["lm_head"] == "w8a8"
    assert found.recipe().format.activation == "int8"


def test_milliseconds_without_costs_are_refused_before_any_work(pair: tuple[Source, Source, AcceptanceProbe]) -> None:
    draft, target, probe = pair
    with pytest.raises(UsageError, match="step costs"):
        allocate_for(draft, target, probe, "12ms", rng=np.random.default_rng(0))
