"""/api/policies and /api/operator-policies: two components of parameters with one form."""

from __future__ import annotations

from typing import Any

from shardmq.broker.controller.management.call import (
    NAME_CHARS_SHOWN,
    Call,
    Route,
    existing,
    long_list,
    put_status,
    with_keys,
)
from shardmq.broker.controller.management.responses.listing import Listing, by_name
from shardmq.broker.model.changes import ParameterDelete, ParameterPut
from shardmq.broker.model.policies import OPERATOR_POLICY, POLICY
from shardmq.supervisor.nearest import did_you_mean

FIELDS = ("pattern", "apply-to", "definition", "priority")
FIELDS_SHOWN = 5  # of those that are ignored
IN_BODY = frozenset((*FIELDS, "vhost", "name", "component"))  # Tools send the last three, too.


def row(put: ParameterPut) -> dict[str, Any]:
    value = put.value if isinstance(put.value, dict) else {}
    return {"vhost": put.vhost, "name": put.name} | {name: value.get(name) for name in FIELDS}


def value_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy that are kept, with defaults; a name or vhost is dropped."""
    return {
        "pattern": body.get("pattern"),
        "definition": body.get("definition"),
        "priority": body.get("priority", 0),
        "apply-to": body.get("apply-to", "all"),
    }


def _warning_of(ignored: list[str]) -> str:
    """Return one sentence about fields that no policy has; it names the first few of them."""
    first = ignored[:FIELDS_SHOWN]
    names = [field[:NAME_CHARS_SHOWN] for field in first]
    if len(ignored) > len(first):
        names.append(f"{len(ignored) - len(first)} more")
    one, many = "is no field of a policy and is", "are no fields of a policy and are"
    hints = dict.fromkeys(did_you_mean(field, FIELDS) for field in first)
    return f"{', '.join(names)} {one if len(names) == 1 else many} ignored{''.join(hints)}"


def _routes(path: str, component: str, changes_tag: str, body: str) -> list[Route]:
    def found(call: Call) -> ParameterPut:
        key = (call.vhost().name, component, call.part("name"))
        return existing(call.catalog.parameters.get(key))

    async def get_all(call: Call) -> Listing:
        """List policies, of all vhosts or of the one in the path."""
        seen = {vhost.name for vhost in call.vhosts()}
        puts = call.catalog.parameters.values()
        return by_name(row(put) for put in puts if put.component == component and put.vhost in seen)

    async def get(call: Call) -> dict[str, Any]:
        """Show a policy."""
        return row(found(call))

    async def put(call: Call) -> Any:
        """Set a policy."""
        vhost, name = call.vhost().name, call.part("name")
        body = with_keys(await call.json(), "pattern", "definition")
        existed = (vhost, component, name) in call.catalog.parameters
        await call.ask(ParameterPut(vhost, component, name, value_of(body)))
        # RabbitMQ ignores other fields without a word. A misspelt one is worth a warning.
        if ignored := [field for field in body if field not in IN_BODY]:
            call.warnings.append(_warning_of(ignored))
        return put_status(existed)

    async def delete(call: Call) -> None:
        """Delete a policy."""
        gone = found(call)
        await call.ask(ParameterDelete(gone.vhost, component, gone.name))

    one = f"{path}/{{vhost}}/{{name}}"
    return [
        long_list(path, get_all, "Policy"),
        long_list(f"{path}/{{vhost}}", get_all, "Policy"),
        Route("GET", one, get, shows="Policy"),
        Route("PUT", one, put, changes_tag, body=body),
        Route("DELETE", one, delete, changes_tag),
    ]


ROUTES = [
    *_routes("/api/policies", POLICY, "policymaker", "PolicyBody"),
    *_routes("/api/operator-policies", OPERATOR_POLICY, "administrator", "OperatorPolicyBody"),
]
