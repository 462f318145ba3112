"""The tokenizer that a GGUF file carries in its metadata.

Two kinds: 'gpt2', byte-level BPE whose merges are listed and whose way of cutting text into words is named by
tokenizer.ggml.pre; and 'llama', SentencePiece BPE with a score for every piece and bytes as a last resort.
"""

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ..errors import ModelFileError
from .gguf import GGUFFile
from .tokenizer import Tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _WORDS + r"|\p{N}{1,3}" + _AFTER_DIGITS
_QWEN2 = _WORDS + r"|\p{N}" + _AFTER_DIGITS

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*){_CONTRACTIONS}?"
_GPT4O = _CASED + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama3": _LLAMA3, "dbrx": _LLAMA3, "qwen2": _QWEN2, "gpt-4o": _GPT4O}

_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = {
    **dict.fromkeys(_LLAMA3_NAMES, "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    "smollm": "smollm",
    "dbrx": "dbrx",
    "gpt-4o": "gpt-4o",
    **dict.fromkeys(("gpt-2", "gpt2", "default"), "gpt-2"),
}
"""Ways to cut text into words before BPE, by the value of tokenizer.ggml.pre."""

_ENDINGS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "</s>",
    "<end_of_turn>",
)
"""Control tokens that end an output whether or not the file names them: a file names one, models use two or three."""


def gguf_special_ids(file: GGUFFile) -> tuple[int | None, tuple[int, ...]]:
    """The id that begins a raw prompt, or None, and the ids that end an output.

    Raises:
        ModelFileError: the metadata name an id that is not in the vocabulary.
    """
    tokens = _tokens(file)
    kinds = _kinds(file, len(tokens))
    bos = _token_id(file, "bos", len(tokens))
    llama3 = file.number("tokenizer.ggml.pre", str, "default") in _LLAMA3_NAMES
    spm = file.number("tokenizer.ggml.model", str, "") == "llama"
    adds_bos = file.number("tokenizer.ggml.add_bos_token", bool, spm or llama3)
    named = [_token_id(file, name, len(tokens)) for name in ("eos", "eot", "eom")]
    known = [i for i, kind in enumerate(kinds) if kind == _CONTROL and tokens[i] in _ENDINGS]
    return bos if adds_bos else None, tuple(dict.fromkeys([i for i in named if i is not None] + known))


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file.

    Raises:
        ModelFileError: there is none, it is damaged, or it is of a kind that is not read.
    """
    tokens = _tokens(file)
    kinds = _kinds(file, len(tokens))
    model = file.number("tokenizer.ggml.model", str)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise ModelFileError(
            f"{file.path}: a tokenizer of kind {model!r}. bitdraft reads 'gpt2' (byte-level BPE) and 'llama' "
            "(SentencePiece): choose a model with one of these, or its folder with tokenizer.json."
        )
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    try:
        backend = build(file, vocabulary, kinds)
        _add_special(backend, tokens, kinds, file.number("general.architecture", str, ""))
    except ModelFileError:
        raise
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ModelFileError(
            f"{file.path}: no tokenizer can be made of its metadata ({error}). The file is damaged: fetch it again."
        ) from None
    bos, eos_ids = gguf_special_ids(file)
    named = {f"{name}_token": _token_id(file, key, len(tokens)) for name, key in _NAMED.items()}
    return Tokenizer(
        backend,
        origin=str(file.path),
        bos_id=bos,
        eos_ids=eos_ids,
        chat_template=file.number("tokenizer.chat_template", str, "") or None,
        named_tokens={name: tokens[i] for name, i in named.items() if i is not None},
    )


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Special tokens by their name in templates and in metadata keys."""


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(
            f"{file.path}: it carries no tokenizer (tokenizer.ggml.tokens is missing). Choose a whole model file, not "
            "one of weights alone."
        )
    return tokens


def _kinds(file: GGUFFile, size: int) -> list[int]:
    kinds = file.integers("tokenizer.ggml.token_type") or [1] * size
    if len(kinds) != size:
        raise ModelFileError(
            f"{file.path}: {len(kinds)} token types for {size} tokens. The file is damaged: fetch it again."
        )
    return kinds


