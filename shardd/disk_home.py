"""Open, recover and remove the stores and streams of a shard on its disk.

`DiskHome` fulfils the protocol `StoreHome` of stores.py.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection

from shardmq.shardd.config import ShardConfig
from shardmq.shardd.damage_log import log_damage, log_later_damage
from shardmq.shardd.directories import stream_directory, vhost_directory
from shardmq.shardd.disk import Calls, WatchedFiles
from shardmq.shardd.remover import Remover
from shardmq.shardd.store.files import Files, OsFiles
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamCache, StreamLog
from shardmq.shardd.store.streams.queue_log import QueueLog, QueueRange, Ranges
from shardmq.shardd.store.streams.segment import SEGMENT_BYTES_MIN
from shardmq.supervisor import notify

log = logging.getLogger(__name__)

# The shortest time between two lines about the progress of a recovery.
PROGRESS_EACH_S = 0.5
VHOST_DIRECTORY = re.compile(r"[0-9a-f]{40}")
STREAM_DIRECTORY = re.compile(r"stream\.([0-9]+)")  # within the directory of a vhost


class DiskHome:
    """The files of a shard: a directory for each vhost, named by the hash of the vhost's name."""

    def __init__(
        self,
        directory: str,
        config: ShardConfig,
        calls: Calls,
        ranges: Ranges | None = None,
        files: Files | None = None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._syncs = config.durability == "fsync"
        self._files = WatchedFiles(files or OsFiles(), calls)
        self._streams = StreamCache(self._files)
        self._ranges = ranges
        self._remover = Remover(self._files)
        self._next_progress = 0.0
        self._opened_at = 0.0  # when the first store was opened, to be recovered
        self._recovery_s = 0.0
        # by vhost, the bytes and messages that the recovery at the start went through
        self._gone_through: dict[str, tuple[int, int]] = {}

    def _path(self, vhost: str) -> str:
        return vhost_directory(self._directory, vhost)

    def _store(self, path: str) -> SegmentStore:
        return SegmentStore(
            path, files=self._files, segment_bytes=self._config.segment_bytes, sync=self._syncs
        )

    def _stream(
        self,
        path: str,
        segment_bytes: int,
        remover: Remover | None = None,
        published: QueueRange | None = None,
    ) -> StreamLog:
        return StreamLog(
            path,
            files=self._files,
            segment_bytes=segment_bytes,
            sync=self._syncs,
            cache=self._streams,
            remover=remover,
            published=published,
        )

    def open(self, vhost: str) -> SegmentStore:
        self._opened_at = self._opened_at or time.monotonic()
        return self._store(self._path(vhost))

    def remove(self, vhost: str) -> None:
        self._remove(self._path(vhost))

    def _remove(self, path: str) -> None:
        """Remove the store of a vhost.

        Files that are not of a store stay, and so does their directory.
        """
        if not os.path.isdir(path):
            return
        try:
            self._remove_streams(path, ())
            self._store(path).delete_all()
            if not os.path.isdir(path):
                log.info("removed %s, of a vhost that is gone", path)
        except OSError as error:  # nobody needs the files: the next start tries again
            log.warning("%s, of a vhost that is gone, stays: %s", path, error)

    def keep_only(self, vhosts: Collection[str]) -> None:
        wanted = {self._path(vhost) for vhost in vhosts}
        for name in os.listdir(self._directory) if os.path.isdir(self._directory) else ():
            path = f"{self._directory}/{name}"
            if VHOST_DIRECTORY.fullmatch(name) and path not in wanted:
                self._remove(path)

    def open_stream(self, vhost: str, queue_id: int, segment_bytes: int) -> QueueLog:
        notify.watchdog()
        path = stream_directory(self._path(vhost), queue_id)
        published = QueueRange(self._ranges, queue_id) if self._ranges is not None else None
        opened = self._stream(path, segment_bytes, self._remover, published)
        opened.recover()
        log_damage(vhost, opened)
        log_later_damage(vhost, opened)
        return QueueLog(opened)

    def keep_only_streams(self, vhost: str, queue_ids: Collection[int]) -> None:
        self._remove_streams(self._path(vhost), queue_ids)

    def _remove_streams(self, path: str, but: Collection[int]) -> None:
        for name in os.listdir(path) if os.path.isdir(path) else ():
            found = STREAM_DIRECTORY.fullmatch(name)
            if found is not None and int(found[1]) not in but:
                self._stream(f"{path}/{name}", SEGMENT_BYTES_MIN).delete_all()
                log.info("removed %s/%s, of a stream that is gone", path, name)

    def recovered(self, vhost: str, store: SegmentStore) -> None:
        self._recovery_s = time.monotonic() - self._opened_at
        log_damage(vhost, store)

    def recovery(self) -> dict[str, float]:
        """Return how long the recovery took at the start, and how much data it went through."""
        gone_through = self._gone_through.values()
        return {
            "recovery_seconds": self._recovery_s,
            "recovered_bytes": sum(size for size, _ in gone_through),
            "recovered_messages": sum(messages for _, messages in gone_through),
        }

    def progress(self, vhost: str, bytes_done: int, bytes_total: int, messages: int) -> None:
        notify.watchdog()
        now = time.monotonic()
        self._gone_through[vhost] = bytes_done, messages
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_EACH_S
            percent = 100 * bytes_done // max(bytes_total, 1)
            line = (
                f"recovering {percent} %: vhost {vhost}, "
                f"{bytes_done / 1e6:.1f} of {bytes_total / 1e6:.1f} MB, {messages:,} messages"
            )
            log.info(line)
            notify.status(line)
