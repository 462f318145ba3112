"""A model as a GGUF file that llama.cpp runs.

Weights whose codes the wanted type holds are moved code by code; others are rounded anew from the values that they
stand for, and it is said how far that took them. The embedding and the output head stay at 8 bits where layers have 4.

Shape suffixes: N outputs, K inputs.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from ..errors import ModelFileError
from ..ops.encoding import dequantize
from ..ops.gguf_blocks import BlockFormat, Bytes, dequantise
from ..ops.gguf_encode import WRITTEN, moved, rounded
from ..ops.packed import Packed
from .checkpoint import Checkpoint
from .config import ModelConfig
from .gguf import GGUFFile, Value
from .gguf_vocab import words_name
from .gguf_writer import Planned, write_gguf
from .tensor_names import EMBEDDING, HEAD, gguf_name, tensor_shapes
from .tokenizer import Tokenizer

TYPES = ("q4_0", "q4_1", "q8_0", "bf16", "f16")
"""Tensor types that a model is written in."""

_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # values of general.file_type
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type


@dataclass
class Exported:
    """What became of the matrices of a model.

    Attributes:
        exact: names of those that stand for the very same values.
        errors: of the others, how far they were taken: ||W' - W|| / ||W||, by name.
    """

    exact: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)


def export_gguf(
    source: Checkpoint,
    path: Path,
    kind: str,
    name: str,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Exported:
    """Write a model as a GGUF file.

    Args:
        source: the model.
        path: the file; must not exist.
        kind: one of `TYPES`.
        name: what the model is called.
        progress: called with (tensors done, tensors, the file's name).

    Raises:
        ModelFileError: a family or a tokenizer for which no file can be written.
        FormatError: a weight that the type does not hold.
        UsageError: the file is there already, or cannot be written.
    """
    form, config = WRITTEN[kind.upper()], source.config
    architecture = _ARCHITECTURES.get(config.family)
    if architecture is None:
        raise ModelFileError(
            f"{source.origin}: a {config.family} model, for which bitdraft writes no GGUF file. It writes those of "
            f"{', '.join(_ARCHITECTURES)}: convert this one with llama.cpp's convert_hf_to_gguf.py."
        )
    result = Exported()
    tensors = [
        _planned(source, name, shape, form, architecture, result) for name, shape in tensor_shapes(config).items()
    ]
    if config.rope_factors and len(set(config.rope_factors)) > 1:
        factors = torch.tensor(config.rope_factors)
        tensors.append(
            Planned("rope_freqs.weight", factors.shape, WRITTEN["F32"], lambda: rounded(factors, WRITTEN["F32"]))
        )
    metadata: dict[str, Value] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": _FILE_TYPES[form.name],
        "general.quantization_version": 2,
        **_sizes(config, architecture),
        **_vocabulary(source),
    }
    write_gguf(path, metadata, tensors, progress)
    return result


def _planned(
    source: Checkpoint, name: str, shape: tuple[int, ...], wanted: BlockFormat, architecture: str, result: Exported
) -> Planned:
    form = WRITTEN["F32"] if len(shape) == 1 else _form(name, shape, wanted)
    config = source.config
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads if ".k_proj." in name else 0

    def made() -> Bytes:
        if len(shape) == 1:
            return rounded(_permuted(source.tensor(name), heads if architecture == "llama" else 0), form)
        rows = _matrix(name, source.packed(name), form, result)
        return _permuted(torch.from_numpy(rows), heads if architecture == "llama" else 0).numpy()

    return Planned(gguf_name(name), shape, form, made)


def _form(name: str, shape: tuple[int, ...], wanted: BlockFormat) -> BlockFormat:
    """The type of a matrix: 8 bits for embedding and head beside fewer, 16 where rows are no whole blocks."""
    if shape[1] % wanted.values:
        return WRITTEN["F16"]
    return WRITTEN["Q8_0"] if wanted.code_bits < 8 and name in (EMBEDDING, HEAD) else wanted


def _matrix(name: str, packed: Packed, form: BlockFormat, result: Exported) -> Bytes:
    """The rows of a matrix in a type, [N, bytes] uint8; notes what that did to it."""
    found = moved(packed, form)
    if found is not None and found[1]:
        result.exact.append(name)
        return found[0]
    values = dequantize(packed)
    rows = found[0] if found is not None else rounded(values, form)
    off = torch.from_numpy(dequantise(rows.reshape(-1), form)).view(values.shape).sub_(values)
    error = float(off.norm() / values.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if error == 0.0:
        result.exact.append(name)
    else:
        result.errors[name] = error
    return rows


def _permuted(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in llama.cpp's order: the halves of each head interleaved (0 heads: as is)."""
    if not heads:
        return rows
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def _sizes(config: ModelConfig, architecture: str) -> dict[str, Value]:
    sizes: dict[str, Value] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.mlp_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "vocab_size": config.vocab_size,
    }
    if config.sliding_window:
        sizes["attention.sliding_window"] = config.sliding_window
    if config.rope_factors and len(set(config.rope_factors)) == 1:
        sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope_factors[0])}
    return {f"{architecture}.{key}": value for key, value in sizes.items()}


