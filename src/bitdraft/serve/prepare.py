"""From what a client asked for to requests of the engine: prompts as ids, sampling values, a grammar."""

import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decoding.constraint import Constraint
from ..engine.sequence import Request, TextStream
from ..errors import BitdraftError, UsageError
from ..models.tokenizer import Tokenizer
from ..types import SamplingParams
from .faults import ApiError
from .progress import Progress
from .schemas import CompletionRequest, Message, Sampling, Tool
from .settings import Defaults

RESERVED = {"messages", "add_generation_prompt", "tools", "self"}
"""Variables of a chat template that no client sets by another name."""
COLDEST = 1e-6
"""Below this temperature sampling is greedy: float32 could not tell the difference, but overflows."""


@dataclass(frozen=True)
class Model:
    """What preparing has to know of the model that is served.

    Attributes:
        tokenizer: its tokenizer.
        vocab_size: ids are below it.
        context_length: tokens of prompt and output together.
        max_draft: longest block that is drafted; 0 without a draft.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    max_draft: int


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and as text where it came so."""

    ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True)
class Asked:
    """What is the same for all prompts of a call.

    Attributes:
        max_tokens: output tokens at most; None for what the context leaves.
        logprobs, prompt_logprobs: likeliest tokens to report; None reports nothing.
        constraint: makes the grammar of one answer, which no other may share; None for any text.
        domain: kind of traffic.
        arrived: when the call came.
        keep: special tokens that stay in the text.
        prediction: ids that the answers are likely to repeat.
    """

    max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: Callable[[], Constraint] | None
    domain: str
    arrived: float
    keep: tuple[str, ...] = ()
    prediction: tuple[int, ...] = ()


@dataclass
class OutputText:
    """The output as text, without the token that ended it unless that was asked for. A `TextStream`."""

    stream: TextStream
    left_out: frozenset[int]

    def push(self, token: int) -> str:
        """The text that a token completes."""
        return "" if token in self.left_out else self.stream.push(token)

    def flush(self) -> str:
        """The text of an incomplete tail."""
        return self.stream.flush()


@dataclass
class Groups:
    """Requests of one call: for each prompt, so many answers.

    Attributes:
        prompts: in the order of the call.
        requests: for each prompt, its requests with what follows them.
    """

    prompts: list[Prompt]
    requests: list[list[tuple[Request, Progress]]] = field(default_factory=list)


def completion_prompts(body: CompletionRequest, model: Model) -> list[Prompt]:
    """The prompts of a completion, which come as a text, as ids, or as a list of either.

    Special tokens in a text are read as such: it is the whole prompt, whoever wrote it. Ids are taken as they are.
    """
    given = body.prompt
    if isinstance(given, str):
        return [_text_prompt(given, body, model)]
    if isinstance(given[0], int):
        return [_cut(Prompt(tuple(i for i in given if isinstance(i, int))), body)]
    return [
        _text_prompt(one, body, model) if isinstance(one, str) else _cut(Prompt(tuple(one)), body)
        for one in given
        if not isinstance(one, int)
    ]


def _text_prompt(text: str, body: CompletionRequest, model: Model) -> Prompt:
    ids = model.tokenizer.encode(text, add_bos=body.add_special_tokens, parse_special=True)
    return _cut(Prompt(tuple(ids), text), body)


def _cut(prompt: Prompt, body: Sampling) -> Prompt:
    """The last `truncate_prompt_tokens` of a prompt."""
    kept = body.truncate_prompt_tokens
    if kept is None or len(prompt.ids) <= kept:
        return prompt
    return Prompt(prompt.ids[-kept:])


def chat_prompt(
    messages: Sequence[Message],
    model: Model,
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    variables: dict[str, Any] | None = None,
) -> Prompt:
    """A conversation in the model's chat template.

    Raises:
        ApiError: a part of a message that is no text, or a variable that would replace one of the call's own fields.
        UsageError: the template refuses it.
    """
    taken = RESERVED & set(variables or {})
    if taken:
        name = min(taken)
        raise ApiError(
            400, f"chat_template_kwargs sets {name!r}. Use the field of that name.", param="chat_template_kwargs"
        )
    plain = [_plain(message, at) for at, message in enumerate(messages)]
    extra = dict(variables or {})
    if tools:
        extra["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    ids = model.tokenizer.chat(plain, add_generation_prompt=add_generation_prompt, **extra)
    return Prompt(tuple(ids))


def _plain(message: Message, at: int) -> dict[str, Any]:
    """A message as templates want it: content as one text; a developer is a system."""
    plain = message.model_dump(exclude_none=True)
    plain["content"] = text_of(message.content, f"messages[{at}].content")
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_called(call) for call in plain["tool_calls"]]
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def _called(call: Any) -> Any:
    """An earlier call as templates want it: clients send the arguments as JSON text, templates write JSON of them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def text_of(content: str | list[dict[str, Any]] | None, place: str) -> str:
    """The text of a message, whose parts are put on lines of their own.

    Raises:
        ApiError: a part that is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f"{place}[{at}] is of type {part.get('type')!r}. This model reads text: expected "
                '{"type": "text", "text": ...}.',
                param=f"{place}[{at}]",
            )
    return "\n".join(part["text"] for part in content)


