"""Serves the API and metrics on sockets the supervisor opened: login, tag, handler, answer, alike for every route."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping
from functools import partial
from random import randrange
from typing import Any

from aiohttp import web

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.config import ControllerConfig, HttpLimits
from shardmq.broker.controller.groups.groups import Groups
from shardmq.broker.controller.management import callers, guard, page
from shardmq.broker.controller.management.answers import openapi
from shardmq.broker.controller.management.answers.answers import (
    JSON,
    Document,
    at_once,
    json_list,
    json_object,
    json_response,
)
from shardmq.broker.controller.management.answers.listing import Lazy, Listing, cut, shown
from shardmq.broker.controller.management.answers.long_answers import Parts
from shardmq.broker.controller.management.call import (
    BODY_BYTES_MAX,
    ApiError,
    Call,
    Context,
    Route,
    check_name,
    not_authorised,
    to_json,
    user_of,
)
from shardmq.broker.controller.management.metrics import object_metrics, prometheus
from shardmq.broker.controller.management.metrics.gathered import Gatherer
from shardmq.broker.controller.management.metrics.object_metrics import FAMILIES
from shardmq.broker.controller.management.resources import (
    about,
    attempts,
    bindings,
    channels,
    connections,
    consumers,
    definitions,
    exchanges,
    garbage,
    health,
    limits,
    loads,
    loglines,
    message_sizes,
    messages,
    overview,
    parameters,
    policies,
    processes,
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
from shardmq.broker.controller.management.resources.overview import product_version
from shardmq.broker.controller.memory import MemoryWatch
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.resharding.settling import Settling
from shardmq.broker.controller.streams.ended_streams import EndedStreams
from shardmq.broker.shared import rights

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

Answer = web.StreamResponse
Endpoint = Callable[[web.Request], Awaitable[Answer]]


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
    ended: EndedStreams | None = None,
) -> Servers:
    config = config_now()
    stats = Gatherer(shard_links, links, hidden_queues=authority.catalog.hidden_queue_ids)
    groups = groups or Groups(randrange)
    found = {} if settling is None else settling  # another dict than theirs would stay empty
    context = Context(
        authority,
        presence,
        shard_links,
        links,
        config_now,
        stats,
        groups,
        memory or MemoryWatch(),
        settling=found,
        ended=ended,
    )
    runners = []
    for app, fds in (
        (api_app(context), config.http_fds),
        (metrics_app(context), config.metrics_fds),
    ):
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, **callers.SERVER
        )
        await runner.setup()
        runners.append(runner)
        for fd in fds:
            await guarded_site(context, runner, socket.socket(fileno=fd)).start()
    for fd in config.https_fds:
        await guarded_site(context, runners[0], socket.socket(fileno=fd), tls).start()
    await _serve_here(runners[0], f"{config.runtime_dir}/{LOCAL_SOCKET}")
    # So that the first look at them has a rate, too.
    stats.noted += [partial(object_metrics.churn_rates, context), partial(processes.node, context)]
    tasks = (_watch(context, runners), stats.keep_sampling())
    return Servers(runners, map(asyncio.create_task, tasks))


def guarded_site(
    context: Context,
    runner: web.AppRunner,
    listening: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> web.BaseSite:
    """Return what lets in by this socket as many connections as the settings say."""
    server = runner.server
    assert server is not None, "the runner is set up"

    def limits_now() -> HttpLimits:
        return context.config.http

    def entrance() -> callers.Entrance:
        return callers.Entrance(context.callers, server, limits_now, context.long_answers.cut_off)

    handshakes = context.callers.handshakes
    return callers.GuardedSite(runner, listening, entrance, BACKLOG, limits_now, handshakes, tls)


async def _watch(context: Context, runners: list[web.AppRunner]) -> None:
    while True:
        await asyncio.sleep(callers.LOOK_EACH_S)
        servers = [runner.server for runner in runners if runner.server is not None]
        context.callers.look(
            (one for server in servers for one in server.connections), context.config.http
        )
        context.long_answers.look()


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
    about = openapi.document(
        (route for resource in RESOURCES for route in resource.ROUTES), product_version()
    )

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
    async def answer(
        request: web.Request, key: Hashable, text: Callable[[], AsyncGenerator[bytes]]
    ) -> Answer:
        async def made() -> Parts:
            return Parts(prometheus.CONTENT_TYPE, text())

        return await context.long_answers.answer(request, key, made, context.config.http)

    async def metrics(request: web.Request) -> Answer:
        return await answer(request, request.path, partial(prometheus.text, context))

    async def per_object(request: web.Request) -> Answer:
        return await answer(request, request.path, partial(prometheus.per_object, context))

    async def detailed(request: web.Request) -> Answer:
        # Names that nobody knows make no other answer.
        families = tuple(
            dict.fromkeys(f for f in request.query.getall("family", []) if f in FAMILIES)
        )
        given = request.query.getall("vhost", [])
        vhosts = frozenset(given).intersection(context.catalog.vhosts) if given else None
        return await answer(
            request,
            (request.path, families, vhosts),
            partial(prometheus.detailed, context, families, vhosts),
        )

    @web.middleware
    async def under_its_name(request: web.Request, handler: Endpoint) -> web.StreamResponse:
        check_name(context, request)
        return await handler(request)

    middlewares = [context.callers.middleware(), json_errors, under_its_name]
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
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
        if not rights.has_tag(user.tags, rights.MANAGEMENT):
            raise not_authorised("Not management user")
        call = Call(context, request, user)
        if not call.has(route.tag):
            tag = "monitor" if route.tag == "monitoring" else route.tag  # RabbitMQ's word
            raise not_authorised(f"Not {tag} user")
        if route.destroys:
            call.knows_only(route.query or (), once=True)
        if route.is_long:
            # All that the answer depends on but what there is, which is looked at when it is made.
            key = (call.is_local, user.name, *user.tags, request.rel_url.raw_path_qs)
            made = partial(_parts, route, call)
            return await context.long_answers.answer(request, key, made, context.config.http)
        response = _response(route, request, await route.handler(call))
        for warning in call.warnings:
            response.headers.add("Warning", warning_value(warning))
        return response

    return answer


def _response(route: Route, request: web.Request, found: Any) -> web.StreamResponse:
    if found is None:
        return web.Response(status=204)
    if isinstance(found, web.StreamResponse):
        return found
    assert not isinstance(found, Listing | Lazy | Document), f"{route.path} is long"
    if isinstance(found, dict) and request.method in ("GET", "HEAD"):
        found = cut(found, request.query)
    return json_response(found)


def warning_value(text: str) -> str:
    """Return a value of the header `Warning` (RFC 7234, 5.5). The text in quotes is a string of JSON, all ASCII."""
    return f"299 shardmq {json.dumps(text)}"


async def _parts(route: Route, call: Call) -> Parts:
    """Return what a call of a route that `is_long` is answered, to be made slice by slice."""
    found, query = await route.handler(call), call.request.query
    if isinstance(found, Document):
        return Parts(JSON, json_object(found.parts), found.headers)
    found = await shown(found, query) if isinstance(found, Listing | Lazy) else cut(found, query)
    return Parts(JSON, at_once(to_json(found)) if isinstance(found, dict) else json_list(found))


@web.middleware
async def json_errors(request: web.Request, handler: Endpoint) -> web.StreamResponse:
    """Whatever goes wrong is answered as JSON, and only what we did not foresee is logged."""
    try:
        return await handler(request)
    except health.Unhealthy as error:
        return json_response(
            {"status": "failed", "reason": error.reason, **error.more}, error.status
        )
    except ApiError as error:
        headers = (
            {"WWW-Authenticate": 'Basic realm="shardmq Management"'}
            if error.status == 401
            else error.headers
        )
        return json_response({"error": error.error, "reason": error.reason}, error.status, headers)
    except web.HTTPException as error:
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        name = "Object Not Found" if error.status == 404 else error.reason
        return json_response({"error": name, "reason": error.reason}, error.status, headers)
    except Exception as error:
        if not (isinstance(error, ConnectionError) and _has_hung_up(request)):
            # The route's own path: a password may be in the one that was called.
            resource = request.match_info.route.resource
            log.exception(
                "%s %s", request.method, resource.canonical if resource is not None else ""
            )
        return json_response(
            {"error": "internal_server_error", "reason": "see the broker's log"}, 500
        )


def _has_hung_up(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()
