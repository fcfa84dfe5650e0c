"""/api/definitions: what exists, out and in, as RabbitMQ's JSON; of all vhosts or of one."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

from aiohttp import BodyPartReader, web

from broker.catalog import PREDECLARED, Catalog, Vhost
from broker.changes import ParameterPut
from broker.checks import Refusal, is_hidden_queue
from broker.controller import imported
from broker.controller.access import hash_new_password
from broker.controller.management import bindings, exchanges, parameters, policies, users
from broker.controller.management.call import (
    ApiError,
    Call,
    Route,
    bad_request,
    refusal_status,
    to_json,
)
from broker.controller.management.overview import RABBITMQ_VERSION, product_version
from broker.controller.management.vhosts import about as about_vhost
from broker.controller.policies import GLOBAL, USER_LIMITS
from broker.policies import POLICY

AT_ONCE_MAX = 1000  # requests under way during an import
NAME_IN_HEADER = re.compile(r"[^\w.-]")

log = logging.getLogger(__name__)


# -- out --------------------------------------------------------------------------------------------------


def definitions(catalog: Catalog) -> dict[str, Any]:
    vhosts = list(catalog.vhosts.values())
    puts = list(catalog.parameters.values())
    return {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "shardmq",
        "product_version": product_version(),
        "users": [users.row(user, catalog) for user in catalog.users.values()],
        "vhosts": [_vhost_row(vhost) for vhost in vhosts],
        "permissions": [users.permission_row(put) for put in catalog.permissions.values()],
        "topic_permissions": [users.topic_permission_row(put) for put in catalog.topic_permissions],
        "global_parameters": [parameters.global_row(put) for put in puts if (put.vhost, put.component) == ("", GLOBAL)],
        **_inside(vhosts, puts, lambda row: row),
    }


def definitions_of(vhost: Vhost, catalog: Catalog) -> dict[str, Any]:
    """Of one vhost, to be imported into any other: nothing in it names its vhost."""
    puts = [put for put in catalog.parameters.values() if put.vhost == vhost.name]
    return {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "shardmq",
        "product_version": product_version(),
        "metadata": about_vhost(vhost.put),
        "description": f"Definitions of virtual host '{vhost.name}'",
        **_inside([vhost], puts, lambda row: _without(row, "vhost")),
    }


def _inside(
    vhosts: list[Vhost], puts: list[ParameterPut], shown: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """What is in vhosts."""
    other = [put for put in puts if put.component not in (POLICY, GLOBAL, USER_LIMITS)]
    return {
        "parameters": [shown(parameters.row(put)) for put in other],
        "policies": [shown(policies.row(put)) for put in puts if put.component == POLICY],
        "queues": [shown(row) for vhost in vhosts for row in _queues(vhost)],
        "exchanges": [shown(row) for vhost in vhosts for row in _exchanges(vhost)],
        "bindings": [shown(row) for vhost in vhosts for row in _bindings(vhost)],
    }


def _vhost_row(vhost: Vhost) -> dict[str, Any]:
    about = about_vhost(vhost.put)
    return {"name": vhost.name, **about, "metadata": about}


def _queues(vhost: Vhost) -> Iterable[dict[str, Any]]:
    """All but exclusive ones, which are their connection's, and those where an exchange keeps messages."""
    for queue in vhost.queues.values():
        if not queue.owner and not is_hidden_queue(queue.name):
            yield {
                "name": queue.name,
                "vhost": queue.vhost,
                "durable": queue.durable,
                "auto_delete": queue.auto_delete,
                "arguments": queue.arguments,
            }


def _exchanges(vhost: Vhost) -> Iterable[dict[str, Any]]:
    for exchange in vhost.exchanges.values():
        if exchange.name not in PREDECLARED:
            yield _without(exchanges.row(exchange, vhost), "policy", "shard_queues", "user_who_performed_action")


def _bindings(vhost: Vhost) -> Iterable[dict[str, Any]]:
    """What an import could not make again is not exported."""
    for binding in vhost.bindings():
        queue = vhost.queues.get(binding.destination) if binding.kind == "queue" else None
        if queue is None or not queue.owner:
            yield _without(bindings.row(binding), "properties_key")


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


async def get(call: Call) -> Any:
    return _file(call, definitions(call.catalog))


async def get_vhost(call: Call) -> Any:
    return _file(call, definitions_of(call.vhost(), call.catalog))


def _file(call: Call, found: dict[str, Any]) -> Any:
    """With ?download=NAME, as a file for a browser."""
    name = NAME_IN_HEADER.sub("_", call.request.query.get("download", ""))
    if not name:
        return found
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return web.Response(body=to_json(found), content_type="application/json", headers=headers)


# -- in ---------------------------------------------------------------------------------------------------


async def post(call: Call) -> None:
    await _import(call, None)


async def post_vhost(call: Call) -> None:
    await _import(call, call.vhost().name)


async def _import(call: Call, vhost: str | None) -> None:
    data = await _document(call)
    loop = asyncio.get_running_loop()
    try:
        document = imported.read(data)
        # In a thread: passwords in it are hashed.
        stages = await loop.run_in_executor(None, imported.stages, document, vhost, hash_new_password)
    except Refusal as refusal:
        raise bad_request(refusal.text) from None
    for stage in stages:
        for start in range(0, len(stage), AT_ONCE_MAX):
            asks = [ask for ask in stage[start : start + AT_ONCE_MAX] if imported.needed(ask, call.catalog)]
            answers = await asyncio.gather(*(call.context.authority.ask(ask) for ask in asks))
            for ask, answer in zip(asks, answers, strict=True):
                if answer.code:
                    raise ApiError(*refusal_status(answer.code), imported.refused(ask, answer.text))
    log.info("definitions imported by user '%s'%s", call.user.name, "" if vhost is None else f" into '{vhost}'")


async def _document(call: Call) -> bytes:
    """The body, or of a form the part that is a file."""
    if not call.request.content_type.startswith("multipart/"):
        return await call.request.read()
    async for part in await call.request.multipart():
        if isinstance(part, BodyPartReader) and (part.filename or part.name == "file"):
            return bytes(await part.read(decode=True))
    raise bad_request("the form has no file")


ROUTES = [
    Route("GET", "/api/definitions", get, "administrator"),
    Route("POST", "/api/definitions", post, "administrator"),
    Route("POST", "/api/definitions/upload", post, "administrator"),
    Route("GET", "/api/definitions/{vhost}", get_vhost, "administrator"),
    Route("POST", "/api/definitions/{vhost}", post_vhost, "administrator"),
    Route("POST", "/api/definitions/{vhost}/upload", post_vhost, "administrator"),
]
