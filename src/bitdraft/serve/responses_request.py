"""What `/v1/responses` takes, and the chat that it comes to: the same model, template, sampling and grammars.

Nothing is stored: a client sends the whole conversation each time.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, WithJsonSchema

from .faults import ApiError
from .schemas import (
    ChatRequest,
    Count,
    Domain,
    Function,
    JsonSchema,
    Message,
    NamedFunction,
    NamedTool,
    NotStored,
    ResponseFormat,
    Schema,
    Speculative,
    Strict,
    Text,
    Tool,
)


def _no_memory(given: str | None) -> str | None:
    if given is not None:
        raise ValueError("this server stores no responses; send the whole conversation as input")
    return given


class FunctionTool(Strict):
    """A function that the model may call, as this endpoint has it: not in an object of its own."""

    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern=r"^[\w.\-]{1,128}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class NamedFunctionTool(Strict):
    """The function that has to be called."""

    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    """What form the text has."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    """How the text comes."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    """Taken, and of no effect."""

    effort: str | None = None
    summary: str | None = None


class ResponseStreamOptions(Strict):
    """Taken, and of no effect."""

    include_obfuscation: bool = False


class ResponsesRequest(Strict):
    """A body of `/v1/responses`."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    text: TextConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: NotStored | None = None
    background: NotStored | None = None
    previous_response_id: Annotated[str | None, AfterValidator(_no_memory), WithJsonSchema({"type": "null"})] = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    speculative: Speculative | None = None
    domain: Domain | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a request comes to.

    Raises:
        ApiError: an item of the input that is no text, call or output of a call.
    """
    choice: Literal["none", "auto", "required"] | NamedFunctionTool | NamedTool | None = body.tool_choice
    if isinstance(choice, NamedFunctionTool):
        choice = NamedTool(type="function", function=NamedFunction(name=choice.name))
    return ChatRequest(
        model=body.model,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        stream=body.stream,
        speculative=body.speculative,
        domain=body.domain,
    )


NAMES = {"messages": "input", "response_format.json_schema": "text.format", "response_format": "text.format"}
"""Fields of a chat by what they are called here."""


def renamed(error: ApiError) -> ApiError:
    """An error about a chat's field as one about the field here."""
    message, param = error.message, error.param
    for old, new in NAMES.items():
        message, param = message.replace(old, new), param.replace(old, new) if param else None
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def _format(given: TextFormat) -> ResponseFormat:
    schema = JsonSchema(name=given.name, description=given.description, schema=given.schema_, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema if given.type == "json_schema" else None)


def _tool(given: FunctionTool) -> Tool:
    return Tool(type="function", function=Function(**given.model_dump(exclude={"type"})))


def _messages(body: ResponsesRequest) -> list[Message]:
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*messages, Message(role="user", content=body.input)]
    for at, item in enumerate(body.input):
        place = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                messages.append(
                    Message(role=_role(item, place), content=_text(item.get("content"), f"{place}.content"))
                )
            case "function_call":
                _add_call(messages, item, place)
            case "function_call_output":
                output = _text(item.get("output"), f"{place}.output")
                call_id = _string(item, "call_id", place)
                messages.append(Message.model_validate({"role": "tool", "content": output, "tool_call_id": call_id}))
            case "reasoning":
                continue  # chat templates leave out what earlier answers thought
            case other:
                raise ApiError(
                    400,
                    f"{place} is of type {other!r}. Expected message, function_call, function_call_output or "
                    "reasoning: nothing is stored, and this model reads text.",
                    param=place,
                )
    return messages


def _add_call(messages: list[Message], item: dict[str, Any], place: str) -> None:
    """A call of the assistant's; calls that follow one another are one message."""
    function = {"name": _string(item, "name", place), "arguments": _string(item, "arguments", place)}
    call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
    last = messages[-1].model_dump(exclude_none=True) if messages else {}
    if last.get("role") == "assistant":
        messages[-1] = Message.model_validate(last | {"tool_calls": [*last.get("tool_calls", ()), call]})
    else:
        messages.append(Message.model_validate({"role": "assistant", "content": "", "tool_calls": [call]}))


def _role(item: dict[str, Any], place: str) -> Literal["system", "developer", "user", "assistant"]:
    role = item.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise ApiError(
            400,
            f"{place}.role is {role!r}. Expected system, developer, user or assistant.",
            param=f"{place}.role",
        )
    return role  # type: ignore[no-any-return]


def _string(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{name} is {value!r}. Expected a text.", param=f"{place}.{name}")
    return value


def _text(content: Any, place: str) -> str:
    """The text of a content, whose parts are put on lines of their own."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is {content!r}. Expected a text, or a list of parts.", param=place)
    for at, part in enumerate(content):
        kinds = ("input_text", "output_text", "text")
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ApiError(
                400,
                f"{place}[{at}] is no text. This model reads text: expected "
                '{"type": "input_text", "text": ...}, or "output_text" of an answer.',
                param=f"{place}[{at}]",
            )
    return "\n".join(part["text"] for part in content)
