"""Serves the API, the page and the metrics on the sockets that the supervisor has opened.

Each call of the API is checked for its site and login and for the tag of its route, handled, and
answered in JSON.
"""

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

from aiohttp import hdrs, web

from shardmq.broker.controller.management import api_page, csrf, http_connections, page
from shardmq.broker.controller.management.api_error import not_authorised
from shardmq.broker.controller.management.call import (
    BODY_BYTES_MAX,
    Call,
    Route,
    called_node,
    flag,
    to_json,
)
from shardmq.broker.controller.management.context import Context
from shardmq.broker.controller.management.login import caller_of, check_host
from shardmq.broker.controller.management.metrics import prometheus
from shardmq.broker.controller.management.metrics.detailed_query import selection
from shardmq.broker.controller.management.metrics.object_metrics import FAMILIES
from shardmq.broker.controller.management.metrics.part import Part
from shardmq.broker.controller.management.metrics.sampling import Sampler
from shardmq.broker.controller.management.resources import (
    bindings,
    channels,
    cluster,
    connections,
    consumers,
    definitions,
    exchanges,
    explain_route,
    federation,
    garbage_collection,
    health,
    limits,
    login_attempts,
    logs,
    message_sizes,
    messages,
    node_drains,
    overview,
    parameters,
    policies,
    processes,
    queue_copies,
    queues,
    resharding,
    settings,
    shard_load,
    shovels,
    snapshots,
    stream_clients,
    stream_groups,
    streams,
    super_streams,
    unclean_elections,
    users,
    vhosts,
    virtual_queues,
)
from shardmq.broker.controller.management.responses import openapi
from shardmq.broker.controller.management.responses.json_body import (
    JSON,
    Document,
    json_list,
    json_object,
    json_response,
)
from shardmq.broker.controller.management.responses.json_errors import json_errors
from shardmq.broker.controller.management.responses.listing import LazyListing, Listing, cut, shown
from shardmq.broker.controller.management.responses.long_responses import ResponseBody, in_one_part
from shardmq.broker.controller.node_facts import product_version
from shardmq.broker.controller.streams.scan_responses import add_rows_route
from shardmq.cluster.streams import LOCAL, LOCAL_SOCKET, METRICS

BACKLOG = 128
# A parameter of the metrics: those of all nodes of a cluster, and not of the one that is called.
OF_CLUSTER = "cluster"
# A part in the path of a Route. By aiohttp's own pattern it would not match names with braces.
ANY_NAME = re.compile(r"\{(\w+)\}")
SHUTDOWN_S_MAX = 2.0  # for calls that are under way when the controller stops

# In the order of their routes: of two paths that fit a call the first one answers.
RESOURCES = (
    overview, cluster, login_attempts, vhosts, users, queues, queue_copies, explain_route,
    resharding, stream_groups, streams, stream_clients, super_streams, virtual_queues, exchanges,
    bindings,
    connections, channels, consumers, messages, policies, parameters, limits, health,
    garbage_collection, node_drains, processes, shard_load, logs, message_sizes, settings,
    definitions, shovels, federation, unclean_elections, snapshots,
)  # fmt: skip

log = logging.getLogger(__name__)

Answer = web.StreamResponse
Endpoint = Callable[[web.Request], Awaitable[Answer]]


class Servers:
    """The servers and tasks that `start` has started."""

    def __init__(
        self, context: Context, runners: list[web.AppRunner], tasks: Iterable[asyncio.Task[None]]
    ) -> None:
        self._context = context
        self._runners = runners
        self._tasks = tuple(tasks)

    def connection(self, service: str) -> asyncio.Protocol:
        """Return the protocol of a connection to `service` that another node relays."""
        api, metrics = self._runners
        server = (metrics if service == METRICS else api).server
        assert server is not None, "the runners are set up"
        if service == LOCAL:
            return server()
        context = self._context
        return http_connections.AdmittingProtocol(
            context.http_connections,
            server,
            lambda: context.config.http,
            context.long_responses.cut_off,
        )

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()
        for runner in self._runners:
            await runner.cleanup()


