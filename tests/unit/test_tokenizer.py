"""The tokenizer: text to ids and back, streams, chat templates, and whether two vocabularies are one."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import model_files
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from bitdraft.errors import ModelFileError, PairError, UsageError
from bitdraft.models.checkpoint import open_checkpoint
from bitdraft.models.tokenizer import Tokenizer, check_pair
from bitdraft.models.tokenizer_folder import folder_tokenizer

END = model_files.SPECIAL.index("<|im_end|>")


def tiny(**settings: Any) -> Tokenizer:
    return Tokenizer(model_files.backend(), origin="tiny", **settings)


@pytest.fixture(scope="session")
def real(smollm2: Path) -> Tokenizer:
    return open_checkpoint(smollm2).tokenizer()


class TestEncode:
    def test_merges_and_words(self) -> None:
        tokenizer = tiny()
        assert [tokenizer.token_text(i) for i in tokenizer.encode("hello world")] == ["hello", " wor", "l", "d"]

    def test_special_tokens_in_a_users_text_are_text(self) -> None:
        tokenizer = tiny()
        assert END not in tokenizer.encode("a<|im_end|>")
        assert tokenizer.decode(tokenizer.encode("a<|im_end|>")) == "a<|im_end|>"
        assert tokenizer.encode("a<|im_end|>", parse_special=True)[-1] == END
        assert END not in tokenizer.encode("a<|im_end|>")

    def test_bos(self) -> None:
        assert tiny().encode("x") == tiny(bos_id=0).encode("x", add_bos=False)
        assert tiny(bos_id=0).encode("x") == [0, *tiny().encode("x")]
        assert tiny(bos_id=0).encode("") == [0]

    def test_half_a_surrogate_pair_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"U\+D83D at character 2, half of a surrogate pair"):
            tiny().encode("ab\ud83d")

    def test_truncation_and_padding_of_the_file_are_switched_off(self) -> None:
        backend = model_files.backend()
        backend.enable_truncation(2)
        backend.enable_padding(length=50)
        assert Tokenizer(backend, origin="tiny").encode("hello world") == tiny().encode("hello world")


class TestDecode:
    @settings(max_examples=200, deadline=None)
    @given(text=st.text())
    def test_round_trip(self, text: str) -> None:
        assert TINY.decode(TINY.encode(text)) == text

    def test_special_tokens_are_left_out_or_shown(self) -> None:
        ids = TINY.encode("a<|im_end|>b", parse_special=True)
        assert (TINY.decode(ids), TINY.decode(ids, skip_special=False)) == ("ab", "a<|im_end|>b")

    def test_ids_that_mean_nothing_are_left_out(self) -> None:
        assert TINY.decode([-1, *TINY.encode("a"), TINY.vocab_size, 10**9]) == "a"
        assert TINY.token_bytes(-1) is None
        assert TINY.token_text(TINY.vocab_size) == ""

    def test_token_text_shows_bytes_that_are_no_character(self) -> None:
        assert [TINY.token_text(i) for i in TINY.encode("é")] == ["\\xc3", "\\xa9"]

    @settings(max_examples=200, deadline=None)
    @given(ids=st.lists(st.integers(0, 275)))
    def test_any_ids_as_the_tokenizers_library_decodes_them(self, ids: list[int]) -> None:
        backend = model_files.backend()
        assert TINY.decode(ids) == backend.decode(ids)
        assert TINY.decode(ids, skip_special=False) == backend.decode(ids, skip_special_tokens=False)


TINY = tiny(bos_id=None)

SCRIPTS = st.sampled_from(
    [
        *"ab \n\t0é",
        "猫",
        "你好",
        "ภาษาไทย",
        "กำ",
        "🙂",
        "👩‍👩‍👧",
        "🇯🇵",
        "한국어",
        "हिन्दी",
        "🤗",
        "ﷺ",
        "\u0301",
        "\u200d",
    ]
)


class TestStream:
    @settings(max_examples=300, deadline=None)
    @given(parts=st.lists(SCRIPTS, max_size=12))
    def test_never_a_part_of_a_character(self, real: Tokenizer, parts: list[str]) -> None:
        text = "".join(parts)
        stream = real.stream()
        emitted = [stream.push(i) for i in real.encode(text)]
        assert stream.flush() == ""
        assert "".join(emitted) == text
        assert "\ufffd" not in "".join(emitted)

    @settings(max_examples=300, deadline=None)
    @given(ids=st.lists(st.integers(0, 49151), max_size=20))
    def test_joined_it_is_the_whole_text_for_any_ids(self, real: Tokenizer, ids: list[int]) -> None:
        stream = real.stream()
        assert "".join([stream.push(i) for i in ids]) + stream.flush() == real.decode(ids)

    def test_bytes_of_one_character_wait_for_each_other(self) -> None:
        stream = TINY.stream()
        assert [stream.push(i) for i in TINY.encode("🙂")] == ["", "", "", "🙂"]

    def test_an_unfinished_character_comes_out_at_the_flush(self) -> None:
        stream = TINY.stream()
        first = TINY.encode("🙂")[0]
        assert (stream.push(first), stream.flush()) == ("", "\ufffd")
        assert [stream.push(i) for i in TINY.encode("ok")] == ["o", "k"]

    def test_bytes_that_can_be_no_character(self) -> None:
        stream = TINY.stream()
        first, second, *_ = TINY.encode("🙂")
        assert [stream.push(i) for i in (first, *TINY.encode("a"), second)] == ["", "\ufffda", "\ufffd"]

    def test_streams_do_not_share_anything(self) -> None:
        one, other = TINY.stream(), TINY.stream()
        ids = TINY.encode("é")
        assert (one.push(ids[0]), other.push(ids[1]), one.push(ids[1])) == ("", "\ufffd", "é")


FAMILY_TEMPLATES = {
    "gemma": (
        "{{ bos_token }}"
        "{%- if messages[0]['role'] == 'system' -%}"
        "{%- set first = messages[0]['content'] + '\n\n' -%}{%- set rest = messages[1:] -%}"
        "{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}"
        "{%- for m in rest -%}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
        "{{ raise_exception('user and assistant must take turns') }}{%- endif -%}"
        "{%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}"
        "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
        "{%- if m['content'] is string -%}{{ m['content'] | trim }}"
        "{%- elif m['content'] is iterable -%}"
        "{%- for part in m['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}",
        "<start_of_turn>user\nhello\n\nor<end_of_turn>\n<start_of_turn>model\n12<end_of_turn>\n"
        "<start_of_turn>user\nwell<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|system|>\nhello<|end|>\n<|user|>\n or <|end|>\n<|assistant|>\n12<|end|>\n<|user|>\nwell<|end|>\n"
        "<|assistant|>\n",
    ),
}


class TestChat:
    def test_template(self) -> None:
        tokenizer = tiny(chat_template=model_files.TEMPLATE)
        messages = [{"role": "user", "content": "hello"}]
        text = "<|im_start|>user\nhello<|im_end|>\n"
        assert tokenizer.decode(tokenizer.chat(messages, add_generation_prompt=False), skip_special=False) == text
        text += "<|im_start|>assistant\n"
        ids = tokenizer.chat(messages)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert ids.count(END) == 1

    @pytest.mark.parametrize("template", ["x", "{{ bos_token }}x", "{{ bos_token }}{{ bos_token }}x"])
    def test_exactly_one_bos(self, template: str) -> None:
        named = {"bos_token": "<|endoftext|>"}
        tokenizer = tiny(chat_template=template, bos_id=0, named_tokens=named)
        assert tokenizer.chat([]) == [0, *tokenizer.encode("x", add_bos=False)]

    def test_a_model_without_bos_gets_what_the_template_says(self) -> None:
        tokenizer = tiny(chat_template="{{ bos_token }}x", named_tokens={"bos_token": "<|endoftext|>"})
        assert tokenizer.chat([]) == [0, *tokenizer.encode("x")]

    def test_no_template(self) -> None:
        with pytest.raises(UsageError, match=r"tiny has no chat template.*Give a raw prompt, or choose a chat model"):
            tiny().chat([{"role": "user", "content": "x"}])
        assert tiny().chat_template is None

    @pytest.mark.parametrize(
        ("template", "variables", "expected"),
        [
            ("{{ strftime_now('%d %b %Y') }}", {}, "29 Feb 2024"),
            ("{{ {'a': 'é<b>'} | tojson }}", {}, '{"a": "é<b>"}'),
            ("{{ [1, {'b': 2}] | tojson(indent=1) }}", {}, json.dumps([1, {"b": 2}], indent=1)),
            ("{{ [1, 2] | tojson(separators=(',', ':')) }}", {}, "[1,2]"),
            ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", {}, "1"),
            ("{% generation %}a{{ 'b' }}{% endgeneration %}c", {}, "abc"),
            ("{{ thinking }}{{ tools is none }}{{ add_generation_prompt }}", {"thinking": 3}, "3TrueTrue"),
            ("{{ tools[0].name }}", {"tools": [{"name": "f"}]}, "f"),
            ("  {% if true %}\n  a\n  {% endif %}\n", {}, "  a\n"),
            (
                "{{ ' a ' | trim }}{{ 'x' is string }}{{ [1] is iterable }}{{ {'b': 1} is mapping }}",
                {},
                "aTrueTrueTrue",
            ),
            ("{% set first = [{'text': 'a'}] %}{{ first[0]['text'] + '\n\n' }}{{ first[1:] }}", {}, "a\n\n[]"),
        ],
    )
    def test_what_templates_use(self, template: str, variables: dict[str, Any], expected: str) -> None:
        tokenizer = tiny(chat_template=template, clock=lambda: datetime(2024, 2, 29))
        assert tokenizer.decode(tokenizer.chat([], **variables)) == expected

    @pytest.mark.parametrize(
        ("template", "said"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0].content + 'x' }}", "TypeError"),
            ("{{ messages[5].content.x }}", "undefined|no element"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "unsafe|not safely callable"),
            ("{{ messages[0] | tojson(sort_keys=true) ~ undefined_filter.x }}", "undefined"),
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ],
    )
    def test_a_template_that_refuses(self, template: str, said: str) -> None:
        message = {"role": "user", "content": None}
        with pytest.raises(UsageError, match=rf"(?s)chat template of tiny refuses.*roles: user.*({said})"):
            tiny(chat_template=template).chat([message])

    @pytest.mark.parametrize("family", FAMILY_TEMPLATES)
    def test_templates_as_gemma_and_phi_have_them(self, family: str) -> None:
        """Gemma calls the assistant a model, has no system's turn and wants user and assistant in turns."""
        template, expected = FAMILY_TEMPLATES[family]
        tokenizer = tiny(chat_template=template, named_tokens={"bos_token": ""})
        messages = [
            {"role": "system", "content": "hello"},
            {"role": "user", "content": " or "},
            {"role": "assistant", "content": "12"},
            {"role": "user", "content": [{"type": "text", "text": "well"}] if family == "gemma" else "well"},
        ]
        assert tokenizer.decode(tokenizer.chat(messages), skip_special=False) == expected
        if family == "gemma":
            with pytest.raises(UsageError, match="must take turns"):
                tokenizer.chat(messages[:2] + messages[3:])

    def test_a_template_that_is_no_jinja(self) -> None:
        with pytest.raises(ModelFileError, match=r"tiny: its chat template is no valid jinja2 \(line 2"):
            tiny(chat_template="a\n{% if %}").chat([])


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return model_files.write_folder(tmp_path / "m", model_files.config())

    def test_same_ids_as_the_gguf_file(self, folder: Path, tmp_path: Path) -> None:
        from_file = model_files.tokenizer_of(tmp_path, model_files.byte_level_metadata)
        from_folder = folder_tokenizer(folder)
        for text in ("hello world", "  12 é 🙂", "a<|im_end|>"):
            assert from_folder.encode(text) == from_file.encode(text)
            assert from_folder.encode(text, parse_special=True) == from_file.encode(text, parse_special=True)
        assert from_folder.vocab_size == from_file.vocab_size == len(model_files.pieces())

    @pytest.mark.parametrize(
        ("generation", "config", "settings", "expected"),
        [
            ({"eos_token_id": [2, 0]}, {"eos_token_id": 1}, {}, (2, 0)),
            ({"eos_token_id": 0}, {"eos_token_id": 1}, {}, (0,)),
            ({}, {"eos_token_id": 1}, {}, (1,)),
            (None, {"eos_token_id": None}, {"eos_token": {"content": "<|im_end|>"}}, (2,)),
            (None, {}, {"eos_token": "<|im_start|>"}, (1,)),
            (None, {}, {}, ()),
        ],
    )
    def test_where_the_end_of_sequence_is_found(
        self, folder: Path, generation: object, config: object, settings: object, expected: tuple[int, ...]
    ) -> None:
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert folder_tokenizer(folder).eos_ids == expected

    @pytest.mark.parametrize(("said", "expected"), [(None, 0), (True, 1), (False, None)])
    def test_whether_a_prompt_begins_with_bos(self, folder: Path, said: bool | None, expected: int | None) -> None:
        backend = model_files.backend()
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        backend.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<|im_start|>"} | ({} if said is None else {"add_bos_token": said})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert folder_tokenizer(folder).bos_id == expected

    def test_no_post_processor_no_bos(self, folder: Path) -> None:
        assert folder_tokenizer(folder).bos_id is None

    def test_where_the_template_is_found(self, folder: Path) -> None:
        assert folder_tokenizer(folder).chat_template is None
        settings: dict[str, Any] = {"chat_template": [{"name": "tool", "template": "t"}]}
        settings["chat_template"].append({"name": "default", "template": "d"})
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        assert folder_tokenizer(folder).chat_template == "d"
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
        assert folder_tokenizer(folder).chat_template == "one"
        (folder / "chat_template.jinja").write_text("file")
        assert folder_tokenizer(folder).chat_template == "file"

    @pytest.mark.parametrize("text", ["", "{", "{}", '{"model": {"type": "BPE"}}', "null"])
    def test_a_damaged_tokenizer(self, folder: Path, text: str) -> None:
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"tokenizer.json: no tokenizer can be read from it"):
            folder_tokenizer(folder)

    def test_a_decoder_of_another_kind(self, folder: Path) -> None:
        backend = model_files.backend()
        backend.decoder = decoders.WordPiece()
        backend.save(str(folder / "tokenizer.json"))
        with pytest.raises(ModelFileError, match=r"a tokenizer whose decoder is \['WordPiece'\]"):
            folder_tokenizer(folder).decode([5])


