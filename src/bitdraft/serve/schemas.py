"""What clients may send, field by field. Anything else is refused by name, or dropped by a lenient server.

The fields are OpenAI's; vLLM's, where clients know them from there; and our own: `speculative`, `domain`,
`return_origins`.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema


def _not_stored(asked: bool) -> bool:
    if asked:
        raise ValueError("this server stores no answers; expected false")
    return asked


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Domain = Annotated[str, StringConstraints(pattern=r"^[\w.\-]{1,64}$")]
Schema = dict[str, Any]
NotStored = Annotated[bool, AfterValidator(_not_stored), WithJsonSchema({"type": "boolean", "enum": [False]})]
MOST_CHOICES = 128


class Strict(BaseModel):
    """A part of a request: no field of another name, no value of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """What a stream says besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(Strict):
    """Speculation for one request: whether at all, and the longest block; the answer is the same."""

    enabled: bool = True
    k: Annotated[int, Field(ge=0, le=64)] | None = None


class StructuredOutputs(Strict):
    """One of several kinds of grammar, vLLM's `structured_outputs`."""

    json_: Schema | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class JsonSchema(Strict):
    """The schema of a response format."""

    name: str = "answer"
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Strict):
    """What completions and chats share. None is the server's default, which `/info` shows."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=64)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: Count = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    bad_words: list[Text] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None
    priority: Annotated[int, Field(ge=0, le=0)] = 0
    user: str | None = None
    speculative: Speculative | None = None
    domain: Domain | None = None
    return_origins: bool = False


Ids = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(Sampling):
    """A body of `/v1/completions`."""

    prompt: str | Ids | Annotated[list[str], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    suffix: None = None
    add_special_tokens: bool = True


class Message(BaseModel):
    """One message of a chat. Fields besides these are the chat template's business."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class Function(Strict):
    """What a tool is called with."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.\-]{1,128}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: Text


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Prediction(Strict):
    """Text that the answer is likely to repeat."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]


class ChatRequest(Sampling):
    """A body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    metadata: dict[str, str] | None = None
    store: NotStored | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TokenizeRequest(Strict):
    """A body of `/tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DraftRequest(Strict):
    """A body of `/admin/draft`: a model by name, folder or file, or 'ngram', or null for no drafts."""

    path: Text | None
    format: Text = "auto"


class DetokenizeRequest(Strict):
    """A body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False
