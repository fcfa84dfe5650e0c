"""What a browser must not be made to do, and where a password must not travel.

A browser that knows a password for this API sends it with whatever another site makes it ask for: calls that change
something are refused when they come from another site's page (CSRF), and no page may show ours in a frame
(clickjacking). Clients that are no browsers send neither of the headers this is told by.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from shardmq.broker.controller.management.call import ApiError
from shardmq.broker.shared.logins import is_loopback

CHANGES = frozenset(("PUT", "POST", "DELETE", "PATCH"))
HEADERS: Final = {
    "Server": "shardmq",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Nothing of an API is a page; a page says itself what it may load.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache, no-store",
}


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = HEADERS["Server"]


def check_site(request: web.BaseRequest) -> None:
    """Raises 403 for a change that another site's page asks for."""
    if request.method not in CHANGES:
        return
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site in ("cross-site", "same-site"):
        raise ApiError(403, "forbidden", "changes asked for by another site's page are refused")
    if (
        site is None
        and origin is not None
        and urlsplit(origin).netloc.lower() != request.host.lower()
    ):
        raise ApiError(
            403,
            "forbidden",
            f"changes asked for by another site's page are refused: Origin is {origin}",
        )


def check_way(request: web.BaseRequest, may_be_plain: bool) -> None:
    """Raises 403 for a password that came readably over a network."""
    if not (may_be_plain or request.secure or is_loopback(request.remote or "")):
        raise ApiError(
            403,
            "tls_required",
            "passwords from other hosts are taken by HTTPS alone (users.http_without_tls allows them by HTTP)",
        )