def requests_for(prompts: list[Prompt], body: Sampling, asked: Asked, model: Model, defaults: Defaults) -> Groups:
    """The engine's requests for a call.

    Answers to the same prompt differ by their place, answers to different prompts of a call do not: each is what the
    prompt would get on its own with the same seed.

    Raises:
        UsageError: a value that sampling cannot use.
        ApiError: a prompt that does not fit.
    """
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    groups = Groups(prompts)
    speculative = body.speculative
    max_draft = None if speculative is None else speculative.k if speculative.enabled else 0
    if not model.max_draft and not asked.prediction:
        max_draft = 0  # nothing drafts: no room has to be kept for it
    for prompt in prompts:
        room = model.context_length - len(prompt.ids)
        if room < 1 or not prompt.ids:
            raise ApiError(
                400,
                f"the prompt has {len(prompt.ids)} tokens. Expected 1 to {model.context_length - 1}: the context holds "
                f"{model.context_length}, and the answer needs a place in it.",
                param="messages" if not isinstance(body, CompletionRequest) else "prompt",
                code="context_length_exceeded",
            )
        check_ids("prompt", prompt.ids, model)
        sampling = sampling_params(body, seed, room if asked.max_tokens is None else asked.max_tokens, model, defaults)
        ending = sampling.ending_ids(frozenset(model.tokenizer.eos_ids))
        group = []
        for _ in range(body.n):
            stream = model.tokenizer.stream(skip_special=body.skip_special_tokens, keep=asked.keep)
            request = Request(
                number=0,
                prompt=prompt.ids,
                sampling=sampling,
                text=OutputText(stream, frozenset() if body.include_stop_str_in_output else ending),
                constraint=asked.constraint() if asked.constraint else None,
                logprobs=asked.logprobs,
                prompt_logprobs=asked.prompt_logprobs,
                domain=asked.domain,
                max_draft=max_draft,
                prediction=asked.prediction,
            )
            group.append((request, Progress(len(prompt.ids), asked.domain, asked.arrived)))
        groups.requests.append(group)
    return groups


def sampling_params(body: Sampling, seed: int, max_tokens: int, model: Model, defaults: Defaults) -> SamplingParams:
    """How a request samples: its own values, and the server's where it has none.

    Raises:
        UsageError: a value that cannot be.
        ApiError: ids that the vocabulary does not have.
    """
    temperature = float(_or(body.temperature, defaults.temperature))
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)
    bias = _bias(body.logit_bias or {})
    check_ids("logit_bias", bias, model)
    check_ids("stop_token_ids", body.stop_token_ids or (), model)
    check_ids("allowed_token_ids", body.allowed_token_ids or (), model)
    try:
        return SamplingParams(
            temperature=0.0 if temperature < COLDEST else temperature,
            top_k=top_k,
            top_p=float(_or(body.top_p, defaults.top_p)),
            min_p=float(_or(body.min_p, defaults.min_p)),
            typical_p=float(_or(body.typical_p, defaults.typical_p)),
            repetition_penalty=float(_or(body.repetition_penalty, defaults.repetition_penalty)),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            logit_bias=bias,
            bad_words=tuple(dict.fromkeys(ids for word in body.bad_words or () for ids in _spellings(word, model))),
            allowed_ids=None if body.allowed_token_ids is None else frozenset(body.allowed_token_ids),
            seed=seed,
            reproducible=body.seed is not None,
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=tuple(stop),
            stop_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
        )
    except BitdraftError as error:
        name = str(error).split(" ", 1)[0]
        raise ApiError(400, str(error), param=name if name in type(body).model_fields else None) from None


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _bias(given: dict[str, float]) -> dict[int, float]:
    wrong = [key for key in given if not (key.isascii() and key.isdigit())]
    if wrong:
        raise ApiError(400, f"logit_bias has the key {wrong[0]!r}. Expected token ids.", param="logit_bias")
    return {int(key): float(value) for key, value in given.items()}


def _spellings(word: str, model: Model) -> Iterable[tuple[int, ...]]:
    """The ids of a word at the start of a text and after a space."""
    for text in (word, f" {word.lstrip()}"):
        ids = model.tokenizer.encode(text, add_bos=False)
        if ids:
            yield tuple(ids)


def check_ids(name: str, ids: Iterable[int], model: Model) -> None:
    """Refuse ids that the vocabulary does not have.

    Raises:
        ApiError: there is one; `name` is the field.
    """
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise ApiError(400, f"{name} holds the id {i}. Expected ids from 0 to {model.vocab_size - 1}.", param=name)


def usage_error(error: UsageError) -> ApiError:
    """What the engine, a template or a grammar refused, as an answer."""
    return ApiError(400, str(error))
