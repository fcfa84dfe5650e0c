"""What the controller and the reader of streams say to each other, through RUNTIME_DIR/reader.sock. One call for each
connection:

    controller   u32 length | JSON of a Scan, Find or Publish; behind that (u32 length, bytes)* and a length of 0
    reader       u32 length | JSON of an Answer; after 200 to a Scan:
    controller   DIRECT with a descriptor of the client's socket, or PROXY
    reader       DIRECT: writes what follows to that socket, as chunks of HTTP but for the last one, then DONE here
                 PROXY: (u32 length, bytes)* here, then a length of 0

A connection that ends before DONE or the 0 means that what was written is not all. All numbers are little endian.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
# Of the JSON, either way; an answer has a schema and a sample of rows in it.
JSON_BYTES_MAX = 1 << 20
# Of the rows to be published by one call.
BODY_BYTES_MAX = 64 << 20
DIRECT, PROXY, DONE = b"D", b"P", b"."
COLUMNS = (
    "queue",
    "shard",
    "offset",
    "timestamp",
    "exchange",
    "routing_key",
    "value",
    "headers",
    "properties",
)


def socket_path(runtime_dir: str) -> str:
    return f"{runtime_dir}/reader.sock"


class Scan(msgspec.Struct, tag="scan", frozen=True):
    """Offsets [start, stop) of a stream; None: its first, its next. `queue` and `part` are what the columns say."""

    vhost: str
    shard: int
    queue_id: int
    queue: str
    part: int
    columns: list[str]
    start: int | None = None
    stop: int | None = None
    pattern: str | None = None  # of the routing key
    key: str | None = None
    exchange: str | None = None
    since: int | None = None  # ms
    until: int | None = None


class Find(msgspec.Struct, tag="find", frozen=True):
    """The first message not older, as near as its chunk."""

    vhost: str
    shard: int
    queue_id: int
    timestamp: int  # ms


class Publish(msgspec.Struct, tag="publish", frozen=True):
    """What comes behind it is an Arrow IPC stream: publish its rows as `user`, by the front door at `door`."""

    user: str
    vhost: str
    door: str
    exchange: str
    routing_key: str
    mandatory: bool
    producer: str | None = None
    sequence: int = 0


class Answer(msgspec.Struct, frozen=True):
    """`status` as HTTP has it; `more`: what the JSON of the answer says beside `error` and `reason`."""

    status: int
    error: str = ""
    reason: str = ""
    more: dict[str, Any] = {}
    begin: bytes = b""  # of the body


Call = Scan | Find | Publish
