"""`/v1/chat/completions`: an answer to a conversation."""

import secrets
from collections import defaultdict
from functools import partial
from typing import Any

from .faults import ApiError
from .pieces import Piece, TokenNames, chat_logprobs, prompt_logprobs
from .prepare import Asked, Groups, Model, chat_prompt, requests_for, text_of
from .reading import AnswerReader, Parts, Reads, call_deltas, whole_calls
from .reasoning import reasoning_of
from .respond import Choice
from .response_format import Compile, Grammar, wanted_grammar
from .schemas import ChatRequest, NamedTool
from .settings import Defaults
from .tool_calls import Dialect, dialect_of
from .tool_grammar import Tool, tool_grammar

_ENDING = 16
"""Tokens of a prompt that are looked at to see whether it opens the reasoning."""


class ChatForm:
    """How answers of a chat are shown, see `respond.Form`."""

    prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, body: ChatRequest, groups: Groups, names: TokenNames, readers: list[AnswerReader]) -> None:
        """Show answers to `body`; there is a reader for each."""
        self._body, self._names, self._prompt, self._readers = body, names, groups.prompts[0], readers
        self._begun: set[int] = set()
        self._ids: list[dict[int, str]] = [defaultdict(lambda: f"call_{secrets.token_hex(12)}") for _ in readers]

    def opening(self) -> list[Choice]:
        """Who speaks, for each answer."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._body.n)]

    def chunks(self, index: int, piece: Piece) -> list[Choice]:
        """What is new, and the end in a chunk of its own."""
        body = self._body
        parts = self._readers[index].push(piece.text, piece.tokens, last=piece.finish is not None)
        delta = self._delta(index, parts)
        extras = self._extras(index, piece)
        found = []
        wanted = body.logprobs or body.return_token_ids or body.return_origins
        if delta or extras.get("prompt_logprobs") or (piece.tokens and wanted):
            chunk = self._chunk(index, delta or {"content": ""})
            if body.logprobs:
                chunk["logprobs"] = chat_logprobs(self._names, piece.logprobs)
            found.append(chunk | extras)
        if piece.finish:
            end = self._chunk(index, {})
            found.append(end | {"finish_reason": self._finish(index, piece), "stop_reason": piece.stop_reason})
        return found

    def whole(self, index: int, piece: Piece) -> Choice:
        """A choice."""
        parts = self._readers[index].push(piece.text, piece.tokens, last=True)
        calls = whole_calls(parts.calls, self._ids[index])
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if calls:
            message |= {"content": parts.content or None, "tool_calls": calls}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._names, piece.logprobs) if self._body.logprobs else None,
            "finish_reason": self._finish(index, piece),
            "stop_reason": piece.stop_reason,
            **self._extras(index, piece),
        }

    def details(self) -> dict[str, int]:
        """How many tokens were reasoning."""
        return {"reasoning_tokens": sum(reader.reasoning_tokens for reader in self._readers)}

    def _finish(self, index: int, piece: Piece) -> str | None:
        return "tool_calls" if piece.finish == "stop" and self._readers[index].called else piece.finish

    def _chunk(self, index: int, delta: dict[str, Any]) -> Choice:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, index: int, parts: Parts) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content:
            delta["content"] = parts.content
        if parts.calls:
            delta["tool_calls"] = call_deltas(parts.calls, self._ids[index])
        return delta

    def _extras(self, index: int, piece: Piece) -> dict[str, Any]:
        body, begins = self._body, index not in self._begun
        self._begun.add(index)
        extras: dict[str, Any] = {}
        if begins and body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(self._names, self._prompt.ids, piece.prompt_logprobs)
        if body.return_token_ids:
            extras["token_ids"] = list(piece.tokens)
            if begins:
                extras["prompt_token_ids"] = list(self._prompt.ids)
        if body.return_origins:
            extras["origins"] = list(piece.origins)
        return extras


def chat(
    body: ChatRequest,
    model: Model,
    defaults: Defaults,
    compile_grammar: Compile,
    domain: str,
    arrived: float,
) -> tuple[ChatForm, Groups]:
    """What the engine is asked for, and how it is shown; arguments and errors as of `completions.completion`."""
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    tools = body.tools if body.tool_choice != "none" else None
    if body.tool_choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice without tools. Expected tools.", param="tool_choice")
    template = model.tokenizer.chat_template
    dialect = dialect_of(template) if tools else None
    if tools and dialect is None:
        raise ApiError(
            400,
            "the chat template of this model knows no tools, or writes calls in a way not known here.",
            param="tools",
        )
    prompt = chat_prompt(
        body.messages,
        model,
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    ending = model.tokenizer.decode(prompt.ids[-_ENDING:], skip_special=False)
    reads = Reads(dialect, reasoning_of(template), ending, body.parallel_tool_calls is not False)
    grammar = _grammar(body, model, dialect)
    splitter = reads.splitter()
    after = reads.reasoning.closes if reads.reasoning and splitter and splitter.inside else None
    limits = [n for n in (body.max_completion_tokens, body.max_tokens, defaults.max_tokens) if n is not None]
    asked = Asked(
        max_tokens=limits[0] if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=partial(compile_grammar, grammar, after) if grammar else None,
        domain=domain,
        arrived=arrived,
        keep=reads.markers,
        prediction=_prediction(body, model),
    )
    groups = requests_for([prompt], body, asked, model, defaults)
    names = TokenNames(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    readers = [AnswerReader(reads, model.tokenizer.stream(keep=reads.markers)) for _ in range(body.n)]
    return ChatForm(body, groups, names, readers), groups


def _prediction(body: ChatRequest, model: Model) -> tuple[int, ...]:
    """The ids of the text that the client expects."""
    if body.prediction is None:
        return ()
    text = text_of(body.prediction.content, "prediction.content")
    return tuple(model.tokenizer.encode(text, add_bos=False))


def _grammar(body: ChatRequest, model: Model, dialect: Dialect | None) -> Grammar | None:
    """The grammar that a response format or a tool that must be called asks for."""
    wanted = wanted_grammar(body)
    if dialect is None or body.tool_choice in (None, "none", "auto"):
        return wanted
    if wanted:
        raise ApiError(
            400, f"{wanted.field} and tool_choice each ask for a grammar. Expected one.", param="tool_choice"
        )
    tools = [
        Tool(tool.function.name, {"type": "object"} if tool.function.parameters is None else tool.function.parameters)
        for tool in body.tools or ()
    ]
    text = tool_grammar(
        dialect,
        tools,
        named=body.tool_choice.function.name if isinstance(body.tool_choice, NamedTool) else None,
        parallel=body.parallel_tool_calls is not False,
        special_id=model.tokenizer.special_id,
    )
    return Grammar("grammar", text, "tool_choice")
