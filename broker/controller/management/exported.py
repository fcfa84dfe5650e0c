"""/api/definitions: everything that lasts, as RabbitMQ exports it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from broker.catalog import PREDECLARED, Catalog
from broker.controller.management import bindings, exchanges, users
from broker.controller.management.call import Call, Route
from broker.controller.management.overview import RABBITMQ_VERSION, product_version


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def definitions(catalog: Catalog) -> dict[str, Any]:
    vhosts = list(catalog.vhosts.values())
    kept = {(q.vhost, q.name) for v in vhosts for q in v.queues.values() if q.durable and not q.owner}
    return {
        "rabbit_version": RABBITMQ_VERSION,
        "rabbitmq_version": RABBITMQ_VERSION,
        "product_name": "shardmq",
        "product_version": product_version(),
        "users": [users.row(user, catalog) for user in catalog.users.values()],
        "vhosts": [{"name": v.name, "description": v.description, "tags": v.tags} for v in vhosts],
        "permissions": [users.permission_row(put) for put in catalog.permissions.values()],
        "topic_permissions": [],
        "parameters": _parameters(catalog, lambda vhost, component: bool(vhost) and component != "policy"),
        "global_parameters": _parameters(catalog, lambda vhost, component: not vhost),
        "policies": _policies(catalog),
        "queues": [
            {
                "name": queue.name,
                "vhost": queue.vhost,
                "durable": queue.durable,
                "auto_delete": queue.auto_delete,
                "arguments": queue.arguments,
            }
            for vhost in vhosts
            for queue in vhost.queues.values()
            if (queue.vhost, queue.name) in kept
        ],
        "exchanges": [
            _without(exchanges.row(exchange), "policy", "user_who_performed_action")
            for vhost in vhosts
            for exchange in vhost.exchanges.values()
            if exchange.name not in PREDECLARED and exchange.durable
        ],
        "bindings": list(_bindings(catalog, kept)),
    }


def _bindings(catalog: Catalog, queues: set[tuple[str, str]]) -> Iterable[dict[str, Any]]:
    """Between durable things only: what an import could not make again is not exported."""
    for vhost in catalog.vhosts.values():
        for one in vhost.bindings():
            there = (
                (one.vhost, one.destination) in queues
                if one.kind == "queue"
                else vhost.exchanges[one.destination].durable
            )
            if there and vhost.exchanges[one.source].durable:
                yield _without(bindings.row(one), "properties_key")


def _parameters(catalog: Catalog, wanted: Any) -> list[dict[str, Any]]:
    return [
        {"vhost": put.vhost, "component": put.component, "name": put.name, "value": put.value}
        if put.vhost
        else {"name": put.name, "value": put.value}
        for put in catalog.parameters.values()
        if wanted(put.vhost, put.component)
    ]


def _policies(catalog: Catalog) -> list[dict[str, Any]]:
    return [
        {"vhost": put.vhost, "name": put.name, **(put.value if isinstance(put.value, dict) else {})}
        for put in catalog.parameters.values()
        if put.component == "policy"
    ]


async def get(call: Call) -> dict[str, Any]:
    return definitions(call.catalog)


ROUTES = [Route("GET", "/api/definitions", get, "administrator")]
