"""`bitdraft bench serve`: figures from answers that are known, and whole runs against a server that misbehaves.

Rows of the users' reports: U89 (ITL of pieces with several tokens, in both definitions), U26 (loops are flagged and do
not count), U13 (plain and speculative by the request's own field).
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from fake_server import FakeServer
from hypothesis import given
from hypothesis import strategies as st

from bitdraft.errors import UsageError
from bitdraft.measure.load_client import Events, Heard
from bitdraft.measure.load_config import Lengths, LoadConfig, Server, loads, read_trace
from bitdraft.measure.load_figures import lines, warnings
from bitdraft.measure.load_prompts import Fit, Prompts
from bitdraft.measure.load_report import load_json, publish_load, render_load_html, summarize_load
from bitdraft.measure.load_run import Answer, Results, distinct_ratio, run_load


def config(*urls: str, **changes) -> LoadConfig:
    servers = tuple(Server(f"s{i}", url) for i, url in enumerate(urls or ("http://127.0.0.1:1",)))
    base = LoadConfig(
        servers=servers,
        lengths=("60/12",),
        concurrency=(2,),
        rates=(),
        trace="",
        trace_speed=1.0,
        requests=4,
        rounds=2,
        compare=True,
        workload="chat-en",
        model="",
        endpoint="chat",
        natural_stop=False,
        temperature=0.0,
        seed=0,
        ttft_bound=2.0,
        timeout=20.0,
    )
    return replace(base, **changes)


def run(given: LoadConfig, folder: Path | None = None, resume: bool = False) -> list[Answer]:
    results = Results(folder, given, resume)
    asyncio.run(run_load(given, results, perf_counter, lambda done, total, label: None))
    return results.answers


def answer(**changes) -> Answer:
    """Ten tokens: a first piece of one after a second, then three pieces of three, 0.3 s apart."""
    base = Answer(
        server="s0",
        arm="as it is",
        load="concurrency 1",
        lengths="60/10",
        round=0,
        index=0,
        level=1,
        due=0.0,
        sent=0.0,
        ended=2.0,
        gaps=(1.0, 0.3, 0.3, 0.3),
        tokens=(1, 3, 3, 3),
        prompt_tokens=60,
        output_tokens=10,
        cached_tokens=0,
        finish="length",
        error="",
        drafted=12,
        accepted=6,
        distinct=1.0,
    )
    return replace(base, **changes)


# Figures


def test_pieces_with_several_tokens_are_timed_in_both_definitions():
    """U89: 9 tokens after the first in 0.9 s are 0.1 s each, whatever the pieces are; a piece waits 0.3 s."""
    (line,) = lines(config(), [answer()], np.random.default_rng(0))
    assert line.ttft["p50"].value == pytest.approx(1.0)
    assert line.tpot["p50"].value == pytest.approx(0.1)
    assert line.itl_token["p50"].value == line.itl_token["p99"].value == pytest.approx(0.1)
    assert line.itl_chunk["p50"].value == pytest.approx(0.3)
    assert line.throughput.value == pytest.approx(5.0)
    assert line.tokens_a_chunk == 2.5
    assert line.accepted_per_drafted == 0.5
    (guessed,) = lines(config(), [answer(tokens=(0, 0, 0, 0))], np.random.default_rng(0))
    assert guessed.itl_token["p50"].value == pytest.approx(0.1)
    assert not guessed.counted
    assert "does not say how many tokens" in " ".join(warnings(config(), [guessed]))


def test_goodput_counts_what_came_whole_and_in_time():
    given = [
        answer(index=0),
        answer(index=1, gaps=(2.5, 0.3, 0.3, 0.3), ended=4.0),
        answer(index=2, error="HTTP 429: too many requests", gaps=(), tokens=(), output_tokens=None, ended=0.1),
    ]
    (line,) = lines(config(), given, np.random.default_rng(0))
    assert line.goodput.value == pytest.approx(1 / 4)
    assert line.requests_a_second.value == pytest.approx(2 / 4)
    assert line.good_share == pytest.approx(1 / 3)
    assert line.throughput.value == pytest.approx(20 / 4)
    assert (line.failed, line.errors) == (1, (("HTTP 429: too many requests", 1),))


def test_a_late_request_counts_from_when_it_was_due():
    (line,) = lines(config(), [answer(due=0.0, sent=1.5, ended=3.5)], np.random.default_rng(0))
    assert line.ttft["p50"].value == pytest.approx(2.5)
    assert line.good_share == 0


def test_loops_are_flagged_and_do_not_count():
    """U26."""
    given = [
        answer(index=0, accepted=3, output_tokens=30),
        answer(index=1, accepted=12, output_tokens=30, distinct=0.05),
    ]
    (line,) = lines(config(), given, np.random.default_rng(0))
    assert line.degenerate == 1
    assert line.accepted_per_drafted == 0.25
    assert "repeat themselves" in " ".join(warnings(config(), [line]))
    assert distinct_ratio("no no no " * 50, []) < 0.1 < distinct_ratio("one of each and no word twice", [])
    assert distinct_ratio("", [5, 6] * 100) < 0.1
    assert distinct_ratio("你好世界" * 100, []) < 0.1


def test_speedups_are_against_plain_and_paired_by_round():
    given = []
    for number in range(3):
        slow = 1 + number  # a slow hour hits both arms
        given.append(answer(arm="plain", round=number, ended=4.0 * slow))
        given.append(answer(arm="speculative", round=number, ended=2.0 * slow))
    plain, speculative = lines(config(), given, np.random.default_rng(0))
    assert plain.speedup is None
    assert speculative.against == "s0 plain"
    assert (speculative.speedup.value, speculative.speedup.low, speculative.speedup.high) == pytest.approx((2, 2, 2))
    _, two_rounds = lines(config(), given[:4], np.random.default_rng(0))
    assert two_rounds.speedup.low is None
    other = [answer(server="s1", ended=1.0), answer(server="s0", ended=2.0)]
    first, second = lines(config(), other, np.random.default_rng(0))
    assert (first.server, second.against, second.speedup.value) == ("s1", "s1 as it is", 0.5)


# Streams, lengths, arrivals


@given(st.lists(st.integers(1, 7)))
def test_events_do_not_depend_on_how_bytes_arrive(cuts):
    data = 'event: x\r\ndata: {"a": "wörd 你"}\r\n\r\n: a comment\n\ndata:[1]\n\ndata: [DONE]\n\n'.encode()
    events, found, at = Events(), [], 0
    for cut in [*cuts, len(data)]:
        found += events.feed(data[at : at + cut])
        at += cut
    assert found == ['{"a": "wörd 你"}', "[1]", "[DONE]"]


def test_what_is_no_chunk_is_an_error_and_no_traceback():
    for event in ("{", '{"error": {"message": "out of memory"}}', '{"error": "no"}'):
        heard = Heard()
        heard.take(event, 0.0)
        assert heard.error


def test_prompts_have_the_wanted_length_and_are_never_the_same():
    prompts = Prompts.of("chat-en", 0)
    fit = Fit.of((400, 110), (2000, 510))
    assert (fit.per_character, fit.extra) == (0.25, 10)
    text = prompts.prompt([0], 0, fit.characters(1010))
    assert len(text) == 4000
    assert prompts.prompt([0], 0, 4000) == text
    assert prompts.prompt([1], 0, 4000)[:20] != text[:20], "a second arm must not find the first one's in the cache"
    assert prompts.prompt([1], 0, 4000)[30:] == text[30:]
    assert not Fit.of((400, 100), (2000, 100)).counted


def test_a_trace_in_azures_layout_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n"
        "2023-11-16 18:17:04.0319600,396,0\n2023-11-16 18:17:05.9799600,879,55\n2023-11-16 18:18:03.9799600,1,1\n"
    )
    arrivals = read_trace(path, 10)
    assert [lengths for _, lengths in arrivals] == [Lengths(374, 44), Lengths(879, 55), Lengths(1, 1)]
    assert [at for at, _ in arrivals] == pytest.approx([0, 2, 60], abs=1e-6)
    (load,) = loads(config(trace=str(path), trace_speed=4.0, concurrency=(), requests=2))
    assert [due.at for due in load.due] == pytest.approx([0, 0.5], abs=1e-6)
    path.write_text("time,in,out\n1,2,3\n")
    with pytest.raises(UsageError, match="no column TIMESTAMP"):
        read_trace(path, 10)


def test_poisson_arrivals_have_the_rate_and_are_the_same_again():
    (load,) = loads(config(rates=(5.0,), concurrency=(), requests=2000))
    times = [due.at for due in load.due]
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)  # 4 standard errors, 1 / sqrt(2000) each
    assert next(iter(loads(config(rates=(5.0,), concurrency=(), requests=2000)))) == load


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": ("12",)},
        {"lengths": ("0/5",)},
        {"concurrency": (0,)},
        {"rates": (-1.0,)},
        {"rounds": 0},
        {"requests": 0},
    ],
)
def test_what_cannot_be_is_refused(changes):
    with pytest.raises(UsageError, match="Expected"):
        config(**changes)


# Whole runs


def test_plain_and_speculative_take_turns(tmp_path):
    """U13: by the request's own field. Three tokens in a piece against one."""
    with FakeServer().running() as server:
        given = config(server.url)
        answers = run(given, tmp_path)
        asked = ["plain" if "speculative" in body else "speculative" for body in server.measured]
        assert asked == [arm for _ in range(2) for arm in ("plain", "speculative") for _ in range(4)]
        assert all(body.get("speculative") in (None, {"enabled": False}) for body in server.bodies)
        assert all(body["ignore_eos"] and body["max_tokens"] == 12 for body in server.measured)
        prompts = [body["messages"][0]["content"] for body in server.measured]
    assert len({prompt[:20] for prompt in prompts}) == 16
    assert all(a.error == "" and a.output_tokens == 12 and sum(a.tokens) == 12 for a in answers)
    assert all(abs(a.prompt_tokens - 60) <= 3 for a in answers)
    plain, speculative = summarize_load(given, answers).lines
    assert (plain.arm, plain.tokens_a_chunk, plain.drafted) == ("plain", 1.0, None)
    assert (speculative.arm, speculative.tokens_a_chunk, speculative.accepted_per_drafted) == ("speculative", 3.0, 0.5)
    assert speculative.speedup is not None
    kept = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(kept) == 16


