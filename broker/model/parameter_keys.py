"""The checks of the keys of parameters whose values are tables: shovels and upstreams.

A check takes the name of a key and its value, and returns "" for a good value, else what is wrong
with the value, in RabbitMQ's words. A table of `Key` rows says which keys a parameter may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from shardmq.broker.model import amqp_uri
from shardmq.broker.model.amqp_uri import BadUri
from shardmq.broker.model.encrypted import is_encrypted
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.erlang import json_term as term
from shardmq.broker.model.values import NAME_BYTES_MAX

PREFETCH_MAX: Final = 65_535  # a short of basic.qos
DELAY_S_MAX: Final = 86_400.0
URIS_MAX: Final = 64

Fault = Callable[[str, Any], str]


class Key(NamedTuple):
    """A key of the value.

    older: the name that the key had before RabbitMQ 3.7.
    is_secret: its texts may hold passwords, and are encrypted in files if there is a key for that.
    """

    fault: Fault
    older: str = ""
    is_needed: bool = False
    is_secret: bool = False


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        return f"{name} should be binary, actually was {term(value)}"
    if len(value.encode()) > NAME_BYTES_MAX:
        return f"{name} has at most {NAME_BYTES_MAX} bytes"
    return ""


def filled(name: str, value: Any) -> str:
    """Check a text that is not empty."""
    return text(name, value) or ("" if value else f"{name} should not be empty")


def flag(name: str, value: Any) -> str:
    is_flag = isinstance(value, bool)
    return "" if is_flag else f"{name} should be boolean, actually was {term(value)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def delay(name: str, value: Any) -> str:
    if not _is_number(value):
        return f"{name} should be a number, actually was {term(value)}"
    return "" if 0 <= value <= DELAY_S_MAX else f"{name} should be from 0 to {DELAY_S_MAX:g}"


def whole(least: int, most: int) -> Fault:
    """Make a check that accepts a whole number from `least` to `most`."""

    def fault(name: str, value: Any) -> str:
        if not _is_number(value) or value != value // 1:
            return f"{name} should be a number, actually was {term(value)}"
        return "" if least <= value <= most else f"{name} should be from {least} to {most}"

    return fault


prefetch: Final = whole(0, PREFETCH_MAX)


def one_of(*known: str) -> Fault:
    def fault(name: str, value: Any) -> str:
        if isinstance(value, str) and value in known:
            return ""
        shown = cut(value, NAME_BYTES_MAX) if isinstance(value, str) else term(value)
        return f"{name} should be one of [{','.join(known)}], actually was {shown}"

    return fault


def table(name: str, value: Any) -> str:
    is_table = isinstance(value, dict) or value == []
    return "" if is_table else f"{name} should be a table, actually was {term(value)}"


def uris(name: str, value: Any) -> str:
    """Check one URI of a broker, or a list of them. An encrypted one cannot be looked at."""
    if isinstance(value, list):
        if not 0 < len(value) <= URIS_MAX:
            return f"{name} should have 1 to {URIS_MAX} URIs"
        faults = (
            f"{name} should be binary, actually was {term(each)}"
            if isinstance(each, list)
            else uris(name, each)
            for each in value
        )
        return next(filter(None, faults), "")
    if not isinstance(value, str):
        return f"{name} should be binary, actually was {term(value)}"
    if is_encrypted(value):
        return ""
    try:
        amqp_uri.parse(value)
    except BadUri as error:
        shown = cut(amqp_uri.without_credentials(value), NAME_BYTES_MAX)
        return f'"{shown}" not a valid URI: {error}'
    return ""


def faults(name: str, value: Mapping[str, Any], keys: Mapping[str, Key]) -> Iterator[str]:
    """Yield what is wrong with the table that is the value of the parameter `name`."""
    known: set[str] = set()
    for key, row in keys.items():
        names = (key, row.older) if row.older else (key,)
        known.update(names)
        given = [each for each in names if each in value]
        if row.is_needed and not given:
            yield f'Key "{key}" not found in {name}'
        for each in given:
            if fault := row.fault(each, value[each]):
                yield fault
    unknown = {key: item for key, item in sorted(value.items()) if key not in known}
    if unknown:
        shown = ",".join(
            f'{{<<"{cut(key, NAME_BYTES_MAX)}">>,{term(unknown[key])}}}'
            for key in list(unknown)[:URIS_MAX]
        )
        yield f"Unrecognised terms [{shown}] in {name}"
