"""Serves the API and metrics on sockets the supervisor opened: login, tag, handler, answer, alike for every route."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from random import randrange

from aiohttp import web

from broker.controller.authority import Authority
from broker.controller.config import ControllerConfig
from broker.controller.groups import Groups
from broker.controller.links import DoorLinks
from broker.controller.management import (
    about,
    bindings,
    channels,
    connections,
    consumers,
    definitions,
    exchanges,
    health,
    limits,
    messages,
    overview,
    parameters,
    policies,
    processes,
    prometheus,
    queues,
    routes,
    shards,
    users,
    vhosts,
    virtual_queues,
)
from broker.controller.management.call import TAGS, ApiError, Call, Context, Route, not_authorised, to_json, user_of
from broker.controller.management.gathered import Gatherer
from broker.controller.management.listing import Listing, cut, shown
from broker.controller.presence import Presence
from broker.controller.settling import Settling
from broker.controller.shard_links import ShardLinks

BODY_BYTES_MAX = 8 << 20
BACKLOG = 128
WELCOME = "shardmq: the HTTP API starts at /api/overview, metrics are at /metrics; at the command line use shardctl.\n"
SHUTDOWN_S_MAX = 2.0  # for calls under way when the controller stops

RESOURCES = (
    overview,
    about,
    vhosts,
    users,
    queues,
    routes,
    shards,
    virtual_queues,
    exchanges,
    bindings,
    connections,
    channels,
    consumers,
    messages,
    policies,
    parameters,
    limits,
    health,
    processes,
    definitions,
)

log = logging.getLogger(__name__)

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Servers:
    """What runs; `cleanup` ends it."""

    def __init__(self, runners: list[web.AppRunner]) -> None:
        self._runners = runners

    async def cleanup(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


async def start(
    authority: Authority,
    presence: Presence,
    shard_links: ShardLinks,
    links: DoorLinks,
    config: ControllerConfig,
    tls: ssl.SSLContext | None = None,
    groups: Groups | None = None,
    settling: Mapping[tuple[str, str], Settling] | None = None,
) -> Servers:
    stats = Gatherer(shard_links, links, delay_queues=authority.catalog.delay_queue_ids)
    found = {} if settling is None else settling  # another dict than theirs would stay empty
    all_groups = groups or Groups(randrange)
    context = Context(authority, presence, shard_links, links, config, stats, all_groups, settling=found)
    runners = []
    for app, fds in ((api_app(context), config.http_fds), (metrics_app(context), config.metrics_fds)):
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX)
        await runner.setup()
        runners.append(runner)
        for fd in fds:
            await web.SockSite(runner, socket.socket(fileno=fd), backlog=BACKLOG).start()
    for fd in config.https_fds:
        await web.SockSite(runners[0], socket.socket(fileno=fd), backlog=BACKLOG, ssl_context=tls).start()
    return Servers(runners)


def api_app(context: Context) -> web.Application:
    app = metrics_app(context)
    app.router.add_get("/", welcome)
    for resource in RESOURCES:
        for route in resource.ROUTES:
            app.router.add_route(route.method, route.path, endpoint(context, route))
    return app


async def welcome(request: web.Request) -> web.Response:
    """For whoever tries the port in a browser; it needs no login and tells nothing of this broker."""
    return web.Response(text=WELCOME)


def metrics_app(context: Context) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        per_object = request.path.endswith("/per-object")
        body = await prometheus.text(context, per_object)
        return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE})

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[json_errors])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/per-object", metrics)
    return app


def endpoint(context: Context, route: Route) -> Endpoint:
    async def answer(request: web.Request) -> web.StreamResponse:
        user = await user_of(context, request)
        if TAGS["management"].isdisjoint(user.tags):
            raise not_authorised("Not management user")
        call = Call(context, request, user)
        if not call.has(route.tag):
            raise not_authorised(f"Not {route.tag} user")
        found = await route.handler(call)
        if found is None:
            return web.Response(status=204)
        if isinstance(found, web.StreamResponse):
            return found
        if isinstance(found, Listing):
            found = await shown(found, request.query)
        elif isinstance(found, dict) and request.method == "GET":
            found = cut(found, request.query)
        return json_response(found)

    return answer


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = to_json(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


@web.middleware
async def json_errors(request: web.Request, handler: Endpoint) -> web.StreamResponse:
    """Whatever goes wrong is answered as JSON, and only what we did not foresee is logged."""
    try:
        return await handler(request)
    except health.Unhealthy as error:
        return json_response({"status": "failed", "reason": error.reason, **error.more}, error.status)
    except ApiError as error:
        headers = {"WWW-Authenticate": 'Basic realm="shardmq Management"'} if error.status == 401 else None
        return json_response({"error": error.error, "reason": error.reason}, error.status, headers)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return json_response({"error": error.reason, "reason": error.reason}, error.status, headers)
    except Exception:
        # The route's own path: a password may be in the one that was called.
        resource = request.match_info.route.resource
        log.exception("%s %s", request.method, resource.canonical if resource is not None else "")
        return json_response({"error": "internal_server_error", "reason": "see the broker's log"}, 500)
