"""The description of the API in OpenAPI 3.1, made from the table of routes.

The first line of a handler's docstring is the summary of its route. BODIES says what the body of a
request is, SHOWS and CHANGE_SHOWS say what a response shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from shardmq.broker.controller.management.call import NUMBER_MAX, Route
from shardmq.broker.controller.management.resources import (
    bindings,
    exchanges,
    explain_route,
    messages,
    queues,
    stream_groups,
    users,
    vhosts,
)
from shardmq.broker.controller.management.responses.schemas import ROWS, Schema, of_list, of_row
from shardmq.broker.model import arguments
from shardmq.broker.model.arguments import Argument, PolicyKey
from shardmq.broker.model.policies import APPLY_TO

PART = re.compile(r"\{(\w+)(?::([^}]+))?\}")

_VALUE: Schema = {"type": "object", "properties": {"value": {}}, "required": ["value"]}
_NUMBER: Schema = {
    "type": "object",
    "properties": {"value": {"type": "integer"}},
    "required": ["value"],
}
_PUBLISH: Schema = {
    "type": "object",
    "properties": {
        "routing_key": {"type": "string"},
        "properties": {"type": "object"},
        "payload": {"type": "string"},
        "payload_encoding": {"enum": ["string", "base64"]},
    },
    "required": ["routing_key", "properties", "payload", "payload_encoding"],
}
_GET: Schema = {
    "type": "object",
    "properties": {
        "ackmode": {
            "enum": [
                "ack_requeue_true",
                "ack_requeue_false",
                "reject_requeue_true",
                "reject_requeue_false",
            ]
        },
        "count": {"type": "integer"},
        "encoding": {"enum": ["auto", "base64"]},
        "truncate": {"type": "integer", "minimum": 0},
    },
    "required": ["ackmode", "count", "encoding"],
}
_NAME: Schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}},
    "required": ["name"],
}
_PASSWORD: Schema = {
    "type": "object",
    "properties": {"password": {"type": "string"}},
    "required": ["password"],
}
_DOCUMENT: Schema = {"type": "object"}

STRUCTS: Final = {
    "QueueBody": queues.QueueBody,
    "MessageBody": explain_route.MessageBody,
    "ReadBody": messages.ReadBody,
    "MoveBody": messages.MoveBody,
    "ActionBody": queues.ActionBody,
    "ExchangeBody": exchanges.ExchangeBody,
    "BindingBody": bindings.BindingBody,
    "GroupBody": stream_groups.GroupBody,
    "VhostBody": vhosts.VhostBody,
    "UserBody": users.UserBody,
    "NamesBody": users.NamesBody,
    "PermissionBody": users.PermissionBody,
    "TopicPermissionBody": users.TopicPermissionBody,
}

# The bodies of requests: the name of a struct, or a schema.
BODIES: Final[dict[tuple[str, str], str | Schema]] = {
    ("PUT", "/api/queues/{vhost}/{queue}"): "QueueBody",
    ("PUT", "/api/exchanges/{vhost}/{exchange}"): "ExchangeBody",
    ("POST", "/api/bindings/{vhost}/e/{source}/{kind}/{destination}"): "BindingBody",
    ("PUT", "/api/streams/{vhost}/{name}/groups/{group}"): "GroupBody",
    ("PUT", "/api/vhosts/{vhost}"): "VhostBody",
    ("PUT", "/api/users/{user}"): "UserBody",
    ("POST", "/api/users/bulk-delete"): "NamesBody",
    ("PUT", "/api/permissions/{vhost}/{user}"): "PermissionBody",
    ("PUT", "/api/topic-permissions/{vhost}/{user}"): "TopicPermissionBody",
    ("PUT", "/api/policies/{vhost}/{name}"): "PolicyBody",
    ("PUT", "/api/operator-policies/{vhost}/{name}"): "OperatorPolicyBody",
    ("PUT", "/api/parameters/{component}/{vhost}/{name}"): _VALUE,
    ("PUT", "/api/global-parameters/{name}"): _VALUE,
    ("PUT", "/api/vhost-limits/{vhost}/{name}"): _NUMBER,
    ("PUT", "/api/user-limits/{user}/{name}"): _NUMBER,
    ("PUT", "/api/cluster-name"): _NAME,
    ("PUT", "/api/auth/hash_password"): _PASSWORD,
    ("POST", "/api/exchanges/{vhost}/{exchange}/publish"): _PUBLISH,
    ("POST", "/api/exchanges/{vhost}/{exchange}/route"): "MessageBody",
    ("POST", "/api/queues/{vhost}/{queue}/get"): _GET,
    ("POST", "/api/queues/{vhost}/{queue}/stream"): "ReadBody",
    ("POST", "/api/queues/{vhost}/{queue}/move"): "MoveBody",
    ("POST", "/api/queues/{vhost}/{queue}/actions"): "ActionBody",
    ("POST", "/api/definitions"): _DOCUMENT,
    ("POST", "/api/all-configuration"): _DOCUMENT,
    ("POST", "/api/definitions/{vhost}"): _DOCUMENT,
}

# The response of GET for each path: one row, or [a list of rows].
SHOWS: Final[dict[str, str | list[str]]] = {
    "/api/overview": "Overview",
    "/api/whoami": "WhoAmI",
    "/api/nodes": ["Node"],
    "/api/nodes/{node}": "Node",
    "/api/queues": ["Queue"],
    "/api/queues/detailed": ["Queue"],
    "/api/queues/{vhost}": ["Queue"],
    "/api/queues/{vhost}/{queue}": "Queue",
    "/api/queues/{vhost}/{queue}/bindings": ["Binding"],
    "/api/exchanges": ["Exchange"],
    "/api/exchanges/{vhost}": ["Exchange"],
    "/api/exchanges/{vhost}/{exchange}": "Exchange",
    "/api/exchanges/{vhost}/{exchange}/bindings/{end}": ["Binding"],
    "/api/bindings": ["Binding"],
    "/api/bindings/{vhost}": ["Binding"],
    "/api/bindings/{vhost}/e/{source}/{kind}/{destination}": ["Binding"],
    "/api/bindings/{vhost}/e/{source}/{kind}/{destination}/{properties}": "Binding",
    "/api/connections": ["Connection"],
    "/api/connections/username/{user}": ["Connection"],
    "/api/connections/{connection}": "Connection",
    "/api/connections/{connection}/channels": ["Channel"],
    "/api/vhosts/{vhost}/connections": ["Connection"],
    "/api/vhosts/{vhost}/channels": ["Channel"],
    "/api/channels": ["Channel"],
    "/api/channels/{channel}": "Channel",
    "/api/consumers": ["Consumer"],
    "/api/consumers/{vhost}": ["Consumer"],
    "/api/vhosts": ["Vhost"],
    "/api/vhosts/{vhost}": "Vhost",
    "/api/vhosts/{vhost}/permissions": ["Permission"],
    "/api/vhosts/{vhost}/topic-permissions": ["TopicPermission"],
    "/api/users": ["User"],
    "/api/users/without-permissions": ["User"],
    "/api/users/{user}": "User",
    "/api/users/{user}/permissions": ["Permission"],
    "/api/users/{user}/topic-permissions": ["TopicPermission"],
    "/api/permissions": ["Permission"],
    "/api/permissions/{vhost}/{user}": "Permission",
    "/api/topic-permissions": ["TopicPermission"],
    "/api/topic-permissions/{vhost}/{user}": ["TopicPermission"],
    "/api/policies": ["Policy"],
    "/api/policies/{vhost}": ["Policy"],
    "/api/policies/{vhost}/{name}": "Policy",
    "/api/operator-policies": ["Policy"],
    "/api/operator-policies/{vhost}": ["Policy"],
    "/api/operator-policies/{vhost}/{name}": "Policy",
    "/api/parameters": ["Parameter"],
    "/api/parameters/{component}": ["Parameter"],
    "/api/parameters/{component}/{vhost}": ["Parameter"],
    "/api/parameters/{component}/{vhost}/{name}": "Parameter",
    "/api/global-parameters": ["GlobalParameter"],
    "/api/global-parameters/{name}": "GlobalParameter",
    "/api/vhost-limits": ["VhostLimits"],
    "/api/vhost-limits/{vhost}": ["VhostLimits"],
    "/api/user-limits": ["UserLimits"],
    "/api/user-limits/{user}": ["UserLimits"],
    "/api/definitions": "Definitions",
    "/api/all-configuration": "Definitions",
    "/api/definitions/{vhost}": "Definitions",
    "/api/aliveness-test/{vhost}": "Check",
    "/api/processes": ["Process"],
    "/api/shards": ["Shard"],
    "/api/streams/{vhost}/{name}/groups": ["StreamGroup"],
    "/api/streams/{vhost}/{name}/groups/{group}": "StreamGroup",
    "/api/shards/load": ["Load"],
    "/api/shards/{shard}/queues": ["Queue"],
    "/api/imports": ["Import"],
    "/api/without-effect": "Warned",
    "/api/logs": ["LogLine"],
}
# The same for other methods.
CHANGE_SHOWS: Final[dict[str, str | list[str]]] = {
    "/api/exchanges/{vhost}/{exchange}/publish": "Routed",
    "/api/exchanges/{vhost}/{exchange}/route": "Explained",
    "/api/queues/{vhost}/{queue}/get": ["Message"],
    "/api/queues/{vhost}/{queue}/stream": ["Message"],
    "/api/queues/{vhost}/{queue}/move": "Moved",
    "/api/auth/hash_password": "Hashed",
}

LIVE: Final = "/api/livelog"  # its response has no end

_QUERY: Final[dict[str, Schema]] = {
    "page": {"type": "integer", "minimum": 1},
    "page_size": {"type": "integer", "minimum": 1, "maximum": 500},
    "name": {"type": "string"},
    "use_regex": {"enum": ["true", "false"]},
    "sort": {"type": "string"},
    "sort_reverse": {"enum": ["true", "false"]},
    "columns": {
        "type": "string",
        "description": "Names of fields, with commas between; a.b for a field inside one.",
    },
    "disable_stats": {"enum": ["true", "false"]},
}
_FLAG: Schema = {"enum": ["true", "false"]}
# The parameters of calls that delete or purge. Calls with any other parameter are refused.
_DELETE_QUERY: Final[dict[str, Schema]] = {
    "if-unused": _FLAG,
    "if-empty": _FLAG,
    "count": {
        "type": "integer",
        "minimum": 1,
        "maximum": NUMBER_MAX,
        "description": "How many, not all.",
    },
    "exchange": {"type": "string", "description": "Of this exchange alone."},
}
_SINCE: Schema = {"type": "number", "description": "Seconds since 1970: only what is later."}
_ERRORS: Final = {
    "400": "What was sent cannot be used; `reason` says why. Nothing was changed.",
    "401": "No login, a wrong one, or one that may not do this.",
    "403": "Asked for by another site's page, or a password came readably from another host.",
    "404": "There is no such thing.",
    "405": "Not with this method.",
    "412": "Not as long as something else holds.",
    "413": "The body is too large.",
    "429": (
        "Too many long answers to the caller's address are under way; "
        "ask again after `Retry-After` seconds."
    ),
    "503": (
        "A part of the broker is away, a check found something, "
        "or too many long answers are under way."
    ),
}


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = PART.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
    _, structs = msgspec.json.schema_components(
        STRUCTS.values(), ref_template="#/components/schemas/{name}"
    )
    table = arguments.TABLE
    structs["QueueBody"]["properties"]["arguments"]["properties"] = _arguments(table.queue)
    structs["ExchangeBody"]["properties"]["arguments"]["properties"] = _arguments(table.exchange)
    policies = {
        "PolicyBody": _policy(table.keys),
        "OperatorPolicyBody": _policy(table.operator_keys),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shardmq HTTP API",
            "version": version,
            "description": (
                "RabbitMQ's management API, as far as it makes sense here, and more of our own. "
                "In a path the `/` of a name is %2F; the default exchange is called amq.default "
                "there."
            ),
        },
        "servers": [{"url": "/"}],
        "security": [{"basic": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
            "schemas": {**{name: of_row(name) for name in ROWS}, **structs, **policies},
            "responses": {
                code: {
                    "description": text,
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
                    },
                }
                for code, text in _ERRORS.items()
            },
        },
    }


def _arguments(rows: Mapping[str, Argument]) -> Schema:
    return {name: {"description": row.summary} for name, row in rows.items()}


def _policy(keys: Mapping[str, PolicyKey]) -> Schema:
    """Return the schema of a policy. A key is described by the summary of the argument it sets."""
    rows = (*arguments.TABLE.queue.values(), *arguments.TABLE.exchange.values())
    says = {row.policy.name: row.summary for row in rows if row.policy is not None}
    described = {name: {"description": says[name]} if name in says else {} for name in keys}
    return {
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "definition": {"type": "object", "properties": described},
            "priority": {"type": "integer"},
            "apply-to": {"enum": sorted(APPLY_TO)},
        },
        "required": ["pattern", "definition"],
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    about = (route.handler.__doc__ or "").strip().splitlines()
    operation: dict[str, Any] = {
        "operationId": f"{route.method} {path}",
        "tags": [path.split("/")[2]],
        "summary": about[0] if about else f"{route.method} {path}",
        "description": f"For users with the tag {route.tag}.",
        "parameters": [
            *_path_parameters(route.path),
            *_query_parameters(route.method, path, route.query),
        ],
        "responses": {
            **_successes(route.method, path),
            **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS},
        },
    }
    body = BODIES.get((route.method, path))
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"} if isinstance(body, str) else body
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _path_parameters(path: str) -> list[Schema]:
    found = []
    for name, pattern in PART.findall(path):
        schema: Schema = (
            {"enum": pattern.split("|")} if pattern else {"type": "string", "minLength": 1}
        )
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    return found


def _query_parameters(method: str, path: str, query: Iterable[str] | None) -> list[Schema]:
    wanted: dict[str, Schema] = {}
    if method == "GET" and isinstance(SHOWS.get(path), list):
        wanted = _QUERY
    elif method == "GET":
        wanted = {"columns": _QUERY["columns"]}
    if (method, path) == ("GET", "/api/logs"):
        wanted = {"since": _SINCE}
    if method != "GET" and query:
        wanted = {name: _DELETE_QUERY[name] for name in query}
    return [{"name": name, "in": "query", "schema": schema} for name, schema in wanted.items()]


def _successes(method: str, path: str) -> Schema:
    if path == LIVE:
        return {"200": {"description": "Lines as they come.", "content": {"text/event-stream": {}}}}
    shown = SHOWS.get(path) if method == "GET" else CHANGE_SHOWS.get(path)
    if shown is not None or method == "GET":
        return {
            "200": {
                "description": "What there is.",
                "content": {"application/json": {"schema": _schema(shown)}},
            }
        }
    if BODIES.get((method, path)) is _DOCUMENT:
        warned = {"application/json": {"schema": _schema("Warned")}}
        said = {"description": "Done; some of it has no effect.", "content": warned}
        return {"200": said, "204": {"description": "Done."}}
    if method == "PUT":
        return {
            "201": {"description": "Made."},
            "204": {"description": "It was there, and is as asked for now."},
        }
    if method == "POST":
        headers = {"Location": {"schema": {"type": "string"}}}
        return {
            "201": {"description": "Made.", "headers": headers},
            "204": {"description": "Done."},
        }
    return {"204": {"description": "Done."}}


def _schema(shown: str | list[str] | None) -> Schema:
    if shown is None:
        return {}
    return (
        of_list(shown[0]) if isinstance(shown, list) else {"$ref": f"#/components/schemas/{shown}"}
    )
