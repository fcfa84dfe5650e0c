"""Which settings can be changed while the broker runs, and what a file that was read anew comes to. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from shardmq.supervisor.config import Http, Settings

# The rest takes a restart: sockets, numbers of processes and what lies on the disk are decided once.
RUN_TIME = frozenset({
    "log_level", "load_definitions", "listen.proxy_protocol_from", "listen.http_hosts",
    *(f"http.{name}" for name in Http.__struct_fields__),
    "front_doors.heartbeat_s", "front_doors.frame_bytes_max", "front_doors.channels_max",
    "front_doors.channel_consumers_max", "front_doors.message_bytes_max", "front_doors.handshake_timeout_s",
    "front_doors.connections_max", "front_doors.channel_max_per_node",
    "shards.disk_free_min_bytes", "shards.disk_free_warn_bytes",
    "memory.high_watermark", "memory.high_watermark_bytes",
    "supervision.drain_timeout_s", "supervision.start_timeout_s", "supervision.watchdog_s",
    "tls.cert", "tls.key", "tls.ca", "tls.min_version", "tls.ciphers", "tls.verify", "tls.fail_if_no_peer_cert",
    "tls.login_from", "tls.san_type", "tls.san_index", "tls.sni",
})  # fmt: skip
SECRET = frozenset({"users.default_pass"})  # shown nowhere
# What `shardctl` changes until the next start, without the file: from words, as a flag would.
SETTABLE = frozenset(
    {
        "log_level",
        "shards.disk_free_min_bytes",
        "memory.high_watermark",
        "memory.high_watermark_bytes",
    }
)


def reloaded(old: Settings, new: Settings) -> tuple[Settings, list[str], list[str]]:
    """What holds from now on, the keys that changed, and those that will at the next start."""
    before, after = flat(old), flat(new)
    differ = [key for key in before if before[key] != after[key]]
    if bool(old.tls.cert) != bool(new.tls.cert):  # its listeners are opened at the start
        later = [key for key in differ if key not in RUN_TIME or key.startswith("tls.")]
    else:
        later = [key for key in differ if key not in RUN_TIME]
    changed = [key for key in differ if key not in later]
    merged = before | {key: after[key] for key in changed}
    return msgspec.convert(nested(merged), Settings), changed, later


def flat(settings: Settings) -> dict[str, Any]:
    """By the keys' paths: {"log_level": ..., "listen.bind": ...}."""
    found: dict[str, Any] = {}
    for key, value in msgspec.to_builtins(settings).items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in keys.items():
        table, _, name = key.rpartition(".")
        (found.setdefault(table, {}) if table else found)[name] = value
    return found
