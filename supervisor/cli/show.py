"""The output of commands that list rows: a table, tab-separated lines, CSV or JSON.

rich is imported where a terminal needs it: it takes longer to load than most commands.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from shardmq.supervisor.cli.api import USAGE, Rows, fail

FORMATTERS = ("table", "json", "csv", "pretty_table")
WIDE = 10_000  # The columns of a table that does not go to a terminal.


def show(found: Rows, formatter: str = "table", headers: bool = True) -> None:
    """Write rows to standard output.

    On a terminal the formatter `table` aligns the columns. Elsewhere it separates them by tabs, as
    rabbitmqctl does, so that programs can split the lines.

    Args:
        found: The rows and the columns to show.
        formatter: One of FORMATTERS.
        headers: Whether the first line holds the names of the columns.
    """
    check_formatter(formatter)
    if formatter == "json":
        rows = [{column: row.get(column) for column in found.columns} for row in found.rows]
        typer.echo(json.dumps(rows if found.document is None else found.document))
    elif formatter == "csv":
        import csv
        import io

        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(_lines(found, headers))
        typer.echo(out.getvalue(), nl=False)
    elif formatter == "table" and not sys.stdout.isatty():
        for line in _lines(found, headers):
            typer.echo("\t".join(map(_one_word, line)))
    else:
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else WIDE)
        console.print(table(found, headers), markup=False)


def table(found: Rows, headers: bool = True) -> Any:
    """Return rows as a table of rich, to be shown on a terminal."""
    from rich.table import Table

    shown = Table(*found.columns, box=None, header_style="bold", show_header=headers)
    for line in _lines(found, headers=False):
        shown.add_row(*map(_one_word, line))
    return shown


@contextmanager
def progress(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how far a command is.

    Args:
        text: The work in one word.
        total: The number of steps, or None if it is not known. One step is not shown.

    Yields:
        A function to call with the number of steps that were done.
    """
    if total == 1 or not sys.stderr.isatty():
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), TextColumn(text), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=total)
        yield lambda steps: shown.advance(task, steps)


def check_formatter(formatter: str) -> None:
    """End the command with status 64 if there is no such formatter."""
    if formatter not in FORMATTERS:
        choices = f"{', '.join(FORMATTERS[:-1])} or {FORMATTERS[-1]}"
        fail(f"--formatter: {choices}, not {formatter}", USAGE)


def _lines(found: Rows, headers: bool) -> list[list[str]]:
    """Return the cells of each row as text, after a line with the names of the columns."""
    lines = [list(found.columns)] if headers else []
    for row in found.rows:
        cells = []
        for value in map(row.get, found.columns):
            if value is None or value == []:
                cells.append("")
            elif isinstance(value, float):
                cells.append(f"{value:.1f}".removesuffix(".0"))
            else:
                is_json = isinstance(value, bool | dict | list)
                cells.append(json.dumps(value) if is_json else str(value))
        lines.append(cells)
    return lines


def _one_word(cell: str) -> str:
    """Return a cell with every character that is not printable replaced by a space.

    A name may hold any character. None may begin a column or a line, or control the terminal.
    """
    return cell if cell.isprintable() else "".join(c if c.isprintable() else " " for c in cell)
