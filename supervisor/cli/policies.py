"""The commands for policies, operator policies and parameters.

The names and the order of the arguments are those of rabbitmqctl.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import USAGE, Api, Rows, fail, json_argument
from shardmq.supervisor.cli.arguments import APPLY_TO, OPERATOR_POLICY_KEYS, POLICY_KEYS
from shardmq.supervisor.cli.names import Vhost

Name = Annotated[str, typer.Argument(metavar="NAME")]
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Regular expression over names.")]


def _definition(keys: Iterable[str]) -> Any:
    """Make the argument for a definition that may have these keys."""
    text = f"JSON, such as '{{\"max-length\": 1000}}'. Keys: {', '.join(keys)}."
    return typer.Argument(metavar="DEFINITION", help=text)


Definition = Annotated[str, _definition(POLICY_KEYS)]
Limits = Annotated[str, _definition(OPERATOR_POLICY_KEYS)]
Priority = Annotated[int, typer.Option(help="The policy with the highest priority applies.")]
ApplyTo = Annotated[str, typer.Option(help=f"One of {', '.join(APPLY_TO)}.")]
Component = Annotated[str, typer.Argument(metavar="COMPONENT")]
Value = Annotated[str, typer.Argument(metavar="JSON", help="A text has quotes: '\"text\"'.")]

COLUMNS = ["vhost", "name", "pattern", "apply-to", "definition", "priority"]


def set_policy(
    api: Api,
    name: Name,
    pattern: Pattern,
    definition: Definition,
    priority: Priority = 0,
    apply_to: ApplyTo = "all",
    vhost: Vhost = "/",
) -> None:
    """Set a policy for all queues and exchanges whose names match a pattern."""
    _set(api, "policies", vhost, name, pattern, definition, priority, apply_to)


def clear_policy(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Clear a policy. Its queues and exchanges are as they were declared."""
    api.delete("policies", vhost, name, thing=f"policy '{name}'")


def list_policies(api: Api, vhost: Vhost = "/") -> Rows:
    """List the policies of a vhost."""
    return _list(api, "policies", vhost)


def list_policies_that_match(
    api: Api,
    name: Name,
    object_type: Annotated[str, typer.Option("--object-type", help="queue or exchange.")] = "queue",
    vhost: Vhost = "/",
) -> Rows:
    """List the policies that match a name, in the order of their priority."""
    kinds = {
        "queue": {"all", "queues", "classic_queues", "quorum_queues", "streams"},
        "exchange": {"all", "exchanges"},
    }
    if object_type not in kinds:
        fail(f"--object-type: queue or exchange, not {object_type}", USAGE)
    rows = [
        row
        for row in api.get("policies", vhost, thing=f"vhost '{vhost}'")
        if row["apply-to"] in kinds[object_type] and re.search(row["pattern"], name)
    ]
    return Rows(sorted(rows, key=lambda row: (-row["priority"], row["name"])), COLUMNS)


def set_operator_policy(
    api: Api,
    name: Name,
    pattern: Pattern,
    definition: Limits,
    priority: Priority = 0,
    apply_to: ApplyTo = "all",
    vhost: Vhost = "/",
) -> None:
    """Set a limit that policies and arguments of users cannot exceed."""
    _set(api, "operator-policies", vhost, name, pattern, definition, priority, apply_to)


def clear_operator_policy(api: Api, name: Name, vhost: Vhost = "/") -> None:
    """Clear an operator policy."""
    api.delete("operator-policies", vhost, name, thing=f"operator policy '{name}'")


def list_operator_policies(api: Api, vhost: Vhost = "/") -> Rows:
    """List the operator policies of a vhost."""
    return _list(api, "operator-policies", vhost)


def _set(
    api: Api,
    kind: str,
    vhost: str,
    name: str,
    pattern: str,
    definition: str,
    priority: int,
    apply_to: str,
) -> None:
    body = {
        "pattern": pattern,
        "definition": json_argument(definition, dict),
        "priority": priority,
        "apply-to": apply_to,
    }
    api.put(kind, vhost, name, body=body)


def _list(api: Api, kind: str, vhost: str) -> Rows:
    return Rows(api.get(kind, vhost, thing=f"vhost '{vhost}'"), COLUMNS)


# -- parameters ------------------------------------------------------------------------------


def set_parameter(
    api: Api, component: Component, name: Name, value: Value, vhost: Vhost = "/"
) -> None:
    """Set a runtime parameter."""
    body = {"value": json_argument(value, object)}
    api.put("parameters", component, vhost, name, body=body)


def clear_parameter(api: Api, component: Component, name: Name, vhost: Vhost = "/") -> None:
    """Clear a runtime parameter."""
    thing = f"parameter '{name}' of component '{component}'"
    api.delete("parameters", component, vhost, name, thing=thing)


def list_parameters(api: Api, vhost: Vhost = "/") -> Rows:
    """List the runtime parameters of a vhost."""
    rows = [row for row in api.get("parameters") if row["vhost"] == vhost]
    return Rows(rows, ["component", "name", "value"])


def set_global_parameter(api: Api, name: Name, value: Value) -> None:
    """Set a parameter of the whole broker."""
    body = {"value": json_argument(value, object)}
    api.put("global-parameters", name, body=body)


def clear_global_parameter(api: Api, name: Name) -> None:
    """Clear a parameter of the whole broker."""
    api.delete("global-parameters", name, thing=f"global parameter '{name}'")


def list_global_parameters(api: Api) -> Rows:
    """List the parameters of the whole broker."""
    return Rows(api.get("global-parameters"), ["name", "value"])
