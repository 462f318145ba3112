"""The report: the same figures in every form, readable everywhere, and nobody's words run as code."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from synthetic_trace import DRAFTS, Spec, synthetic_trace

from bitdraft.measure.report import Summary, render_html, render_markdown, render_terminal, summarize, to_json
from bitdraft.measure.report.html import render_html as render
from bitdraft.measure.trace import Trace

CONFIRM = (("w8a8", 3), ("w8a8", 4), ("fp8", 4))
FULL = Spec(confirm=CONFIRM, prompts=16)
MANY = Spec(acceptance={"code": 0.9, "chat": 0.7, "edit": 0.94, "maths": 0.8, "summarise": 0.75}, prompts=8, tokens=48)
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta"}


def told(trace: Trace, seed: int = 0) -> Summary:
    return summarize(trace, np.random.default_rng(seed), 100)


@pytest.fixture(scope="module")
def full() -> Summary:
    return told(synthetic_trace(FULL))


WHOLE = replace(FULL, prompts=4, tokens=24, confirm_prompts=2)
UNFINISHED: Mapping[str, tuple[Spec, Callable[[Trace], Trace]]] = {
    "no confirmations": (WHOLE, lambda trace: replace(trace, confirmations=())),
    "no costs": (WHOLE, lambda trace: replace(trace, costs=(), confirmations=())),
    "no costs but runs": (WHOLE, lambda trace: replace(trace, costs=())),
    "no sizes": (WHOLE, lambda trace: replace(trace, sizes={})),
    "no scores": (WHOLE, lambda trace: replace(trace, scores={}, costs=(), confirmations=())),
    "one workload": (WHOLE, lambda t: replace(t, scores={k: s for k, s in t.scores.items() if k[1] == "code"})),
    "one format": (WHOLE, lambda t: replace(t, scores={k: s for k, s in t.scores.items() if k[0] == "w8a8"})),
    "one prompt": (replace(WHOLE, prompts=1), lambda trace: trace),
    "short texts": (replace(WHOLE, tokens=4, spread=0.0, confirm=()), lambda trace: trace),
    "one token": (replace(WHOLE, tokens=1, spread=0.0, confirm=()), lambda trace: trace),
    "one length": (replace(WHOLE, k_values=(1,), confirm=()), lambda trace: trace),
}
"""Traces as Ctrl-C leaves them, and odd ones."""


def terminal(summary: Summary, width: int = 100, encoding: str = "utf-8", colour: bool = False) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    render_terminal(summary, console)
    file.flush()
    return raw.getvalue().decode(encoding)


# JSON


def test_json_has_what_is_promised(full: Summary) -> None:
    found = json.loads(json.dumps(to_json(full), allow_nan=False))
    for name in DRAFTS:
        for workload in ("code", "chat"):
            cell = found["formats"][name][workload]
            for figure in ("conditional_acceptance", "accepted_per_drafted", "kl", "tokens_per_step", "speedup"):
                assert set(cell[figure]) == {"value", "low", "high"}
                assert cell[figure]["low"] <= cell[figure]["value"] <= cell[figure]["high"]
            assert cell["accepted_per_drafted"]["value"] < cell["conditional_acceptance"]["value"]
            assert len(cell["hazards"]) == cell["hazards_k"] == 8
            assert [point["k"] for point in cell["curve"]] == list(range(1, 9))
    assert found["formats"]["bf16"]["code"]["share_of_16_bit_acceptance"] == {"value": 1, "low": 1, "high": 1}
    assert found["formats"]["w8a8"]["code"]["confirmed_speedup"]["value"] > 1
    assert found["formats"]["bf16"]["code"]["confirmed_speedup"] is None
    assert found["recommendation"]["headline"] == full.recommendation.headline


def test_json_figures_are_near_the_truth(full: Summary) -> None:
    cells = to_json(full)["formats"]
    for workload, truth in FULL.acceptance.items():
        bounds = cells["bf16"][workload]["conditional_acceptance"]
        assert bounds["value"] == pytest.approx(truth, abs=0.04)
        assert bounds["high"] - bounds["low"] < 0.1
    acceptance = [cells[name]["code"]["conditional_acceptance"]["value"] for name in DRAFTS]
    assert acceptance == sorted(acceptance, reverse=True)


def test_the_same_stream_gives_the_same_report() -> None:
    trace = synthetic_trace(replace(FULL, prompts=6))
    assert to_json(told(trace)) == to_json(told(trace))
    assert to_json(told(trace)) != to_json(told(trace, seed=1))


@pytest.mark.parametrize("name", UNFINISHED)
def test_an_unfinished_measurement_is_told_in_every_form(name: str) -> None:
    spec, change = UNFINISHED[name]
    summary = told(change(synthetic_trace(spec)))
    json.dumps(to_json(summary), allow_nan=False)
    for text in (render_html(summary), render_markdown(summary), terminal(summary)):
        assert "nan" not in text.lower()
        assert summary.recommendation.headline.split(" with ")[0] in text.replace("\\", "").replace("\u00a0", " ")
        read(render_html(summary))


# Terminal


def test_terminal_fits_in_100_columns(full: Summary) -> None:
    text = terminal(full)
    assert max(map(len, text.splitlines())) <= 100
    for word in ("packed", "predicted", "confirmed", "tokens", "none", "dequantised reference", "temperature 1"):
        assert word in text
    rows = [line for line in text.splitlines() if line.startswith(("  bf16", "▸"))]
    assert any(full.recommendation.draft_format or "-" in line for line in rows if line.startswith("▸"))


def test_terminal_has_colour_only_where_there_is_colour(full: Summary) -> None:
    assert "\x1b[" not in terminal(full)
    assert "\x1b[" in terminal(full, colour=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", terminal(full, colour=True))
    assert plain == terminal(full)


def test_terminal_without_unicode(full: Summary) -> None:
    text = terminal(full, encoding="ascii")
    assert f"> {full.recommendation.draft_format}" in text
    assert "?" not in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_cuts_no_figure(full: Summary, width: int) -> None:
    text = terminal(full, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    row = next(row for row in full.rows if row.best)
    assert row.predicted is not None
    assert f"{row.predicted.value:.2f}×" in text


def test_many_workloads_fit_too() -> None:
    text = terminal(told(synthetic_trace(MANY)))
    assert max(map(len, text.splitlines())) <= 100
    assert "summarise" in text
    assert "…" not in text


# HTML


class Page(HTMLParser):
    """Reads a page, and insists that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    return page


