"""Tiny model files for tests: a decoder of a few thousand random weights and a vocabulary of 300 pieces."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from bitdraft.models.config import ModelConfig
from bitdraft.models.gguf import GGUFFile
from bitdraft.models.gguf_vocab import gguf_tokenizer
from bitdraft.models.tensor_names import tensor_shapes
from bitdraft.models.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġ Ġ", "1 2", "Ġ 1")


def alphabet() -> list[str]:
    """The 256 letters of a byte-level vocabulary."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def pieces() -> list[str]:
    """Special tokens, bytes, and what the merges make."""
    return [*SPECIAL, *alphabet(), *(m.replace(" ", "") for m in MERGES)]


_SWITCHES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "rope_theta": 1e6,
        "local_rope_theta": 1e4,
        "sliding_window": 16,
        "full_layers": (5,),
        "num_layers": 7,
        "post_norms": True,
        "gate": "gelu_tanh",
        "embedding_scale": 32**0.5,
        "query_scale": 8**-0.5,
    },
    "phi3": {
        "rotary_dim": 6,
        "rope_factors": (1.0, 1.5, 2.0),
        "rope_long_factors": (1.0, 3.0, 8.0),
        "rope_original_context": 32,
        "rope_scale": 1.25,
        "sliding_window": 100,
        "tied_head": False,
    },
}


def config(family: str = "llama", **changes: Any) -> ModelConfig:
    """A model of two layers, four heads over two KV heads, heads of 8 channels; Gemma 3 of seven layers."""
    sizes: dict[str, Any] = {
        "family": family,
        "vocab_size": len(pieces()) + 3,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_size": 64,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "context_length": 128,
        "attention_bias": family == "qwen2",
        "qk_norm": family in ("gemma3", "qwen3"),
    }
    return ModelConfig(**sizes | _SWITCHES.get(family, {}) | changes)


def weights(of: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of every shape that the model calls for."""
    rng = np.random.default_rng(seed)
    return {
        name: torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        for name, shape in tensor_shapes(of).items()
    }


_TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_TO_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def to_gguf_name(name: str, family: str = "llama") -> str:
    """llama.cpp's name of a tensor, spelled out apart from the code under test."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        names = _TO_GGUF | (_TO_GEMMA if family == "gemma3" else {})
        return f"blk.{number}.{names[part]}.{kind}"
    return f"{_TO_GGUF[stem]}.{kind}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Query or key rows as llama.cpp's converter orders them: channel c of the first half, then c of the second."""
    size = rows.shape[0] // heads
    order = [h * size + half * (size // 2) + c for h in range(heads) for c in range(size // 2) for half in (0, 1)]
    return np.ascontiguousarray(rows[order])


def fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with q, k, v and gate, up as one each, as Phi-3's files have them."""
    made: dict[str, torch.Tensor] = {}
    joined = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    joined |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        whole = name.replace(f".{part}.", f".{joined[part]}.") if part in joined else name
        made[whole] = torch.cat([made[whole], tensor]) if whole in made else tensor
    return made


def _write_rope(writer: gguf.GGUFWriter, of: ModelConfig) -> None:
    """Windows, channels that turn and LongRoPE, where a model has them."""
    if of.sliding_window is not None:
        writer.add_sliding_window(of.sliding_window)
    if of.rotary_dim is not None:
        writer.add_rope_dimension_count(of.rotary_dim)
    if of.rope_long_factors is not None and of.rope_original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(of.rope_original_context)
        writer.add_rope_scaling_attn_factors(of.rope_scale)
        writer.add_tensor("rope_factors_short.weight", np.array(of.rope_factors, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(of.rope_long_factors, np.float32))


def byte_level_metadata(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """A byte-level vocabulary with three control tokens and three entries of padding."""
    tokens = [*pieces(), "[PAD0]", "[PAD1]", "[PAD2]"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 3) + [5] * 3)
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    of: ModelConfig,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    vocabulary: Callable[[gguf.GGUFWriter], None] = byte_level_metadata,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    blocks: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a model with llama.cpp's own writer, in F32 but for the tensors named in `types`.

    Those in `blocks` are given as they are to stand in the file, [N, bytes of a row], rows in Hugging Face's order.
    """
    writer = gguf.GGUFWriter(str(path), of.family)
    writer.add_block_count(of.num_layers)
    writer.add_context_length(of.context_length)
    writer.add_embedding_length(of.hidden_size)
    writer.add_feed_forward_length(of.mlp_size)
    writer.add_head_count(of.num_heads)
    writer.add_head_count_kv(of.num_kv_heads)
    writer.add_key_length(of.head_dim)
    writer.add_layer_norm_rms_eps(of.norm_eps)
    writer.add_rope_freq_base(of.rope_theta)
    _write_rope(writer, of)
    vocabulary(writer)
    tensors = weights(of) if tensors is None else tensors
    for name, tensor in (fused(tensors) if of.family == "phi3" else tensors).items():
        values = tensor.numpy() if name not in (blocks or {}) else (blocks or {})[name]
        if of.family == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleaved(values, of.num_heads if ".q_proj." in name else of.num_kv_heads)
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(to_gguf_name(name, of.family), values)
        elif name in (blocks or {}):
            writer.add_tensor(to_gguf_name(name), values, raw_dtype=kind)
        else:
            writer.add_tensor(to_gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_config(of: ModelConfig) -> dict[str, Any]:
    """config.json of a model."""
    return {
        "model_type": of.family,
        "vocab_size": of.vocab_size,
        "hidden_size": of.hidden_size,
        "num_hidden_layers": of.num_layers,
        "num_attention_heads": of.num_heads,
        "num_key_value_heads": of.num_kv_heads,
        "head_dim": of.head_dim,
        "intermediate_size": of.mlp_size,
        "rms_norm_eps": of.norm_eps,
        "rope_theta": of.rope_theta,
        "max_position_embeddings": of.context_length,
        "tie_word_embeddings": of.tied_head,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def backend() -> tokenizers.Tokenizer:
    """The same vocabulary as `byte_level_metadata`, as the tokenizers library holds it."""
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in MERGES)]
    made = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces())}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    return made


def write_folder(
    folder: Path, of: ModelConfig, *, shards: int = 1, dtype: torch.dtype = torch.float32, **config_changes: Any
) -> Path:
    """Write a model folder: config.json, tokenizer.json and safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(of) | config_changes))
    backend().save(str(folder / "tokenizer.json"))
    tensors = {name: tensor.to(dtype) for name, tensor in weights(of).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for n, key in enumerate(tensors) if n % shards == i}
        save_file(part, folder / name)
        files |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def tokenizer_of(tmp_path: Path, vocabulary: Callable[[gguf.GGUFWriter], None]) -> Tokenizer:
    """The tokenizer of a GGUF file that holds nothing but a vocabulary."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    vocabulary(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_tokenizer(GGUFFile(path))
