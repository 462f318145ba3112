"""GGUF vocabularies against two oracles: transformers, and byte-level BPE spelled out from its definition.

transformers cuts every byte-level GGUF vocabulary into words as GPT-2 does, so it can only speak for texts whose digits
it would not join, and whose spaces before a digit are not more than one: GPT-2 gives the last of them to what follows,
SmolLM2, which sets digits apart first, does not. The second oracle has no such limits: it reads the patterns in the
notation of the `regex` package.
"""

import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from bitdraft.models.gguf import GGUFFile
from bitdraft.models.gguf_vocab import gguf_tokenizer
from bitdraft.models.tokenizer import Tokenizer, check_pair

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "def fib(n: int) -> int:\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    'for (int i = 0; i < 10; ++i) {\r\n\tprintf("%d\\n", i);\r\n}',
    "我的订单还没有到,能帮我查一下吗?谢谢!",
    "日本語とかな、한국어 텍스트, ภาษาไทย, हिन्दी",
    "emoji 🙂🤗👩‍👩‍👧 and flags 🇯🇵🇺🇳",
    "3.14159 1234567890 10,000 x2y33",
    "it's you're I'LL don't WE'VE",
    "tabs\t\tand\n\n\nblank lines\n   \n",
    "naïve café über ǅ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]
MESSAGES = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "写一个函数 🙂"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "  and 2 + 2?\n"},
    ],
]


@pytest.fixture(scope="session")
def ours(smollm2: Path) -> Tokenizer:
    return gguf_tokenizer(GGUFFile(smollm2))


@pytest.fixture(scope="session")
def theirs(smollm2: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)


