"""Tokenizers built from GGUF metadata: byte-level and SentencePiece vocabularies, special ids, damaged tables."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import model_files
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.errors import ModelFileError
from bitdraft.models.gguf import GGUFFile
from bitdraft.models.gguf_vocab import gguf_tokenizer
from bitdraft.models.tokenizer import Tokenizer


class TestGgufVocabulary:
    def test_padding_is_left_out(self, tmp_path: Path) -> None:
        tokenizer = model_files.tokenizer_of(tmp_path, model_files.byte_level_metadata)
        assert tokenizer.vocab_size == len(model_files.pieces())
        assert tokenizer.token_bytes(len(model_files.pieces())) is None

    def test_every_token_that_ends_an_output(self, tmp_path: Path) -> None:
        assert model_files.tokenizer_of(tmp_path, model_files.byte_level_metadata).eos_ids == (2, 0)

    @pytest.mark.parametrize(
        ("pre", "added", "expected"),
        [("gpt-2", None, None), ("gpt-2", True, 1), ("llama-bpe", None, 1), ("llama-bpe", False, None)],
    )
    def test_bos(self, tmp_path: Path, pre: str, added: bool | None, expected: int | None) -> None:
        def vocabulary(w: gguf.GGUFWriter) -> None:
            w.add_tokenizer_model("gpt2")
            w.add_tokenizer_pre(pre)
            w.add_token_list(model_files.pieces())
            w.add_token_merges(list(model_files.MERGES))
            w.add_bos_token_id(1)
            if added is not None:
                w.add_add_bos_token(added)

        assert model_files.tokenizer_of(tmp_path, vocabulary).bos_id == expected

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"tokens": None}, "carries no tokenizer"),
            ({"tokens": []}, "carries no tokenizer"),
            ({"model": "unigram"}, "a tokenizer of kind 'unigram'"),
            ({"model": None}, "'tokenizer.ggml.model' is missing"),
            ({"pre": "tekken"}, "in the way called 'tekken'.*use the model's folder"),
            ({"merges": None}, "has no merges"),
            ({"merges": ["h q"]}, "no tokenizer can be made of its metadata"),
            ({"merges": ["nospace"]}, "no tokenizer can be made of its metadata"),
            ({"token_type": [1]}, "1 token types for"),
            ({"token_type": ["a"]}, "'tokenizer.ggml.token_type' is no list of int values"),
            ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
            ({"bos_token_id": -1}, "bos_token_id is -1"),
            ({"model": "llama"}, "0 token scores for"),
        ],
    )
    def test_damaged_metadata(self, tmp_path: Path, change: dict[str, Any], said: str) -> None:
        values: dict[str, Any] = {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": model_files.pieces(),
            "merges": list(model_files.MERGES),
            "eos_token_id": 2,
        }

        def vocabulary(w: gguf.GGUFWriter) -> None:
            for key, value in (values | change).items():
                if isinstance(value, str):
                    w.add_string(f"tokenizer.ggml.{key}", value)
                elif isinstance(value, int):
                    w.add_int32(f"tokenizer.ggml.{key}", value)
                elif value:
                    w.add_array(f"tokenizer.ggml.{key}", value)

        with pytest.raises(ModelFileError, match=said):
            model_files.tokenizer_of(tmp_path, vocabulary)


SPM_PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "▁▁", "▁abc", "é", "猫", "aa", "ca", "bca"]


def spm_metadata(*, prefix: bool) -> Callable[[gguf.GGUFWriter], None]:
    """A SentencePiece vocabulary as llama.cpp writes it: unknown, two controls, 256 bytes, scored pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *SPM_PIECES]

    def vocabulary(w: gguf.GGUFWriter) -> None:
        w.add_tokenizer_model("llama")
        w.add_token_list(tokens)
        w.add_token_scores([0.0] * 259 + [float(-i) for i in range(len(SPM_PIECES))])
        w.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES))
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_unk_token_id(0)
        w.add_add_space_prefix(prefix)

    return vocabulary


def spm_by_hand(text: str, *, prefix: bool) -> list[str]:
    """SentencePiece's BPE as its paper tells it: join the neighbours whose whole scores best, leftmost first."""
    symbols = list((("▁" if prefix else "") + text.replace(" ", "▁")) if text else "")
    scores = {piece: -i for i, piece in enumerate(SPM_PIECES)}
    while True:
        pairs = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces = [[s] if s in scores else [f"<0x{b:02X}>" for b in s.encode()] for s in symbols]
    return [piece for some in pieces for piece in some]


@pytest.fixture(scope="session", params=[True, False], ids=["space-prefix", "no-prefix"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, bool]:
    return model_files.tokenizer_of(tmp_path_factory.mktemp("spm"), spm_metadata(prefix=request.param)), request.param


class TestSentencePiece:
    @settings(max_examples=300, deadline=None)
    @given(text=st.text(alphabet="abc é猫🙂\n", max_size=12))
    def test_as_by_hand(self, spm: tuple[Tokenizer, bool], text: str) -> None:
        tokenizer, prefix = spm
        ids = tokenizer.encode(text, add_bos=False)
        expected = [_bytes_of(piece) for piece in spm_by_hand(text, prefix=prefix)]
        assert [tokenizer.token_bytes(i) for i in ids] == expected
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == text

    def test_bos_and_ends(self, tmp_path: Path) -> None:
        tokenizer = model_files.tokenizer_of(tmp_path, spm_metadata(prefix=True))
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
        assert tokenizer.encode("abc") == [1, 259 + SPM_PIECES.index("▁abc")]
        assert tokenizer.encode("</s>", parse_special=True, add_bos=False)[-1] == 2
        assert 2 not in tokenizer.encode("</s>")

    @pytest.mark.parametrize(
        ("architecture", "after"), [("phi3", ["<|user|>", "abc"]), ("llama", ["<|user|>", " abc"])]
    )
    def test_phis_control_tokens_take_white_space_along(
        self, tmp_path: Path, architecture: str, after: list[str]
    ) -> None:
        """As `rstrip` in its tokenizer.json says, but for the three that begin, end and stand for the unknown."""
        tokens = ["<unk>", "<s>", "<|endoftext|>", "<|user|>", "<end_of_turn>", *SPM_PIECES]
        writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), architecture)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([float(-i) for i in range(len(tokens))])
        writer.add_token_types([2, 3, 3, 3, 3] + [1] * len(SPM_PIECES))
        writer.add_add_space_prefix(False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        tokenizer = gguf_tokenizer(GGUFFile(tmp_path / "m.gguf"))

        def texts(text: str) -> list[str]:
            return [tokenizer.token_text(i) for i in tokenizer.encode(text, parse_special=True, add_bos=False)]

        assert texts("<|user|> abc") == after
        assert texts("<|endoftext|> abc") == ["<|endoftext|>", " abc"]
        assert tokenizer.eos_ids == (2, 4)


def _bytes_of(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
