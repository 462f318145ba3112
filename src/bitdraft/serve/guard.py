"""What every HTTP request goes through: a name, a line in the log, the key, and limits on its body."""

import hmac
import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .faults import ApiError
from .respond import ClientGone

NOTES = "bitdraft.notes"
"""Where in an ASGI scope endpoints put what the log is to say of their request."""

POLLED = {"/health", "/info", "/metrics"}
"""Paths that programs ask for every few seconds: logged at debug level, unless something is wrong."""

_log = logging.getLogger(__name__)
_ID = re.compile(r"[\w.:\-]{1,128}")


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to(stream: Any = sys.stderr, level: int = logging.INFO) -> None:
    """Write what bitdraft and the HTTP server have to say as JSON lines to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    for name, least in (("bitdraft", level), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


class Attended:
    """Gives requests their ids, logs them, and answers errors that nobody expected. An ASGI middleware."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float]) -> None:
        """Wrap `app`; `clock` gives seconds."""
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; `x-request-id` is the client's, or a new one."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        notes = scope[NOTES] = {"id": request_id}
        status, started = 0, self._clock()

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-request-id", request_id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            await self._app(scope, receive, named)
        except (ClientGone, ClientDisconnect):
            status = 499
        except Exception:
            _log.exception("a request failed", extra={"fields": notes})
            if not status:
                error = ApiError(500, f"the server failed on this request; its log has more under {request_id}.")
                await error.response()(scope, receive, named)
        finally:
            fields = {"method": scope["method"], "path": scope["path"], "status": status}
            seconds = round(self._clock() - started, 4)
            quiet = scope["path"] in POLLED and status < 400
            _log.log(
                logging.DEBUG if quiet else logging.INFO,
                "request",
                extra={"fields": notes | fields | {"seconds": seconds}},
            )


class Keyed:
    """Refuses requests for some paths that do not show the key. An ASGI middleware."""

    def __init__(self, app: ASGIApp, key: str, paths: Collection[str]) -> None:
        """Wrap `app`; for these paths clients have to send `Authorization: Bearer KEY`."""
        self._app, self._expected, self._paths = app, f"Bearer {key}".encode(), frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer with status 401."""
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        free = scope["type"] != "http" or scope["path"] not in self._paths
        if free or hmac.compare_digest(shown, self._expected):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "a wrong API key, or none. Send the server's key as `Authorization: Bearer KEY`.",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes:
    """The body of a request for JSON.

    A content type that browsers send without asking is refused: so no page of another origin can make a browser use
    the server.

    Raises:
        ApiError: it is too long, or of another type.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the content type is {kind or 'missing'}. Expected application/json.", code="unsupported_media_type"
        )
    too_long = ApiError(413, f"the body is longer than {limit} bytes (--max-body).", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_long
        parts.append(part)
    return b"".join(parts)
