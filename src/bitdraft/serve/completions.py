"""`/v1/completions`: a prompt, continued."""

from functools import partial

from ..models.tokenizer import Tokenizer
from .faults import ApiError
from .pieces import LegacyLogprobs, Piece, TokenNames, prompt_logprobs
from .prepare import Asked, Groups, Model, completion_prompts, requests_for
from .respond import Choice
from .response_format import Compile, wanted_grammar
from .schemas import CompletionRequest
from .settings import Defaults

DEFAULT_MAX_TOKENS = 16


class CompletionForm:
    """How completions are shown, see `respond.Form`."""

    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, body: CompletionRequest, groups: Groups, tokenizer: Tokenizer) -> None:
        """Show answers to `body`."""
        self._body, self._tokenizer = body, tokenizer
        self._prompts = [prompt for prompt in groups.prompts for _ in range(body.n)]
        self._names = TokenNames(tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._logprobs: dict[int, LegacyLogprobs] = {}

    def opening(self) -> list[Choice]:
        """Nothing comes first."""
        return []

    def chunks(self, index: int, piece: Piece) -> list[Choice]:
        """A chunk with text, the end, or what was asked for of each token."""
        begins = index not in self._logprobs
        wanted = self._body.logprobs is not None or self._body.return_token_ids or self._body.return_origins
        if not (piece.text or piece.finish or (begins and self._body.echo) or (piece.tokens and wanted)):
            return []
        return [self.whole(index, piece)]

    def whole(self, index: int, piece: Piece) -> Choice:
        """A choice; the prompt comes with the first piece if it is echoed."""
        body, prompt = self._body, self._prompts[index]
        begins = index not in self._logprobs
        if begins:
            self._logprobs[index] = LegacyLogprobs(
                self._names, self._tokenizer.stream(skip_special=body.skip_special_tokens)
            )
        text, tokens, entries = piece.text, piece.tokens, (*piece.prompt_logprobs, *piece.logprobs)
        if begins and body.echo:
            text = self._echoed(index) + text
            tokens = prompt.ids + tokens
        elif begins:
            entries = piece.logprobs
        choice: Choice = {"index": index, "text": text, "logprobs": None, "finish_reason": piece.finish}
        choice["stop_reason"] = piece.stop_reason
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs[index].shown(tokens, entries, body.logprobs)
        if begins and body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, prompt.ids, piece.prompt_logprobs)
        if body.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
            choice["prompt_token_ids"] = list(prompt.ids) if begins else None
        if body.return_origins:
            choice["origins"] = list(piece.origins)
        return choice

    def _echoed(self, index: int) -> str:
        prompt = self._prompts[index]
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.ids, skip_special=self._body.skip_special_tokens)

    def details(self) -> dict[str, int]:
        """Nothing to say."""
        return {}


def completion(
    body: CompletionRequest,
    model: Model,
    defaults: Defaults,
    compile_grammar: Compile,
    domain: str,
    arrived: float,
) -> tuple[CompletionForm, Groups]:
    """What the engine is asked for, and how it is shown.

    Args:
        body: what the client asked for.
        model: that is served.
        defaults: of sampling.
        compile_grammar: makes constraints.
        domain: kind of traffic.
        arrived: when the call came.

    Raises:
        ApiError, UsageError: something in it cannot be used.
    """
    if body.best_of is not None and body.best_of != body.n:
        raise ApiError(
            400,
            f"best_of is {body.best_of} and n is {body.n}. Expected the same: all are given.",
            param="best_of",
        )
    grammar = wanted_grammar(body)
    scored = body.logprobs if body.echo else None
    counts = [count for count in (scored, body.prompt_logprobs) if count is not None]
    asked = Asked(
        max_tokens=next(n for n in (body.max_tokens, defaults.max_tokens, DEFAULT_MAX_TOKENS) if n is not None),
        logprobs=body.logprobs,
        prompt_logprobs=max(counts, default=None),
        constraint=partial(compile_grammar, grammar) if grammar else None,
        domain=domain,
        arrived=arrived,
    )
    groups = requests_for(completion_prompts(body, model), body, asked, model, defaults)
    return CompletionForm(body, groups, model.tokenizer), groups
