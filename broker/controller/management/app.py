"""Serves the API and metrics on sockets the supervisor opened: login, tag, handler, answer, alike for every route."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from random import randrange

from aiohttp import web

from broker.controller.authority import Authority
from broker.controller.config import ControllerConfig
from broker.controller.groups import Groups
from broker.controller.links import DoorLinks
from broker.controller.management import (
    about,
    attempts,
    bindings,
    callers,
    channels,
    connections,
    consumers,
    definitions,
    exchanges,
    garbage,
    guard,
    health,
    limits,
    loads,
    loglines,
    message_sizes,
    messages,
    object_metrics,
    openapi,
    overview,
    page,
    parameters,
    policies,
    processes,
    prometheus,
    queues,
    routes,
    settings,
    shards,
    stream_groups,
    streams,
    users,
    vhosts,
    virtual_queues,
)
from broker.controller.management.answers import json_response, streamed_list, streamed_text
from broker.controller.management.call import (
    BODY_BYTES_MAX,
    TAGS,
    ApiError,
    Call,
    Context,
    Route,
    not_authorised,
    user_of,
)
from broker.controller.management.gathered import Gatherer
from broker.controller.management.listing import Lazy, Listing, cut, shown
from broker.controller.management.overview import product_version
from broker.controller.memory import MemoryWatch
from broker.controller.presence import Presence
from broker.controller.settling import Settling
from broker.controller.shard_links import ShardLinks

BACKLOG = 128
# In a route's path; what aiohttp makes of it by itself does not match names with braces.
ANY_NAME = re.compile(r"\{(\w+)\}")
LOCAL_SOCKET = "shardctl.sock"  # in the runtime directory
SHUTDOWN_S_MAX = 2.0  # for calls under way when the controller stops

RESOURCES = (
    overview,
    about,
    attempts,
    vhosts,
    users,
    queues,
    routes,
    shards,
    stream_groups,
    streams,
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
    garbage,
    processes,
    loads,
    loglines,
    message_sizes,
    settings,
    definitions,
)

log = logging.getLogger(__name__)

Endpoint = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Servers:
    """What runs; `cleanup` ends it."""

    def __init__(self, runners: list[web.AppRunner], tasks: Iterable[asyncio.Task[None]]) -> None:
        self._runners = runners
        self._tasks = tuple(tasks)

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        for runner in self._runners:
            await runner.cleanup()


async def start(
    authority: Authority,
    presence: Presence,
    shard_links: ShardLinks,
    links: DoorLinks,
    config_now: Callable[[], ControllerConfig],
    tls: ssl.SSLContext | None = None,
    groups: Groups | None = None,
    memory: MemoryWatch | None = None,
    settling: Mapping[tuple[str, str], Settling] | None = None,
) -> Servers:
    config = config_now()
    stats = Gatherer(shard_links, links, hidden_queues=authority.catalog.hidden_queue_ids)
    groups = groups or Groups(randrange)
    found = {} if settling is None else settling  # another dict than theirs would stay empty
    context = Context(
        authority, presence, shard_links, links, config_now, stats, groups, memory or MemoryWatch(), settling=found
    )
    runners = []
    for app, fds in ((api_app(context), config.http_fds), (metrics_app(context), config.metrics_fds)):
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, **callers.SERVER)
        await runner.setup()
        runners.append(runner)
        for fd in fds:
            await web.SockSite(runner, _patient(fd), backlog=BACKLOG).start()
    for fd in config.https_fds:
        await web.SockSite(runners[0], _patient(fd), backlog=BACKLOG, ssl_context=tls).start()
    await _serve_here(runners[0], f"{config.runtime_dir}/{LOCAL_SOCKET}")
    # So that the first look at them has a rate, too.
    stats.noted += [partial(object_metrics.churn_rates, context), partial(processes.node, context)]
    tasks = (context.callers.watch(runners), stats.keep_sampling())
    return Servers(runners, map(asyncio.create_task, tasks))


def _patient(fd: int) -> socket.socket:
    """A listening socket; who is let in there and reads nothing for long is cut off by the kernel."""
    listening = socket.socket(fileno=fd)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, callers.UNREAD_MS_MAX)
    return listening


async def _serve_here(runner: web.AppRunner, path: str) -> None:
    """For shardctl on this host: who may open the socket (the broker's user and group) may do everything."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    await web.UnixSite(runner, path, backlog=BACKLOG).start()
    os.chmod(path, 0o660)


def api_app(context: Context) -> web.Application:
    app = metrics_app(context)
    page.add_routes(app)
    methods: dict[str, set[str]] = {}
    for resource in RESOURCES:
        for route in resource.ROUTES:
            path, answer = ANY_NAME.sub(r"{\1:[^/]+}", route.path), endpoint(context, route)
            for each in {path, path.rstrip("/") + "/"}:  # as in RabbitMQ a slash more is none
                app.router.add_route(route.method, each, answer)
                methods.setdefault(each, {"OPTIONS"}).add(route.method)
                if route.method == "GET":
                    app.router.add_route("HEAD", each, answer)
                    methods[each].add("HEAD")
    for path, known in methods.items():
        app.router.add_route("OPTIONS", path, options(known))
    about = openapi.document((route for resource in RESOURCES for route in resource.ROUTES), product_version())

    async def described(request: web.Request) -> web.Response:
        """Needs no login: it tells nothing of this broker."""
        return json_response(about)

    app.router.add_get("/api/openapi.json", described)
    app.on_shutdown.append(loglines.end_live)
    return app


def options(methods: Iterable[str]) -> Endpoint:
    allow = {"Allow": ", ".join(sorted(methods))}

    async def answer(request: web.Request) -> web.Response:
        """Tells nothing of what exists, and needs no login."""
        return web.Response(headers=allow)

    return answer


def metrics_app(context: Context) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        body = await prometheus.text(context)
        return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE})

    async def per_object(request: web.Request) -> web.StreamResponse:
        return await streamed_text(request, prometheus.per_object(context), prometheus.CONTENT_TYPE)

    async def detailed(request: web.Request) -> web.StreamResponse:
        families, vhosts = request.query.getall("family", []), request.query.getall("vhost", [])
        return await streamed_text(request, prometheus.detailed(context, families, vhosts), prometheus.CONTENT_TYPE)

    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[context.callers.middleware(), json_errors])
    app.on_response_prepare.append(guard.add_headers)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/metrics/per-object", per_object)
    app.router.add_get("/metrics/detailed", detailed)
    return app