async def start(context: Context, tls: ssl.SSLContext | None = None) -> Servers:
    """Serve on the sockets of the settings and on a Unix socket for shardctl."""
    config = context.config
    runners = []
    for app, fds in (
        (api_app(context), config.http_fds),
        (metrics_app(context), config.metrics_fds),
    ):
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, **http_connections.SERVER
        )
        await runner.setup()
        runners.append(runner)
        for fd in fds:
            await limited_site(context, runner, socket.socket(fileno=fd)).start()
    for fd in config.https_fds:
        await limited_site(context, runners[0], socket.socket(fileno=fd), tls).start()
    await serve_shardctl(runners[0], f"{config.runtime_dir}/{LOCAL_SOCKET}")
    context.stats.noted.append(Sampler(context).take)
    tasks = (_watch(context, runners), context.stats.keep_sampling())
    return Servers(context, runners, map(asyncio.create_task, tasks))


def limited_site(
    context: Context,
    runner: web.AppRunner,
    listening: socket.socket,
    tls: ssl.SSLContext | None = None,
) -> web.BaseSite:
    """Return a site that admits as many connections by this socket as the settings allow."""
    return http_connections.LimitedSite(
        runner,
        listening,
        context.http_connections,
        lambda: context.config.http,
        context.long_responses.cut_off,
        BACKLOG,
        tls,
    )


