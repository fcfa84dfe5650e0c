"""/api/definitions: export and import of what exists, in RabbitMQ's JSON, of all vhosts or of one.

Exports are written and imports are carried out in slices. /api/imports shows the progress of
imports.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import BodyPartReader

from shardmq.broker.controller import without_effect
from shardmq.broker.controller.access import hash_new_password
from shardmq.broker.controller.management.api_error import ApiError, bad_request, too_large
from shardmq.broker.controller.management.call import Call, Route, refusal_status
from shardmq.broker.controller.management.cluster_id import global_parameters
from shardmq.broker.controller.management.cluster_id import identity as identity_of
from shardmq.broker.controller.management.import_progress import Import
from shardmq.broker.controller.management.resources import (
    bindings,
    exchanges,
    parameters,
    policies,
    users,
)
from shardmq.broker.controller.management.resources.vhosts import metadata_of
from shardmq.broker.controller.management.responses.cpu_budget import SlicedWork
from shardmq.broker.controller.management.responses.json_body import Document
from shardmq.broker.controller.management.responses.listing import columns_of
from shardmq.broker.controller.management.responses.schemas import DOCUMENT
from shardmq.broker.controller.node_facts import product_version
from shardmq.broker.controller.policies import USER_LIMITS
from shardmq.broker.controller.stored import imported
from shardmq.broker.controller.stored.imported import Ask
from shardmq.broker.model.catalog import PREDECLARED, Catalog, Vhost
from shardmq.broker.model.changes import GLOBAL, BindingPut, ParameterPut, PermissionPut, VhostPut
from shardmq.broker.model.checks import Refusal, is_hidden_queue
from shardmq.broker.model.policies import POLICY
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION

SLICE_THINGS = 1_000  # checked before the processor is offered
REQUESTS_MAX = 500  # of an import at a time, so that declares of clients come in between
DOCUMENT_BYTES_MAX = 256 << 20
CHUNK_BYTES = 64 << 10
NAME_IN_HEADER = re.compile(r"[^\w.-]")

log = logging.getLogger(__name__)


# -- export ----------------------------------------------------------------------------------------


def definitions(catalog: Catalog, identity: str) -> dict[str, Any]:
    """Return the definitions of all vhosts. Long lists are iterators over copies."""
    vhosts = list(catalog.vhosts.values())
    puts = list(catalog.parameters.values())
    return {
        **_versions(),
        "users": [users.row(user, catalog) for user in catalog.users.values()],
        "vhosts": [
            {"name": vhost.name, **metadata_of(vhost.put), "metadata": metadata_of(vhost.put)}
            for vhost in vhosts
        ],
        "permissions": [users.permission_row(put) for put in catalog.permissions.puts.values()],
        "topic_permissions": [
            users.topic_permission_row(put) for put in catalog.permissions.topic_puts
        ],
        "global_parameters": [
            parameters.global_row(put) for put in global_parameters(catalog, identity)
        ],
        **_inside(vhosts, puts, lambda row: row),
    }


def definitions_of(vhost: Vhost, catalog: Catalog) -> dict[str, Any]:
    """Return the definitions of one vhost without its name, to be imported into any vhost."""
    puts = [put for put in catalog.parameters.values() if put.vhost == vhost.name]
    return {
        **_versions(),
        "metadata": metadata_of(vhost.put),
        "description": f"Definitions of virtual host '{vhost.name}'",
        **_inside([vhost], puts, lambda row: _without(row, "vhost")),
    }


def _versions() -> dict[str, Any]:
    return {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "shardmq",
        "product_version": product_version(),
    }


def _inside(
    vhosts: list[Vhost], puts: list[ParameterPut], shown: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return the parts of definitions that belong to vhosts, with rows as `shown` makes them."""
    queues = [queue for vhost in vhosts for queue in vhost.queues.values()]
    bindings_of = [(vhost, list(vhost.bindings())) for vhost in vhosts]
    other = [put for put in puts if put.component not in (POLICY, GLOBAL, USER_LIMITS)]
    columns = ("policy", "shard_queues", "user_who_performed_action")
    return {
        "parameters": [shown(parameters.row(put)) for put in other],
        "policies": [shown(policies.row(put)) for put in puts if put.component == POLICY],
        # Without exclusive queues, and without those that an exchange makes for itself.
        "queues": (
            shown(
                {
                    "name": queue.name,
                    "vhost": queue.vhost,
                    "durable": queue.durable,
                    "auto_delete": queue.auto_delete,
                    "arguments": queue.arguments,
                }
            )
            for queue in queues
            if not queue.owner and not is_hidden_queue(queue.name)
        ),
        "exchanges": [
            shown(_without(exchanges.row(exchange, vhost), *columns))
            for vhost in vhosts
            for exchange in vhost.exchanges.values()
            if exchange.name not in PREDECLARED
        ],
        "bindings": (
            shown(_without(bindings.row(binding), "properties_key"))
            for vhost, bound in bindings_of
            for binding in bound
            if not _is_of_exclusive_queue(vhost, binding)
        ),
    }


def _is_of_exclusive_queue(vhost: Vhost, binding: BindingPut) -> bool:
    """Return whether an import could not make the binding, because its queue is exclusive."""
    queue = vhost.queues.get(binding.destination) if binding.kind == "queue" else None
    return queue is not None and bool(queue.owner)


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


