"""Text to token ids and back, with the model's own vocabulary and chat template, whatever file they came from."""

import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import tokenizers

from ..errors import PairError, UsageError
from .chat_template import ChatTemplate, Clock
from .detokenize import Detokenizer, Pieces, pieces_of

_PADDING = re.compile(rb"\[PAD\d*\]|[<\[]unused_?\d+[>\]]|<\|reserved_special_token_\d+\|>|<\|?(extra|dummy)_?\d+\|?>")
"""Tokens that only fill a table: they mean nothing, so two vocabularies may differ in them."""


class Tokenizer:
    """A model's vocabulary and its chat template.

    Attributes:
        origin: the file or folder it came from, for messages.
        bos_id: the id that begins a raw prompt; None where the model wants none.
        eos_ids: ids that end an output.
        chat_template: the template's source; None where the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        origin: str,
        bos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
        clock: Clock = datetime.now,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            backend: the vocabulary and its rules.
            origin: where it came from.
            bos_id, eos_ids, chat_template: see the attributes.
            named_tokens: texts of special tokens by the name that templates know them by, such as 'bos_token'.
            clock: what a template's `strftime_now` reads.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()  # `encode_special_tokens` is a switch on the backend, not an argument
        self.origin = origin
        self.bos_id, self.eos_ids = bos_id, tuple(dict.fromkeys(eos_ids))
        self._template = None if chat_template is None else ChatTemplate(chat_template, origin=origin, clock=clock)
        self._named_tokens = dict(named_tokens or {})

    @property
    def vocab_size(self) -> int:
        """Ids from here on mean nothing; the model's table may have more rows."""
        return len(self._pieces.of)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None where the model has none."""
        return None if self._template is None else self._template.source

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of special tokens by the name that templates know them by, such as 'bos_token'."""
        return self._named_tokens

    def to_json(self) -> str:
        """The vocabulary and its rules as the contents of a tokenizer.json; `bos_id` is not among the rules."""
        return self._backend.to_str()

    @cached_property
    def _pieces(self) -> Pieces:
        return pieces_of(self._backend, self.origin)

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            add_bos: begin with `bos_id` where the model wants it.
            parse_special: read '<|im_end|>' and the like as the special tokens they name. Text that a user wrote has
                none; a rendered template does.

        Raises:
            UsageError: the text holds half a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds U+{ord(text[error.start]):04X} at character {error.start}, half of a surrogate pair. "
                "Expected characters: decode the text as UTF-8."
            ) from None
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            ids = self._backend.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of token ids; bytes that make no character become U+FFFD, ids that mean nothing are left out."""
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(i) for i in ids]) + stream.flush()

    def stream(self, *, skip_special: bool = True, keep: Collection[str] = ()) -> Detokenizer:
        """A detokeniser for one text whose ids come one by one.

        Args:
            skip_special: leave special tokens out.
            keep: texts of special tokens that are kept all the same, such as those that mark a tool call.
        """
        return Detokenizer(self._pieces, skip_special=skip_special, keep=keep)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text of their own, such as an end of turn."""
        return self._pieces.special

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written so; None where there is none."""
        wanted = text.encode()
        return next((i for i in sorted(self.special_ids) if self._pieces.of[i] == wanted), None)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template, with exactly one `bos_id` where it has one.

        Args:
            messages: mappings with 'role' and 'content'.
            add_generation_prompt: end where the assistant's answer begins.
            variables: what else the template knows, such as `tools` or `enable_thinking`.

        Raises:
            UsageError: the model has no chat template, or the template refuses the messages.
        """
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        ids = self.encode(text, add_bos=False, parse_special=True)
        if self.bos_id is None:
            return ids
        while ids and ids[0] == self.bos_id:
            ids = ids[1:]
        return [self.bos_id, *ids]

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation as the text that the chat template makes of it; what `chat` takes and raises."""
        if self._template is None:
            raise UsageError(
                f"{self.origin} has no chat template, so messages cannot be put into the form it was trained on. Give "
                "a raw prompt, or choose a chat model; a folder may carry its template as chat_template.jinja."
            )
        return self._template.render(
            messages,
            {"tools": None, "documents": None, **self._named_tokens, **variables}
            | {"add_generation_prompt": add_generation_prompt},
        )

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that an id stands for; None for an id that means nothing."""
        return self._pieces.of[token] if 0 <= token < self.vocab_size else None

    def token_text(self, token: int) -> str:
        """An id as text to look at: bytes that are no whole character are written as escapes; '' means nothing."""
        return (self.token_bytes(token) or b"").decode("utf-8", "backslashreplace")


def check_pair(target: Tokenizer, draft: Tokenizer) -> int:
    """Check that a draft's ids mean to it what they mean to the target.

    Tables of different sizes are no obstacle: what one has past the other's end, and entries that only fill a table,
    are left out.

    Returns:
        S: ids 0 .. S - 1 may be drafted.

    Raises:
        PairError: ids that mean one thing to the target and another to the draft.
    """
    shared = min(target.vocab_size, draft.vocab_size)
    differing = [i for i in range(shared) if not _same_or_padding(target.token_bytes(i), draft.token_bytes(i))]
    if differing or shared == 0:
        shown = "; ".join(f"{i} is {target.token_text(i)!r} and {draft.token_text(i)!r}" for i in differing[:8])
        more = f"; and {len(differing) - 8} more" if len(differing) > 8 else ""
        raise PairError(
            f"{len(differing)} of {shared} token ids mean one thing to the target {target.origin} and another to the "
            f"draft {draft.origin}: {shown}{more}. Expected one vocabulary: choose a "
            "draft of the target's own family, or a draft without a vocabulary, such as ngram."
        )
    return shared


def _same_or_padding(a: bytes | None, b: bytes | None) -> bool:
    return a == b or a is None or b is None or bool(_PADDING.fullmatch(a) or _PADDING.fullmatch(b))
