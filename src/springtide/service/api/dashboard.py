"""The dashboard's routes: one server-rendered page and its static files. The page gets its data over the REST API."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jinja2
from fastapi import APIRouter
from starlette.responses import Response
from starlette.routing import BaseRoute

from springtide import __version__
from springtide.service.api import openapi

PAGES = Path(__file__).parent / "pages"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_TEXT = {"type": "string"}
_HTML = "text/html"
# Scripts and styles come from this origin only and never inline, so that text from a job cannot run as code.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# The page shows these while nothing has been submitted yet.
FIRST_COMMANDS = (
    ("springtide hello", "a first run: one training job resized without a restart, one service scaled to zero"),
    ("springtide run examples/digits.py --deadline 10m", "train a small network with a deadline"),
    ("springtide deploy examples/serve_digits.py", "serve what it learned"),
)


class StaticFiles:
    """The static files, in memory. Their digest is part of every address, so that browsers may cache them for ever."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.name: (path.read_bytes(), MEDIA_TYPES[path.suffix])
            for path in sorted(folder.iterdir())
            if path.suffix in MEDIA_TYPES
        }
        digest = hashlib.sha256()
        for name, (body, _) in self._files.items():
            digest.update(name.encode() + b"\0" + len(body).to_bytes(8, "big") + body)
        self.digest = digest.hexdigest()[:16]

    def answer(self, digest: str, filename: str) -> Response:
        """Return one file; 404 for an unknown name or for the address of another version."""
        found = self._files.get(filename)
        if found is None or digest != self.digest:
            return Response(
                "no such file; reload the page\n",
                status_code=404,
                media_type="text/plain",
                headers={"Cache-Control": "no-store"},
            )
        body, media_type = found
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
        return Response(body, media_type=media_type, headers=headers)


def render_page(digest: str) -> str:
    """Return the page's HTML, with every value escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PAGES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.get_template("dashboard.html")
    return template.render(version=__version__, static=f"/static/{digest}", commands=FIRST_COMMANDS)


def dashboard_routes() -> list[BaseRoute]:
    """Return the routes of the page (`/`) and of its static files (`/static/<digest>/<file>`)."""
    static_files = StaticFiles(PAGES / "static")
    html = render_page(static_files.digest)
    router = APIRouter(tags=["pages"], default_response_class=Response)

    @router.get(
        "/", name="dashboard", summary="The dashboard", responses=openapi.answers(_TEXT, "A page.", media_type=_HTML)
    )
    async def page() -> Response:
        headers = {
            "Cache-Control": "no-cache",
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    @router.get(
        "/static/{digest}/{filename}",
        name="static",
        summary="A file of the dashboard; needs no token",
        openapi_extra={"security": []},
        responses={
            **openapi.answers(_TEXT, "A file.", media_type="text/*"),
            404: {"description": "No such file in this version.", "content": {"text/plain": {"schema": _TEXT}}},
        },
    )
    async def static(digest: str, filename: str) -> Response:
        return static_files.answer(digest, filename)

    return router.routes
