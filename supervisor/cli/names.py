"""Arguments and options that name an object of the broker, with their completion in a shell.

A completion asks the broker that the command line names, as the command itself would. It asks
nobody for a password, waits for a second at the most, and offers nothing if it gets no answer.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import DEFAULT_PASSWORD, connect
from shardmq.supervisor.cli.columns import COLUMNS, KINDS
from shardmq.supervisor.cli.contexts import Broker, chosen, flags, read
from shardmq.supervisor.cli.passwords import password_in

WAIT_S_MAX = 1.0
ROWS_MAX = 500  # The rows that the HTTP API gives in one page.
WITHOUT_PAGES = ("vhosts", "users", "streams")
# As the broker has them; a completion does not load its modules.
QUEUE_TYPES = ("classic", "quorum", "stream")
EXCHANGE_TYPES = (
    "direct", "fanout", "topic", "headers", "x-consistent-hash", "x-modulus-hash",
    "x-local-random", "x-random", "x-delayed-message", "x-recent-history",
)  # fmt: skip


def offered(context: typer.Context, incomplete: str, kind: str, in_vhost: bool) -> list[str]:
    """Return the names of objects that begin like the word at the cursor.

    Args:
        context: What stands before the cursor.
        incomplete: The word at the cursor.
        kind: The kind, as in the paths of the HTTP API.
        in_vhost: Whether the objects are those of a vhost.
    """
    given = dict(context.params)
    early = context.find_root().params
    file = given.get("password_file")
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(typer.Exit, OSError):
        data_dir = given.get("data_dir")
        broker = chosen(
            given.get("node") or early.get("named") or "",
            Broker(
                given.get("url") or "",
                given.get("user") or "",
                given.get("password"),
                Path(file) if file else None,
                Path(data_dir) if data_dir else None,
            ),
            flags(context),
        )
        password = broker.password
        if password is None and broker.password_file is not None:
            password = password_in(broker.password_file)
        password = DEFAULT_PASSWORD if password is None else password
        api = connect(broker.url, broker.user, password, broker.data_dir, WAIT_S_MAX)
        vhost = early.get("vhost") or given.get("vhost") or "/"
        path = [kind, vhost] if in_vhost else [kind]
        if kind in WITHOUT_PAGES:
            rows = api.get(*path)
            rows = [row for row in rows if kind != "streams" or row["vhost"] == vhost]
        else:
            # The broker filters, so that thousands of queues cost one page.
            like = {"name": f"^{re.escape(incomplete)}", "use_regex": "true"} if incomplete else {}
            page = {"page": "1", "page_size": str(ROWS_MAX), "columns": "name"}
            rows = api.get(*path, **page, **like)["items"]
        return [row["name"] for row in rows if row["name"].startswith(incomplete) and row["name"]]
    return []


def complete_queues(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the queues of the vhost."""
    return offered(context, incomplete, "queues", True)


def complete_exchanges(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the exchanges of the vhost."""
    return offered(context, incomplete, "exchanges", True)


def complete_streams(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the streams of the vhost, and exchanges whose shards are streams."""
    return offered(context, incomplete, "streams", False)


def complete_vhosts(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the vhosts."""
    return offered(context, incomplete, "vhosts", False)


def complete_users(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the users."""
    return offered(context, incomplete, "users", False)


def complete_contexts(incomplete: str) -> list[str]:
    """Offer the contexts."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(typer.Exit):
        return [name for name in read()["contexts"] if name.startswith(incomplete)]
    return []


def complete_queue_types(incomplete: str) -> list[str]:
    """Offer the types of queues."""
    return [name for name in QUEUE_TYPES if name.startswith(incomplete)]


def complete_exchange_types(incomplete: str) -> list[str]:
    """Offer the types of exchanges."""
    return [name for name in EXCHANGE_TYPES if name.startswith(incomplete)]


def complete_columns(context: typer.Context, incomplete: str) -> list[str]:
    """Offer the columns of the command that are not given yet."""
    known = COLUMNS[KINDS[str(context.info_name)]].split()
    given: Any = context.params.get("columns") or ()
    return [name for name in known if name.startswith(incomplete) and name not in given]


Vhost = Annotated[
    str,
    typer.Option("--vhost", "-p", help="Virtual host.", autocompletion=complete_vhosts),
]
VhostName = Annotated[str, typer.Argument(metavar="VHOST", autocompletion=complete_vhosts)]
Username = Annotated[str, typer.Argument(metavar="USERNAME", autocompletion=complete_users)]
Queue = Annotated[str, typer.Argument(metavar="QUEUE", autocompletion=complete_queues)]
Exchange = Annotated[str, typer.Argument(metavar="EXCHANGE", autocompletion=complete_exchanges)]
Stream = Annotated[
    str,
    typer.Argument(
        metavar="STREAM",
        help="A stream, or an exchange whose shards are streams.",
        autocompletion=complete_streams,
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Argument(
        help="Columns to show, such as name. An unknown column is refused with a list of all.",
        autocompletion=complete_columns,
    ),
]
ContextName = Annotated[str, typer.Argument(metavar="NAME", autocompletion=complete_contexts)]
