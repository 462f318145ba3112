"""From token ids back to text, all at once or as they come.

Every id stands for bytes, not for characters: one Thai letter or one emoji may be spread over several tokens. So text
is made by joining bytes and decoding them as UTF-8, and a stream holds back the bytes of a character that is not whole.
"""

import codecs
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import tokenizers

from ..errors import ModelFileError

_SPACE = "▁"  # how SentencePiece writes a space inside a piece


@dataclass(frozen=True)
class Pieces:
    """What every token id stands for.

    Attributes:
        of: bytes by id; None where an id has no meaning (a hole, or padding of the table).
        special: ids that stand for no text of their own, such as an end of turn.
        strips_space: the first space of a text was put there by the encoder, and is taken away again.
    """

    of: tuple[bytes | None, ...]
    special: frozenset[int]
    strips_space: bool


class Detokenizer:
    """Turns ids into text as they come, and never emits a part of a character.

    The pieces pushed and the flush, joined, are what `Tokenizer.decode` makes of all ids at once. Bytes that can be no
    part of any character become U+FFFD; so do those of an unfinished character at the flush.
    """

    def __init__(self, pieces: Pieces, *, skip_special: bool = True, keep: Collection[str] = ()) -> None:
        """Begin a text.

        Args:
            pieces: of the vocabulary.
            skip_special: leave special tokens out.
            keep: texts of special tokens that are kept all the same.
        """
        kept = {text.encode() for text in keep}
        skipped = pieces.special if skip_special else frozenset()
        self._skipped = frozenset(i for i in skipped if pieces.of[i] not in kept) if kept else skipped
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces.strips_space

    def push(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        if not 0 <= token < len(self._pieces.of) or token in self._skipped:
            return ""
        return self._emit(self._decoder.decode(self._pieces.of[token] or b""))

    def flush(self) -> str:
        """What is left at the end. The next push begins a new text."""
        text = self._emit(self._decoder.decode(b"", final=True))
        self._strip = self._pieces.strips_space
        return text

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text


def pieces_of(backend: tokenizers.Tokenizer, origin: str) -> Pieces:
    """The bytes of every id, as the tokenizer's own decoder would have them.

    Args:
        backend: a tokenizer with a byte-level or a SentencePiece decoder.
        origin: the file, for errors.

    Raises:
        ModelFileError: a decoder of another kind.
    """
    steps = _decoder_steps(backend)
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        to_bytes, strips = _byte_level, False
    elif kinds & {"ByteFallback", "Metaspace"} or any(step.get("content") == " " for step in steps):
        to_bytes, strips = _sentencepiece, any(_strips_space(step) for step in steps)
    else:
        raise ModelFileError(
            f"{origin}: a tokenizer whose decoder is {sorted(str(k) for k in kinds) or 'missing'}. bitdraft reads "
            "byte-level and SentencePiece tokenizers; choose a model that has one of these."
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    found: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, index in vocabulary.items():
        found[index] = to_bytes(token)
    added = backend.get_added_tokens_decoder()
    for index, entry in added.items():
        found[index] = entry.content.encode()
    return Pieces(tuple(found), frozenset(i for i, entry in added.items() if entry.special), strips)


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[Mapping[str, object]]:
    """The steps of the decoder, from its own description of itself."""
    if backend.decoder is None:
        return []
    whole = json.loads(backend.decoder.__getstate__())
    steps: list[Mapping[str, object]] = whole.get("decoders", [whole])
    return steps


def _strips_space(step: Mapping[str, object]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and bool(step.get("start"))


def _byte_alphabet() -> dict[int, int]:
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's encoder.py, `bytes_to_unicode`).

    Bytes that print are written as themselves; the other 68 as the letters from U+0100 on.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printed]
    return {b: b for b in printed} | {256 + n: b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[ord(letter)] for letter in token])
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()
