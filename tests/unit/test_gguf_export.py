"""GGUF files that we write: read back by our reader and by llama.cpp's own package, to the same values."""

import json
from pathlib import Path

import gguf
import model_files
import numpy as np
import pytest
import quantized_models
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bitdraft.errors import FormatError, ModelFileError, UsageError
from bitdraft.formats import Recipe, get_format
from bitdraft.models.checkpoint import Checkpoint, open_checkpoint
from bitdraft.models.config import ModelConfig
from bitdraft.models.gguf_export import TYPES, export_gguf, vocabulary_metadata
from bitdraft.models.gguf_writer import Planned, write_gguf
from bitdraft.models.tokenizer import Tokenizer
from bitdraft.ops.encoding import dequantize
from bitdraft.ops.gguf_blocks import dequantise
from bitdraft.ops.gguf_encode import WRITTEN, moved, rounded

# Below 1e-25 the inverse of a scale may overflow, and what ggml writes then means nothing.
SIZES = st.floats(-100, 100, width=32).map(lambda v: v if abs(v) > 1e-25 else 0.0)
MATRICES = arrays(np.float32, (3, 64), elements=SIZES)


@given(MATRICES)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "BF16", "F16"])
def test_rounding_is_that_of_ggml(name: str, values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, Kind[name])
        # In float16 a scale may vanish that float32 still has: both then write codes that stand for nothing.
        got = rounded(torch.from_numpy(values), WRITTEN[name])
    assert np.array_equal(got, np.ascontiguousarray(expected).view(np.uint8).reshape(3, -1))


@pytest.mark.parametrize(
    ("recipe", "name", "exact"),
    [
        ("w4a16", "Q4_0", True),
        ("w4a8-g64", "Q4_0", True),
        ("w4a16-asym", "Q4_1", False),
        ("w8a8", "Q8_0", False),
    ],
)
def test_codes_are_moved_as_they_are(recipe: str, name: str, exact: bool) -> None:
    packed = get_format(recipe).encode(torch.randn(8, 128, generator=torch.Generator().manual_seed(0)))
    found = moved(packed, WRITTEN[name])
    assert found is not None
    rows, same = found
    got = torch.from_numpy(dequantise(rows.reshape(-1), WRITTEN[name])).view(8, 128)
    assert same == exact
    # Half of float16's last bit, of the minimum (15 steps at most) or of the scale of an output (127 steps).
    largest = dequantize(packed).abs().max()
    torch.testing.assert_close(got, dequantize(packed), rtol=0, atol=0 if exact else float(largest) * 2**-10)


@pytest.mark.parametrize(
    ("recipe", "name"), [("w4a16", "Q4_1"), ("w4a16-asym", "Q4_0"), ("w3a16", "Q4_0"), ("bf16", "Q8_0")]
)
def test_other_codes_are_not_moved(recipe: str, name: str) -> None:
    assert moved(get_format(recipe).encode(torch.randn(4, 64)), WRITTEN[name]) is None


def test_values_that_no_float16_holds() -> None:
    with pytest.raises(FormatError, match=r"beyond 65504.*use BF16"):
        rounded(torch.full((1, 32), 1e5), WRITTEN["F16"])


FAMILIES = [
    quantized_models.config("llama"),
    quantized_models.config("llama", tied_head=False, rope_factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)),
    quantized_models.config("mistral", sliding_window=64, tied_head=False),
    quantized_models.config("qwen2", rope_factors=(2.0,) * 8),
    quantized_models.config("qwen3", num_kv_heads=4),
]


def folder_of(tmp_path: Path, config: ModelConfig) -> Checkpoint:
    """A plain folder, in bfloat16."""
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}} if config.family == "qwen2" else {}
    return open_checkpoint(model_files.write_folder(tmp_path / "source", config, dtype=torch.bfloat16, **rope))


@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.family)
@pytest.mark.parametrize("kind", TYPES)
def test_a_model_is_read_back(tmp_path: Path, config: ModelConfig, kind: str) -> None:
    source = folder_of(tmp_path, config)
    path = tmp_path / "m.gguf"
    result = export_gguf(source, path, kind, "tiny")
    got = open_checkpoint(path)
    for name in (
        "hidden_size",
        "num_layers",
        "head_dim",
        "context_length",
        "rope_theta",
        "tied_head",
        "sliding_window",
    ):
        assert getattr(got.config, name) == getattr(source.config, name)
    if config.family == "qwen2":
        assert got.config.rope_factors == (2.0,) * 8
    # Half a step of the blocks that have the widest ones, of weights that reach 4 or so; of Q4_0 a whole one, for 8
    # steps lead to one side of 0 and 7 to the other.
    off = {"bf16": 0.0, "f16": 0.0, "q8_0": 4.5 / 127, "q4_0": 9 / 8, "q4_1": 9 / 15}[kind] / 2 * 1.01
    for name in model_files.weights(config):
        given, found = source.tensor(name), got.tensor(name)
        assert float((given - found).abs().max()) <= (off if given.dim() == 2 else 0), name
    assert len(result.exact) + len(result.errors) == sum(t.dim() == 2 for t in model_files.weights(config).values())
    assert (not result.errors) == (kind in ("bf16", "f16"))
    assert got.tokenizer().encode("hello world 12") == source.tokenizer().encode("hello world 12")


def test_rotary_factors_have_a_tensor_of_their_own(tmp_path: Path) -> None:
    from dataclasses import replace

    source = folder_of(tmp_path, FAMILIES[0])
    source.config = replace(source.config, rope_factors=FAMILIES[1].rope_factors)  # type: ignore[misc]
    export_gguf(source, tmp_path / "m.gguf", "bf16", "tiny")
    assert open_checkpoint(tmp_path / "m.gguf").config.rope_factors == FAMILIES[1].rope_factors


