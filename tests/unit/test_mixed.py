"""Mixed precision from end to end, on a tiny random pair: texts, prices, choice, and the draft that comes of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import config, write_folder
from synthetic_trace import Spec, describe
from typer.testing import CliRunner

from bitdraft import cli
from bitdraft.errors import UsageError
from bitdraft.formats import Recipe
from bitdraft.measure.probe_texts import write_probe
from bitdraft.measure.speed import speed_of
from bitdraft.measure.trace import CostSample, Size, Trace
from bitdraft.models.cached import CachedModel
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.ops.encoding import dequantize
from bitdraft.quantize.load import Source, open_source
from bitdraft.quantize.mixed import allocate_for, load_recipe
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


@pytest.mark.parametrize(("inputs", "activation"), [("8", "int8"), ("8-ag32", "int8_g32")])
def test_inputs_of_8_bits_and_a_head_apart(
    inputs: str, activation: str, pair: tuple[Source, Source, AcceptanceProbe]
) -> None:
    draft, target, probe = pair
    rng = np.random.default_rng(0)
    found = allocate_for(draft, target, probe, "4bits", rng=rng, activation=inputs, with_head=False)
    assert found.expected.bits_without_head <= 4
    recipe = found.recipe()
    assert {recipe.format_of(tensor).activation for tensor in found.formats} == {activation}
    assert found.formats["lm_head"] == f"w8a{inputs}"
    assert recipe.format.activation == activation


def test_milliseconds_without_costs_are_refused_before_any_work(pair: tuple[Source, Source, AcceptanceProbe]) -> None:
    draft, target, probe = pair
    with pytest.raises(UsageError, match="step costs"):
        allocate_for(draft, target, probe, "12ms", rng=np.random.default_rng(0))


def test_the_verb_writes_a_folder_that_loads_and_says_what_it_chose(
    pair: tuple[Source, Source, AcceptanceProbe], tmp_path: Path
) -> None:
    draft, target, _ = pair
    prompts = draft.path.parent / "prompts.jsonl"
    words = f"quantize {draft.path} --format w4a16 --budget 4.75bits --target {target.path} --workload {prompts}"
    result = CliRunner().invoke(cli.app, [*words.split(), "-o", str(tmp_path / "out")], catch_exceptions=False)
    assert result.exit_code == 0
    assert "kv6" in result.stdout
    wanted = load_recipe(tmp_path / "out" / "allocation.json")
    made = open_source(str(tmp_path / "out"), use_cache=False).checkpoint
    direct = quantize(draft.checkpoint, wanted, rng=np.random.default_rng(0))
    for tensor in wanted.formats:
        stored = dequantize(made.packed(f"{tensor}.weight"))
        assert torch.equal(stored, dequantize(direct.packed[tensor]))
    neither = CliRunner().invoke(cli.app, ["quantize", str(draft.path), "--budget", "4bits", "-o", str(tmp_path / "x")])
    assert isinstance(neither.exception, UsageError)
    words = ["quantize", str(draft.path), "--target", str(target.path), "-o", str(tmp_path / "x")]
    assert "without --budget" in str(CliRunner().invoke(cli.app, words).exception)


def test_speed_is_a_line_through_timings() -> None:
    run = describe(Spec())
    costs = [CostSample("target", None, rows, r, 20.0 + 2 * rows) for rows in (1, 3, 5) for r in range(3)]
    costs += [CostSample("draft", name, 1, 0, ms) for name, ms in (("bf16", 11.0), ("w4a16", 4.0))]
    sizes = {name: Size(name, size, size, 4.0) for name, size in (("bf16", 10_000_000), ("w4a16", 3_000_000))}
    speed = speed_of(Trace(run, costs=(*costs, CostSample("overhead", None, 1, 0, 0.5)), sizes=sizes))
    assert [speed.draft_ms(size) for size in (0, 3e6, 5e6)] == pytest.approx([1.0, 4.0, 6.0])
    assert [speed.verify_ms(rows) for rows in (1, 2, 5, 10)] == pytest.approx([22.5, 24.5, 30.5, 60.5])
    one = speed_of(Trace(run, costs=tuple(costs[:-1]), sizes=sizes))
    assert one.draft_ms(5e6) == pytest.approx(5.5)
    with pytest.raises(UsageError, match="no timings"):
        speed_of(Trace(run))