@pytest.mark.parametrize("told", [{"ids": False}, {"ids": False, "usage": False}], ids=["usage", "nothing"])
def test_tokens_are_counted_by_whatever_the_server_says(told):
    with FakeServer(**told).running() as server:
        answers = run(config(server.url, rounds=1))
        counted = told.get("usage", True)
        assert all((sum(a.tokens) == 12) == counted for a in answers)
        for line in summarize_load(config(server.url), answers).lines:
            assert line.counted == counted


def test_a_server_of_another_kind_is_sent_nothing_that_it_does_not_know():
    with FakeServer(owner="somebody", info=None, chunk=1).running() as server:
        answers = run(config(server.url, rounds=1, endpoint="completions"))
        assert {a.arm for a in answers} == {"as it is"}
        assert not any(a.error for a in answers)
        assert all("prompt" in body for body in server.bodies)


def test_two_servers_take_turns():
    with FakeServer().running() as one, FakeServer(owner="other", info=None).running() as two:
        given = config(one.url, two.url, compare=False)
        answers = run(given)
        assert [(a.server, a.round) for a in answers[::4]] == [("s0", 0), ("s1", 0), ("s0", 1), ("s1", 1)]
        first, second = summarize_load(given, answers).lines
        assert (first.speedup, second.against) == (None, "s0 as it is")


