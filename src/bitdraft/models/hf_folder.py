"""The small files of a model folder in Hugging Face's form: config.json, the tokenizer's files, and the model card."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from ..errors import ModelFileError
from .config import ModelConfig
from .hf_config import config_from_hf
from .tensor_names import PLAIN_FAMILIES
from .tokenizer import Tokenizer
from .tokenizer_folder import read_json

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "LICENSE",
)
_LLAMA3 = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)
"""Rotary scaling of Llama 3.1 (8) and 3.2 (32): a GGUF file has only the divisors that came of it."""


def folder_settings(origin: str, config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json for a model: its own where it has one, without what said how it was quantised.

    Args:
        origin: the model's folder or .gguf file.
        config: its sizes.
        tokenizer: its tokenizer.

    Raises:
        ModelFileError: a family whose folders hold other tensors than ours; or the model is from a GGUF file, and no
            config.json can describe it.
    """
    if config.family not in PLAIN_FAMILIES:
        raise ModelFileError(
            f"{origin}: a {config.family} model, whose folders bitdraft does not write yet: it writes those of "
            f"{', '.join(PLAIN_FAMILIES)}. Run it in the format that you want, which is made as it loads."
        )
    own = Path(origin) / "config.json"
    if own.exists():
        return {k: v for k, v in read_json(own).items() if k not in ("quantization_config", "bitdraft")}
    return hf_config(config, tokenizer)


def hf_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """A config.json that says what `config` says.

    Raises:
        ModelFileError: a family or a rotary scaling that config.json cannot describe.
    """
    family = config.family
    if family == "llama" and config.sliding_window:
        family = "mistral"  # whose GGUF files call themselves llama
    if family not in _ARCHITECTURES or (config.attention_bias and family != "qwen2"):
        bias = " with biases" if config.attention_bias else ""
        raise ModelFileError(
            f"{tokenizer.origin}: a {config.family} model{bias}, for which bitdraft writes no config.json. Start from "
            "the model's folder with safetensors, which has one."
        )
    theta = {"rope_theta": config.rope_theta}
    settings: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        **theta,
        "rope_parameters": _rope(config, tokenizer.origin) | theta,
        "tie_word_embeddings": config.tied_head,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": list(tokenizer.eos_ids) or None,
    }
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = False
    if family == "mistral":
        settings["sliding_window"] = config.sliding_window
    if family in ("qwen2", "qwen3"):
        settings |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}
    return settings


def _rope(config: ModelConfig, origin: str) -> dict[str, Any]:
    """Rotary scaling in config.json's words."""
    factors = config.rope_factors
    if factors is None:
        return {"rope_type": "default"}
    if len(set(factors)) == 1:
        return {"rope_type": "linear", "factor": factors[0]}
    for scaling in _LLAMA3:
        known = config_from_hf(_sizes(config) | {"rope_parameters": scaling}, origin).rope_factors
        if known and all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(known, factors, strict=True)):
            return scaling
    raise ModelFileError(
        f"{origin}: its rotary factors are neither linear nor those of Llama 3.1 or 3.2, so no config.json can "
        "describe them. Start from the model's folder with safetensors, which has one."
    )


def _sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "rope_theta": config.rope_theta,
    }


def write_tokenizer_files(origin: str, tokenizer: Tokenizer, context_length: int, folder: Path) -> None:
    """Put a model's tokenizer into a folder: the files of its own folder, or files made of what a GGUF file says.

    Args:
        origin: the model's folder or .gguf file.
        tokenizer: its tokenizer.
        context_length: positions that the model was made for.
        folder: where the files go.
    """
    if Path(origin).is_dir():
        for name in _COPIED:
            if (Path(origin) / name).exists():
                shutil.copyfile(Path(origin) / name, folder / name)
        return
    write_json(folder / "tokenizer_config.json", _tokenizer_settings(tokenizer, context_length))
    write_json(folder / "generation_config.json", _generation(tokenizer))
    backend = Backend.from_str(tokenizer.to_json())
    if tokenizer.bos_id is not None:
        bos = backend.id_to_token(tokenizer.bos_id)
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.bos_id)]
                ),
            ]
        )
    backend.save(str(folder / "tokenizer.json"))
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _tokenizer_settings(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.bos_id is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        **tokenizer.named_tokens,
    }


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    settings: dict[str, Any] = {"eos_token_id": list(tokenizer.eos_ids)} if tokenizer.eos_ids else {}
    return settings if tokenizer.bos_id is None else settings | {"bos_token_id": tokenizer.bos_id}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as JSON for people to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def model_card(
    source: str, recipe: str, formats: Mapping[str, int], bits: float, quantized: bool, own_head: bool, outliers: bool
) -> str:
    """README.md of a folder that bitdraft wrote.

    Args:
        source: what the model was called.
        recipe: the recipe's name.
        formats: how many linear layers are in each format.
        bits: mean bits of their weights.
        quantized: whether any of them is quantised.
        own_head: whether head and embedding stand in a file of their own, too.
        outliers: whether layers keep inputs in 16 bits.
    """
    rows = "\n".join(f"| {name} | {count} |" for name, count in formats.items())
    loads = (
        "The folder is in the form of compressed-tensors: vLLM reads it, and transformers with the package "
        "compressed-tensors. They round the scales of groups to the type that they compute in; bitdraft takes them as "
        "they are."
        if quantized
        else "vLLM, transformers and others read the folder like any other."
    )
    if outliers:
        loads = (
            "Each of these layers keeps a few inputs in 16 bits, with their weights beside the codes. Only bitdraft "
            "reads that, and other programs refuse the folder by the name of its `format`."
        )
    head = (
        "\n\nThe output head and the embedding are in 16 bits for other programs. bitdraft runs them as its format has "
        "them, from `bitdraft-head.safetensors`, which nothing else reads: it may be left out of an upload that is "
        "for others, together with the `bitdraft` part of config.json."
        if own_head
        else ""
    )
    return f"""---
base_model: {source}
library_name: transformers
tags:
- bitdraft
---

# {source} in {recipe}

Written by [bitdraft](https://pypi.org/project/bitdraft/) with

    bitdraft quantize {source} --format {recipe}

| format | linear layers |
|---|---|
{rows}

{bits:.2f} bits a weight in these layers, scales included. {loads}{head}
"""
