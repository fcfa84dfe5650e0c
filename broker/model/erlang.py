"""Values as Erlang prints them, because RabbitMQ's texts show values that way.

Client libraries and test suites compare those texts. A value of an AMQP table and a value of a
JSON document print differently, so there is one function for each.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any, Final

TERM_CHARS_SHOWN: Final = 1_000  # of a value of a JSON document

TYPE_NAMES: Final[tuple[tuple[type, str], ...]] = (
    (bool, "bool"),
    (str, "longstr"),
    (float, "double"),
    (bytes, "binary"),
    (bytearray, "binary"),
    (list, "array"),
    (dict, "table"),
    (datetime.datetime, "timestamp"),
)


def type_name(value: Any) -> str:
    """Return what RabbitMQ calls the type of a field of an AMQP table.

    Integers travel as the smaller of the types I and l that holds them.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return "signedint" if -(1 << 31) <= value < 1 << 31 else "long"
    for python_type, name in TYPE_NAMES:
        if isinstance(value, python_type):
            return name
    return "void"


def erlang_term(value: Any) -> str:
    """Print a value of an AMQP table."""
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'<<"{value}">>' if value else "<<>>"
    if isinstance(value, bytes | bytearray):
        return f"<<{','.join(str(byte) for byte in value)}>>"
    if isinstance(value, list):
        return f"[{','.join(f'{{{type_name(item)},{erlang_term(item)}}}' for item in value)}]"
    if isinstance(value, dict):
        pairs = (
            f'{{<<"{key}">>,{type_name(item)},{erlang_term(item)}}}' for key, item in value.items()
        )
        return f"[{','.join(pairs)}]"
    return str(value)


def json_term(value: Any) -> str:
    """Print a value of a JSON document, cut to TERM_CHARS_SHOWN characters.

    A client can send megabytes. The time to print a value has the same bound as the text.
    """
    text, pieces = "", _json_pieces(value)
    while len(text) <= TERM_CHARS_SHOWN:
        if (piece := next(pieces, None)) is None:
            return text
        text += piece
    return cut(text, TERM_CHARS_SHOWN)


def cut(text: str, chars: int) -> str:
    """Return the text, or its first characters and three dots if it is longer than that."""
    return text if len(text) <= chars else text[:chars] + "..."


def _json_pieces(value: Any) -> Iterator[str]:
    if value is None:
        yield "null"
    elif isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, str):
        yield f'<<"{value}">>'
    elif isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            yield "," if number else ""
            yield from _json_pieces(item)
        yield "]"
    elif isinstance(value, dict):
        yield "#{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{json_term(key)} => "
            yield from _json_pieces(item)
        yield "}"
    else:
        yield str(value)