def endpoint(context: Context, route: Route) -> Endpoint:
    async def answer(request: web.Request) -> web.StreamResponse:
        guard.check_site(request)
        if "Authorization" in request.headers:
            guard.check_way(request, context.config.http_without_tls)
        user = await user_of(context, request)
        if TAGS["management"].isdisjoint(user.tags):
            raise not_authorised("Not management user")
        call = Call(context, request, user)
        if not call.has(route.tag):
            tag = "monitor" if route.tag == "monitoring" else route.tag  # RabbitMQ's word
            raise not_authorised(f"Not {tag} user")
        if route.destroys:
            call.knows_only(route.query or (), once=True)
        found = await route.handler(call)
        if found is None:
            return web.Response(status=204)
        if isinstance(found, web.StreamResponse):
            return found
        if isinstance(found, Listing | Lazy):
            found = await shown(found, request.query)
            if not isinstance(found, dict):
                return await streamed_list(request, found)
        elif isinstance(found, dict) and request.method in ("GET", "HEAD"):
            found = cut(found, request.query)
        return json_response(found)

    return answer


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
        name = "Object Not Found" if error.status == 404 else error.reason
        return json_response({"error": name, "reason": error.reason}, error.status, headers)
    except Exception as error:
        if not (isinstance(error, ConnectionError) and _has_hung_up(request)):
            # The route's own path: a password may be in the one that was called.
            resource = request.match_info.route.resource
            log.exception("%s %s", request.method, resource.canonical if resource is not None else "")
        return json_response({"error": "internal_server_error", "reason": "see the broker's log"}, 500)


def _has_hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
