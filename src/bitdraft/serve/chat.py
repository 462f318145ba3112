"""`/v1/chat/completions`: an answer to a conversation."""

from typing import Any

from .faults import ApiError
from .pieces import Piece, TokenNames, chat_logprobs, prompt_logprobs
from .prepare import Asked, Groups, Model, chat_prompt, requests_for
from .respond import Choice
from .response_format import Compile, wanted_grammar
from .schemas import ChatRequest
from .settings import Defaults


class ChatForm:
    """How answers of a chat are shown, see `respond.Form`."""

    prefix = "chatcmpl"
    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, body: ChatRequest, groups: Groups, names: TokenNames) -> None:
        """Show answers to `body`."""
        self._body, self._names, self._prompt = body, names, groups.prompts[0]
        self._begun: set[int] = set()

    def opening(self) -> list[Choice]:
        """Who speaks, for each answer."""
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._body.n)]

    def chunks(self, index: int, piece: Piece) -> list[Choice]:
        """What is new, and the end in a chunk of its own."""
        body = self._body
        found = []
        extras = self._extras(index, piece)
        wanted = body.logprobs or body.return_token_ids or body.return_origins
        if piece.text or extras.get("prompt_logprobs") or (piece.tokens and wanted):
            chunk = self._chunk(index, {"content": piece.text})
            if body.logprobs:
                chunk["logprobs"] = chat_logprobs(self._names, piece.logprobs)
            found.append(chunk | extras)
        if piece.finish:
            end = self._chunk(index, {})
            found.append(end | {"finish_reason": piece.finish, "stop_reason": piece.stop_reason})
        return found

    def whole(self, index: int, piece: Piece) -> Choice:
        """A choice."""
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._names, piece.logprobs) if self._body.logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
            **self._extras(index, piece),
        }

    def details(self) -> dict[str, int]:
        """Nothing to say."""
        return {}

    def _chunk(self, index: int, delta: dict[str, Any]) -> Choice:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

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
    prompt = chat_prompt(
        body.messages,
        model,
        tools=body.tools if body.tool_choice != "none" else None,
        add_generation_prompt=body.add_generation_prompt,
        variables=body.chat_template_kwargs,
    )
    limits = [n for n in (body.max_completion_tokens, body.max_tokens, defaults.max_tokens) if n is not None]
    grammar = wanted_grammar(body)
    asked = Asked(
        max_tokens=limits[0] if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        constraint=compile_grammar(grammar) if grammar else None,
        domain=domain,
        arrived=arrived,
    )
    groups = requests_for([prompt], body, asked, model, defaults)
    names = TokenNames(model.tokenizer, as_ids=body.return_tokens_as_token_ids)
    return ChatForm(body, groups, names), groups
