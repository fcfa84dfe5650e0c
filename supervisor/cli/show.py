"""Rows as people and programs want them: a table, tab-separated lines, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import sys
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from shardmq.supervisor.cli.api import USAGE, Rows, fail

FORMATTERS = ("table", "json", "csv", "pretty_table")
WIDE = 10_000  # columns of a table that goes nowhere in particular


def show(found: Rows, formatter: str = "table", headers: bool = True) -> None:
    """`table` is aligned on a terminal and, like rabbitmqctl's, separated by tabs elsewhere, for programs to cut."""
    check_formatter(formatter)
    if formatter == "json":
        typer.echo(
            json.dumps(
                [{column: row.get(column) for column in found.columns} for row in found.rows]
            )
        )
    elif formatter == "csv":
        typer.echo(_csv(found, headers), nl=False)
    elif formatter == "table" and not sys.stdout.isatty():
        for line in _lines(found, headers):
            typer.echo("\t".join(map(_one_word, line)))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDE)
        console.print(table(found, headers), markup=False)


def table(found: Rows, headers: bool = True) -> Table:
    shown = Table(*found.columns, box=None, header_style="bold", show_header=headers)
    for line in _lines(found, headers=False):
        shown.add_row(*map(_one_word, line))
    return shown


def check_formatter(formatter: str) -> None:
    if formatter not in FORMATTERS:
        fail(
            f"--formatter: {', '.join(FORMATTERS[:-1])} or {FORMATTERS[-1]}, not {formatter}", USAGE
        )


def _csv(found: Rows, headers: bool) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(_lines(found, headers))
    return out.getvalue()


def _lines(found: Rows, headers: bool) -> list[list[str]]:
    head = [list(found.columns)] if headers else []
    return head + [[_cell(row.get(column)) for column in found.columns] for row in found.rows]


def _one_word(cell: str) -> str:
    """A name may have any characters: none makes another column or line, or tells the terminal what to do."""
    return cell if cell.isprintable() else "".join(c if c.isprintable() else " " for c in cell)


def _cell(value: Any) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
