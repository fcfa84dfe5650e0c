"""/api/definitions: what exists, out and in, as RabbitMQ's JSON; of all vhosts or of one.

Both may be long: they are written and done some at a time; /api/imports tells how far the last ones are.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from aiohttp import BodyPartReader

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.management.answers.answers import Document
from shardmq.broker.controller.management.answers.listing import columns_of
from shardmq.broker.controller.management.answers.turns import Turns
from shardmq.broker.controller.management.call import (
    ApiError,
    Call,
    Route,
    bad_request,
    refusal_status,
    too_large,
)
from shardmq.broker.controller.management.resources import (
    bindings,
    exchanges,
    parameters,
    policies,
    users,
)
from shardmq.broker.controller.management.resources.identity import global_parameters
from shardmq.broker.controller.management.resources.imports import Import
from shardmq.broker.controller.management.resources.overview import product_version
from shardmq.broker.controller.management.resources.vhosts import about as about_vhost
from shardmq.broker.controller.policies import USER_LIMITS
from shardmq.broker.controller.stored import imported
from shardmq.broker.model.catalog import PREDECLARED, Catalog, Vhost
from shardmq.broker.model.changes import GLOBAL, BindingPut, ParameterPut, QueuePut
from shardmq.broker.model.checks import Refusal, is_hidden_queue
from shardmq.broker.model.policies import POLICY
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION

LOOKED_AT_ONCE = 1_000  # things that exist, before others have a turn
AT_ONCE_MAX = 500  # requests under way during an import; declares of clients come between
DOCUMENT_BYTES_MAX = 256 << 20
CHUNK_BYTES = 64 << 10
NAME_IN_HEADER = re.compile(r"[^\w.-]")

log = logging.getLogger(__name__)


# -- out --------------------------------------------------------------------------------------------------


def definitions(catalog: Catalog, data_dir: str) -> dict[str, Any]:
    """What may be long comes as an iterator, which stands on its own."""
    vhosts = list(catalog.vhosts.values())
    puts = list(catalog.parameters.values())
    return {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "shardmq",
        "product_version": product_version(),
        "users": [users.row(user, catalog) for user in catalog.users.values()],
        "vhosts": [_vhost_row(vhost) for vhost in vhosts],
        "permissions": [users.permission_row(put) for put in catalog.permissions.puts.values()],
        "topic_permissions": [
            users.topic_permission_row(put) for put in catalog.permissions.topic_puts
        ],
        "global_parameters": [
            parameters.global_row(put) for put in global_parameters(catalog, data_dir)
        ],
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
    queues_of = [(vhost, list(vhost.queues.values())) for vhost in vhosts]
    bindings_of = [(vhost, list(vhost.bindings())) for vhost in vhosts]
    other = [put for put in puts if put.component not in (POLICY, GLOBAL, USER_LIMITS)]
    return {
        "parameters": [shown(parameters.row(put)) for put in other],
        "policies": [shown(policies.row(put)) for put in puts if put.component == POLICY],
        "queues": (shown(row) for vhost, queues in queues_of for row in _queues(queues)),
        "exchanges": [shown(row) for vhost in vhosts for row in _exchanges(vhost)],
        "bindings": (shown(row) for vhost, bound in bindings_of for row in _bindings(vhost, bound)),
    }


def _vhost_row(vhost: Vhost) -> dict[str, Any]:
    about = about_vhost(vhost.put)
    return {"name": vhost.name, **about, "metadata": about}


def _queues(queues: Iterable[QueuePut]) -> Iterable[dict[str, Any]]:
    """All but exclusive ones, which are their connection's, and those of an exchange, which come with it."""
    for queue in queues:
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
            yield _without(
                exchanges.row(exchange, vhost),
                "policy",
                "shard_queues",
                "user_who_performed_action",
            )


def _bindings(vhost: Vhost, bound: Iterable[BindingPut]) -> Iterable[dict[str, Any]]:
    """What an import could not make again is not exported."""
    for binding in bound:
        queue = vhost.queues.get(binding.destination) if binding.kind == "queue" else None
        if queue is None or not queue.owner:
            yield _without(bindings.row(binding), "properties_key")


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


async def get(call: Call) -> Document:
    return _file(call, definitions(call.catalog, call.context.config.data_dir))


async def get_vhost(call: Call) -> Document:
    return _file(call, definitions_of(call.vhost(), call.catalog))


