"""The ends of streams that are not shards of their exchange any more.

A stream that is one too many goes when nothing is in it. A reader that keeps its own offsets
(Spark, over HTTP) then finds the stream gone. It has lost nothing if it had read the stream to the
end that is kept here. The file is JSON, the oldest first, and is written before the stream goes:

    {"format": 1, "streams": [{"vhost", "exchange", "shard", "id", "next"}, ...]}
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.controller.stored.definitions import ENDED_NAME
from shardmq.broker.controller.stored.room import write_whole
from shardmq.broker.controller.streams.stream_ranges import StreamRanges, is_stream
from shardmq.broker.model.changes import QueuePut

FORMAT: Final = 1
# The oldest are forgotten. A reader of such a stream is told that it does not exist any more.
ENDED_MAX: Final = 1000

log = logging.getLogger(__name__)


class Ended(msgspec.Struct, frozen=True):
    """A stream that was a shard; `next` is the offset behind the last message that it ever had."""

    vhost: str
    exchange: str
    shard: int
    id: str
    next: int


class _File(msgspec.Struct, frozen=True):
    format: int
    streams: tuple[Ended, ...]


class EndedStreams:
    """The list of ended streams, and its file.

    write: replaces the file, on stable storage.
    """

    def __init__(
        self,
        ranges: StreamRanges,
        config_now: Callable[[], ControllerConfig],
        write: Callable[[Path, bytes], None] = write_whole,
    ) -> None:
        self._ranges = ranges
        self._config_now = config_now
        self._write = write
        self._streams: tuple[Ended, ...] | None = None

    def of(self, vhost: str, exchange: str) -> list[dict[str, Any]]:
        """Return what is known of the former shards of an exchange, the oldest first."""
        found = [
            ended for ended in self._known() if (ended.vhost, ended.exchange) == (vhost, exchange)
        ]
        return [{"shard": ended.shard, "id": ended.id, "next": ended.next} for ended in found]

    async def note(self, queue: QueuePut) -> bool:
        """Keep where a shard ends that is about to go.

        Returns whether it may go, because its end is known and on stable storage.
        """
        if not is_stream(queue) or queue.part is None:
            return True
        config = self._config_now()
        found = (await self._ranges.of(config, [queue])).get(queue.id)
        if found is None:
            return False
        id_ = self._ranges.id_of(config, queue)
        ended = Ended(queue.vhost, queue.part.exchange, queue.part.index, id_, found.next)
        others = [each for each in self._known() if each.id != id_]
        try:
            streams = (*others, ended)[-ENDED_MAX:]
            text = json.dumps(msgspec.to_builtins(_File(FORMAT, streams)), indent=1) + "\n"
            path = Path(config.data_dir) / ENDED_NAME
            # In a thread, because the disk may be slow, and in a cluster other nodes write it, too.
            await asyncio.to_thread(self._write, path, text.encode())
        except OSError as error:
            log.warning(
                "shard queue '%s' in vhost '%s' stays for now: %s", queue.name, queue.vhost, error
            )
            return False
        self._streams = streams
        return True

    def _known(self) -> tuple[Ended, ...]:
        if self._streams is None:
            self._streams = self._read()
        return self._streams

    def _read(self) -> tuple[Ended, ...]:
        path = Path(self._config_now().data_dir) / ENDED_NAME
        try:
            return msgspec.json.decode(path.read_bytes(), type=_File).streams
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            log.error(
                "%s cannot be read, readers of shards that went are told of a loss: %s", path, error
            )
            return ()
