"""The description of the API in OpenAPI 3.1, made from the table of routes.

The first line of a handler's docstring is the summary of its route.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from shardmq.broker.controller.management.call import MESSAGES_PURGED, Route
from shardmq.broker.controller.management.metrics import past
from shardmq.broker.controller.management.metrics.time_range import SAMPLES_MAX
from shardmq.broker.controller.management.numbers import NUMBER_MAX
from shardmq.broker.controller.management.responses.schemas import (
    DOCUMENT,
    ROWS,
    Schema,
    of_list,
    of_row,
)
from shardmq.broker.model import arguments
from shardmq.broker.model.arguments import Argument, PolicyKey
from shardmq.broker.model.policies import APPLY_TO

PART = re.compile(r"\{(\w+)(?::([^}]+))?\}")
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
# The kinds of objects whose rows have samples, by the name of the row.
_SAMPLED: Final = {
    "Overview": past.BROKER, "Node": past.NODE, "Load": past.SHARD, "Vhost": past.VHOST,
    "Queue": past.QUEUE, "Exchange": past.EXCHANGE, "Connection": past.CONNECTION,
    "Channel": past.CHANNEL,
}  # fmt: skip
_FLAG: Schema = {"enum": ["true", "false"]}
# The parameters of calls that delete or purge. Calls with any other parameter are refused.
_DELETE_QUERY: Final[dict[str, Schema]] = {
    "if-unused": _FLAG,
    "if-empty": _FLAG,
    "count": {
        "type": "integer",
        "minimum": 1,
        "maximum": NUMBER_MAX,
        "description": "Purge so many messages, not all.",
    },
    "exchange": {"type": "string", "description": "Delete the permission for this exchange alone."},
}
_SINCE: Schema = {
    "type": "number",
    "description": "Show only what is later than this time, in seconds since 1970.",
}
_ERRORS: Final = {
    "400": "What was sent cannot be used; `reason` says why. Nothing was changed.",
    "401": "The login is missing or wrong, or the user lacks a right for this call.",
    "403": (
        "The page of another site has sent the call, "
        "or a password came without TLS from another host."
    ),
    "404": "The path names something that does not exist, or that this user may not see.",
    "405": "The path does not have this method.",
    "412": "The vhost is protected from deletion, or the stream is not the one that is meant.",
    "413": "The body is too large.",
    "429": (
        "Too many long answers to the caller's address are under way; "
        "ask again after `Retry-After` seconds."
    ),
    "502": (
        "In a cluster: the node that leads has ended meanwhile. "
        "It may have carried out this call, which is not to be made twice."
    ),
    "503": (
        "A part of the broker is away, a check found something, "
        "or too many long answers are under way."
    ),
}


def document(routes: Iterable[Route], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    bodies = []
    for route in routes:
        path = PART.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path)
        if isinstance(route.body, type):
            bodies.append(route.body)
    _, structs = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
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
                "there. Messages are counted as by a RabbitMQ with `rates_mode: basic`, which "
                "`/api/overview` says: `incoming`, `outgoing`, `deliveries` and `publishes` of "
                "single exchanges, queues and channels are always empty."
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
        "description": f"The user needs the tag {route.tag}.",
        "parameters": _parameters(route, path),
        "responses": {
            **_successes(route, path),
            **{code: {"$ref": f"#/components/responses/{code}"} for code in _ERRORS},
        },
    }
    body = route.body.__name__ if isinstance(route.body, type) else route.body
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"} if isinstance(body, str) else body
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return operation


def _parameters(route: Route, path: str) -> list[Schema]:
    found: list[Schema] = []
    for name, pattern in PART.findall(route.path):
        schema: Schema = (
            {"enum": pattern.split("|")} if pattern else {"type": "string", "minLength": 1}
        )
        found.append({"name": name, "in": "path", "required": True, "schema": schema})
    wanted: dict[str, Schema] = {}
    if path == "/api/logs":
        wanted = {"since": _SINCE}
    elif route.method == "GET":
        is_list = isinstance(route.shows, list)
        wanted = {**_QUERY} if is_list else {"columns": _QUERY["columns"]}
        row = route.shows[0] if isinstance(route.shows, list) else route.shows
        if row in _SAMPLED:
            wanted |= _sample_query(_SAMPLED[row])
    elif route.query:
        wanted = {name: _DELETE_QUERY[name] for name in route.query}
    return found + [{"name": n, "in": "query", "schema": schema} for n, schema in wanted.items()]


def _sample_query(kind: past.Kind) -> dict[str, Schema]:
    """Return the parameters that ask for samples of the past of such objects."""
    found: dict[str, Schema] = {}
    for prefix in dict.fromkeys(column.asked_by for column in kind.columns):
        for end, text in (
            ("age", "of the past that samples are wanted of"),
            ("incr", "between two samples"),
        ):
            about = f"Seconds {text}; age / incr is at most {SAMPLES_MAX}."
            found[f"{prefix}_{end}"] = {"type": "integer", "minimum": 1, "description": about}
    return found


def _successes(route: Route, path: str) -> Schema:
    if path == LIVE:
        return {
            "200": {
                "description": "The lines of the log as they come.",
                "content": {"text/event-stream": {}},
            }
        }
    if route.shows is not None or route.method == "GET":
        return {
            "200": {
                "description": "The answer.",
                "content": {"application/json": {"schema": _schema(route.shows)}},
            }
        }
    if route.body is DOCUMENT or path.endswith("/upload"):
        warned = {"application/json": {"schema": _schema("Warned")}}
        said = {
            "description": "The import is done; some of it has no effect.",
            "content": warned,
        }
        return {"200": said, "204": {"description": "The import is done."}}
    # The annotations are texts. A handler that returns None answers 204, whatever it has done.
    returned = getattr(route.handler, "__annotations__", {}).get("return")
    if route.method == "DELETE" or returned == "None":
        done: Schema = {"description": "The call is carried out."}
        if "count" in (route.query or ()):
            done["headers"] = {MESSAGES_PURGED: {"schema": {"type": "integer"}}}
        return {"204": done}
    if route.method == "PUT":
        return {
            "201": {"description": "The object did not exist and is made."},
            "204": {"description": "The object existed and is now as the call says."},
        }
    if returned == "web.Response":
        headers = {"Location": {"schema": {"type": "string"}}}
        return {"201": {"description": "The object is made.", "headers": headers}}
    return {"200": {"description": "The answer."}}


def _schema(shown: str | list[str] | None) -> Schema:
    if shown is None:
        return {}
    return (
        of_list(shown[0]) if isinstance(shown, list) else {"$ref": f"#/components/schemas/{shown}"}
    )
