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

from supervisor.cli.api import Rows, connect, show

Url = Annotated[str, typer.Option(help="Of the HTTP API; else of the broker on --data-dir.")]
User = Annotated[str, typer.Option(envvar="SHARDMQ_USER", help="Who asks.")]
Password = Annotated[str, typer.Option(envvar="SHARDMQ_PASSWORD", help="Their password.")]
DataDir = Annotated[Path, typer.Option(help="Data directory of a broker on this host.")]
Formatter = Annotated[str, typer.Option(help="table or json.")]

DEFAULT_DATA_DIR = Path("./data")
ASKING: dict[str, tuple[Any, Any]] = {
    "url": (Url, ""),
    "user": (User, "guest"),
    "password": (Password, "guest"),
    "data_dir": (DataDir, DEFAULT_DATA_DIR),
}
SHOWING: dict[str, tuple[Any, Any]] = {"formatter": (Formatter, "table")}

Command = Callable[..., Any]


def bound(function: Command) -> Command:
    """As typer takes it; a function without `api` is taken as it is."""
    parameters, hints = inspect.signature(function).parameters, get_type_hints(function, include_extras=True)
    if next(iter(parameters), "") != "api":
        return function
    shown = SHOWING if hints["return"] is Rows else {}

    def run(**given: Any) -> None:
        api = connect(**{name: given.pop(name) for name in ASKING})
        how = {name: given.pop(name) for name in shown}
        found = function(api, **given)
        if shown:
            show(found, **how)

    own = [parameter.replace(annotation=hints[name]) for name, parameter in parameters.items() if name != "api"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in {**ASKING, **shown}.items()
    ]
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return run