async def serve_shardctl(runner: web.AppRunner, path: str) -> None:
    """Serve a Unix socket: the broker's user and group may do everything by it, without a login."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    await web.UnixSite(runner, path, backlog=BACKLOG).start()
    os.chmod(path, 0o660)


async def _watch(context: Context, runners: list[web.AppRunner]) -> None:
    while True:
        await asyncio.sleep(http_connections.CHECK_EACH_S)
        servers = [runner.server for runner in runners if runner.server is not None]
        context.http_connections.close_superfluous(
            (one for server in servers for one in server.connections), context.config.http
        )
        context.long_responses.give_memory_back()


def api_app(context: Context) -> web.Application:
    app = metrics_app(context)
    page.add_routes(app)
    methods: dict[str, set[str]] = {}
    for resource in RESOURCES:
        for route in resource.ROUTES:
            path, answer = ANY_NAME.sub(r"{\1:[^/]+}", route.path), endpoint(context, route)
            for each in {path, path.rstrip("/") + "/"}:  # as in RabbitMQ one more slash is ignored
                app.router.add_route(route.method, each, answer)
                methods.setdefault(each, {"OPTIONS"}).add(route.method)
                if route.method == "GET":
                    app.router.add_route("HEAD", each, answer)
                    methods[each].add("HEAD")
    for path, known in methods.items():
        app.router.add_route("OPTIONS", path, _options(known))
    description = openapi.document(
        (route for resource in RESOURCES for route in resource.ROUTES), product_version()
    )

    # Without a login: they have no data of this broker. So they have the bounds of long responses.
    described, index = to_json(description), api_page.file_of(description)
    index_headers = {**page.HEADERS, hdrs.ETAG: f'"{index.etag}"'}

    async def send(
        request: web.Request, content_type: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        async def made() -> ResponseBody:
            return ResponseBody(content_type, in_one_part(body), headers)

        return await context.long_responses.answer(request, request.path, made, context.config.http)

    async def send_description(request: web.Request) -> Answer:
        return await send(request, JSON, described, {})

    async def send_index(request: web.Request) -> Answer:
        if page.is_held(index, request):
            return page.response_of(index, request)
        return await send(request, f"{index.type}; charset=utf-8", index.body, index_headers)

    if (elsewhere := context.streams.elsewhere) is not None:
        add_rows_route(app, elsewhere.tickets, context.to_reader, elsewhere)
    app.router.add_get("/api/openapi.json", send_description)
    app.router.add_get(api_page.INDEX, send_index)
    api_page.add_redirects(app)
    app.on_shutdown.append(logs.end_live)
    return app


def _options(methods: Iterable[str]) -> Endpoint:
    allow = {"Allow": ", ".join(sorted(methods))}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(headers=allow)  # without a login: it has no data of this broker

    return answer


def metrics_app(context: Context) -> web.Application:
    async def metrics(request: web.Request) -> Answer:
        others = (OF_CLUSTER,) if context.cluster.is_cluster else ()
        is_whole = not others or flag(request.query, OF_CLUSTER)
        part = Part(context, called_node(context, request), is_whole)
        selected = None
        if request.path == "/metrics":
            text: Callable[[], AsyncGenerator[bytes]] = partial(prometheus.text, part)
        elif request.path == "/metrics/per-object":
            text = partial(prometheus.per_object, part)
        else:
            selected = selection(request.query, FAMILIES, context.catalog.vhosts, others)
            text = partial(prometheus.detailed, part, selected)
        # Calls with the same key share a response: all that it depends on but the data.
        key: Hashable = (request.path, selected, part.called, is_whole)

        async def made() -> ResponseBody:
            return ResponseBody(prometheus.CONTENT_TYPE, text())

        return await context.long_responses.answer(request, key, made, context.config.http)

    @web.middleware
    async def host_checked(request: web.Request, handler: Endpoint) -> web.StreamResponse:
        check_host(context, request)
        return await handler(request)

    @web.middleware
    async def caught_up(request: web.Request, handler: Endpoint) -> web.StreamResponse:
        """Show nothing that is older than what clients of AMQP were told."""
        await context.authority.caught_up()
        return await handler(request)

    middlewares = [context.http_connections.middleware(), json_errors, host_checked, caught_up]
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=middlewares)
    app.on_response_prepare.append(csrf.add_headers)
    for path in ("/metrics", "/metrics/per-object", "/metrics/detailed"):
        app.router.add_get(path, metrics)
    return app


def endpoint(context: Context, route: Route) -> Endpoint:
    async def answer(request: web.Request) -> web.StreamResponse:
        user = await caller_of(context, request)
        call = Call(context, request, user)
        if not call.has(route.tag):
            tag = "monitor" if route.tag == "monitoring" else route.tag  # as RabbitMQ says
            raise not_authorised(f"Not {tag} user")
        if route.destroys:
            call.knows_only(route.query or (), once=True)
        if route.is_long:
            key = (call.is_local, user.name, *user.tags, request.rel_url.raw_path_qs)
            made = partial(_parts, route, call)
            return await context.long_responses.answer(request, key, made, context.config.http)
        found = await route.handler(call)
        assert not isinstance(found, Listing | LazyListing | Document), f"{route.path} is long"
        if found is None:
            response: web.StreamResponse = web.Response(status=204)
        elif isinstance(found, web.StreamResponse):
            response = found
        elif isinstance(found, dict) and request.method in ("GET", "HEAD"):
            response = json_response(cut(found, request.query))
        else:
            response = json_response(found)
        for warning in call.warnings:
            response.headers.add("Warning", warning_value(warning))
        return response

    return answer


def warning_value(text: str) -> str:
    """Return a value of the header `Warning` (RFC 7234, 5.5), its text as JSON, which is ASCII."""
    return f"299 shardmq {json.dumps(text)}"


async def _parts(route: Route, call: Call) -> ResponseBody:
    """Return the body of a long response, to be made slice by slice."""
    found, query = await route.handler(call), call.request.query
    if isinstance(found, Document):
        return ResponseBody(JSON, json_object(found.parts), found.headers)
    found = (
        await shown(found, query) if isinstance(found, Listing | LazyListing) else cut(found, query)
    )
    body = json_object(found) if isinstance(found, dict) else json_list(found)
    return ResponseBody(JSON, body)
