"""Compare catalogs, and make copies of them, as a front door does from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardmq.broker.model.catalog import Catalog, binding_key
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ParameterPut,
    PermissionPut,
    TopicPermissionPut,
)


def rebuilt(version: int, changes: Iterable[AnyChange]) -> Catalog:
    """Make the copy that a snapshot describes."""
    catalog = Catalog()
    for change in changes:
        catalog.apply(change)
    catalog.version = version
    return catalog


def state(catalog: Catalog) -> dict[Any, AnyChange]:
    """Return all that is in a catalog, comparable, whatever the order it came in."""
    return {
        (type(change).__name__, getattr(change, "vhost", ""), _identity(change)): change
        for change in catalog.changes()
    }


def _identity(change: Any) -> Any:
    match change:
        case BindingPut():
            return binding_key(change)
        case PermissionPut():
            return change.user
        case TopicPermissionPut():
            return (change.user, change.exchange)
        case ParameterPut():
            return (change.component, change.name)
    return change.name
