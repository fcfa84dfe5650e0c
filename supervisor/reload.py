"""The settings that can change while the broker runs, and how a file that is read again is applied.

This module does no I/O.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.supervisor.config import Http, Settings

# A reload applies these keys. The other keys need a restart: sockets, the numbers of processes and
# the layout of the disk are decided at the start.
RUN_TIME = frozenset({
    "log_level", "load_definitions", "listen.proxy_protocol_from", "listen.http_hosts",
    *(f"http.{name}" for name in Http.__struct_fields__),
    "front_doors.heartbeat_s", "front_doors.frame_bytes_max", "front_doors.channels_max",
    "front_doors.channel_consumers_max", "front_doors.message_bytes_max",
    "front_doors.handshake_timeout_s", "front_doors.connections_max",
    "front_doors.channel_max_per_node", "front_doors.spin_us", "shards.spin_us",
    "shards.disk_free_min_bytes", "shards.disk_free_warn_bytes",
    "memory.high_watermark", "memory.high_watermark_bytes",
    "supervision.drain_timeout_s", "supervision.start_timeout_s", "supervision.watchdog_s",
    "tls.cert", "tls.key", "tls.ca", "tls.min_version", "tls.ciphers", "tls.verify",
    "tls.fail_if_no_peer_cert", "tls.login_from", "tls.san_type", "tls.san_index", "tls.sni",
})  # fmt: skip
# `shardctl` can change these settings until the next start. The settings file stays as it is.
SETTABLE = frozenset(
    {
        "log_level",
        "shards.disk_free_min_bytes",
        "memory.high_watermark",
        "memory.high_watermark_bytes",
    }
)


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str], list[str]]:
    """Apply those changes of the settings that a running broker can take.

    Args:
        old: The settings that hold now.
        new: The settings as they were read again.

    Returns:
        The settings that hold from now on, the paths of the keys that have changed, and the paths
        of the keys that change at the next start.
    """
    before, after = flat(old), flat(new)
    differ = [key for key in before if before[key] != after[key]]
    if bool(old.tls.cert) != bool(new.tls.cert):
        # The listeners for TLS are opened at the start, so every change of TLS waits for the next.
        later = [key for key in differ if key not in RUN_TIME or key.startswith("tls.")]
    else:
        later = [key for key in differ if key not in RUN_TIME]
    changed = [key for key in differ if key not in later]
    merged = before | {key: after[key] for key in changed}
    return msgspec.convert(nested(merged), Settings), changed, later


def flat(settings: Settings) -> dict[str, Any]:
    """Return the settings by the paths of their keys: {"log_level": ..., "listen.bind": ...}."""
    found: dict[str, Any] = {}
    for key, value in msgspec.to_builtins(settings).items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return settings by path, as `flat` makes them, as the tables of a settings file."""
    found: dict[str, Any] = {}
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        (found.setdefault(table, {}) if table else found)[name] = value
    return found
