"""The page at `/` as far as it can be checked without a browser; test_page_in_browser.py has the rest."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest
from parrot import parrot_service
from running import Running, start

from bitdraft.serve.page import CONTENT_SECURITY_POLICY, TYPES, WEB

SCRIPTS = sorted(WEB.glob("*.js"))
HTML, CSS = (WEB / "index.html").read_text(), (WEB / "style.css").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key."""
    folder = tmp_path_factory.mktemp("parrots")
    with start(parrot_service(folder / "plain", 4, api_key="secret")[0]) as running:
        yield running


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(HTML)
    return parser.tags


def test_the_page_and_its_parts_need_no_key_and_nothing_else_is_there(server: Running) -> None:
    index = httpx2.get(server.url + "/")
    assert (index.status_code, index.text) == (200, HTML)
    for path in WEB.iterdir():
        if path.name != "index.html":
            answer = httpx2.get(f"{server.url}/web/{path.name}")
            assert (answer.status_code, answer.content) == (200, path.read_bytes())
            assert answer.headers["content-type"] == TYPES[path.suffix]
    assert httpx2.get(server.url + "/info").status_code == 401
    for wrong in ("/web/", "/web/nothing.js", "/web/%2e%2e/app.py", "/web/%2e%2e/info"):
        assert httpx2.get(server.url + wrong).status_code == 404


def test_an_unchanged_file_is_not_sent_again(server: Running) -> None:
    first = httpx2.get(server.url + "/web/app.js")
    assert first.headers["cache-control"] == "no-cache"
    for tags_known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}'):
        again = httpx2.get(server.url + "/web/app.js", headers={"if-none-match": tags_known})
        assert (again.status_code, again.content) == (304, b"")
    assert httpx2.get(server.url + "/web/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_the_policy_allows_this_server_only(server: Running) -> None:
    for path in ("/", "/web/app.js", "/web/icon.svg"):
        headers = httpx2.get(server.url + path).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {value for name, value in rules.items() if name.endswith("-src") and name != "default-src"} == {"'self'"}


def test_nothing_is_asked_of_anybody_else() -> None:
    for path in WEB.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?|wss?):|//[\w.-]+\.\w|@import|url\(", text), path.name


def test_no_markup_is_made_of_text() -> None:
    """Only text nodes: none of what parses a string as HTML or as a script, and no inline code."""
    for path in SCRIPTS:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc|DOMParser",
            path.read_text(),
        )
        assert not found, path.name
    for tag, attributes in tags():
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert tag != "style"
        assert tag != "script" or attributes["src"]


def test_every_id_that_scripts_and_labels_name_exists_once() -> None:
    ids = [attributes["id"] for _, attributes in tags() if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = set()
    for path in SCRIPTS:
        named |= set(re.findall(r'(?:\$|getElementById|\bset)\("([\w-]+)"', path.read_text()))
    assert len(named) > 25
    for _, attributes in tags():
        for name in ("for", "aria-labelledby", "aria-describedby", "aria-controls"):
            named |= set((attributes.get(name) or "").split())
    assert named <= set(ids)
    assert {f"count-{origin}" for origin in ("draft", "corrected", "free", "cached")} <= set(ids)


def test_files_are_small() -> None:
    for path in WEB.iterdir():
        assert len(path.read_text().splitlines()) < 400, path.name


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_colours_have_contrast(theme: int) -> None:
    """WCAG AA: 4.5 for text, 3 for the edges of controls."""
    pairs = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", CSS)
    colours = {name: (light, dark)[theme] for name, light, dark in pairs}
    for ground in ("paper", "sheet"):
        for name in ("ink", "quiet", "draft", "corrected", "free", "cached"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        assert contrast(colours["edge"], colours[ground]) >= 3, ground


def test_origins_differ_without_colour() -> None:
    styles = re.findall(r"\.tok\.(draft|corrected|free|cached) \{[^}]*text-decoration-style: (\w+)", CSS)
    assert len(styles) == len({style for _, style in styles}) == 4


def test_motion_is_only_for_those_who_want_it() -> None:
    before = CSS.partition("@media (prefers-reduced-motion: no-preference)")[0]
    assert "transition" not in before
    assert "animation:" not in before
    assert "smooth" not in CSS


def test_the_wheel_has_the_page() -> None:
    """Wheels hold what lies in the package's folder and is not ignored by git."""
    root = Path(__file__).parents[2]
    assert 'wheel.packages = ["src/bitdraft"]' in (root / "pyproject.toml").read_text()
    ignored = [line for line in (root / ".gitignore").read_text().splitlines() if line]
    assert not [line for line in ignored if line.rstrip("/").rpartition("/")[2] in ("web", "*.js", "*.css", "*.html")]


def test_streams_show_every_step_where_origins_are_asked_for(tmp_path: Path) -> None:
    """Steps in chunks add up to what the whole says; without origins there are none."""
    with start(parrot_service(tmp_path / "plain", 4)[0]) as running:
        body = {"messages": [{"role": "user", "content": "hello world, hello"}], "temperature": 0}
        asked = body | {"return_origins": True, "stream_options": {"include_usage": True}}
        events = running.stream("/v1/chat/completions", **asked)
        steps = [step for e in events for c in e["choices"] for step in c.get("steps", ())]
        said = events[-1]["metrics"]["speculative_decoding"]
        assert [s["drafted"] for s in steps] == said["per_step_drafted"]
        assert [s["accepted"] for s in steps] == said["per_step_accepted"]
        # a position is looked at if everything before it was accepted
        assert all(s["tested"] == min(s["accepted"] + 1, s["drafted"]) for s in steps)
        assert all(s["overlap"] == pytest.approx(s["accepted"]) for s in steps)
        assert sum(s["drafted"] for s in steps) > sum(s["accepted"] for s in steps) > 0
        plain = running.stream("/v1/chat/completions", **body)
        assert not [c for e in plain for c in e["choices"] if "steps" in c or "origins" in c]
