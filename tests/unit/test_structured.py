"""Grammars as constraints: what they allow, that their states are values, and what is refused."""

import json
from collections.abc import Iterator

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bitdraft.decoding.constraint import Constraint
from bitdraft.errors import UsageError
from bitdraft.models.tokenizer import Tokenizer
from bitdraft.serve.structured import MAX_GRAMMAR_BYTES, Grammars
from bitdraft.serve.tool_calls import HERMES, LLAMA3, MISTRAL, Dialect, dialect_of, parse
from bitdraft.serve.tool_grammar import Tool, tool_grammar

WORDS = ["null", "true", '{"', '":', '", "', "</th", "ink>", "</think>", "k>\n", "k>{", "name", "[TOOL", "_CALLS]"]
SPECIAL = ["<eos>", "<also-eos>", "<pad>", "[TOOL_CALLS]", "[ARGS]"]


def make_tokenizer() -> Tokenizer:
    """All bytes, some words, and special tokens; two of them end an output."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(piece for piece, _ in level.pre_tokenize_str(word)) for word in WORDS]
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = level, tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    first = len(vocabulary)
    return Tokenizer(backend, origin="a test", eos_ids=(first, first + 1))


TOKENIZER = make_tokenizer()
SIZE = TOKENIZER.vocab_size + 3
END, ALSO_END = TOKENIZER.eos_ids


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, SIZE)


def ids_of(text: str) -> list[int]:
    """The longest token at each place, special ones too: not how the vocabulary encodes, and just as good."""
    ids, rest = [], text.encode()
    while rest:
        fitting = [i for i in range(TOKENIZER.vocab_size) if rest.startswith(TOKENIZER.token_bytes(i) or b"\xff")]
        ids.append(max(fitting, key=lambda i: len(TOKENIZER.token_bytes(i) or b"")))
        rest = rest[len(TOKENIZER.token_bytes(ids[-1]) or b"") :]
    return ids


def allows(state: Constraint, token: int) -> bool:
    return state.allowed_V is None or bool(state.allowed_V[token])


def walk(state: Constraint, tokens: list[int]) -> Constraint | None:
    """The state after these tokens; None if one of them is not allowed."""
    for token in tokens:
        if not allows(state, token):
            return None
        state = state.after(token)
    return state


def accepts(state: Constraint, text: str) -> bool:
    """Whether tokens that are allowed write the text, and the output may end there, by either end."""
    rest = text.encode()
    while rest:
        known = [(i, TOKENIZER.token_bytes(i) or b"") for i in range(TOKENIZER.vocab_size) if allows(state, i)]
        fitting = [(i, piece) for i, piece in known if piece and rest.startswith(piece)]
        if not fitting:
            return False
        token, piece = max(fitting, key=lambda one: len(one[1]))
        state, rest = state.after(token), rest[len(piece) :]
    return allows(state, END) and allows(state, ALSO_END)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "note": {"type": ["string", "null"]}},
    "required": ["name", "note"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (lambda g: g.json_schema(PERSON), ['{"name": "Ann", "note": null}', '{"name":"é","note":"x"}'], ["null", "{}"]),
        (lambda g: g.json_schema(json.dumps(PERSON)), ['{"name":"a","note":null}'], ['{"name":"a"}', '{"name":1']),
        (lambda g: g.json_schema(True), ["3", "[null]"], ["", "nul"]),
        (lambda g: g.json_object(), ["{}", '{"a": {"b": [1, "x"]}}'], ["[]", '{"a"}', ' {"a": 1}']),
        (lambda g: g.regex(r"[a-c]+\d{2}"), ["a01", "abc99"], ["a1", "d11", "a011"]),
        (lambda g: g.lark('start: "(" start? ")"'), ["()", "((()))"], ["(()", ")"]),
        (lambda g: g.choice(["yes", "no", 'say "no"\n']), ["yes", "no", 'say "no"\n'], ["y", "yesno", "maybe", ""]),
    ],
)
def test_what_is_allowed(grammars: Grammars, make: object, good: list[str], bad: list[str]) -> None:
    state = make(grammars)  # type: ignore[operator]
    assert [accepts(state, text) for text in good] == [True] * len(good)
    assert [accepts(state, text) for text in bad] == [False] * len(bad)


def test_nothing_follows_the_end_and_special_tokens_are_no_text(grammars: Grammars) -> None:
    state = walk(grammars.json_object(), ids_of('{"a'))
    assert state is not None
    assert state.allowed_V is not None
    assert len(state.allowed_V) == SIZE
    assert not state.allowed_V[TOKENIZER.vocab_size - len(SPECIAL) :].any()
    for end in (END, ALSO_END):
        done = walk(grammars.json_object(), [*ids_of("{}"), end])
        assert done is not None
        assert not done.allowed_V.any()  # type: ignore[union-attr]


def test_what_is_not_allowed_leads_to_a_state_that_allows_all(grammars: Grammars) -> None:
    state = grammars.json_object().after(ids_of("x")[0])
    assert state.allowed_V is None
    assert state.after(SIZE).allowed_V is None
    assert grammars.json_object().after(END).allowed_V is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_states_are_values(data: st.DataObject) -> None:
    """Whatever was tried and thrown away, in any order, a state allows what a new matcher says."""
    grammars = _shared()
    states: dict[tuple[int, ...], Constraint] = {(): grammars.json_schema(PERSON)}
    for _ in range(data.draw(st.integers(1, 25))):
        path = data.draw(st.sampled_from(sorted(states)))
        allowed_V = states[path].allowed_V
        if allowed_V is not None and allowed_V.any():
            token = data.draw(st.sampled_from(allowed_V.nonzero()[:, 0].tolist()))
            states[(*path, token)] = states[path].after(token)
    for path in data.draw(st.permutations(sorted(states))):
        anew = walk(_shared().json_schema(PERSON), list(path))
        assert anew is not None
        assert anew.allowed_V is not None
        assert states[path].allowed_V is not None
        assert torch.equal(states[path].allowed_V, anew.allowed_V)


_GRAMMARS: list[Grammars] = []


def _shared() -> Grammars:
    if not _GRAMMARS:
        _GRAMMARS.append(Grammars(TOKENIZER, SIZE))
    return _GRAMMARS[0]


def test_states_do_not_pile_up(grammars: Grammars) -> None:
    """The request keeps the first state; only the last block's states are alive beside it."""
    import gc
    import weakref

    first = grammars.regex("a*")
    state, seen = first, []
    for _ in range(50):
        assert state.allowed_V is not None
        state = state.after(ids_of("a")[0])
        seen.append(weakref.ref(state))
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda g: g.json_schema("{"), "is no JSON"),
        (lambda g: g.json_schema("3"), r"is 3\. Expected an object"),
        (lambda g: g.json_schema({"type": "foo"}), "cannot be used: Invalid type: foo"),
        (lambda g: g.json_schema({"not": {}}), 'Unimplemented keys: \\["not"\\]'),
        (lambda g: g.json_schema(False), "cannot be used"),
        (lambda g: g.json_schema({"type": "string", "pattern": "(?=a)b"}), "cannot be used: "),
        (lambda g: g.json_schema({"enum": ["x" * MAX_GRAMMAR_BYTES]}), r"bytes\. Expected at most"),
        (lambda g: g.json_schema('{"items":' * 100 + "{}" + "}" * 100), "nested 101 deep"),
        (lambda g: g.json_schema("[" * 200_000), "is no JSON"),
        (lambda g: g.regex("(a"), "regular expression cannot be used"),
        (lambda g: g.regex("(a{1000}){1000}"), "cannot go on: .*too many"),
        (lambda g: g.lark("start: x"), 'cannot be used: .*unknown name: "x"'),
        (lambda g: g.choice([]), "Expected at least one text"),
        (lambda g: g.choice(["a", ""]), "none of them empty"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(grammars: Grammars, make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make(grammars)  # type: ignore[operator]


def test_a_model_without_an_end_has_no_grammars() -> None:
    endless = make_tokenizer()
    endless.eos_ids = ()
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        Grammars(endless, SIZE)


def after(grammars: Grammars, text: str) -> Constraint | None:
    return walk(grammars.starts_after(grammars.json_object(), "</think>"), ids_of(text))


def test_a_grammar_begins_at_the_end_of_its_marker(grammars: Grammars) -> None:
    """Users-pain U47, whichever tokens write the marker."""
    inside = after(grammars, 'any <pad> text {"</thin ')
    assert inside is not None
    assert inside.allowed_V is None
    for tokens in (ids_of("</think>"), ids_of("</th") + ids_of("ink>"), [ids_of(c)[0] for c in "</think>"]):
        state = walk(grammars.starts_after(grammars.json_object(), "</think>"), [*ids_of("a <"), *tokens])
        assert state is not None
        assert accepts(state, '{"a": 1}')
        assert not allows(state, ids_of("a")[0])


def test_no_token_takes_the_grammar_across_its_marker(grammars: Grammars) -> None:
    state = after(grammars, "a </thin")
    assert state is not None
    assert not allows(state, WORDS.index("k>{") + 256)
    assert allows(state, WORDS.index("k>\n") + 256)
    assert accepts(state.after(WORDS.index("k>\n") + 256), "{}")


TOOLS = [
    Tool("play.song", {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}),
    Tool("find", {"$defs": {"q": {"type": "string"}}, "type": "object", "properties": {"q": {"$ref": "#/$defs/q"}}}),
]
MISTRAL_NEW = dialect_of("tools [TOOL_CALLS] [ARGS]") or MISTRAL


def outputs(state: Constraint, seed: int) -> Iterator[int]:
    """Tokens drawn from what is allowed, longer ones first, until the end."""
    random = torch.Generator().manual_seed(seed)
    while True:
        allowed = state.allowed_V.nonzero()[:, 0]  # type: ignore[union-attr]
        if END in allowed:
            return
        token = int(allowed[int(torch.randint(len(allowed), (), generator=random))])
        yield token
        state = state.after(token)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("named", [None, "find"])
@pytest.mark.parametrize("dialect", [HERMES, LLAMA3, MISTRAL, MISTRAL_NEW], ids=str)
def test_required_calls_are_written_as_they_are_read(
    grammars: Grammars, dialect: Dialect, named: str | None, parallel: bool
) -> None:
    grammar = tool_grammar(dialect, TOOLS, named=named, parallel=parallel, special_id=TOKENIZER.special_id)
    for seed in range(5):
        ids = list(outputs(grammars.lark(grammar), seed))
        content, calls = parse(dialect, TOKENIZER.decode(ids, skip_special=False))
        assert content == ""
        assert len(calls) >= 1
        assert parallel or len(calls) == 1
        for call in calls:
            assert call.name in ({named} if named else {"play.song", "find"})
            arguments = json.loads(call.arguments, strict=False)
            if call.name == "play.song":
                assert isinstance(arguments["minutes"], int)


def test_special_tokens_that_mark_calls_can_be_kept() -> None:
    ids = [*ids_of("[TOOL_CALLS]"), *ids_of("f"), END]
    assert TOKENIZER.special_id("[TOOL_CALLS]") == ids[0]
    assert TOKENIZER.special_id("nothing") is None
    for keep, text in (((), "f"), (MISTRAL.markers, "[TOOL_CALLS]f")):
        stream = TOKENIZER.stream(keep=keep)
        assert "".join(map(stream.push, ids)) == text
