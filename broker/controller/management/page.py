"""The web page at /ui/: the files of `controller/web`, read once at the start.

Its files need no login: they hold no data of this broker. The page calls the API like any client,
as the user that logs in there. POLICY restricts what a browser lets the page do: scripts, styles
and calls of this origin only, nothing inline, no markup made of strings (trusted types), no frame
around it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import hdrs, web

FILES: Final = Path(__file__).parent.parent / "web"
BASE: Final = "/ui/"
WELCOME: Final = (
    f"shardmq: the page is at {BASE}, the HTTP API begins at /api/overview (see /api/index.html), "
    "metrics are at /metrics; at the command line use shardctl.\n"
)
INDEX: Final = "index.html"
TYPES: Final = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Browsers ask for each file every time, and get 304 while it is the same. So a page never runs with
# parts of another version.
HEADERS: Final = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}


class StaticFile(NamedTuple):
    body: bytes
    type: str
    etag: str


def static_file(body: bytes, suffix: str) -> StaticFile:
    return StaticFile(body, TYPES[suffix], hashlib.sha256(body).hexdigest()[:32])


def read_files(folder: Path = FILES) -> dict[str, StaticFile]:
    return {
        path.relative_to(folder).as_posix(): static_file(path.read_bytes(), path.suffix)
        for path in sorted(folder.rglob("*"))
        if path.suffix in TYPES
    }


def is_held(file: StaticFile, request: web.Request) -> bool:
    """Return whether the client says that it has the file."""
    return any(tag.value in (file.etag, "*") for tag in request.if_none_match or ())


def response_of(file: StaticFile, request: web.Request) -> web.Response:
    """Return the file under the policy, or 304 if the client has it."""
    response = web.Response(headers=HEADERS)
    response.etag = file.etag
    if is_held(file, request):
        response.set_status(304)
    else:
        response.content_type, response.charset = file.type, "utf-8"
        response.body = file.body
    return response


def add_routes(app: web.Application) -> None:
    files = read_files()

    async def serve(request: web.Request) -> web.Response:
        # The path is only a key here, so `..` leads nowhere.
        file = files.get(request.match_info["file"] or INDEX)
        if file is None:
            raise web.HTTPNotFound
        return response_of(file, request)

    app.router.add_get("/", welcome)
    app.router.add_get(BASE.rstrip("/"), to_page)
    app.router.add_get(BASE + "{file:.*}", serve)


async def welcome(request: web.Request) -> web.Response:
    """Redirect a browser to the page, and answer any other client with a line of text."""
    if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return web.Response(
            status=302, headers={"Location": BASE.removeprefix("/"), "Vary": hdrs.ACCEPT}
        )
    return web.Response(text=WELCOME, headers={"Vary": hdrs.ACCEPT})


async def to_page(request: web.Request) -> web.Response:
    return web.Response(status=301, headers={"Location": BASE.strip("/") + "/"})
