"""The part of a section of the settings that says how a process reaches etcd."""

from __future__ import annotations

import msgspec


class EtcdSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The endpoints of etcd, and the login; `deploy/broker.toml` explains the settings."""

    endpoints: list[str]
    user: str = ""
    password: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
