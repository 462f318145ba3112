"""What of an answer is shown at once: a chunk of a stream, or the whole of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.engine import Emission
from ..models.detokenize import Detokenizer
from ..models.tokenizer import Tokenizer
from ..types import Origin, TokenLogprob

LEAST = -9999.0
"""Instead of minus infinity, which JSON does not have."""


@dataclass(frozen=True)
class Piece:
    """Several emissions of one request as one. Attributes as there."""

    text: str
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...]
    finish: str | None
    stop_reason: int | str | None
    error: str


def joined(emissions: Sequence[Emission], *, include_stop: bool) -> Piece:
    """Emissions of one request, in order, as one piece; `include_stop` shows the stop string that ended it."""
    last = emissions[-1]
    text = "".join(e.text for e in emissions)
    if include_stop and isinstance(last.stop_reason, str):
        text += last.stop_reason
    return Piece(
        text,
        tuple(token for e in emissions for token in e.tokens),
        tuple(origin for e in emissions for origin in e.origins),
        tuple(entry for e in emissions for entry in e.logprobs),
        tuple(entry for e in emissions for entry in e.prompt_logprobs),
        last.finish,
        last.stop_reason,
        last.error,
    )


def _finite(value: float) -> float:
    return max(value, LEAST)


class TokenNames:
    """How tokens are written in answers: as their text, or as 'token_id:17'."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def name(self, token: int) -> str:
        """A token for people; bytes of an incomplete character are escapes."""
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def raw(self, token: int) -> list[int]:
        """The bytes of a token."""
        return list(self._tokenizer.token_bytes(token) or b"")


class LegacyLogprobs:
    """Log-probabilities as `/v1/completions` shows them: four lists, one entry for each token."""

    def __init__(self, names: TokenNames, stream: Detokenizer) -> None:
        """Begin at the start of the text that `stream` makes of the tokens."""
        self._names, self._stream, self._offset = names, stream, 0

    def shown(self, tokens: Iterable[int], entries: Iterable[TokenLogprob | None], count: int) -> dict[str, list[Any]]:
        """The next tokens and what is known of them, with `count` likeliest ones; offsets count from the text's start.

        The token itself is always among `top_logprobs`, with the very same number. Of two ids with one name the
        likelier one is shown.
        """
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in zip(tokens, entries, strict=True):
            found["tokens"].append(self._names.name(token))
            found["text_offset"].append(self._offset)
            self._offset += len(self._stream.push(token))
            found["token_logprobs"].append(None if entry is None else _finite(entry.logprob))
            found["top_logprobs"].append(None if entry is None else self._top(entry, count))
        return found

    def _top(self, entry: TokenLogprob, count: int) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in (*entry.top[:count], (entry.token, entry.logprob)):
            name = self._names.name(token)
            top[name] = max(top.get(name, LEAST), _finite(value))
        return top


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities as `/v1/chat/completions` shows them."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": _finite(value), "bytes": names.raw(token)}

    return {
        "content": [
            one(e.token, e.logprob) | {"top_logprobs": [one(token, value) for token, value in e.top]} for e in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    names: TokenNames, tokens: Sequence[int], entries: Sequence[TokenLogprob | None]
) -> list[Mapping[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt, what is known by id; None for the first.

    `rank` is None for a token that is not among the likeliest ones that were asked for.
    """
    found: list[Mapping[str, Any] | None] = []
    for token, entry in zip(tokens, entries, strict=True):
        if entry is None:
            found.append(None)
            continue
        shown = {
            str(t): {"logprob": _finite(value), "rank": rank, "decoded_token": names.name(t)}
            for rank, (t, value) in enumerate(entry.top, 1)
        }
        shown.setdefault(
            str(token), {"logprob": _finite(entry.logprob), "rank": None, "decoded_token": names.name(token)}
        )
        found.append(shown)
    return found
