"""The decoder against transformers: every family on random weights, SmolLM2 on its real ones.

Tolerance: FP32 through a few layers, summed in another order: 1e-4 on logits of order one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bitdraft.formats import KV_FORMATS, Recipe
from bitdraft.models.cached import CachedModel
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.decoder import Decoder, prepare_model
from bitdraft.quantize.pipeline import quantize
from bitdraft.types import Feed

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = SIZES | {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "query_pre_attn_scalar": 40}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 8.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}


def gemma(**changes: Any) -> transformers.PretrainedConfig:
    """Every switch that Gemma 3 has: layers 1 and 3 see all positions, by other and scaled angles."""
    kinds = ["sliding_attention", "full_attention"] * 2
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return transformers.Gemma3TextConfig(**GEMMA | {"layer_types": kinds, "rope_parameters": ropes} | changes)


def phi(**changes: Any) -> transformers.PretrainedConfig:
    """Heads of 8 channels, 6 of which turn; a context of 64 made eight times as long."""
    made = {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 64, "pad_token_id": 0}
    return transformers.Phi3Config(**SIZES | made | changes)


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3 scaling": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral window": lambda: transformers.MistralConfig(**SIZES, sliding_window=16, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma3": gemma,
    "gemma3 capped": lambda: gemma(final_logit_softcapping=0.5, tie_word_embeddings=False, layer_types=None),
    "phi3 longrope": phi,
    "phi3 window": lambda: phi(rope_parameters={"rope_type": "default"}, sliding_window=16, tie_word_embeddings=True),
}
IDS = [int(i) for i in np.random.default_rng(0).integers(0, 160, 70)]


def build_tiny(kind: str, folder: Path) -> torch.nn.Module:
    """A random model of one family, saved as a safetensors folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases off their trivial start, or a mix-up would not show
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def load(folder: Path, vocab_size: int = 160, kv: str = "f32") -> CachedModel:
    weights = quantize(open_checkpoint(folder), Recipe.parse("f32"), rng=np.random.default_rng(0))
    return CachedModel(Decoder(prepare_model(weights)), kv_tokens=512, vocab_size=vocab_size, kv=KV_FORMATS[kv])


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_of_every_family(kind: str, tmp_path: Path) -> None:
    oracle = build_tiny(kind, tmp_path)
    with torch.no_grad():
        expected = oracle(torch.tensor([IDS])).logits[0]
    got = load(tmp_path).forward([Feed(0, IDS, 0, 0)])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(("kv", "loss"), [("bf16", 0.01), ("int8", 0.03)])
def test_a_smaller_cache_costs_little(kind: str, kv: str, loss: float, tmp_path: Path) -> None:
    """Logits of order one; every number in the cache is off by half a step at most: 0.005 and 0.014 were seen."""
    build_tiny(kind, tmp_path)
    exact, small = load(tmp_path).forward([Feed(0, IDS, 0, 0)]), load(tmp_path, kv=kv)
    got = small.forward([Feed(0, IDS, 0, 0)])
    assert 1e-5 < float((got - exact).abs().max()) < loss
    small.fork(0, 1)
    small.truncate(1, 60)
    again = small.forward([Feed(1, IDS[60:], 60, 0)])  # on a copy of the half-filled block, scales and all
    torch.testing.assert_close(again, got[60:], rtol=1e-4, atol=loss)


@pytest.mark.parametrize("kind", CONFIGS)
def test_chunks_neighbours_and_rollbacks_change_nothing(kind: str, tmp_path: Path) -> None:
    """Prefill at once; in chunks; beside another request; and after tokens that were taken back."""
    build_tiny(kind, tmp_path)
    model = load(tmp_path)
    whole = model.forward([Feed(0, IDS, 0, 0)])
    parts = [model.forward([Feed(1, IDS[:33], 0, 0)])]
    wrong = model.forward([Feed(1, [3, 1, 4, 1, 5], 33, 0), Feed(2, IDS[::-1], 0, 0)])
    assert len(wrong) == 5 + 70
    model.truncate(1, 33)
    for i in range(33, 40):
        parts.append(model.forward([Feed(1, IDS[i : i + 1], i, 0)]))
    both = model.forward([Feed(2, IDS[:3], 70, 3), Feed(1, IDS[40:], 40, 0)])
    torch.testing.assert_close(torch.cat([*parts, both]), whole, rtol=1e-4, atol=1e-4)
    model.release(0)
    model.fork(1, 0)
    model.truncate(0, 20)
    torch.testing.assert_close(model.forward([Feed(0, IDS[20:30], 20, 0)]), whole[20:30], rtol=1e-4, atol=1e-4)
    for request in (0, 1, 2):
        model.release(request)
    assert model.pool.num_free == model.pool.num_blocks


def test_logits_of_smollm2(smollm2: Path) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    checkpoint = open_checkpoint(smollm2)
    ids = checkpoint.tokenizer().encode("The quick brown fox jumps over the lazy dog. def fib(n):\n    return 1")
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    got = load(smollm2, checkpoint.config.vocab_size).forward([Feed(0, ids, 0, 0)])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_logits_of_the_reference_pair(name: str) -> None:
    from bitdraft.models import hub

    path = hub.resolve(name)
    checkpoint = open_checkpoint(path)
    ids = checkpoint.tokenizer().encode("def quicksort(values):\n    if len(values) < 2:\n        return values\n")
    got = load(path, checkpoint.config.vocab_size).forward([Feed(0, ids, 0, 0)])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-3)
