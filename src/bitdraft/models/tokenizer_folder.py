"""The tokenizer of a model folder: tokenizer.json and the small files beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import ModelFileError
from .tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelFileError: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read as JSON ({error}). Fetch the file again.") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds no JSON object. Fetch the file again.")
    return value


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Reads tokenizer.json and, where they are there, tokenizer_config.json, chat_template.jinja, generation_config.json
    and config.json.

    Raises:
        ModelFileError: tokenizer.json is missing or damaged, or is of a kind that is not read.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(
            f"{folder}: there is no tokenizer.json. Expected it beside config.json: fetch it, or write it with "
            "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(f"{path}: no tokenizer can be read from it ({error}). Fetch the file again.") from None
    settings = _optional_json(folder / "tokenizer_config.json")
    named = {name: _content(settings[name]) for name in _NAMED if settings.get(name)}
    return Tokenizer(
        backend,
        origin=str(folder),
        bos_id=_bos_id(backend, settings, named),
        eos_ids=_eos_ids(folder, backend, named),
        chat_template=_chat_template(folder, settings),
        named_tokens=named,
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(token: Any) -> str:
    """The text of a token that is written as a string or as an object."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


def _bos_id(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Mapping[str, str]) -> int | None:
    """The id that begins a prompt: as 'add_bos_token' says or, if it says nothing, as the post-processor does."""
    wanted = settings.get("add_bos_token")
    if wanted is not None:
        return backend.token_to_id(named["bos_token"]) if wanted and "bos_token" in named else None
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    return whole[0] if whole[: len(plain)] != plain else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> list[int]:
    """Ids that end an output: generation_config.json knows best, then config.json, then the tokenizer."""
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(folder / name).get("eos_token_id")
        ids = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
        if ids:
            return ids
    end = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return [] if end is None else [end]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template from its own file, or from tokenizer_config.json: one, or several of which one is the default."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be read ({error}). Fetch the file again.") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        value = {t.get("name"): t.get("template") for t in value if isinstance(t, Mapping)}.get("default")
    return value if isinstance(value, str) else None