def test_llama_cpps_own_reader_reads_it(tmp_path: Path) -> None:
    source = folder_of(tmp_path, FAMILIES[3])
    export_gguf(source, tmp_path / "m.gguf", "q4_0", "tiny")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.get_field("general.architecture").contents() == "qwen2"
    assert reader.get_field("qwen2.rope.scaling.factor").contents() == 2.0
    assert reader.get_field("tokenizer.ggml.tokens").contents()[:3] == list(model_files.SPECIAL)
    assert reader.get_field("tokenizer.ggml.token_type").contents()[:4] == [3, 3, 3, 1]
    mine = open_checkpoint(tmp_path / "m.gguf")
    tensors = {t.name: t for t in reader.tensors}
    assert tensors["blk.1.ffn_down.weight"].tensor_type == Kind.Q4_0
    assert tensors["token_embd.weight"].tensor_type == Kind.Q8_0
    assert tensors["blk.0.attn_q.bias"].tensor_type == Kind.F32
    for name in model_files.weights(source.config):
        theirs = tensors[model_files.to_gguf_name(name)]
        values = gguf.quants.dequantize(theirs.data, theirs.tensor_type).reshape(mine.tensor(name).shape)
        assert np.array_equal(values, mine.tensor(name).numpy()), name


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_quantised_folder_and_a_gguf_file_stand_for_the_same(tmp_path: Path, family: str) -> None:
    source = folder_of(tmp_path, quantized_models.config(family))
    made = quantized_models.write(tmp_path / "made", source, Recipe.parse("w4a8"))
    folder = open_checkpoint(tmp_path / "made")
    result = export_gguf(folder, tmp_path / "m.gguf", "q4_0", "tiny")
    got = open_checkpoint(tmp_path / "m.gguf")
    for name, packed in made.items():
        if name.startswith("model.layers."):
            assert torch.equal(got.tensor(f"{name}.weight"), dequantize(packed)), name
    # The 8-bit head has a float32 scale for each output; Q8_0 has a float16 one.
    assert result.errors.keys() == {"model.embed_tokens.weight"}
    assert result.errors["model.embed_tokens.weight"] < 2**-11


def test_blocks_of_the_same_type_are_copied(tmp_path: Path) -> None:
    config = quantized_models.config("llama")
    names = [f"{n}.weight" for n in config.linear_shapes() if n != "lm_head"]
    types = dict.fromkeys(names, Kind.Q4_1) | {"model.embed_tokens.weight": Kind.Q8_0}
    source = open_checkpoint(model_files.write_gguf(tmp_path / "a.gguf", config, types=types))
    result = export_gguf(source, tmp_path / "b.gguf", "q4_1", "tiny")
    assert not result.errors
    first, second = gguf.GGUFReader(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "b.gguf")
    raw = {t.name: t.data for t in second.tensors}
    assert all(np.array_equal(t.data, raw[t.name]) for t in first.tensors)
    assert second.get_field("tokenizer.chat_template").contents() == model_files.TEMPLATE


class TestFiles:
    def test_a_file_that_is_there_is_not_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"mine")
        with pytest.raises(UsageError, match="is there already, and is not overwritten"):
            write_gguf(tmp_path / "m.gguf", {}, [])
        assert (tmp_path / "m.gguf").read_bytes() == b"mine"

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_nothing_half_written_is_left(self, tmp_path: Path, error: BaseException) -> None:
        def fail() -> np.ndarray:
            raise error

        with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt):
            write_gguf(tmp_path / "m.gguf", {"a": 1}, [Planned("t", (32,), WRITTEN["F32"], fail)])
        assert list(tmp_path.iterdir()) == []

    def test_a_family_that_has_no_gguf_form(self, tmp_path: Path) -> None:
        from dataclasses import replace

        source = folder_of(tmp_path, FAMILIES[0])
        source.config = replace(source.config, family="unheard")  # type: ignore[misc]
        with pytest.raises(ModelFileError, match="a unheard model, for which bitdraft writes no GGUF file"):
            export_gguf(source, tmp_path / "m.gguf", "q8_0", "tiny")


class TestVocabulary:
    def test_padding_and_added_tokens(self, tmp_path: Path) -> None:
        tokenizer = folder_of(tmp_path, FAMILIES[0]).tokenizer()
        rows = len(model_files.pieces()) + 3
        metadata = vocabulary_metadata(tokenizer, rows)
        assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{rows - 1}]"  # type: ignore[index]
        assert metadata["tokenizer.ggml.token_type"][-4:] == [1, 5, 5, 5]  # type: ignore[index]
        assert metadata["tokenizer.ggml.merges"] == list(model_files.MERGES)

    def test_smollm2_is_recognised(self, smollm2: Path) -> None:
        source = open_checkpoint(smollm2)
        made = vocabulary_metadata(source.tokenizer(), source.config.vocab_size)
        own = gguf.GGUFReader(smollm2)
        for key in ("pre", "tokens", "merges", "token_type", "eos_token_id"):
            assert made[f"tokenizer.ggml.{key}"] == own.get_field(f"tokenizer.ggml.{key}").contents(), key

    def test_words_that_are_cut_in_another_way(self) -> None:
        backend = model_files.backend()
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        with pytest.raises(ModelFileError, match="BPE that cuts text into words in its own way"):
            vocabulary_metadata(Tokenizer(backend, origin="m"), 10)

    def test_a_tokenizer_of_another_kind(self) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        with pytest.raises(ModelFileError, match=r"its tokenizer \(WordLevel\) is none of the byte-level ones"):
            vocabulary_metadata(Tokenizer(backend, origin="m"), 10)
        assert json.loads(backend.to_str())["model"]["type"] == "WordLevel"
