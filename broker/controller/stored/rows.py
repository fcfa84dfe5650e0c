"""The JSON files of definitions: vhosts, users, permissions and parameters, one row for each.

The secrets of parameters are encrypted if there is a key for that (`key_ring.py`).

The changes travel as tagged arrays. In the files they are objects with named fields, so that people
can read and edit them while the broker is down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.controller.stored.key_ring import KeyRing
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)

JsonChange = VhostPut | UserPut | PermissionPut | TopicPermissionPut | ParameterPut

# The kind of row in each file, by its name without ".json".
JSON_FILES: Final[dict[str, type[JsonChange]]] = {
    "vhosts": VhostPut,
    "users": UserPut,
    "permissions": PermissionPut,
    "topic_permissions": TopicPermissionPut,
    "parameters": ParameterPut,
}
# The files that each kind of change may change.
FILES_OF: Final[dict[type, set[str]]] = {
    VhostPut: {"vhosts"},
    VhostDelete: {"vhosts", "permissions", "topic_permissions", "parameters"},
    UserPut: {"users"},
    UserDelete: {"users", "permissions", "topic_permissions", "parameters"},
    PermissionPut: {"permissions"},
    PermissionDelete: {"permissions"},
    TopicPermissionPut: {"topic_permissions"},
    TopicPermissionDelete: {"topic_permissions"},
    ParameterPut: {"parameters"},
    ParameterDelete: {"parameters"},
}


def encode_rows(name: str, catalog: Catalog, keys: KeyRing) -> bytes:
    """Return the content of a file as the catalog has it."""
    puts: dict[str, Any] = {
        "vhosts": [vhost.put for vhost in catalog.vhosts.values()],
        "users": catalog.users.values(),
        "permissions": catalog.permissions.puts.values(),
        "topic_permissions": catalog.permissions.topic_puts,
        "parameters": keys.sealed_all(catalog.parameters.values()) if name == "parameters" else (),
    }
    return _encode([msgspec.structs.asdict(put) for put in puts[name]]) + b"\n"


def row_bytes_max(change: AnyChange, keys: KeyRing) -> int:
    """Return how much a change may add to a file: nothing when it takes something away."""
    if isinstance(change, ParameterPut):
        change = keys.sealed(change)
    return len(_encode([msgspec.structs.asdict(change)])) if isinstance(change, JsonChange) else 0


def _encode(rows: list[dict[str, Any]]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(rows), indent=2)


def read_rows(name: str, path: Path, data: bytes) -> list[JsonChange]:
    """Return the changes in the content `data` of a file. Raises DefinitionsError."""
    try:
        rows = msgspec.json.decode(data, type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise DefinitionsError(f"{path}: {error}") from None
    kind, changes = JSON_FILES[name], []
    for row in rows:
        try:
            # The detour over builtin types checks the types of the fields.
            changes.append(msgspec.convert(msgspec.to_builtins(kind(**row)), kind))
        except (TypeError, msgspec.ValidationError) as error:
            raise DefinitionsError(f"{path}: {row}: {error}") from None
    return changes
