"""Define the messages between the controller and the reader of streams.

They go through RUNTIME_DIR/reader.sock, with one call for each connection:

    controller   u32 length | JSON of a Scan, Find or Publish; behind a Publish (u32 length, bytes)*
                 and a length of 0
    reader       u32 length | JSON of an Answer; after 200 to a Scan:
    controller   DIRECT with a descriptor of the client's socket, or PROXY
    reader       DIRECT: writes the body to that socket, as chunks of HTTP without the last chunk,
                 then DONE here
                 PROXY: (u32 length, bytes)* here, then a length of 0

If a connection ends before DONE or the 0, the body is not complete. All numbers are little endian.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
# The longest JSON in either direction; an answer has a schema and a sample of rows in it.
JSON_BYTES_MAX = 1 << 20
# The largest body of rows that one call publishes.
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
    """Read the offsets [start, stop) of a stream.

    A `start` of None is the first offset of the stream, a `stop` of None its next offset. `queue`
    and `part` are the values of the columns. `since` and `until` are in ms.

    there: the first and the next offset of the stream, as the leader of the shard has said, if a
        node that follows is to read its copy; `start` and `stop` lie within. None: the leader
        reads.
    copy: the name of this copy, which has all that was confirmed when it was asked for.
    """

    vhost: str
    shard: int
    queue_id: int
    queue: str
    part: int
    columns: list[str]
    start: int | None = None
    stop: int | None = None
    pattern: str | None = None  # a pattern of routing keys
    key: str | None = None
    exchange: str | None = None
    since: int | None = None  # ms
    until: int | None = None
    there: tuple[int, int] | None = None
    copy: str = ""


class Find(msgspec.Struct, tag="find", frozen=True):
    """Find the first message that is not older than `timestamp`, to the accuracy of its chunk."""

    vhost: str
    shard: int
    queue_id: int
    timestamp: int  # ms


class Publish(msgspec.Struct, tag="publish", frozen=True):
    """Publish rows as `user`, through the front door at `door`.

    The rows come behind this message as an Arrow IPC stream.
    """

    user: str
    vhost: str
    door: str
    exchange: str
    routing_key: str
    mandatory: bool
    producer: str | None = None
    sequence: int = 0


class Answer(msgspec.Struct, frozen=True):
    """The answer of the reader to one call.

    `status` is an HTTP status. `more` has the members of the JSON answer beside `error` and
    `reason`.
    """

    status: int
    error: str = ""
    reason: str = ""
    more: dict[str, Any] = {}
    begin: bytes = b""  # the begin of the body


# The status of an answer to a scan of a copy that cannot be used: the leader is to be asked.
NO_COPY = 421
Call = Scan | Find | Publish
