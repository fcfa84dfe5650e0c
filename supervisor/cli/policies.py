"""Policies, operator policies, parameters: rabbitmqctl's names and order of arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.api import (
    DEFAULT_DATA_DIR,
    Api,
    DataDir,
    Formatter,
    Password,
    Url,
    User,
    Vhost,
    connect,
    json_argument,
    show,
)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Pattern = Annotated[str, typer.Argument(metavar="PATTERN", help="Regular expression over names.")]
Definition = Annotated[str, typer.Argument(metavar="DEFINITION", help="JSON, such as '{\"max-length\": 1000}'.")]
Priority = Annotated[int, typer.Option(help="The highest one that matches applies.")]
ApplyTo = Annotated[str, typer.Option(help="all, queues, exchanges, classic_queues, quorum_queues or streams.")]
Component = Annotated[str, typer.Argument(metavar="COMPONENT")]
Value = Annotated[str, typer.Argument(metavar="JSON", help="A text needs its own quotes: '\"text\"'.")]

COLUMNS = ["vhost", "name", "pattern", "apply-to", "definition", "priority"]


def set_policy(
    name: Name,
    pattern: Pattern,
    definition: Definition,
    priority: Priority = 0,
    apply_to: ApplyTo = "all",
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set what holds for all queues and exchanges of a pattern, at once."""
    _set(connect(url, user, password, data_dir), "policies", vhost, name, pattern, definition, priority, apply_to)


def clear_policy(
    name: Name,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Clear a policy; what it limited is as it was declared."""
    connect(url, user, password, data_dir).delete("policies", vhost, name, thing=f"policy '{name}'")


def list_policies(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Policies of a vhost."""
    _list(connect(url, user, password, data_dir), "policies", vhost, formatter)


def set_operator_policy(
    name: Name,
    pattern: Pattern,
    definition: Definition,
    priority: Priority = 0,
    apply_to: ApplyTo = "all",
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set a limit that users' policies and arguments cannot exceed."""
    api = connect(url, user, password, data_dir)
    _set(api, "operator-policies", vhost, name, pattern, definition, priority, apply_to)


def clear_operator_policy(
    name: Name,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Clear an operator policy."""
    api = connect(url, user, password, data_dir)
    api.delete("operator-policies", vhost, name, thing=f"operator policy '{name}'")


def list_operator_policies(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Operator policies of a vhost."""
    _list(connect(url, user, password, data_dir), "operator-policies", vhost, formatter)


def _set(
    api: Api, kind: str, vhost: str, name: str, pattern: str, definition: str, priority: int, apply_to: str
) -> None:
    body = {
        "pattern": pattern,
        "definition": json_argument(definition, dict),
        "priority": priority,
        "apply-to": apply_to,
    }
    api.put(kind, vhost, name, body=body)


def _list(api: Api, kind: str, vhost: str, formatter: str) -> None:
    show(api.get(kind, vhost, thing=f"vhost '{vhost}'"), COLUMNS, formatter)


# -- parameters ---------------------------------------------------------------------------------------------


def set_parameter(
    component: Component,
    name: Name,
    value: Value,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set a runtime parameter."""
    body = {"value": json_argument(value, object)}
    connect(url, user, password, data_dir).put("parameters", component, vhost, name, body=body)


def clear_parameter(
    component: Component,
    name: Name,
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Clear a runtime parameter."""
    thing = f"parameter '{name}' of component '{component}'"
    connect(url, user, password, data_dir).delete("parameters", component, vhost, name, thing=thing)


def list_parameters(
    vhost: Vhost = "/",
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Runtime parameters of a vhost."""
    rows = [row for row in connect(url, user, password, data_dir).get("parameters") if row["vhost"] == vhost]
    show(rows, ["component", "name", "value"], formatter)


def set_global_parameter(
    name: Name,
    value: Value,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Set a parameter of the whole broker."""
    body = {"value": json_argument(value, object)}
    connect(url, user, password, data_dir).put("global-parameters", name, body=body)


def clear_global_parameter(
    name: Name,
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Clear a parameter of the whole broker."""
    connect(url, user, password, data_dir).delete("global-parameters", name, thing=f"global parameter '{name}'")


def list_global_parameters(
    url: Url = "",
    user: User = "guest",
    password: Password = "guest",
    data_dir: DataDir = DEFAULT_DATA_DIR,
    formatter: Formatter = "table",
) -> None:
    """Parameters of the whole broker."""
    show(connect(url, user, password, data_dir).get("global-parameters"), ["name", "value"], formatter)
