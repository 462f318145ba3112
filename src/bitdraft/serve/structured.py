"""Structured output: JSON schemas, regular expressions, Lark grammars and choices as constraints, through llguidance.

Every state of a grammar is a value, as the engine wants it, while one matcher per output walks behind them: to the
state that is asked about, back over rejected tokens and on over others. (Going back costs a microsecond; a copy of the
matcher for every state costs 5 at first, and 2 000 after 6 000 tokens.) Positions of a block share their states, so a
mask is computed once for the draft, the target and the commit together.

Shape suffixes: V vocabulary of the target.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..decoding.constraint import Constraint
from ..errors import UsageError
from ..models.tokenizer import Tokenizer
from .marker import Later, Marker

if TYPE_CHECKING:
    import llguidance

MAX_GRAMMAR_BYTES = 256 * 1024
"""Longest grammar or schema that is compiled."""

MAX_NESTING = 64
"""Deepest schema that is compiled."""

_KEPT = 64
"""Compiled grammars that are kept for requests with the same one."""

_LEXER_FUEL = 100_000
"""What llguidance may spend on the first mask of a grammar: about a second at worst, ten times less than its default
lets a regular expression such as (a{1000}){1000} take."""

_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
"""White space has an end: a small model may well go on with it for ever."""


class Grammars:
    """Compiles grammars for one vocabulary, from any thread. Every constraint it hands out is for one output."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Read the vocabulary, which takes seconds for a large one: once for a target, and not on an event loop.

        Args:
            tokenizer: the target's.
            vocab_size: V, the target's logits; it may exceed the tokenizer's table.

        Raises:
            UsageError: llguidance is not installed, or the model has no end-of-sequence token.
        """
        self._llguidance = _import()
        if not tokenizer.eos_ids:
            raise UsageError(
                f"{tokenizer.origin} has no end-of-sequence token, so a grammar could not end an output. Choose a "
                "model that has one for structured output."
            )
        self._tokenizer = tokenizer
        self._vocabulary = _Vocabulary(
            self._llguidance.LLTokenizer(
                self._llguidance.TokenizerWrapper(_Adapter(tokenizer)), n_vocab=tokenizer.vocab_size
            ),
            vocab_size,
            tokenizer.vocab_size,
            list(tokenizer.eos_ids),
        )
        self._compiled: OrderedDict[str, GrammarState] = OrderedDict()
        self._markers: dict[str, Marker] = {}
        self._lock = Lock()

    def json_object(self) -> Constraint:
        """Any JSON object."""
        return self.json_schema({"type": "object"})

    def json_schema(self, schema: Mapping[str, Any] | bool | str) -> Constraint:
        """JSON that a schema describes.

        Args:
            schema: the schema, or its JSON text. What llguidance cannot enforce is refused, not ignored.

        Raises:
            UsageError: no JSON schema, or one that is too large or cannot be enforced.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_size("the JSON schema", text)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema is no JSON: {error}. Expected an object.") from None
        if isinstance(value, bool):
            value = {} if value else {"not": {}}
        if not isinstance(value, dict):
            raise UsageError(f"the JSON schema is {text[:80]}. Expected an object, or true or false.")
        if _nesting(text) > MAX_NESTING:
            raise UsageError(f"the JSON schema is nested {_nesting(text)} deep. Expected at most {MAX_NESTING}.")
        grammar = self._llguidance.LLMatcher.grammar_from_json_schema(json.dumps(value), defaults=_JSON)
        return self._compile("the JSON schema", grammar)

    def regex(self, pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole; the syntax of Rust's regex crate, without look-around.

        Raises:
            UsageError: no such regular expression, or one that is too large.
        """
        _check_size("the regular expression", pattern)
        return self._compile("the regular expression", self._llguidance.LLMatcher.grammar_from_regex(pattern))

    def lark(self, grammar: str) -> Constraint:
        """Text of a context-free grammar, in llguidance's variant of Lark.

        Raises:
            UsageError: no such grammar, or one that is too large.
        """
        _check_size("the grammar", grammar)
        return self._compile("the grammar", self._llguidance.LLMatcher.grammar_from_lark(grammar))

    def choice(self, options: Sequence[str]) -> Constraint:
        """One of some texts.

        Raises:
            UsageError: none, an empty one, or too many.
        """
        if not options or not all(options):
            raise UsageError(f"the choice is between {list(options)}. Expected at least one text, none of them empty.")
        return self.lark("start: " + " | ".join(json.dumps(option) for option in dict.fromkeys(options)))

    def starts_after(self, constraint: Constraint, marker: str) -> Constraint:
        """Any text up to and including the first `marker`, such as '</think>', and then what `constraint` allows.

        White space that shares a token with the end of the marker is allowed; anything else there is not.
        """
        with self._lock:
            if marker not in self._markers:
                self._markers[marker] = Marker(marker.encode(), self._tokenizer, self._vocabulary.size)
        return Later(self._markers[marker], constraint)

    def _compile(self, what: str, grammar: str) -> Constraint:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is None:
                known = GrammarState(_Walker(self._vocabulary, self._new_matcher(what, grammar)), None)
                if not bool(known.allowed_V.any()):
                    raise UsageError(f"{what} allows no text at all. Expected one that allows something.")
                # What is far too complex shows at the second mask: now, and not while others wait for the step.
                known.for_another_output().after(int(known.allowed_V.to(torch.uint8).argmax())).allowed_V  # noqa: B018
                self._compiled[grammar] = known
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return known.for_another_output()

    def _new_matcher(self, what: str, grammar: str) -> "llguidance.LLMatcher":
        known = self._vocabulary.tokenizer
        limits = self._llguidance.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL, verbose_errors=False)
        matcher: llguidance.LLMatcher = self._llguidance.LLMatcher(known, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"{what} cannot be used: {_reason(matcher)}. Mend it, or make it simpler.")
        return matcher


@dataclass(frozen=True, eq=False)
class _Node:
    """A token of an output, and those before it."""

    before: "_Node | None"
    token: int
    depth: int


class _Walker:
    """The matcher of one output, and where it stands."""

    def __init__(self, vocabulary: "_Vocabulary", matcher: "llguidance.LLMatcher") -> None:
        self.vocabulary, self._matcher = vocabulary, matcher
        self._at: _Node | None = None

    def copy_of_start(self) -> "_Walker":
        """A walker for another output of the grammar."""
        self._go(None)
        return _Walker(self.vocabulary, self._matcher.deep_copy())

    def mask(self, node: _Node | None) -> Tensor:
        """Which tokens may come after `node`, [V] bool."""
        self._go(node)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"the grammar cannot go on: {_reason(self._matcher)}. Make it simpler.")
        known = torch.from_numpy(np.unpackbits(bits, bitorder="little").view(np.bool_))[: self.vocabulary.known]
        allowed_V = torch.zeros(self.vocabulary.size, dtype=torch.bool)
        allowed_V[: len(known)] = known
        allowed_V[self.vocabulary.eos] = self._matcher.is_accepting()
        return allowed_V

    def _go(self, node: _Node | None) -> None:
        """Bring the matcher to `node`, over the last one that its place and `node` have in common."""
        at, back, missing = self._at, 0, list[int]()
        self._at = node
        while at is not node:
            if at is not None and (node is None or at.depth >= node.depth):
                at, back = at.before, back + 1
            else:
                assert node is not None
                missing.append(node.token)
                node = node.before
        if back:
            self._matcher.rollback(back)
        if missing:
            self._matcher.consume_tokens(missing[::-1])


class GrammarState:
    """A grammar after some tokens, a `Constraint`.

    States are made by `after` and kept by the state before, so that draft, verification and commit share them. The
    first state keeps none: the request holds it to its end, and with it would hold every state of the output.
    """

    def __init__(self, walker: _Walker, node: _Node | None, allowed_V: Tensor | None = None) -> None:
        """Take the walker of the output and the tokens so far."""
        self._walker, self._node, self._allowed_V = walker, node, allowed_V
        self._next: dict[int, Constraint] = {}

    @property
    def allowed_V(self) -> Tensor:
        """Which tokens may come next, [V] bool.

        Raises:
            UsageError: the grammar is too complex at this place.
        """
        if self._allowed_V is None:
            self._allowed_V = self._walker.mask(self._node)
        return self._allowed_V

    def after(self, token: int) -> Constraint:
        """The state after one more token."""
        if token in self._next:
            return self._next[token]
        state = self._after(token)
        if self._node is not None:
            self._next[token] = state
        return state

    def for_another_output(self) -> "GrammarState":
        """The first state, for an output with a matcher of its own."""
        return GrammarState(self._walker.copy_of_start(), None, self.allowed_V)

    def _after(self, token: int) -> Constraint:
        vocabulary = self._walker.vocabulary
        if token >= vocabulary.size or not self.allowed_V[token]:
            return _ANYTHING
        if token in vocabulary.eos:
            return _Complete(vocabulary.size)
        depth = 1 if self._node is None else self._node.depth + 1
        return GrammarState(self._walker, _Node(self._node, token, depth))


@dataclass(frozen=True)
class _Anything:
    """After a token that was not allowed: never reached."""

    allowed_V: None = None

    def after(self, token: int) -> Constraint:
        return self


_ANYTHING = _Anything()


@dataclass(frozen=True)
class _Complete:
    """After the end of sequence: nothing more."""

    vocab_size: int

    @property
    def allowed_V(self) -> Tensor:
        return torch.zeros(self.vocab_size, dtype=torch.bool)

    def after(self, token: int) -> Constraint:
        return _ANYTHING


@dataclass(frozen=True)
class _Vocabulary:
    """What all states of one vocabulary share.

    Attributes:
        tokenizer: the vocabulary as llguidance has it.
        size: V.
        known: ids that the tokenizer knows.
        eos: ids that end an output.
    """

    tokenizer: "llguidance.LLTokenizer"
    size: int
    known: int
    eos: list[int]


_BEFORE = "\x02"
"""Stands before text that begins inside another, where some tokenizers would put a space; merges with nothing."""


class _Adapter:
    """A tokenizer as llguidance wants one.

    It is asked how text is written that a grammar leaves no choice about: only the model's own way of writing it is
    allowed there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) or b"" for token in range(tokenizer.vocab_size)]
        self._before = tokenizer.encode(_BEFORE, add_bos=False)
        self.special_token_ids = sorted(tokenizer.special_ids | set(tokenizer.eos_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that stands inside another."""
        text = text if isinstance(text, str) else text.decode()
        ids = self._tokenizer.encode(_BEFORE + text, add_bos=False)
        return ids[len(self._before) :] if ids[: len(self._before)] == self._before else ids


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        deepest = max(deepest, depth)
    return deepest


def _check_size(what: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise UsageError(f"{what} has {size} bytes. Expected at most {MAX_GRAMMAR_BYTES}.")


def _reason(matcher: "llguidance.LLMatcher") -> str:
    """The first line of what a matcher says is wrong."""
    return matcher.get_error().strip().partition("\n")[0].rstrip(".")


def _import() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "structured output and required tool calls need the package llguidance, which is not installed. "
            "Install it with: pip install 'bitdraft[structured]'."
        ) from None
    return llguidance
