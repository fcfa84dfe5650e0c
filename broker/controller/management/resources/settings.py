"""/api/settings: the settings in effect. Some can be changed here until the next start.

The supervisor owns the settings. It is asked for a change, and tells all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route, with_keys
from shardmq.broker.controller.node_facts import status
from shardmq.supervisor import notify

LEVELS = ("debug", "info", "warning", "error")
BYTES_MAX = 1 << 50


# The check of a value, and what it must be.
Check = tuple[Callable[[Any], bool], str]
_BYTES: Check = (lambda value: type(value) is int and 0 <= value <= BYTES_MAX, "a number of bytes")
SETTABLE: dict[str, Check] = {
    "log_level": (lambda value: value in LEVELS, f"one of {', '.join(LEVELS)}"),
    "shards.disk_free_min_bytes": _BYTES,
    "memory.high_watermark": (
        lambda value: type(value) in (int, float) and 0 <= value <= 1,
        "a part of the memory, 0 to 1",
    ),
    "memory.high_watermark_bytes": _BYTES,
}


async def get(call: Call) -> dict[str, Any]:
    """Return the settings in effect by their keys in the file, with secrets hidden."""
    found: dict[str, Any] = status(call.context.config.runtime_dir).get("settings", {})
    return found


async def get_sources(call: Call) -> dict[str, str]:
    """Return the source of each setting: `default`, `file`, a variable, a flag or `shardctl`."""
    found: dict[str, str] = status(call.context.config.runtime_dir).get("sources", {})
    return found


async def put(call: Call) -> None:
    """Change a setting until the next start; only some can be changed while the broker runs."""
    name = call.part("name")
    if name not in SETTABLE:
        raise not_found(
            f"not to be set while the broker runs: {name}; these are: {', '.join(SETTABLE)}"
        )
    value = with_keys(await call.json(), "value")["value"]
    is_good, what = SETTABLE[name]
    if not is_good(value):
        raise bad_request(f"value must be {what}")
    # For these values JSON is the same as TOML.
    notify.setting(name, msgspec.json.encode(value).decode())


ROUTES = [
    Route("GET", "/api/settings", get, "administrator"),
    Route("GET", "/api/settings/sources", get_sources, "administrator"),
    Route("GET", "/api/config/effective", get, "administrator"),
    Route("PUT", "/api/settings/{name}", put, "administrator"),
]
