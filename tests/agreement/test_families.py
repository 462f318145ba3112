"""Families whose layers differ from each other: contexts of two kinds, windows that wrap under a draft, a real Gemma 3.

Compiled rows are the same to the bit whatever stands beside them, so greedy outputs are compared without allowance.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import transformers
from test_decoder import IDS, build_tiny, load

from bitdraft.decoding.lookahead import Fixed
from bitdraft.decoding.protocols import Drafter
from bitdraft.drafters import scripted
from bitdraft.drafters.model import ModelDrafter
from bitdraft.engine.engine import Engine
from bitdraft.engine.sequence import Request
from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.models import hub
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.ops import native
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed, SamplingParams


def model(path: Path, recipe: str, kv_tokens: int = 256, longest: int | None = None) -> CachedModel:
    """A model with its keys and values in bfloat16, or in float32 beside float32 activations."""
    weights = quantize(open_checkpoint(path), Recipe.parse(recipe), rng=np.random.default_rng(0))
    kv = KV_FORMATS["f32" if recipe == "f32" else "bf16"]
    decoder = Decoder(prepare_model(weights), longest)
    return CachedModel(decoder, kv_tokens=kv_tokens, vocab_size=weights.config.vocab_size, kv=kv)


def greedy(target: CachedModel, drafter: Drafter | None, prompt: Sequence[int], tokens: int, k: int) -> list[int]:
    """What the engine emits, drafting k tokens a step."""
    engine = Engine(target, drafter, eos_ids=[], max_draft=k, max_batch=1)
    engine.submit(Request(0, tuple(prompt), SamplingParams(temperature=0, max_tokens=tokens)))
    return [token for emission in engine.run() for token in emission.tokens]


def test_longrope_of_a_context_that_was_not_extended(tmp_path: Path) -> None:
    """Up to 64 positions transformers takes the short factors, and so does a decoder that is to hold no more."""
    oracle = build_tiny("phi3 longrope", tmp_path)
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS[:64]])).logits[0]
    short, long = (model(tmp_path, "f32", longest=n).forward([Feed(0, IDS[:64], 0, 0)]) for n in (64, 65))
    torch.testing.assert_close(short, expected, rtol=1e-4, atol=1e-4)
    assert float((long - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["gemma3", "gemma3 capped", "phi3 longrope"])
def test_the_reference_says_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_tiny(kind, tmp_path)
    compiled = load(tmp_path).forward([Feed(0, IDS, 0, 0)])
    monkeypatch.setattr(native, "default", lambda: None)
    torch.testing.assert_close(load(tmp_path).forward([Feed(0, IDS, 0, 0)]), compiled, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "phi3 window"])
def test_a_draft_changes_nothing_past_the_window(kind: str, tmp_path: Path) -> None:
    """Users-pain U66: a window of 16 that the output leaves behind three times, under rejections of every length."""
    build_tiny(kind, tmp_path)
    target, draft = model(tmp_path, "w8a8"), model(tmp_path, "w4a8")
    prompt, tokens = IDS[:11], 50
    plain = greedy(target, None, prompt, tokens, 0)
    for k in (1, 2, 3, 4):
        drafters = ModelDrafter(draft, Fixed(k), []), scripted.half_wrong({0: plain}, 160, Random(k))
        for drafter in drafters:
            assert greedy(target, drafter, prompt, tokens, k) == plain, f"{k} tokens of {type(drafter).__name__}"
    assert target.pool.num_free == target.pool.num_blocks


@pytest.fixture(scope="module")
def gemma() -> Path:
    """Gemma 3 270M as a .gguf file (253 MB)."""
    return hub.resolve("gemma-3-270m")


CHAPTERS = " ".join(f"Chapter {i} tells of a ship that left Lisbon in the year {1700 + i}." for i in range(30))


@pytest.mark.models
def test_logits_of_gemma(gemma: Path) -> None:
    """transformers reads the same file by its own code. FP32 sums in another order: 3e-4 on logits of 30 was seen."""
    checkpoint = open_checkpoint(gemma)
    tokenizer, ours = checkpoint.tokenizer(), model(gemma, "f32", kv_tokens=1024)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(gemma.parent, gguf_file=gemma.name, dtype=torch.float32)
    texts = ("The quick brown fox jumps over the lazy dog.", "def fib(n):\n    if n < 2:\n        return n\n", CHAPTERS)
    for request, text in enumerate(texts):
        ids = tokenizer.encode(text)
        with torch.no_grad():
            expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        got = ours.forward([Feed(request, ids, 0, 0)]).log_softmax(-1)
        assert float((expected.argmax(-1) == got.argmax(-1)).float().mean()) > 0.995
        assert float((expected.exp() * (expected - got)).sum(-1).max()) < 1e-5
    assert len(ids) > checkpoint.config.sliding_window


@pytest.mark.models
def test_a_draft_of_gemma_changes_nothing_past_its_window(gemma: Path) -> None:
    """Users-pain U66: a prompt of 480 tokens, and an output that crosses the window of 512."""
    ids = open_checkpoint(gemma).tokenizer().encode(CHAPTERS)[:480]
    target, draft = model(gemma, "w8a8", kv_tokens=1024), model(gemma, "w4a8", kv_tokens=1024)
    plain = greedy(target, None, ids, 60, 0)
    for k in (1, 2, 3, 4):
        assert greedy(target, ModelDrafter(draft, Fixed(k), []), ids, 60, k) == plain
    assert greedy(target, scripted.half_wrong({0: plain}, target.vocab_size, Random(0)), ids, 60, 4) == plain
