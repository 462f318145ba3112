"""What a server was told at its start: limits, names, and what sampling does when a request does not say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import ModelFileError


@dataclass(frozen=True)
class Defaults:
    """Sampling values of requests that do not give their own.

    Attributes:
        temperature, top_p, top_k, min_p, typical_p, repetition_penalty: as in `SamplingParams`.
        max_tokens: output tokens at most; None for the endpoint's own: 16 of a completion, what the context leaves
            of a chat.
        origin: where they are from.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    origin: str = "OpenAI's defaults"


def read_defaults(folder: Path) -> Defaults:
    """The defaults in a model folder's generation_config.json; OpenAI's where there is none.

    Raises:
        ModelFileError: the file is no JSON object, or a value in it cannot be.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return Defaults()
    try:
        raw: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {f.name: raw[f.name] for f in fields(Defaults) if raw.get(f.name) is not None and f.name != "origin"}
        if raw.get("max_new_tokens") is not None:
            values["max_tokens"] = raw["max_new_tokens"]
        if raw.get("do_sample") is False:
            values["temperature"] = 0.0
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFileError(
            f"{path} cannot be used ({error}). Mend it, or start with --generation-config none."
        ) from None
    wrong = [name for name, value in values.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise ModelFileError(
            f"{path}: {wrong[0]} is {values[wrong[0]]!r}. Expected a number. Mend it, or start with "
            "--generation-config none."
        )
    return Defaults(**values, origin=str(path))


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        names: of the model; the first is its own, the others are as good. None yet where nobody chose them.
        defaults: sampling values where a request has none.
        lenient: ignore unknown fields.
        api_key: what clients have to show; None asks for nothing.
        origins: web origins whose pages may call the server; none by default.
        max_queue: requests that may wait; more are refused with status 429.
        max_body: bytes of a request's body.
        timeout: seconds that a request may take, waiting included.
        drain: seconds that running requests get to finish when the server is told to stop.
        admin: whether clients may change what drafts.
        vllm_metrics: show speculation's counters under vLLM's names, too.
    """

    names: tuple[str, ...] = ()
    defaults: Defaults = field(default_factory=Defaults)
    lenient: bool = False
    api_key: str | None = None
    origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 8 << 20
    timeout: float = 600.0
    drain: float = 30.0
    admin: bool = False
    vllm_metrics: bool = True