def _token_id(file: GGUFFile, name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    value = file.number(key, int)
    if not 0 <= value < size:
        raise ModelFileError(
            f"{file.path}: {key} is {value}, but there are {size} tokens. The file is damaged: fetch it again."
        )
    return value


_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Of Phi-3's control tokens, those that leave the white space after them."""


def _add_special(backend: Backend, tokens: list[str], kinds: list[int], architecture: str) -> None:
    """Tell the backend which tokens are found in a text as a whole, and which of them are no text at all.

    Those of Phi-3's SentencePiece vocabulary take the white space after them along, as its tokenizer.json has it.
    """
    strips = architecture == "phi3" and isinstance(backend.model, models.BPE) and backend.model.byte_fallback
    added = [
        AddedToken(
            token,
            normalized=False,
            special=kind != _USER_DEFINED,
            rstrip=bool(strips) and kind == _CONTROL and token not in _KEEP_SPACES,
        )
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def _byte_level(file: GGUFFile, vocabulary: dict[str, int], kinds: list[int]) -> Backend:
    name = file.number("tokenizer.ggml.pre", str, "default")
    kind = _PRE_TOKENIZERS.get(name)
    if kind is None:
        raise ModelFileError(
            f"{file.path}: its tokenizer cuts text into words in the way called {name!r}. bitdraft knows "
            f"{', '.join(_PRE_TOKENIZERS)}: use the model's folder with tokenizer.json instead."
        )
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _listed_merges(file))]
    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=kind == "llama3"))
    backend.pre_tokenizer = _word_rules(kind)
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _word_rules(kind: str) -> pre_tokenizers.PreTokenizer:
    """How a text is cut into words before BPE, by a value of `_PRE_TOKENIZERS`."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind in ("gpt-2", "smollm"))
    if kind == "gpt-2":
        return words
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
    return pre_tokenizers.Sequence([split, words])


_PROBES = (
    "I'VE seen, haven't you? It's 12345678 o'clock ...\n\n  \tEND\r\n",
    "naïve cafe\u0301  x=3.14159; //日本語１２３😀 \u00a0~~ 'll'LL",
    '  \n \n\n a  1 22 333 4444\t\t--=>\nprint("hi")',
)
"""Texts that the known ways cut differently: contractions, digits, spaces, line ends, punctuation, other letters."""


def words_name(backend: Backend) -> str | None:
    """The value of tokenizer.ggml.pre whose way to cut text into words is this tokenizer's; None if none is."""
    if backend.pre_tokenizer is None:
        return None
    for name in ("llama-bpe", "qwen2", "smollm", "gpt-2"):
        kind = _PRE_TOKENIZERS[name]
        normal = normalizers.NFC() if kind == "qwen2" else None
        rules = _word_rules(kind)
        if all(_cut(backend.normalizer, backend.pre_tokenizer, t) == _cut(normal, rules, t) for t in _PROBES):
            return name
    return None


def _cut(
    normal: normalizers.Normalizer | None, rules: pre_tokenizers.PreTokenizer, text: str
) -> list[tuple[str, tuple[int, int]]]:
    return rules.pre_tokenize_str(normal.normalize_str(text) if normal else text)


def _listed_merges(file: GGUFFile) -> list[str]:
    merges = file.strings("tokenizer.ggml.merges")
    if merges is None:
        raise ModelFileError(
            f"{file.path}: its byte-level tokenizer has no merges (tokenizer.ggml.merges). Fetch or convert the file "
            "again."
        )
    return merges


def _sentencepiece(file: GGUFFile, vocabulary: dict[str, int], kinds: list[int]) -> Backend:
    scores = file.floats("tokenizer.ggml.scores") or []
    if len(scores) != len(kinds):
        raise ModelFileError(
            f"{file.path}: {len(scores)} token scores for {len(kinds)} tokens. The file is damaged: fetch it again."
        )
    unknown = next((token for token, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    merges = _merges(vocabulary, kinds, scores)
    backend = Backend(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.number("tokenizer.ggml.add_space_prefix", bool, True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(vocabulary: dict[str, int], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges that join pieces in SentencePiece's order: the pair whose whole has the best score comes first.

    SentencePiece keeps no list of merges: any two neighbours may be joined whose whole is a piece.
    """
    ranked = []
    for token, i in vocabulary.items():
        if kinds[i] in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[i], i, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
