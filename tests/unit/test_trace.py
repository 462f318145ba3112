"""A trace on disk: nothing is lost, nothing is guessed, and what is broken is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_trace import Spec, synthetic_trace, write

from bitdraft.errors import UsageError
from bitdraft.measure.trace import CostSample, Score, Size, Text, Trace, TraceWriter

SMALL = Spec(prompts=3, tokens=16, rounds=2, confirm=(("w8a8", 2),), confirm_prompts=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "trace", synthetic_trace(SMALL))
    return tmp_path / "trace"


def test_what_is_written_is_read(folder: Path, tmp_path: Path) -> None:
    made, read = synthetic_trace(SMALL), Trace.load(folder)
    assert read.run == made.run
    assert read.texts.keys() == made.texts.keys()
    for key, score in made.scores.items():
        assert read.scores[key].overlap == pytest.approx(score.overlap, rel=1e-5)
        assert read.scores[key].top1 == score.top1
    write(tmp_path / "again", read)
    assert Trace.load(tmp_path / "again") == read


def test_digest_names_the_evidence(folder: Path) -> None:
    before = Trace.load(folder).digest
    assert Trace.load(folder).digest == before
    TraceWriter(folder).append(CostSample("target", None, 1, 99, 1.0))
    assert Trace.load(folder).digest != before


@pytest.mark.parametrize("name", ["texts.jsonl", "scores.jsonl", "costs.jsonl", "sizes.jsonl", "confirm.jsonl"])
def test_any_cut_of_the_last_line_loses_that_line_only(folder: Path, name: str) -> None:
    if name == "texts.jsonl":  # a score without its text is another error
        (folder / "scores.jsonl").unlink()
    path = folder / name
    data = path.read_bytes()
    lines = data.count(b"\n")
    start = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start, len(data) - 1, max(1, (len(data) - start) // 15)):
        path.write_bytes(data[:cut])
        trace = Trace.load(folder)
        found = {
            "texts.jsonl": trace.texts,
            "scores.jsonl": trace.scores,
            "costs.jsonl": trace.costs,
            "sizes.jsonl": trace.sizes,
            "confirm.jsonl": trace.confirmations,
        }[name]
        assert len(found) == lines - 1
    path.write_bytes(data[:-1])  # whole, but for its line feed
    assert Trace.load(folder).run
    TraceWriter(folder)
    assert path.read_bytes() == data


def test_writer_goes_on_after_a_cut(folder: Path) -> None:
    path = folder / "costs.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind":"target","form')
    writer = TraceWriter(folder)
    writer.append(CostSample("target", None, 1, 50, 2.5))
    assert Trace.load(folder).costs[-1] == CostSample("target", None, 1, 50, 2.5)


def test_writer_knows_what_is_there(folder: Path) -> None:
    writer = TraceWriter(folder)
    assert writer.has(Text, "code", 0)
    assert not writer.has(Text, "code", 3)
    assert writer.has(Score, "fp8", "chat", 2)
    assert writer.has(CostSample, "target", None, 1, 0)
    with pytest.raises(UsageError, match="is there already"):
        writer.append(Size("fp8", 1, 1, 8.0))


def test_resuming_asks_for_the_same(folder: Path) -> None:
    run = Trace.load(folder).run
    writer = TraceWriter(folder)
    writer.begin(replace(run, command="bitdraft measure --resume", started="2027-01-01T00:00:00+00:00"))
    assert Trace.load(folder).run == run
    with pytest.raises(UsageError, match=r"prompts = 3\. Now it is 4"):
        writer.begin(replace(run, prompts=4))


def edit(path: Path, line: int, change: str, value: object) -> None:
    lines = path.read_text().splitlines()
    record = json.loads(lines[line])
    if value is KeyError:
        del record[change]
    else:
        record[change] = value
    lines[line] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("texts.jsonl", "colour", 1, "unknown field 'colour'"),
        ("texts.jsonl", "seconds", KeyError, "field 'seconds' is missing"),
        ("texts.jsonl", "ids", "abc", "ids is 'abc'. Expected a list"),
        ("texts.jsonl", "index", True, "index is True. Expected a whole number"),
        ("texts.jsonl", "finish", "tired", "Expected one of 'stop', 'length'"),
        ("scores.jsonl", "overlap", [float("nan")], "NaN is not a JSON number"),
        ("scores.jsonl", "overlap", [0.5], "the length of the lists"),
        ("costs.jsonl", "ms", -1.0, "ms is -1.0. Expected a positive number"),
        ("costs.jsonl", "format", "fp8", "a name for 'draft', else null"),
        ("confirm.jsonl", "k", 3, "a format and k >= 1, or none and k 0"),
        ("sizes.jsonl", "format", "fp8", "also in line"),
    ],
)
def test_a_broken_line_is_named(folder: Path, name: str, field: str, value: object, message: str) -> None:
    edit(folder / name, 0, field, value)
    with pytest.raises(UsageError, match=message) as error:
        Trace.load(folder)
    assert f"{name}, line {2 if name == 'sizes.jsonl' else 1}" in str(error.value)


def test_a_cut_line_in_the_middle_is_an_error(folder: Path) -> None:
    path = folder / "costs.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(first[:20] + "\n" + rest)
    with pytest.raises(UsageError, match=r"costs\.jsonl, line 1: this is not JSON"):
        Trace.load(folder)


def test_a_score_must_fit_its_text(folder: Path) -> None:
    edit(folder / "texts.jsonl", 0, "ids", [1, 2, 3])
    with pytest.raises(UsageError, match="Expected 3"):
        Trace.load(folder)


def test_not_a_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no run\.json"):
        Trace.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to"):
        TraceWriter(tmp_path / "file")


def test_a_run_asks_for_something() -> None:
    run = synthetic_trace(SMALL).run
    for change in ({"formats": ()}, {"workloads": ()}, {"k_values": (2, 1)}, {"k_values": (0, 1)}, {"k_values": ()}):
        with pytest.raises(UsageError, match=next(iter(change))):
            replace(run, **change)