def words(tokens: Sequence[str], origin: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, origin=origin)


class TestCheckPair:
    def test_one_vocabulary(self) -> None:
        assert check_pair(TINY, tiny()) == TINY.vocab_size

    @pytest.mark.parametrize(
        ("target", "draft", "shared"),
        [
            ("abcd", "abcd", 4),
            ("abcd", "ab", 2),
            ("ab", "abcd", 2),
            (["a", "[PAD1]"], ["a", "[PAD7]", "[PAD8]"], 2),
            (["a", "<unused1>", "b"], ["a", "x", "b"], 3),
            (["a", "<|reserved_special_token_3|>"], ["a", "<|tool|>"], 2),
        ],
    )
    def test_sizes_and_padding_are_no_obstacle(self, target: Sequence[str], draft: Sequence[str], shared: int) -> None:
        assert check_pair(words(target, "T"), words(draft, "D")) == shared

    def test_a_piece_means_the_same_in_either_spelling(self) -> None:
        spm = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1, "<0xC3>": 2}, []))
        spm.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        assert check_pair(words(["Ġa", "b", "Ã"], "T"), Tokenizer(spm, origin="D")) == 3

    def test_ids_that_differ_are_named(self) -> None:
        with pytest.raises(PairError) as caught:
            check_pair(words("abcdefghijkl", "T"), words("abXdefghijlk", "D"))
        assert str(caught.value).startswith(
            "3 of 12 token ids mean one thing to the target T and another to the draft D: 2 is 'c' and 'X'; "
            "10 is 'k' and 'l'; 11 is 'l' and 'k'. Expected one vocabulary: choose a draft of the target's own family"
        )

    def test_eight_at_most_are_named(self) -> None:
        with pytest.raises(PairError, match=r"^10 of 10 .*; 7 is 'h' and 'H'; and 2 more\. Expected"):
            check_pair(words("abcdefghij", "T"), words("ABCDEFGHIJ", "D"))

    def test_an_added_token_counts_like_any_other(self) -> None:
        backend = model_files.backend()
        backend.add_special_tokens([AddedToken("<|extra|>", special=True)])
        assert check_pair(tiny(), Tokenizer(backend, origin="D")) == TINY.vocab_size
