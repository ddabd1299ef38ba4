"""The page at `/`: a few static files of the package, read once, and the headers under which they can do no harm.

They hold no data and need no key: what they show they ask the API for, with the key that the reader types in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response

FOLDER = Path(__file__).parent / "page"
FIRST = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no HTML out of strings (trusted types), in nobody's frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # kept, and asked for again: a 304 where nothing changed
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    kind: str
    etag: str

    def respond(self, request: Request) -> Response:
        headers = HEADERS | {"etag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.kind, headers=headers)


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, KINDS[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:24]}"')


ASSETS = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}
PATHS = frozenset({"/", *(f"/page/{name}" for name in ASSETS if name != FIRST)})


def add_page(app: FastAPI) -> None:
    """The routes of `PATHS`."""
    for path in PATHS:
        asset = ASSETS[path.removeprefix("/page/") if path != "/" else FIRST]
        app.add_api_route(path, asset.respond, methods=["GET", "HEAD"], include_in_schema=False)
