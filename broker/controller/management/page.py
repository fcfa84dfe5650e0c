"""The page for people, at /ui/: files of `controller/web`, read once at the start and served as they are.

It needs no login: it holds nothing of this broker, and asks the API like any client, as who logs in there. What a
browser may do with it is said in POLICY: scripts, styles and calls of this origin alone, nothing inline, no markup made
of strings (trusted types), no frame around it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

from aiohttp import hdrs, web

FILES: Final = Path(__file__).parent.parent / "web"
BASE: Final = "/ui/"
WELCOME: Final = (
    f"shardmq: the page is at {BASE}, the HTTP API starts at /api/overview, metrics are at /metrics; "
    "at the command line use shardctl.\n"
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
# Asked for anew each time, answered with 304 while it is the same: a page never runs with another version's parts.
HEADERS: Final = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}


class File(NamedTuple):
    body: bytes
    type: str
    etag: str


def read_files(folder: Path = FILES) -> dict[str, File]:
    """By their paths below the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in TYPES:
            body = path.read_bytes()
            etag = hashlib.sha256(body).hexdigest()[:32]
            found[path.relative_to(folder).as_posix()] = File(body, TYPES[path.suffix], etag)
    return found


def add_routes(app: web.Application) -> None:
    files = read_files()

    async def serve(request: web.Request) -> web.Response:
        """Only what was read: a path is a name here, and leads nowhere."""
        file = files.get(request.match_info["file"] or INDEX)
        if file is None:
            raise web.HTTPNotFound
        response = web.Response(headers=HEADERS)
        response.etag = file.etag
        if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
            response.set_status(304)
        else:
            response.content_type, response.charset = file.type, "utf-8"
            response.body = file.body
        return response

    app.router.add_get("/", welcome)
    app.router.add_get(BASE.rstrip("/"), to_page)
    app.router.add_get(BASE + "{file:.*}", serve)


async def welcome(request: web.Request) -> web.Response:
    """A browser is led to the page, whatever else comes gets a line of text. It tells nothing of this broker."""
    if "text/html" in request.headers.get(hdrs.ACCEPT, ""):
        return web.Response(
            status=302, headers={"Location": BASE.removeprefix("/"), "Vary": hdrs.ACCEPT}
        )
    return web.Response(text=WELCOME, headers={"Vary": hdrs.ACCEPT})


async def to_page(request: web.Request) -> web.Response:
    return web.Response(status=301, headers={"Location": BASE.strip("/") + "/"})