def test_html_is_one_file_that_needs_nothing(full: Summary) -> None:
    html = render_html(full)
    page = read(html)
    for mark in ("http://", "https://", "@import", "url(", "javascript:"):
        assert mark not in html
    assert not {"script", "link", "img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in page.tags for name in attrs)
    assert "prefers-color-scheme: dark" in html
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_html_drawings_are_well_formed_and_described(full: Summary) -> None:
    drawings = re.findall(r"<svg.*?</svg>", render_html(full), re.DOTALL)
    assert len(drawings) > 7
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        if root.get("aria-hidden"):
            continue
        title, description = (root.find("title"), root.find("desc"))
        assert title is not None
        assert title.text
        assert description is not None
        assert description.text
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        for node in root.iter():
            for name in ("x", "y", "cx", "cy", "width", "height"):
                if name in node.attrib:
                    assert -1 <= float(node.attrib[name]) <= 1000


def test_html_drawings_hold_their_figures(full: Summary) -> None:
    html = render_html(full)
    cell = full.figures.cells["w8a8", "chat"]
    speedup = cell.curve[3].speedup
    assert speedup is not None
    assert f"w8a8, K = 4: predicted {speedup.value:.2f}×" in html
    assert re.search(r"w8a8, K = 4: confirmed \d\.\d\d×", html)
    assert f"w8a8 on chat: {100 * cell.agreement.conditional_acceptance.value:.1f}%" in html
    assert f"w8a8, position 1: {100 * cell.hazards[0].value:.1f}%" in html
    assert re.search(r"w8a8, K \d: drafting [\d.]+ ms an output token", html)


def test_html_says_the_advice_first(full: Summary) -> None:
    page = read(render_html(full))
    tags = [tag for tag, _ in page.tags]
    assert tags.index("h1") < tags.index("table")
    for sentence in (*full.recommendation.reasons, *full.recommendation.warnings, *full.notes):
        assert sentence in page.text.replace("\u00a0", " ")
    assert full.figures.run.command in page.text
    assert full.figures.run.machine.cpu in page.text


def test_html_escapes_other_peoples_words() -> None:
    bad = "<script>alert('x')</script>&\"'"
    spec = replace(FULL, prompts=3, draft_name=bad, confirm=(("a<b>&", 3),), drafts={"a<b>&": DRAFTS["w8a8"]})
    trace = synthetic_trace(spec)
    trace = replace(trace, run=replace(trace.run, command=bad, backend=bad))
    html = render(told(trace))
    page = read(html)
    assert "<script" not in html
    assert "a<b>" not in html
    assert bad in page.text
    for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(drawing)


# Markdown


def test_markdown_tables_are_whole(full: Summary) -> None:
    text = render_markdown(full)
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert len(tables[0]) == 2 + 1 + len(DRAFTS)
    assert f"**{full.recommendation.draft_format}**, recommended" in text
    assert full.recommendation.headline in text


def test_markdown_escapes_signs() -> None:
    trace = synthetic_trace(replace(FULL, prompts=3, draft_name="a|b*c_d`e", confirm=()))
    text = render_markdown(told(trace))
    assert "a\\|b\\*c\\_d\\`e" in text


# All forms


def strip(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("\\", "").replace("\u00a0", " "))


def test_every_form_tells_the_same_figures(full: Summary) -> None:
    forms = [strip(terminal(full)), strip(read(render_html(full)).text), strip(render_markdown(full))]
    for row in full.rows:
        figures: list[Any] = [f for f in (row.tokens_per_step, row.predicted, row.confirmed) if f]
        for figure in figures:
            for form in forms:
                assert f"{figure.value:.2f}" in form
    for form in forms:
        assert full.recommendation.headline in form


def test_the_16_bit_notice_is_given_only_for_low_bit_files() -> None:
    for bits, wanted in ((5.0, True), (16.0, False)):
        summary = told(synthetic_trace(replace(FULL, prompts=3, stored_bits=bits, confirm=())))
        assert any("dequantised reference" in note for note in summary.notes) is wanted


def test_greedy_parity_is_said_when_it_holds() -> None:
    greedy = replace(FULL, prompts=3, temperature=0.0, confirm_prompts=3)
    assert any("very tokens of plain decoding" in note for note in told(synthetic_trace(greedy)).notes)
    sampled = replace(greedy, temperature=1.0)
    assert not any("very tokens" in note for note in told(synthetic_trace(sampled)).notes)