async def get(call: Call) -> Document:
    """Export definitions: all, or those of the vhost in the path."""
    if "vhost" in call.request.match_info:
        found = definitions_of(call.vhost(), call.catalog)
    else:
        found = definitions(call.catalog, identity_of(call.context.config))
    # With ?download=NAME a browser saves the document as a file.
    name = NAME_IN_HEADER.sub("_", call.request.query.get("download", ""))
    headers = {"Content-Disposition": f'attachment; filename="{name}"'} if name else {}
    columns = columns_of(call.request.query)
    return Document(
        {key: part for key, part in found.items() if not columns or key in columns}, headers
    )


# -- import ----------------------------------------------------------------------------------------


async def post(call: Call) -> dict[str, list[str]] | None:
    """Import definitions, for all vhosts or for the one in the path; what exists stays."""
    # The answer holds warnings about what has no effect here.
    vhost = call.vhost().name if "vhost" in call.request.match_info else None
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
        # In a thread, since it takes long: passwords in the document are hashed.
        algorithm = call.authority.hashing_algorithm
        hashed = partial(hash_new_password, algorithm=algorithm)
        stages = await loop.run_in_executor(
            None,
            lambda: imported.stages(
                imported.read(data), vhost, hashed, call.authority.keys.decrypted
            ),
        )
    except Refusal as refusal:
        raise bad_request(refusal.text) from None
    progress.state, progress.total = "running", sum(map(len, stages))
    for stage in stages:
        for start in range(0, len(stage), REQUESTS_MAX):
            part = stage[start : start + REQUESTS_MAX]
            asks = [ask for ask in part if imported.needed(ask, call.catalog)]
            rights = _rights_in_new_vhosts(call, asks)
            await _carry_out(call, asks)
            await _carry_out(call, rights)
            progress.done += len(part)
    most = call.authority.most_copies
    return without_effect.sentences((ask for stage in stages for ask in stage), most)


async def _carry_out(call: Call, asks: Sequence[Ask]) -> None:
    """Have the authority carry out requests that do not need each other, or raise ApiError."""
    answers = await asyncio.gather(*(call.authority.ask(ask, asked_at=call.via) for ask in asks))
    for ask, answer in zip(asks, answers, strict=True):
        if answer.code:
            raise ApiError(*refusal_status(answer.code), imported.refused(ask, answer.text))


def _rights_in_new_vhosts(call: Call, asks: list[Ask]) -> list[PermissionPut]:
    """Return the rights of the importing user in the vhosts that these requests make.

    As in RabbitMQ a user may use the vhosts it makes. The permissions of the document come in a
    later stage, so they win. shardctl is no user.
    """
    if call.is_local:
        return []
    made = (
        ask.name
        for ask in asks
        if isinstance(ask, VhostPut) and ask.name not in call.catalog.vhosts
    )
    return [PermissionPut(name, call.user.name, ".*", ".*", ".*") for name in made]


async def _document(call: Call) -> bytes:
    """Return the body, or the file in a form."""
    if not call.request.content_type.startswith("multipart/"):
        return await call.raw_body(DOCUMENT_BYTES_MAX)
    call.must_be_unpacked()
    async for part in await call.request.multipart():
        if isinstance(part, BodyPartReader) and (part.filename or part.name == "file"):
            data = bytearray()
            while chunk := await part.read_chunk(CHUNK_BYTES):
                data += part.decode(chunk)
                if len(data) > DOCUMENT_BYTES_MAX:
                    raise too_large(DOCUMENT_BYTES_MAX)
            return bytes(data)
    raise bad_request("the form has no file")


async def imports(call: Call) -> list[dict[str, Any]]:
    """List the imports of definitions that run or have ended, with their progress."""
    return call.context.imports.rows()


async def kept_without_effect(call: Call) -> dict[str, list[str]]:
    """Return warnings about all that exists and has no effect here."""
    summary, work = without_effect.Summary(call.authority.most_copies), SlicedWork()
    for count, thing in enumerate(without_effect.things(call.catalog), 1):
        summary.add(thing)
        if count % SLICE_THINGS == 0:
            await work.yield_to_others()
    return {"warnings": summary.sentences()}


ROUTES = [
    Route(
        "GET",
        "/api/without-effect",
        kept_without_effect,
        "administrator",
        is_long=True,
        shows="Warned",
    ),
    Route("GET", "/api/imports", imports, "administrator", shows=["Import"]),
    Route("GET", "/api/all-configuration", get, "administrator", is_long=True, shows="Definitions"),
    Route("POST", "/api/all-configuration", post, "administrator", body=DOCUMENT),
    Route("GET", "/api/definitions", get, "administrator", is_long=True, shows="Definitions"),
    Route("POST", "/api/definitions", post, "administrator", body=DOCUMENT),
    Route("POST", "/api/definitions/upload", post, "administrator"),
    Route(
        "GET",
        "/api/definitions/{vhost}",
        get,
        "administrator",
        is_long=True,
        shows="Definitions",
    ),
    Route("POST", "/api/definitions/{vhost}", post, "administrator", body=DOCUMENT),
    Route("POST", "/api/definitions/{vhost}/upload", post, "administrator"),
]
