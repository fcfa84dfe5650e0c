"""/api/snapshots: the definitions and messages of this broker, in a directory of its host.

In a cluster each node makes its part, in a directory of the same name on its host.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.stored.snapshot_directory import NoSnapshot

PATH_CHARS_MAX = 3072
PATH = r"^/[^\x00-\x1f\x7f-\x9f]*\Z"  # without control characters, which would be in logs

log = logging.getLogger(__name__)


class SnapshotBody(msgspec.Struct):
    """`directory` is an absolute path at the broker, of an empty directory or of nothing."""

    directory: Annotated[str, msgspec.Meta(min_length=1, max_length=PATH_CHARS_MAX, pattern=PATH)]


async def snapshot(call: Call) -> dict[str, Any]:
    """Make a snapshot of the definitions and messages of this broker in a directory of its host.

    In a cluster each node that runs makes its part, `DIRECTORY/NODE` on its host. Then the answer
    says which shards each part has, and which nodes are away.
    """
    body = await call.body(SnapshotBody)
    if call.context.snapshots is None:
        raise bad_request("no snapshots are made here")
    try:
        made = await call.context.snapshots.make(Path(body.directory))
    except NoSnapshot as error:
        log.error("user '%s' gets no snapshot in %s: %s", call.user.name, body.directory, error)
        raise bad_request(f"no snapshot: {error}") from None
    log.info("user '%s' has made a snapshot in %s", call.user.name, body.directory)
    return {"directory": body.directory, **made}


ROUTES = [Route("POST", "/api/snapshots", snapshot, "administrator", body=SnapshotBody)]