def _vocabulary(source: Checkpoint) -> Mapping[str, Value]:
    """The metadata of the tokenizer: the source's own, or made from its tokenizer.json."""
    origin = Path(source.origin)
    if origin.is_file():
        own = GGUFFile(origin).metadata
        return {
            k: v for k, v in own.items() if k.startswith("tokenizer.") and k != "tokenizer.ggml.precompiled_charsmap"
        }
    return vocabulary_metadata(source.tokenizer(), source.config.vocab_size)


def vocabulary_metadata(tokenizer: Tokenizer, rows: int) -> dict[str, Value]:
    """What a GGUF file says of a byte-level BPE tokenizer.

    Args:
        tokenizer: of a model folder.
        rows: of the embedding: ids past the vocabulary's end become unused entries.

    Raises:
        ModelFileError: a tokenizer of another kind, or one that cuts text into words in a way that has no name there.
    """
    backend = Backend.from_str(tokenizer.to_json())
    model = json.loads(tokenizer.to_json())["model"]
    name = words_name(backend)
    if model.get("type") != "BPE" or model.get("byte_fallback") or name is None:
        kind = (
            model.get("type") if name or model.get("type") != "BPE" else "BPE that cuts text into words in its own way"
        )
        raise ModelFileError(
            f"{tokenizer.origin}: its tokenizer ({kind}) is none of the byte-level ones that bitdraft writes into GGUF "
            "files (those of Llama 3, Qwen2, SmolLM and GPT-2). Convert the model with llama.cpp's "
            "convert_hf_to_gguf.py."
        )
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(rows)]
    kinds = [
        _UNUSED if t is None else _NORMAL if i not in added else _CONTROL if added[i].special else _USER_DEFINED
        for i, t in enumerate(tokens)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": [f"[PAD{i}]" if t is None else t for i, t in enumerate(tokens)],
        "tokenizer.ggml.token_type": list[Value](kinds),
        "tokenizer.ggml.merges": list[Value](merges),
        "tokenizer.ggml.add_bos_token": tokenizer.bos_id is not None,
    }
    named = {k: backend.token_to_id(t) for k, t in tokenizer.named_tokens.items()}
    ids = {"bos": tokenizer.bos_id if tokenizer.bos_id is not None else named.get("bos_token")}
    ids |= {"eos": tokenizer.eos_ids[0] if tokenizer.eos_ids else named.get("eos_token")}
    ids |= {"unknown": named.get("unk_token"), "padding": named.get("pad_token")}
    metadata |= {f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items() if i is not None}
    if tokenizer.chat_template is not None:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata
