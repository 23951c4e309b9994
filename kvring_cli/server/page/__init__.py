"""The page at `/`: static files out of the package, with a policy that lets them load and ask this server only.

The page works below any path that a proxy puts before it: its own addresses are relative.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/ring.js": ("ring.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
}
"""What is served where. These hold nothing secret: they answer without a key, so that the key can be typed."""


def mount(app: FastAPI) -> None:
    """Add the page's routes; they stay out of the OpenAPI document."""
    for path, (name, kind) in FILES.items():
        app.add_route(path, _route(files(__package__).joinpath(name).read_bytes(), kind), include_in_schema=False)


def _route(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    from starlette.responses import Response

    async def serve(request: Request) -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return serve