class TestTransformers:
    @pytest.mark.parametrize("text", TEXTS)
    def test_ids(self, ours: Tokenizer, theirs: Any, text: str) -> None:
        assert ours.encode(text, parse_special=True) == theirs.encode(text, add_special_tokens=False)

    @settings(max_examples=200, deadline=None)
    @given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Nl", "No"])))
    @example(text=" \n0")
    def test_any_text(self, ours: Tokenizer, theirs: Any, smollm2_by_definition: "ByDefinition", text: str) -> None:
        ids = ours.encode(text, parse_special=True)
        speaks = not regex.search(r"\s\s\p{N}", text)
        assert ids == (theirs.encode(text, add_special_tokens=False) if speaks else smollm2_by_definition.encode(text))
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)

    @settings(max_examples=200, deadline=None)
    @given(ids=st.lists(st.integers(0, 49151), max_size=20), skip=st.booleans())
    def test_decode_any_ids(self, ours: Tokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special=skip) == expected

    @pytest.mark.parametrize("messages", MESSAGES)
    @pytest.mark.parametrize("prompt", [True, False])
    def test_chat(self, ours: Tokenizer, theirs: Any, messages: list[dict[str, str]], prompt: bool) -> None:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ours.chat(messages, add_generation_prompt=prompt) == expected


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": GPT2,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def letters(text: str) -> str:
    """The text's bytes as letters of a byte-level vocabulary (GPT-2's encoder.py)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in printed}
    table |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in printed)}
    return "".join(table[b] for b in text.encode())


def cut(text: str, pre: str) -> list[str]:
    """Words of a text. 'smollm' first sets every digit apart, then cuts what lies between as GPT-2 does."""
    if pre != "smollm":
        return regex.findall(PATTERNS[pre], text)
    return [w for part in regex.findall(r"\p{N}|\P{N}+", text) for w in regex.findall(GPT2, part)]


class ByDefinition:
    """Byte-level BPE from its definition: in every word, join the pair of the lowest rank until there is none."""

    def __init__(self, file: GGUFFile, pre: str) -> None:
        self.pre = pre
        self.vocabulary = {token: i for i, token in enumerate(file.strings("tokenizer.ggml.tokens") or [])}
        merges = file.strings("tokenizer.ggml.merges") or []
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}

    def encode(self, text: str) -> list[int]:
        return [self.vocabulary[s] for word in cut(text, self.pre) for s in self.symbols(letters(word))]

    def symbols(self, word: str) -> list[str]:
        if self.pre == "llama-bpe" and word in self.vocabulary:
            return [word]
        symbols = [letter for letter in word if letter in self.vocabulary]  # SmolLM2 lacks some control characters
        while True:
            ranked = [(self.ranks[pair], i) for i, pair in enumerate(pairwise(symbols)) if pair in self.ranks]
            if not ranked:
                return symbols
            at = min(ranked)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


TRICKY = st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\r\t'sStd1234½²Ⅷ")))


@pytest.fixture(scope="session")
def smollm2_by_definition(smollm2: Path) -> ByDefinition:
    return ByDefinition(GGUFFile(smollm2), "smollm")


class TestByDefinition:
    @settings(max_examples=300, deadline=None)
    @given(text=TRICKY)
    @example(text=" \n0")
    @example(text="a  1\t\t2")
    def test_smollm2(self, ours: Tokenizer, smollm2_by_definition: ByDefinition, text: str) -> None:
        assert ours.encode(text) == smollm2_by_definition.encode(text)

    @pytest.mark.parametrize("text", TEXTS)
    def test_smollm2_on_texts(self, ours: Tokenizer, smollm2_by_definition: ByDefinition, text: str) -> None:
        assert ours.encode(text) == smollm2_by_definition.encode(text)


MERGES = ["1 2", "12 3", "3 4", "Ġ 1", "Ġ Ġ", "' s", "' S", "Ċ Ċ", "Ġ Ċ", "Ġ a", "a b", "! Ċ", "Â ²", "b ="]


@pytest.fixture(scope="session", params=["gpt-2", "qwen2", "llama-bpe", "smollm"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, ByDefinition]:
    """A vocabulary whose merges show where text is cut into words."""
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(request.param)
    writer.add_token_list([*LETTERS, *(m.replace(" ", "") for m in MERGES), "ab=", "1234"])
    writer.add_token_merges(MERGES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_tokenizer(GGUFFile(path)), ByDefinition(GGUFFile(path), request.param)


class TestWaysToCut:
    @settings(max_examples=300, deadline=None)
    @given(text=st.text(alphabet="1234 \n\r\t'sSab!=²½é猫"))
    def test_as_by_definition(self, small: tuple[Tokenizer, ByDefinition], text: str) -> None:
        tokenizer, expected = small
        assert tokenizer.encode(text, add_bos=False) == expected.encode(text)


@pytest.mark.models
class TestQwen:
    """The reference pair: one vocabulary, cut into words as Qwen2 does."""

    def test_one_vocabulary(self, qwen_half: Path, qwen_big: Path) -> None:
        target, draft = (gguf_tokenizer(GGUFFile(path)) for path in (qwen_big, qwen_half))
        assert check_pair(target, draft) == target.vocab_size == draft.vocab_size == 151_665
        assert target.eos_ids == (151_645, 151_643)
        assert target.bos_id is None

    def test_by_definition(self, qwen_half: Path) -> None:
        file = GGUFFile(qwen_half)
        ours, expected = gguf_tokenizer(file), ByDefinition(file, "qwen2")

        @settings(max_examples=500, deadline=None)
        @given(text=st.one_of(TRICKY, st.sampled_from(TEXTS)))
        def check(text: str) -> None:
            assert ours.encode(text) == expected.encode(unicodedata.normalize("NFC", text))

        check()

    def test_chat(self, qwen_half: Path) -> None:
        tokenizer = gguf_tokenizer(GGUFFile(qwen_half))
        ids = tokenizer.chat([{"role": "user", "content": "写一个函数"}])
        assert tokenizer.decode(ids, skip_special=False) == (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n写一个函数<|im_end|>\n<|im_start|>assistant\n"
        )
