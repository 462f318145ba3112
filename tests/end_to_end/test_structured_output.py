"""JSON from a real model under a schema: valid, and the same ids with drafts as without (users-pain U45, U48)."""

import json
from pathlib import Path

import numpy as np
import pytest

from bitdraft.decoding.lookahead import Fixed
from bitdraft.decoding.protocols import Drafter
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.formats import Recipe
from bitdraft.quantize.load import load_model, open_source
from bitdraft.serve.structured import Grammars
from bitdraft.types import SamplingParams, StepRecord

SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["bug", "feature", "null"]},
        "explanation": {"type": ["string", "null"], "maxLength": 40},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["type", "explanation", "lines"],
    "additionalProperties": False,
}
QUESTION = 'Report as JSON: {"type": "bug", "explanation": null, "lines": [3, 4]}. null null null, line 17 is null.'
K = 4


class Model:
    """SmolLM2, which is its own draft."""

    def __init__(self, path: Path) -> None:
        source = open_source(str(path))
        rng = np.random.default_rng(0)
        self.target = load_model(source, Recipe.parse("bf16"), kv_tokens=2048, rng=rng)
        self.draft = load_model(source, Recipe.parse("w4a16"), kv_tokens=2048, rng=rng, target=source)
        self.tokenizer = source.tokenizer
        self.grammars = Grammars(source.tokenizer, self.target.vocab_size)
        self.prompt = tuple(self.tokenizer.chat([{"role": "user", "content": QUESTION}]))

    def run(self, drafter: Drafter | None, sampling: SamplingParams) -> tuple[list[int], str | None, list[StepRecord]]:
        records: list[StepRecord] = []
        engine = Engine(
            self.target,
            drafter,
            eos_ids=self.tokenizer.eos_ids,
            max_draft=K,
            max_batch=1,
            on_record=records.append,
        )
        engine.submit(Request(0, self.prompt, sampling, constraint=self.grammars.json_schema(SCHEMA)))
        emissions = list(engine.run())
        return [token for emission in emissions for token in emission.tokens], emissions[-1].finish, records


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return Model(smollm2)


def test_json_under_a_schema_is_valid_and_the_same_with_drafts(model: Model) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=96)
    plain, finish, _ = model.run(None, greedy)
    answer = json.loads(model.tokenizer.decode(plain))
    assert list(answer) == ["type", "explanation", "lines"]
    assert finish == "stop"
    for drafter in (ModelDrafter(model.draft, Fixed(K), model.tokenizer.eos_ids), NGramDrafter()):
        ids, _, records = model.run(drafter, greedy)
        assert ids == plain
        assert len(records) < len(plain)


def test_a_hot_sample_under_a_schema_is_valid(model: Model) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=96)
    ids, finish, _ = model.run(ModelDrafter(model.draft, Fixed(K), model.tokenizer.eos_ids), hot)
    assert finish == "stop"
    assert set(json.loads(model.tokenizer.decode(ids))) == set(SCHEMA["properties"])
