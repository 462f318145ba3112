"""Greedy output with and without drafts, on a real model: the same ids for every drafter, draft length and batch.

The reference sums in FP32 but not in one order for every number of rows, so two logits that tie to within rounding may
change places. A first difference counts as a tie only if the target's two best logits are within `TIE` nats there;
anything else is a bug.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from bitdraft.decoding.lookahead import Confidence, Fixed
from bitdraft.decoding.protocols import Drafter
from bitdraft.drafters import scripted
from bitdraft.drafters.model import ModelDrafter
from bitdraft.drafters.ngram import NGramDrafter
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.formats import Recipe
from bitdraft.models.cached import CachedModel
from bitdraft.quantize.load import load_model, open_source
from bitdraft.types import Feed, SamplingParams, StepRecord

TIE = 0.02
TOKENS = 17
PROMPTS = (
    "def fibonacci(n):\n",
    "Repeat: red, green, blue. Red, green, blue. Red,",
)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
LENGTHS = (1, 2, 3, 5, 8, 16)


class Pair:
    """SmolLM2 as the target, and its own 4-bit copy as the draft, with the plain outputs."""

    def __init__(self, path: Path) -> None:
        source = open_source(str(path))
        rng = np.random.default_rng(0)
        self.target = load_model(source, Recipe.parse("bf16"), kv_tokens=2048, rng=rng)
        self.draft = load_model(source, Recipe.parse("w4a16"), kv_tokens=2048, rng=rng, target=source)
        self.eos_ids = source.tokenizer.eos_ids
        self.prompts = [tuple(source.tokenizer.encode(text)) for text in PROMPTS]
        self.plain = [self.run([prompt], None, 0)[0][0] for prompt in self.prompts]

    def run(
        self, prompts: list[tuple[int, ...]], drafter: Drafter | None, k: int
    ) -> tuple[list[list[int]], list[StepRecord]]:
        records: list[StepRecord] = []
        engine = Engine(
            self.target,
            drafter,
            eos_ids=self.eos_ids,
            max_draft=k,
            max_batch=8,
            max_rows=16,
            on_record=records.append,
        )
        outputs: list[list[int]] = [[] for _ in prompts]
        for number, prompt in enumerate(prompts):
            engine.submit(Request(number, prompt, GREEDY))
        for emission in engine.run():
            outputs[emission.request] += emission.tokens
        assert self.target.pool.num_free == self.target.pool.num_blocks
        return outputs, records

    def check(self, number: int, output: list[int]) -> None:
        """Equal to the plain output, or first different where the target ties."""
        plain = self.plain[number]
        at = next((i for i, (a, b) in enumerate(zip(plain, output, strict=False)) if a != b), None)
        if at is None:
            assert len(output) == len(plain)
            return
        known = [*self.prompts[number], *plain[:at]]
        best = self.target.forward([Feed(99, known, 0, len(known) - 1)])[0].topk(2).values
        self.target.release(99)
        assert float(best[0] - best[1]) < TIE, f"token {at} differs, and the target was sure of its own"


@pytest.fixture(scope="module")
def pair(smollm2: Path) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a real model: two threads pay here
    yield Pair(smollm2)
    torch.set_num_threads(threads)


def script(pair: Pair) -> dict[int, list[int]]:
    return dict(enumerate(pair.plain))


DRAFTERS: dict[str, Callable[[Pair, int], Drafter]] = {
    "4-bit copy": lambda pair, k: ModelDrafter(pair.draft, Fixed(k), pair.eos_ids),
    "4-bit copy, by confidence": lambda pair, k: ModelDrafter(pair.draft, Confidence(k, 0.6), pair.eos_ids),
    "n-gram": lambda pair, k: NGramDrafter(),
    "oracle": lambda pair, k: scripted.oracle(script(pair)),
    "always wrong": lambda pair, k: scripted.always_wrong(script(pair), pair.target.vocab_size),
    "half wrong": lambda pair, k: scripted.half_wrong(script(pair), pair.target.vocab_size, Random(k)),
    "end of sequence everywhere": lambda pair, k: scripted.always(pair.eos_ids[0]),
}


@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_mixed_batch_says_what_each_says_alone(pair: Pair, name: str, k: int) -> None:
    outputs, records = pair.run(pair.prompts, DRAFTERS[name](pair, k), k)
    for number, output in enumerate(outputs):
        pair.check(number, output)
    accepted = sum(r.accepted for r in records)
    if name == "oracle":
        assert accepted == sum(r.proposed for r in records) > 0
    if name in ("always wrong", "end of sequence everywhere"):
        assert accepted == 0
        assert len(records) == len(PROMPTS) * TOKENS


@pytest.mark.parametrize("k", LENGTHS)
def test_alone(pair: Pair, k: int) -> None:
    (output,), _ = pair.run([pair.prompts[0]], DRAFTERS["4-bit copy"](pair, k), k)
    pair.check(0, output)


def test_a_draft_with_a_shorter_context_stops_drafting_and_nothing_else(pair: Pair) -> None:
    limit = len(pair.prompts[0]) + 7
    short = CachedModel(pair.draft.decoder, kv_tokens=256, vocab_size=pair.target.vocab_size, context_length=limit)
    (output,), records = pair.run([pair.prompts[0]], ModelDrafter(short, Fixed(4), pair.eos_ids), 4)
    pair.check(0, output)
    assert records[0].proposed == 4
    assert records[-2].proposed == 0


@pytest.mark.parametrize("k", [1, 4, 7])
def test_an_end_inside_a_block_ends_there(pair: Pair, k: int) -> None:
    """Users-pain U57: the 6th token is made a stop id; the output ends at its first occurrence, whatever K is."""
    stop = pair.plain[0][5]
    expected = pair.plain[0][: pair.plain[0].index(stop) + 1]
    engine = Engine(
        pair.target,
        scripted.oracle(script(pair)),
        eos_ids=pair.eos_ids,
        max_draft=k,
        max_batch=1,
    )
    engine.submit(Request(0, pair.prompts[0], SamplingParams(temperature=0, max_tokens=TOKENS, stop_ids=(stop,))))
    emissions = list(engine.run())
    assert [t for e in emissions for t in e.tokens] == expected
    assert emissions[-1].finish == "stop"


def test_after_an_error_the_next_request_is_served_as_ever(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users-pain U49: verification raises once; caches roll back and the same request goes on to the same output."""
    drafter = ModelDrafter(pair.draft, Fixed(3), pair.eos_ids)
    engine = Engine(pair.target, drafter, eos_ids=pair.eos_ids, max_draft=3, max_batch=1)
    engine.submit(Request(0, pair.prompts[0], GREEDY))
    output = list(engine.step()[0].tokens)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr("bitdraft.engine.engine.verify", fail)
        with pytest.raises(RuntimeError, match="power cut"):
            engine.step()
    for emission in engine.run():
        output += emission.tokens
    pair.check(0, output)
