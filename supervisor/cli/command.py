"""The options that all commands have which ask a broker.

They say where the broker is, as which user to ask, how long to wait and how to show the answer.

A command is a plain function whose first parameter is `api`. `bound` turns it into a function for
typer, which has these options after those of the command. A command that returns Rows has the
options for the output too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from shardmq.supervisor.cli.api import DEFAULT_PASSWORD, TIMEOUT_S, Api, Rows, connect
from shardmq.supervisor.cli.contexts import Broker, chosen, data_dir_here, flags
from shardmq.supervisor.cli.names import complete_contexts, complete_users
from shardmq.supervisor.cli.passwords import for_login
from shardmq.supervisor.cli.show import check_formatter, show

Url = Annotated[
    str,
    typer.Option(
        envvar="SHARDMQ_URL", help="URL of the HTTP API. Default: the broker on this host."
    ),
]
User = Annotated[
    str,
    typer.Option(envvar="SHARDMQ_USER", help="User name for HTTP.", autocompletion=complete_users),
]
Password = Annotated[
    str | None,
    typer.Option(envvar="SHARDMQ_PASSWORD", help="Password of the user. Default: ask for it."),
]
PasswordFile = Annotated[
    Path | None,
    typer.Option(envvar="SHARDMQ_PASSWORD_FILE", help="File whose first line is the password."),
]
Node = Annotated[
    str,
    typer.Option(
        "--node",
        "-n",
        help="Name of a context: shardctl context. Also a node of this host.",
        autocompletion=complete_contexts,
    ),
]
Context = Annotated[
    str,
    typer.Option(
        "--context",
        "-n",
        help="Name of a context: shardctl context.",
        autocompletion=complete_contexts,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(envvar="SHARDMQ_DATA_DIR", help="Data directory of the broker on this host."),
]
Timeout = Annotated[float, typer.Option("--timeout", "-t", help="Seconds to wait for an answer.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print the result only, as rabbitmqctl does."),
]
Formatter = Annotated[str, typer.Option(help="table, json, csv or pretty_table.")]
Json = Annotated[bool, typer.Option("--json", help="The same as --formatter json.")]
NoHeaders = Annotated[
    bool, typer.Option("--no-table-headers", "--silent", "-s", help="Print the rows only.")
]

ASKING: dict[str, tuple[Any, Any]] = {
    "url": (Url, ""),
    "user": (User, ""),
    "password": (Password, None),
    "password_file": (PasswordFile, None),
    "data_dir": (DataDir, None),
    "node": (Node, ""),
    "timeout": (Timeout, TIMEOUT_S),
}
LOCAL: dict[str, tuple[Any, Any]] = {"node": (Node, "")}
# Of `start`, where --node names a node of a cluster. An early -n comes here by the name `node`.
LOCAL_START: dict[str, tuple[Any, Any]] = {"context": (Context, "")}
QUIET: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False)}
SHOWING: dict[str, tuple[Any, Any]] = {
    "formatter": (Formatter, "table"),
    "as_json": (Json, False),
    "no_table_headers": (NoHeaders, False),
}

Command = Callable[..., Any]


def _api(options: dict[str, Any], by_flag: set[str]) -> Api:
    """Return the broker to ask, by the options ASKING and the names of those that are flags."""
    given = Broker(**{name: options[name] for name in Broker._fields})
    broker = chosen(options["node"], given, by_flag)
    password = for_login(broker.user, broker.password, broker.password_file)
    return connect(
        broker.url,
        broker.user,
        DEFAULT_PASSWORD if password is None else password,
        broker.data_dir,
        options["timeout"],
    )


def bound(function: Command) -> Command:
    """Return a command with the common options, as typer expects it.

    Args:
        function: The command. A function without `api` that has a data directory is for a broker of
            this host, and gets the option --node only. Any other function is returned as it is.
    """
    parameters = inspect.signature(function).parameters
    hints = get_type_hints(function, include_extras=True)
    asks = next(iter(parameters), "") == "api"
    starts = function.__name__ == "start"
    added = ASKING if asks else LOCAL if "data_dir" in parameters else {}
    if starts:
        added = LOCAL_START
    added = added | (SHOWING if hints.get("return") is Rows else {})
    if not added:
        return function
    added = added | (QUIET if asks and "quiet" not in parameters else {})

    def run(typer_context: typer.Context, **given: Any) -> None:
        by_flag = flags(typer_context)
        options = {name: given.pop(name) for name in added}
        check_formatter(options.get("formatter", "table"))
        if asks:
            found = function(_api(options, by_flag), **given)
        elif not starts and "node" not in options:
            found = function(**given)
        else:
            named = options["context" if starts else "node"]
            # A context in use says where a broker runs, not where another one starts.
            if named or not starts:
                given["data_dir"] = data_dir_here(named, given["data_dir"], "data_dir" in by_flag)
            found = function(**given)
        if isinstance(found, Rows):
            formatter = "json" if options["as_json"] else options["formatter"]
            show(found, formatter, not options["no_table_headers"])

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
    common.append(
        inspect.Parameter("typer_context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    )
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    # typer reads the signature and the annotations.
    run.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *common)}
    return run