def test_failures_are_counted_and_stop_nothing():
    """Every third request dies in the middle of its stream, or every second is refused."""
    with FakeServer(die_every=3).running() as server:
        answers = run(config(server.url, rounds=1, compare=False, requests=9))
    assert len(answers) == 9
    assert sum(bool(a.error) for a in answers) == 3
    assert all(len(a.gaps) < 4 for a in answers if a.error)
    with FakeServer(refuse_every=2).running() as server:
        given = config(server.url, rounds=1, compare=False, requests=6)
        summary = summarize_load(given, run(given))
    (line,) = summary.lines
    assert (line.failed, line.errors[0][0]) == (3, "HTTP 429: too many requests")
    assert "3 of 6 requests failed" in " ".join(summary.warnings)


def test_loops_of_a_server_are_flagged():
    """U26."""
    with FakeServer(loop=True, delay=0).running() as server:
        given = config(server.url, rounds=1, compare=False, requests=2, lengths=("60/40",))
        (line,) = summarize_load(given, run(given)).lines
    assert line.degenerate == 4
    assert line.accepted_per_drafted is None


def test_an_open_loop_does_not_wait_for_answers():
    with FakeServer(delay=0.05).running() as server:
        given = config(server.url, rounds=1, compare=False, concurrency=(), rates=(200.0,), requests=10)
        answers = run(given)
    assert min(a.ended for a in answers) > max(a.due for a in answers), "all were open at once"
    assert all(a.sent >= a.due for a in answers)


