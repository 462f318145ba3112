"""The page at `/` in a real Chromium: what a user sees, types and presses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from chromium import FOUND, Chromium, Tab
from parrot import Parrot, parrot_service
from running import Running, start

pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium is installed (Debian: apt-get install chromium)")

INJECTION = '<img src=x onerror="document.title=1"><script>document.title=2</script>&amp; **no**'
SENT = "document.querySelectorAll('.turn.model:not(:has([aria-busy]))').length"
"""Answers that have ended."""


class Served:
    """A server with a parrot, which says everything again, and what it says of itself."""

    def __init__(self, folder: Path, k: int = 4, **settings: Any) -> None:
        service, self.parrot = parrot_service(folder, k, **settings)

        def info() -> dict[str, Any]:
            load = service.worker.load
            names = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "cached_blocks")
            return {
                "models": ["parrot"],
                "target": {"name": "parrot", "format": "f32"},
                "draft": {"name": "chick", "format": "w4a16"} if k else None,
                "max_batch": 4,
                "speculative": {"max_draft": k, "draft_length": f"K = {k}: fixed."},
                "sampling_defaults": {"temperature": 0.0, "top_p": 1.0, "max_tokens": None},
                "load": {name: getattr(load, name) for name in names},
            }

        service.info = info
        self.running: Running = start(service)
        self.url = self.running.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parrots")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    made = Served(folder / "plain")
    with made.running:
        yield made


@pytest.fixture
def parrot(served: Served) -> Iterator[Parrot]:
    yield served.parrot
    served.parrot.pause = 0.0


@pytest.fixture(scope="module")
def window(browser: Chromium, served: Served) -> Tab:
    return browser.open(served.url + "/")


@pytest.fixture
def tab(window: Tab, served: Served) -> Iterator[Tab]:
    """A fresh page of the server; at its end nothing has complained, and nobody else was asked for anything."""
    window.resize(1280, 800)
    window.prefer(dark=False)
    window.run("localStorage.clear(); sessionStorage.clear()")
    window.load(served.url + "/")
    window.wait("document.getElementById('kv').textContent.includes('of')")
    yield window
    assert not window.complaints()
    assert window.hosts() == {served.url}


def say(tab: Tab, text: str, answers: int = 1) -> None:
    """Send a message and wait until the answer is whole."""
    tab.run("document.getElementById('prompt').focus()")
    tab.type(text)
    tab.press("Enter")
    tab.wait(f"{SENT} === {answers}")


def bodies(tab: Tab) -> list[dict[str, Any]]:
    """What was asked of the server so far."""
    sent = [e["request"] for e in tab.events("Network.requestWillBeSent")]
    return [json.loads(request["postData"]) for request in sent if request["url"].endswith("/v1/chat/completions")]


def test_an_answer_shows_where_its_tokens_are_from(tab: Tab) -> None:
    assert "parrot f32, drafted by chick w4a16" in tab.text("#model")
    tab.press("Enter")  # nothing to send: nothing is sent
    say(tab, "hello world and hello 漢字, bye")
    assert tab.text(".model .text") == "hello world and hello 漢字, bye"
    counts = {o: int(tab.text(f"#count-{o}")) for o in ("draft", "corrected", "free", "cached")}
    seen = {o: tab.run(f"document.querySelectorAll('.model .tok.{o}').length") for o in ("draft", "corrected", "free")}
    # a character of several tokens is one span
    assert 0 < seen["draft"] <= counts["draft"]
    assert 0 < seen["corrected"] <= counts["corrected"]
    colours = tab.run(
        "[...new Set([...document.querySelectorAll('.model .tok')].map((e) => {"
        "const s = getComputedStyle(e); return s.color + ' ' + s.textDecorationStyle; }))]"
    )
    assert len(colours) == sum(count > 0 for count in seen.values())
    total = int(tab.text("#tokens").split()[0])
    assert total == sum(counts[o] for o in ("draft", "corrected", "free"))
    accepted, drafted = map(int, tab.text("#accepted-of").split(" of "))
    assert tab.text("#accepted") == f"{accepted / drafted:.3f}"
    assert accepted == counts["draft"] <= drafted
    assert 0 < float(tab.text("#conditional")) < 1
    bars = tab.run("document.querySelectorAll('#steps .drafted, #steps .none').length")
    assert f"{bars} steps" in tab.run("document.getElementById('steps').getAttribute('aria-label')")


def test_lines_and_code_keep_every_character(tab: Tab) -> None:
    text = "a\n\n```py\nif x:\n  y\n```\nz"
    tab.run("document.getElementById('prompt').focus()")
    for part in text.split("\n"):
        if part != "a":
            tab.press("Enter", shift=True)
        tab.type(part) if part else None
    assert tab.run("document.getElementById('prompt').value") == text
    tab.press("Enter")
    tab.wait(f"{SENT} === 1")
    assert tab.text(".model .text") == text
    code = tab.run("[...document.querySelectorAll('.model .line.code:not(.fence)')].map((e) => e.textContent)")
    assert code == ["if x:\n", "  y\n"]


def test_markup_from_the_model_is_text(tab: Tab) -> None:
    say(tab, INJECTION)
    assert tab.text(".model .text") == INJECTION
    assert tab.text(".user .text") == INJECTION
    assert tab.run("document.querySelectorAll('#thread img, #thread script, #thread b').length") == 0
    assert tab.run("document.title") == "parrot · bitdraft"


def test_escape_stops_the_request_and_the_part_stays(tab: Tab, served: Served, parrot: Parrot) -> None:
    parrot.pause = 0.05
    tab.type("one two three four five six seven eight nine ten eleven twelve " * 8)
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.model .tok').length > 5")
    assert tab.run("document.getElementById('send').hidden")
    assert not tab.run("document.getElementById('stop').hidden")
    tab.press("Escape")
    tab.wait(f"{SENT} === 1")
    assert served.running.idle()
    said = tab.text(".model .text")
    assert 0 < len(said) < 300
    assert tab.text(".model .remark") == "stopped"
    assert tab.text("#status") == "Stopped"
    parrot.pause = 0.0
    tab.click("#compare")  # as far as it came
    tab.wait("document.getElementById('equality')")
    assert tab.text("#equality").startswith("Equal as far as it came")
    say(tab, "and now", answers=2)
    assert tab.text(".turn:last-child .text") == "and now"


def test_plain_decoding_gives_the_same_answer(tab: Tab, parrot: Parrot) -> None:
    parrot.pause = 0.01
    assert tab.run("document.getElementById('compare').disabled")
    say(tab, "the same answer, whoever speaks first: 12 12 12")
    tab.click("#compare")
    tab.wait("document.getElementById('equality')")
    assert tab.text("#equality") == f"Equal: all {tab.text('#tokens').split()[0]} tokens."
    assert float(tab.text("#ratio")[:-1]) > 0
    first, second = bodies(tab)
    assert first["speculative"] == {"enabled": True}
    assert second == first | {"speculative": {"enabled": False}}
    # a stranger's answer is not called equal
    said = tab.run("import('/web/figures.js').then((m) => m.verdict([1, 2, 3], [1, 5, 3], true, false))")
    assert (said["equal"], said["words"].split(".")[0]) == (False, "Different from token 2 on")
    said = tab.run("import('/web/figures.js').then((m) => m.verdict([1, 2], [1, 2, 3], true, false))")
    assert not said["equal"]


def test_a_token_tells_what_is_known_of_it(tab: Tab) -> None:
    say(tab, "hello world")
    tab.run("document.querySelector('.model .text').focus()")
    tab.press("ArrowRight")
    assert not tab.run("document.getElementById('tip').hidden")
    first = tab.text("#tip")
    assert "log-probability 0.000 (100.0 %)" in first
    tab.press("ArrowRight")
    assert tab.text("#tip") != first
    assert "log-probability" in tab.text("#status")
    tab.press("Escape")
    assert tab.run("document.getElementById('tip').hidden")
    tab.click(".model details summary")
    tab.wait("document.querySelectorAll('.prompt-text .tok').length > 5")
    assert tab.text(".prompt-text").startswith("<|im_start|>user\nhello world")


def test_errors_are_told_in_words(tab: Tab, parrot: Parrot) -> None:
    parrot.broken = RuntimeError("no more seed")
    say(tab, "hello")
    tab.wait("document.querySelector('.fault')")
    assert "no more seed" in tab.text("[role=alert] p")
    tab.click(".fault button")
    tab.wait(f"{SENT} === 2")
    assert tab.text(".turn:last-child .text") == "hello"
    tab.fill("[name=top_p]", "0")  # the browser has nothing against it, the server has
    tab.type("again")
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.fault').length === 2")
    assert "top_p" in tab.text(".turn:last-child [role=alert] p")
    # the browser says by itself that a request failed
    said = tab.complaints()
    assert said == ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
    tab.forget()
    tab.load(tab.run("location.href"))


def test_settings_reach_the_server(tab: Tab) -> None:
    tab.fill("#system", "Be a bird.")
    tab.fill("[name=max_tokens]", "3")
    tab.fill("[name=k]", "1")
    tab.fill("[name=temperature]", "0.5")
    say(tab, "hello world and more")
    (body,) = bodies(tab)
    assert body["messages"][0] == {"role": "system", "content": "Be a bird."}
    assert (body["max_tokens"], body["temperature"], body["speculative"]) == (3, 0.5, {"enabled": True, "k": 1})
    assert isinstance(body["seed"], int)
    assert tab.text(".model .remark") == "ended by the limit on tokens"
    tab.click("#new-chat")
    assert tab.run("document.getElementById('thread').childElementCount") == 0
    tab.fill("[name=temperature]", "-1")
    tab.type("hello")
    tab.press("Enter")
    assert tab.text("#status").startswith("Temperature: ")
    assert tab.run("document.getElementById('thread').childElementCount") == 0


def test_keys_reach_what_they_should(tab: Tab) -> None:
    tab.run("document.activeElement.blur()")
    tab.press("/")
    assert tab.run("document.activeElement.id") == "prompt"
    tab.press("/")
    assert tab.run("document.getElementById('prompt').value") == "/"
    tab.run("document.activeElement.blur()")
    for _ in range(3):
        tab.press("Tab")
        assert tab.run("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_both_themes(tab: Tab) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    assert tab.run(ground) == "rgb(250, 249, 246)"
    tab.prefer(dark=True)
    assert tab.run(ground) == "rgb(23, 24, 27)"
    tab.wait("document.getElementById('theme').textContent === 'Light'")
    tab.click("#theme")
    assert tab.run(ground) == "rgb(250, 249, 246)"
    tab.load(tab.run("location.href"))
    assert tab.run(ground) == "rgb(250, 249, 246)"
    tab.wait("document.getElementById('kv').textContent.includes('of')")


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_is_cut_off(tab: Tab, width: int) -> None:
    tab.resize(width, 700)
    say(tab, "hello world " * 6 + "x" * 120)
    fits = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollHeight <= innerHeight"
    inside = (
        "[...document.querySelectorAll('button, input, textarea, .tok, dd, h1, h2')].filter((e) => e.offsetParent)"
        ".every((e) => [...e.getClientRects()].every((b) => b.left >= 0 && b.right <= innerWidth + 0.5))"
    )
    assert tab.run(fits)
    assert tab.run(inside)
    if width < 900:
        assert not tab.run("document.getElementById('panel').checkVisibility()")
        tab.click("#show-panel")
        assert tab.run("document.getElementById('panel').checkVisibility()")
        assert tab.run("document.getElementById('show-panel').getAttribute('aria-expanded')") == "true"
        assert tab.run(fits)
        assert tab.run(inside)


def test_without_a_draft_there_are_no_figures_of_one(browser: Chromium, folder: Path) -> None:
    made = Served(folder / "plain", 0)
    with made.running:
        tab = browser.open(made.url + "/")
        tab.wait("!document.getElementById('plainly').hidden")
        say(tab, "hello")
        assert tab.text(".model .text") == "hello"
        for name in ("comparison", "conditional", "steps"):
            assert not tab.run(f"document.getElementById('{name}').checkVisibility()")
        assert not tab.complaints()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Chromium, folder: Path) -> None:
    made = Served(folder / "plain", 4, api_key="secret")
    with made.running:
        tab = browser.open(made.url + "/")
        for key in ("wrong", "secret"):
            tab.wait("document.getElementById('key-dialog').open")
            tab.type(key)
            tab.press("Enter")
        tab.wait("document.getElementById('model').textContent.startsWith('parrot')")
        assert not tab.run("document.getElementById('key-dialog').open")
        say(tab, "hello")
        assert tab.text(".model .text") == "hello"
        stored = tab.run("[JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert stored == ['{"bitdraft.key":"secret"}', "{}", ""]
        tab.load(made.url + "/")
        tab.wait("document.getElementById('model').textContent.includes('chick')")
        assert httpx2.get(made.url + "/info").status_code == 401


def test_tokens_fit_the_text_however_a_stream_is_cut(tab: Tab) -> None:
    """Also where the text lags behind, lacks markers and the end, and has characters of several tokens."""
    found = tab.run(
        """(async () => {
          const { Aligner } = await import("/web/tokens.js");
          const bytes = (text) => [...new TextEncoder().encode(text)];
          const said = [["<think>", null], ["so", "reasoning"], [" it", "reasoning"], ["</think>", null],
            ["\\n\\n", null], ["a", "content"], [[0xe6, 0xbc], "content"], [[0xa2], "content"], ["b.", "content"],
            [" c", "content"], ["<|im_end|>", null]];
          const tokens = said.map(([text], at) =>
            ({ token: String(text), at, bytes: Array.isArray(text) ? text : bytes(text) }));
          const kinds = { reasoning: "so it", content: "a\\u6f22b. c" };
          let seed = 1;
          const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
          const wrong = [];
          for (let round = 0; round < 300; round += 1) {
            const aligner = new Aligner();
            const pieces = [];
            let at = 0, reasoning = 0, content = 0;
            while (at < tokens.length) {
              const next = Math.min(tokens.length, at + 1 + random(4));
              // text that these tokens wrote, or less: it may be held back
              const ready = (kind) => new TextDecoder().decode(Uint8Array.from(tokens.slice(0, next)
                .filter((_, i) => said[i][1] === kind).flatMap((t) => t.bytes)), { stream: true }).length;
              const r = reasoning + random(ready("reasoning") - reasoning + 1);
              const allowed = next > 4 ? ready("content") : 0;
              const upTo = allowed ? ready("reasoning") : r;
              const c = content + random(Math.max(1, allowed - content + 1));
              pieces.push(...aligner.push([["reasoning", kinds.reasoning.slice(reasoning, upTo)],
                ["content", kinds.content.slice(content, c)]].filter(([, t]) => t), tokens.slice(at, next), false));
              [at, reasoning, content] = [next, upTo, c];
            }
            pieces.push(...aligner.push([["content", kinds.content.slice(content)]].filter(([, t]) => t), [], true));
            const text = (kind) => pieces.filter((p) => p.kind === kind).map((p) => p.text).join("");
            const order = pieces.flatMap((p) => p.tokens.map((t) => t.at));
            const shows = Object.fromEntries(pieces.flatMap((p) => p.tokens.map((t) => [t.at, p.text])));
            const right = text("reasoning") === kinds.reasoning && text("content") === kinds.content
              && order.join() === [...tokens.keys()].join() && shows[0] === "" && shows[1] === "so" && shows[3] === ""
              && shows[5] === "a" && shows[6] === "\\u6f22" && shows[7] === "\\u6f22" && shows[9] === " c"
              && shows[10] === "";
            if (!right) wrong.push(pieces);
          }
          return wrong.slice(0, 1);
        })()"""
    )
    assert found == []
