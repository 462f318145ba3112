"""A server on a thread of the test process."""

import json
import threading
import time
from typing import Any, Self

import httpx2 as httpx
import uvicorn

from bitdraft.drafters.model import ModelDrafter
from bitdraft.serve.app import Service, create_app
from bitdraft.serve.server import bind


class Running:
    """A server that answers at `url` until it is closed."""

    def __init__(self, service: Service, app: Any = None) -> None:
        self.service = service
        self._socket = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        settings = {"http": "h11", "loop": "asyncio", "ws": "none", "log_config": None, "lifespan": "on"}
        self._server = uvicorn.Server(uvicorn.Config(app or create_app(service), **settings))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not self._server.started and time.monotonic() < end:
            time.sleep(0.01)
        assert self._server.started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()

    @property
    def drafter(self) -> ModelDrafter:
        """What asks the draft model, under what follows predictions."""
        drafter = self.service.worker._engine.drafter._otherwise
        assert isinstance(drafter, ModelDrafter)
        return drafter

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        answer = httpx.post(self.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """A greedy completion, unless the body says otherwise."""
        return self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, "max_tokens": 16} | body)

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        with httpx.stream("POST", self.url + path, json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = "".join(answer.iter_text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def idle(self, seconds: float = 5.0) -> bool:
        """Whether nothing runs, waits or holds blocks within some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            load = self.service.worker.load
            if not (load.running or load.waiting or load.kv_blocks_used or self.service.worker.open):
                return True
            time.sleep(0.02)
        return False


def start(service: Service) -> Running:
    """Serve in the background."""
    return Running(service)
