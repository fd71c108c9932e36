"""The page at `/`: a talk and what the server does, in files of our own and nothing from elsewhere.

It holds no data: what it shows it asks for with the bearer token that it is given.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from compute.frontend.service import Frontend

PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PAGE_PATHS = frozenset(PAGE_FILES)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FOLDER = Path(__file__).resolve().parents[1] / "page"


def page_file(path: str) -> Callable[[Request, Frontend], Awaitable[Response]]:
    """Return what answers with the file of one of PAGE_PATHS, which is read now."""
    name, kind = PAGE_FILES[path]
    body = (_FOLDER / name).read_bytes()

    async def answered(_request: Request, _frontend: Frontend) -> Response:
        return Response(body, headers=_HEADERS | {"content-type": kind})

    return answered
