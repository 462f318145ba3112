"""The page at `/`: its files, and the headers that keep anything else out of it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

WEB = Path(__file__).parent / "web"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by ending: those that the system has on file may differ, and scripts of another type do not run."""
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    # Kept, and asked for again each time: after an update of the server no old part may run with a new one.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    headers: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "_File":
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
        return cls(content, HEADERS | {"content-type": TYPES[path.suffix], "etag": tag})

    async def __call__(self, request: Request) -> Response:
        known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
        if self.headers["etag"] in known:
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def page_routes(folder: Path = WEB) -> list[Route]:
    """Routes of the page, `/`, and of its parts, `/web/NAME`. The files are read now and kept: they are small."""
    files = {path.name: _File.read(path) for path in sorted(folder.iterdir()) if path.suffix in TYPES}
    index = files.pop("index.html")
    return [Route("/", index.__call__), *(Route(f"/web/{name}", file.__call__) for name, file in files.items())]
