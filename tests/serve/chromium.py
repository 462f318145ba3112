"""A real browser for tests: headless Chromium, spoken to through its DevTools pipe, which needs no other package."""

import base64
import fcntl
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 30.0
"""Seconds to wait for what has to come."""
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_MOVE = "import os, sys; [os.dup2(int(fd), to) for fd, to in zip(sys.argv[1:3], (3, 4))]; "
_START = _MOVE + "os.execvp(sys.argv[3], sys.argv[3:])"
_KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "/": 191}


def _high(fd: int) -> int:
    """The same file under a number that cannot be 3 or 4, where Chromium has its ends."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


class Chromium:
    """A running browser."""

    def __init__(self, folder: Path) -> None:
        """Start one whose profile lies in `folder`."""
        assert FOUND
        its_in, our_out = map(_high, os.pipe())
        our_in, its_out = map(_high, os.pipe())
        command = [sys.executable, "-c", _START, str(its_in), str(its_out), FOUND, *_FLAGS, f"--user-data-dir={folder}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=(its_in, its_out), **quiet)
        os.close(its_in)
        os.close(its_out)
        self._out, self._in = os.fdopen(our_out, "wb", 0), os.fdopen(our_in, "rb")
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self._out.close()
        self._in.close()

    def _read(self) -> None:
        rest = b""
        while part := os.read(self._in.fileno(), 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                else:
                    self.events.append(message)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        found = answer.get(timeout=PATIENCE)
        assert "error" not in found, found
        return found["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> "Tab":
        """A tab of its own, without anything that other tabs stored."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.prefer(dark=dark)
        tab.load(url)
        return tab


class Tab:
    """A page in a browser."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a DevTools method for this tab."""
        return self._browser.call(method, self._session, **parameters)

    def load(self, url: str) -> None:
        """Go to a page, and forget what the one before did."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.forget()
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def forget(self) -> None:
        """Forget what was said and asked for so far."""
        self._browser.events[:] = [e for e in self._browser.events if e.get("sessionId") != self._session]

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, waited for if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is truthy."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.run(f"Boolean({expression})"):
                return
            time.sleep(0.02)
        shown = self.run("document.body.innerText")
        raise AssertionError(f"never true: {expression}\n{shown}\n{self.complaints()}")

    def text(self, selector: str) -> str:
        """The text of the first such element."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """Click on an element, which has to be where a pointer reaches it."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "const at = [b.x + Math.min(b.width, 40) / 2, b.y + b.height / 2];"
            "return e.contains(document.elementFromPoint(...at)) ? at : null; })()"
        )
        assert place, f"{selector} is covered"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key."""
        text = {"Enter": "\r", "/": "/"}.get(key)
        down: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": _KEYS[key], "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **down, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **down)

    def fill(self, selector: str, value: str) -> None:
        """Set a field's value as a user would."""
        field = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def resize(self, width: int, height: int) -> None:
        """Give the window another size, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, *, dark: bool) -> None:
        """Say which theme the system has."""
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of a kind so far."""
        return [
            e["params"] for e in self._browser.events if e.get("sessionId") == self._session and e["method"] == method
        ]

    def complaints(self) -> list[str]:
        """Errors and warnings in the console: of scripts, of the network, of the content security policy."""
        thrown = [e["exceptionDetails"]["text"] for e in self.events("Runtime.exceptionThrown")]
        said = [str(e["args"]) for e in self.events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning")]
        entries = [e["entry"] for e in self.events("Log.entryAdded")]
        return thrown + said + [e["text"] for e in entries if e["level"] in ("error", "warning")]

    def hosts(self) -> set[str]:
        """Schemes and hosts that anything was asked of."""
        urls = [e["request"]["url"] for e in self.events("Network.requestWillBeSent")]
        return {"/".join(url.split("/")[:3]) for url in urls}
