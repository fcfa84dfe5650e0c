"""Protection of users' browsers (CSRF, clickjacking) and of passwords on their way.

A browser that knows a password for this API sends it with every request that another site's page
makes it send. So requests that change something are refused when they come from another site's
page, and no page may show ours in a frame. Clients that are no browsers send neither `Origin` nor
`Sec-Fetch-Site`, and are not affected.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from shardmq.broker.controller.management.api_error import ApiError
from shardmq.broker.shared.logins import is_loopback

CHANGES = frozenset(("PUT", "POST", "DELETE", "PATCH"))
HEADERS: Final = {
    "Server": "shardmq",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # For all but the page, which sets its own policy.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache, no-store",
}


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = HEADERS["Server"]


def check_site(request: web.BaseRequest) -> None:
    """Raise 403 for a change that another site's page asks for."""
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


def check_transport(request: web.BaseRequest, may_be_plain: bool) -> None:
    """Raise 403 for a password that came over a network in plain text."""
    if not (may_be_plain or request.secure or is_loopback(request.remote or "")):
        raise ApiError(
            403,
            "tls_required",
            "passwords from other hosts are taken by HTTPS alone "
            "(users.http_without_tls allows them by HTTP)",
        )