def test_an_interrupted_run_goes_on(tmp_path):
    """What was whole is kept, a half block is measured again, and another question is refused."""
    with FakeServer().running() as server:
        given = config(server.url, concurrency=(1, 2))
        run(given, tmp_path)
        path = tmp_path / "results.jsonl"
        kept = path.read_text().splitlines()
        path.write_text("\n".join(kept[:10]) + '\n{"server": "s0", "ar')
        asked = len(server.measured)
        answers = run(given, tmp_path, resume=True)
        assert len(server.measured) - asked == len(kept) - 8
        assert [json.loads(line) for line in path.read_text().splitlines()[:8]] == [
            json.loads(line) for line in kept[:8]
        ]
        assert len({(a.arm, a.load, a.round, a.index) for a in answers}) == len(answers) == len(kept)
        asked = len(server.bodies)
        run(given, tmp_path, resume=True)
        assert len(server.bodies) == asked, "nothing was left to ask"
        with pytest.raises(UsageError, match="--resume"):
            Results(tmp_path, given, resume=False)
        with pytest.raises(UsageError, match="seed"):
            Results(tmp_path, replace(given, seed=1), resume=True)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a program that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    def press(done: int, total: int, label: str) -> None:
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    with FakeServer().running() as server:
        given = config(server.url, compare=False)
        results = Results(tmp_path, given, False)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run_load(given, results, perf_counter, press))
        assert 3 <= len(results.answers) < 8
        assert len((tmp_path / "results.jsonl").read_text().splitlines()) == len(results.answers)
        assert len(run(given, tmp_path, resume=True)) == 8


def test_nobody_there_is_one_message():
    with pytest.raises(UsageError, match="no server answers"):
        run(config("http://127.0.0.1:9"))
    with FakeServer().running() as server, pytest.raises(UsageError, match="has no model 'gpt'"):
        run(config(server.url, model="gpt"))


# Reports


def test_reports_are_written_and_escape_what_servers_say(tmp_path):
    given = [
        answer(arm=arm, round=r, load=f"concurrency {n}", level=n, ended=2.0 + n + r, error="<script>" * (r == 2))
        for n in (1, 4)
        for r in range(3)
        for arm in ("plain", "speculative")
    ]
    summary = summarize_load(config(), given)
    written = publish_load(tmp_path, summary)
    assert {path.name for path in written} == {"report.html", "report.md", "report.json"}
    page = render_load_html(summary)
    assert "<script>" not in page
    assert "http://www" not in page
    assert page.count("<svg") == 2
    assert (
        (tmp_path / "report.md")
        .read_text()
        .startswith("# Speculative has 1.00× (1.00× to 1.00×) the throughput of plain")
    )
    figures = load_json(summary)
    assert json.loads((tmp_path / "report.json").read_text())["lines"] == figures["lines"]
    assert {line["arm"] for line in figures["lines"]} == {"plain", "speculative"}
    assert any("ITL by chunk" in sentence for sentence in figures["definitions"])