def _file(call: Call, found: dict[str, Any]) -> Document:
    """With ?download=NAME, as a file for a browser."""
    name = NAME_IN_HEADER.sub("_", call.request.query.get("download", ""))
    headers = {"Content-Disposition": f'attachment; filename="{name}"'} if name else {}
    columns = columns_of(call.request.query)
    return Document(
        {key: part for key, part in found.items() if not columns or key in columns}, headers
    )


# -- in ---------------------------------------------------------------------------------------------------


async def post(call: Call) -> Any:
    return await _import(call, None)


async def post_vhost(call: Call) -> Any:
    return await _import(call, call.vhost().name)


async def _import(call: Call, vhost: str | None) -> dict[str, list[str]] | None:
    """Take the document in. Returns what of it has no effect here, or None if all has."""
    progress = call.context.imports.begin(call.user.name, vhost, time.time())
    try:
        progress.warnings = await _do_import(call, vhost, await _document(call), progress)
    except BaseException as error:
        progress.state = f"failed: {error}" if isinstance(error, ApiError) else "failed"
        raise
    finally:
        progress.ended_at = time.time()
    progress.state = "done"
    log.info(
        "definitions imported by user '%s'%s",
        call.user.name,
        "" if vhost is None else f" into '{vhost}'",
    )
    for warning in progress.warnings:
        log.warning("definitions imported by user '%s': %s", call.user.name, warning)
    return {"warnings": progress.warnings} if progress.warnings else None


async def _do_import(call: Call, vhost: str | None, data: bytes, progress: Import) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        # In a thread: it takes long, and passwords in it are hashed.
        stages = await loop.run_in_executor(
            None, _stages, data, vhost, call.context.authority.hashing_algorithm
        )
    except Refusal as refusal:
        raise bad_request(refusal.text) from None
    progress.state, progress.total = "running", sum(map(len, stages))
    for stage in stages:
        for start in range(0, len(stage), AT_ONCE_MAX):
            part = stage[start : start + AT_ONCE_MAX]
            asks = [ask for ask in part if imported.needed(ask, call.catalog)]
            answers = await asyncio.gather(*(call.context.authority.ask(ask) for ask in asks))
            for ask, answer in zip(asks, answers, strict=True):
                if answer.code:
                    raise ApiError(*refusal_status(answer.code), imported.refused(ask, answer.text))
            progress.done += len(part)
    return without_effect.sentences(ask for stage in stages for ask in stage)


def _stages(data: bytes, vhost: str | None, algorithm: str) -> list[list[imported.Ask]]:
    return imported.stages(
        imported.read(data), vhost, partial(hash_new_password, algorithm=algorithm)
    )


async def _document(call: Call) -> bytes:
    """The body, or of a form the part that is a file."""
    if not call.request.content_type.startswith("multipart/"):
        return await call.raw_body(DOCUMENT_BYTES_MAX)
    call.must_be_plain()
    async for part in await call.request.multipart():
        if isinstance(part, BodyPartReader) and (part.filename or part.name == "file"):
            return await _file_of(part)
    raise bad_request("the form has no file")


async def _file_of(part: BodyPartReader) -> bytes:
    data = bytearray()
    while chunk := await part.read_chunk(CHUNK_BYTES):
        data += part.decode(chunk)
        if len(data) > DOCUMENT_BYTES_MAX:
            raise too_large(DOCUMENT_BYTES_MAX)
    return bytes(data)


async def imports(call: Call) -> list[dict[str, Any]]:
    return call.context.imports.rows()


async def kept_without_effect(call: Call) -> dict[str, list[str]]:
    """Say of all that exists what has no effect here, whatever way it came."""
    summary, turns = without_effect.Summary(), Turns()
    for count, thing in enumerate(without_effect.things(call.catalog), 1):
        summary.add(thing)
        if count % LOOKED_AT_ONCE == 0:
            await turns.others_first()
    return {"warnings": summary.sentences()}


ROUTES = [
    Route("GET", "/api/without-effect", kept_without_effect, "administrator", is_long=True),
    Route("GET", "/api/imports", imports, "administrator"),
    Route("GET", "/api/all-configuration", get, "administrator", is_long=True),
    Route("POST", "/api/all-configuration", post, "administrator"),
    Route("GET", "/api/definitions", get, "administrator", is_long=True),
    Route("POST", "/api/definitions", post, "administrator"),
    Route("POST", "/api/definitions/upload", post, "administrator"),
    Route("GET", "/api/definitions/{vhost}", get_vhost, "administrator", is_long=True),
    Route("POST", "/api/definitions/{vhost}", post_vhost, "administrator"),
    Route("POST", "/api/definitions/{vhost}/upload", post_vhost, "administrator"),
]
