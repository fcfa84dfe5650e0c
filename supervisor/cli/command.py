"""What all commands that ask a broker have in common: where it is, who asks, how long to wait, how the answer is shown.

A command is a plain function whose first parameter is the `api`; `bound` makes of it what typer takes, with those
options behind its own. One that returns Rows also gets the options of how to show them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from shardmq.supervisor.cli.api import TIMEOUT_S, Rows, connect
from shardmq.supervisor.cli.show import check_formatter, show

Url = Annotated[
    str, typer.Option(envvar="SHARDMQ_URL", help="Of the HTTP API; else the broker on this host.")
]
User = Annotated[str, typer.Option(envvar="SHARDMQ_USER", help="Who asks, by HTTP.")]
Password = Annotated[str, typer.Option(envvar="SHARDMQ_PASSWORD", help="Their password.")]
DataDir = Annotated[
    Path | None, typer.Option(envvar="SHARDMQ_DATA_DIR", help="Of the broker on this host.")
]
Timeout = Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait for an answer.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Nothing but what was asked for; as rabbitmqctl knows it."),
]
Formatter = Annotated[str, typer.Option(help="table, json, csv or pretty_table.")]
NoHeaders = Annotated[
    bool, typer.Option("--no-table-headers", "--silent", "-s", help="Rows alone.")
]

ASKING: dict[str, tuple[Any, Any]] = {
    "url": (Url, ""),
    "user": (User, ""),
    "password": (Password, "guest"),
    "data_dir": (DataDir, None),
    "timeout": (Timeout, TIMEOUT_S),
}
QUIET: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False)}
SHOWING: dict[str, tuple[Any, Any]] = {
    "formatter": (Formatter, "table"),
    "no_table_headers": (NoHeaders, False),
}

Command = Callable[..., Any]


def bound(function: Command) -> Command:
    """As typer takes it; a function without `api` is taken as it is."""
    parameters, hints = (
        inspect.signature(function).parameters,
        get_type_hints(function, include_extras=True),
    )
    if next(iter(parameters), "") != "api":
        return function
    added = ASKING | (SHOWING if hints["return"] is Rows else {})
    added |= {} if "quiet" in parameters else QUIET

    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in added}
        check_formatter(options.get("formatter", "table"))
        found = function(connect(**{name: options[name] for name in ASKING}), **given)
        if isinstance(found, Rows):
            show(found, options["formatter"], not options["no_table_headers"])

    own = [
        parameter.replace(annotation=hints[name])
        for name, parameter in parameters.items()
        if name != "api"
    ]
    common = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
        )
        for name, (annotation, default) in added.items()
    ]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *common)}
    return run
