"""The secrets in the values of parameters: the texts of the keys that are marked `is_secret`.

The tables of keys (`shovels.KEYS`, `federation.KEYS`) say which keys these are. A value may have
been stored when nothing checked it, so texts are looked for wherever such a key may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from shardmq.broker.model import federation, shovels
from shardmq.broker.model.encrypted import is_encrypted
from shardmq.broker.model.parameter_keys import Key


def _secret(keys: Mapping[str, Key]) -> frozenset[str]:
    rows = ((name, row) for name, row in keys.items() if row.is_secret)
    return frozenset(each for name, row in rows for each in (name, row.older) if each)


# By component. The value of a set is a list of tables, the others are tables.
KEYS: Final[Mapping[str, frozenset[str]]] = {
    shovels.SHOVEL: _secret(shovels.KEYS),
    federation.UPSTREAM: _secret(federation.KEYS),
    federation.UPSTREAM_SET: _secret(federation.KEYS),
}


def replaced(component: str, value: Any, replace: Callable[[str], str]) -> Any:
    """Return the value of a parameter with each secret replaced.

    The value itself stays as it is.
    """
    secret = KEYS.get(component)
    if secret is None:
        return value
    if isinstance(value, list):
        return [_in_table(each, secret, replace) for each in value]
    return _in_table(value, secret, replace)


def _in_table(value: Any, secret: frozenset[str], replace: Callable[[str], str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _in_texts(item, replace) if key in secret else item for key, item in value.items()}


def _in_texts(value: Any, replace: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [replace(each) if isinstance(each, str) else each for each in value]
    return replace(value) if isinstance(value, str) else value


def secrets(component: str, value: Any) -> Iterator[str]:
    """Yield each secret in the value of a parameter."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    replaced(component, value, note)
    yield from found


def has_encrypted(component: str, value: Any) -> bool:
    """Return whether one of the secrets cannot be read, because its key is not there."""
    return any(map(is_encrypted, secrets(component, value)))
