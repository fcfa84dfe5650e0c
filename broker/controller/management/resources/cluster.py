"""/api/cluster-name, /api/version, features, and hashes of passwords: what tools ask first."""

from __future__ import annotations

import asyncio
from typing import Any

from shardmq.broker.controller.access import hash_password
from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import Call, Route, with_keys
from shardmq.broker.controller.management.responses.schemas import STRING, object_of
from shardmq.broker.model.changes import CLUSTER_NAME, GLOBAL, ParameterPut
from shardmq.broker.shared.cluster_name import RABBITMQ_VERSION, cluster_name


async def get_cluster_name(call: Call) -> Any:
    """Show the name of the cluster and, if there may be several nodes, the nodes."""
    cluster, shown = call.context.cluster, {"name": cluster_name(call.catalog)}
    if not cluster.is_cluster:
        return shown
    nodes = [
        {"name": node.name, "running": node.is_alive, "is_leader": node.name == cluster.own}
        for node in cluster.nodes
    ]
    return {**shown, "nodes": nodes}


async def put_cluster_name(call: Call) -> None:
    """Set the name of the cluster."""
    name = with_keys(await call.json(), "name")["name"]
    if not isinstance(name, str) or not name:
        raise bad_request("name: not a string, or an empty one")
    await call.ask(ParameterPut("", GLOBAL, CLUSTER_NAME, name))


async def version(call: Call) -> Any:
    """Show the version of RabbitMQ whose API this is."""
    return RABBITMQ_VERSION


async def nothing(call: Call) -> Any:
    """Return an empty list: this broker has none, and tools that ask go on."""
    return []


async def enable_feature(call: Call) -> None:
    """Accept the feature `all` and do nothing: all features are always on."""
    if call.part("feature") != "all":
        raise bad_request("unsupported")


async def auth(call: Call) -> Any:
    """Show that OAuth 2 is not in use."""
    return {"oauth_enabled": False}


async def hashed(call: Call) -> Any:
    """Hash a password for a definitions file."""
    return {"ok": await _hash(call, call.part("password"))}


async def hashed_of_body(call: Call) -> Any:
    """Hash a password that is sent in the body, where no log of paths has it."""
    password = with_keys(await call.json(), "password")["password"]
    if not isinstance(password, str):
        raise bad_request("password: not a string")
    return {"password_hash": await _hash(call, password)}


async def _hash(call: Call, password: str) -> str:
    algorithm = call.authority.hashing_algorithm
    # In a thread, since it takes a while.
    return await asyncio.get_running_loop().run_in_executor(
        None, hash_password, password, None, algorithm
    )


ROUTES = [
    Route("GET", "/api/cluster-name", get_cluster_name),
    Route(
        "PUT",
        "/api/cluster-name",
        put_cluster_name,
        "administrator",
        body=object_of(name={"type": "string", "minLength": 1}),
    ),
    Route("GET", "/api/version", version),
    Route("GET", "/api/extensions", nothing),
    Route("GET", "/api/feature-flags", nothing, "administrator"),
    Route("PUT", "/api/feature-flags/{feature}/enable", enable_feature, "administrator"),
    Route("GET", "/api/deprecated-features", nothing, "administrator"),
    Route("GET", "/api/deprecated-features/used", nothing, "administrator"),
    Route("GET", "/api/auth", auth),
    Route("GET", "/api/auth/hash_password/{password}", hashed, "administrator"),
    Route(
        "PUT",
        "/api/auth/hash_password",
        hashed_of_body,
        "administrator",
        body=object_of(password=STRING),
        shows="Hashed",
    ),
]
