"""Run a scan: check its range, answer a refusal, and send its batches to the client."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterable
from types import ModuleType

import msgspec

from shardmq.cluster.records import COPIES_FOLDER
from shardmq.cluster.rules import Held
from shardmq.shardd.directories import (
    held_path,
    shard_directory,
    stream_directory,
    vhost_directory,
)
from shardmq.shardd.reader.buffers import Sender
from shardmq.shardd.reader.ipc import END, batch_head
from shardmq.shardd.reader.pace import Pacer
from shardmq.shardd.store.errors import Corrupt, FormatTooNew
from shardmq.shardd.store.files import OsFiles
from shardmq.shardd.store.format.columns import Columns, Filter
from shardmq.shardd.store.streams.scan import Places, Truncated, find
from shardmq.shardd.store.streams.scan import Scan as StreamScan
from shardmq.shardd.wire import gaps
from shardmq.shardd.wire.board import BoardView, Range, path_of
from shardmq.shardd.wire.reader_protocol import LENGTH, NO_COPY, Answer, Find, Scan

# A batch is small enough to stay in the cache of a core from the writing of its columns to its
# sending.
BATCH_ROWS_MAX = 5_000
BATCH_BYTES_MAX = 1 << 20
# The key of the metadata of an empty batch behind the others, sent if messages in between are lost.
# The value is [[from, to], ...]; `to` is not included.
GAPS = "shardmq.gaps"
NO_ARROW = (
    "pyarrow is not installed where the broker runs: pip install pyarrow, then restart the broker"
)

log = logging.getLogger(__name__)


class Refused(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


class Copy:
    """The copy of a shard at this node, which follows: `name` is that of the copy to be read.

    The node notes in a file beside the copy what the copy is, and changes the note before it
    compares the files with those of another leader. So what was read before `check` is of the copy.
    """

    def __init__(self, shard: int, directory: str, name: str) -> None:
        self.name = name
        # What a scan saw of files that are being compared must not be of use to the next copy.
        self.places = Places()
        self._shard, self._path = shard, held_path(directory)

    def check(self) -> None:
        """Raise Corrupt if the files may be those of another copy by now."""
        try:
            with open(self._path, "rb") as file:
                held = msgspec.json.decode(file.read(), type=Held)
        except (OSError, ValueError) as error:
            raise Corrupt(f"nobody knows what copy of shard {self._shard} it is: {error}") from None
        if not (held.is_whole and self.name and held.copy == self.name):
            raise Corrupt(f"the copy of shard {self._shard} is compared anew")


class Streams:
    """The streams of the shards that this node has, as far as they are on stable storage.

    `shards` are the shards of this node. All others are those of other nodes that it has copies of.
    Several threads may use one object.
    """

    def __init__(self, data_dir: str, runtime_dir: str, shards: Iterable[int]) -> None:
        self._data_dir, self._runtime_dir = data_dir, runtime_dir
        self._shards = frozenset(shards)
        self._boards: dict[int, BoardView] = {}
        self._copies: dict[int, Copy] = {}
        self._lock = threading.Lock()
        self.places = Places()
        self.files = OsFiles()

    def range_of(self, shard: int, queue_id: int) -> Range:
        """Return the range of offsets that a stream holds.

        Raise Refused if the shard has not published the range yet.
        """
        with self._lock:
            if shard not in self._boards:
                self._boards[shard] = BoardView(path_of(self._runtime_dir, shard))
            found = self._boards[shard].range_of(queue_id)
        if found is None:
            raise Refused(
                Answer(503, "unavailable", f"shard {shard} has not said yet what the stream holds")
            )
        return found

    def directory(self, shard: int, vhost: str, queue_id: int) -> str:
        return stream_directory(vhost_directory(self._directory_of(shard), vhost), queue_id)

    def copy(self, shard: int, name: str) -> Copy:
        """Return the copy of a shard at this node, the same one as long as the name is the same."""
        with self._lock:
            found = self._copies.get(shard)
            if found is None or found.name != name:
                found = self._copies[shard] = Copy(shard, self._directory_of(shard), name)
            return found

    def _directory_of(self, shard: int) -> str:
        is_own = shard in self._shards
        data_dir = self._data_dir if is_own else f"{self._data_dir}/{COPIES_FOLDER}"
        return shard_directory(data_dir, shard)

    def tell_gaps(self, shard: int, queue_id: int, found: list[tuple[int, int]]) -> None:
        """Tell the shard about these gaps, so that its numbers count them too."""
        try:
            gaps.tell(
                gaps.path_of(self._runtime_dir, shard), queue_id, [first for first, _ in found]
            )
        except OSError as error:
            log.warning("shard %d is not told of damage: %s", shard, error)

    def find(self, asked: Find) -> Answer:
        there = self.range_of(asked.shard, asked.queue_id)
        directory = self.directory(asked.shard, asked.vhost, asked.queue_id)
        for _ in range(3):  # retention may remove segments meanwhile, again and again
            try:
                offset = find(self.files, directory, asked.timestamp, there.next, self.places)
                return Answer(200, more={"offset": max(offset, there.first)})
            except Truncated:
                there = self.range_of(asked.shard, asked.queue_id)
            except (Corrupt, FormatTooNew) as error:
                raise Refused(Answer(500, "unreadable", str(error))) from None
        raise Refused(Answer(503, "unavailable", "segments of the stream are being taken away"))


class Scanning:
    """A scan, created when its turn comes. Call `begin`, then `run`, then `close`.

    A scan of a copy gives what the leader would give, or is refused with NO_COPY, or is cut off.
    """

    def __init__(self, streams: Streams, asked: Scan) -> None:
        self._asked = asked
        self._streams = streams
        self._copy: Copy | None = None
        if asked.there is None:
            there = streams.range_of(asked.shard, asked.queue_id)
        else:
            self._copy, there = streams.copy(asked.shard, asked.copy), Range(*asked.there)
        self._start, self._stop = bounds(asked, there)
        self._there = there
        arrow = arrow_of()
        self._schema = arrow.schema_of(asked.columns)
        self._columns = Columns(arrow.bits_of(asked.columns), filter_of(asked))
        self._arrays = arrow.arrays_of(asked.columns, self._columns, asked.queue, asked.part)
        directory = streams.directory(asked.shard, asked.vhost, asked.queue_id)
        places = streams.places if self._copy is None else self._copy.places
        self._scan = StreamScan(
            streams.files, directory, self._start, self._stop, self._columns, places
        )

    def begin(self) -> Answer:
        """Read the first batch and return the answer that begins the stream. Raise Refused.

        The first batch is read before the answer, so that a range that retention has removed is
        answered with an error.
        """
        try:
            self._scan.fill(BATCH_ROWS_MAX, BATCH_BYTES_MAX)
            self._check_copy()
        except (Truncated, Corrupt, FormatTooNew) as error:
            raise Refused(self._refusal(error)) from None
        told = {
            "from": self._start,
            "to": self._stop,
            "first": self._there.first,
            "next": self._there.next,
        }
        return Answer(200, more=told, begin=bytes(self._schema.serialize()))

    def _refusal(self, error: Truncated | Corrupt | FormatTooNew) -> Answer:
        if self._copy is not None:
            return Answer(NO_COPY, "no_copy", str(error))
        if not isinstance(error, Truncated):
            return Answer(500, "unreadable", str(error))
        first = self._streams.range_of(self._asked.shard, self._asked.queue_id).first
        return truncated(self._start, Range(max(error.first, first), self._there.next))

    def run(self, client: socket.socket, chunked: bool, pace: Pacer) -> None:
        """Send all batches, then the end of the IPC stream.

        They are sent as chunks of HTTP, or as parts for a proxy. Raise OSError of `client`,
        Truncated or Corrupt. The stream is then cut off. Rows of a copy are sent when it is known
        that they were read from that copy.
        """
        head = batch_head(self._arrays.nodes, self._arrays.buffers)
        timeout_ms = int((client.gettimeout() or 0.0) * 1000)
        sender = Sender(self._arrays, head, client.fileno(), chunked, timeout_ms, pace.unseen_bytes)
        while True:
            if self._columns.rows:
                self._columns.flush(sender)
            pace(sender.take_sent())
            if self._scan.offset >= self._stop:
                break
            sink = sender if self._copy is None else None
            self._scan.fill(BATCH_ROWS_MAX, BATCH_BYTES_MAX, sink)
            self._check_copy()
        if self._scan.gaps:
            self._tell_gaps()
            told = arrow_of().empty_batch(self._schema, {GAPS: json.dumps(self._scan.gaps)})
            client.sendall(as_chunk(told) if chunked else as_part(told))
        client.sendall(as_chunk(END) if chunked else as_part(END))

    def _check_copy(self) -> None:
        """Raise Corrupt if what was read may not be what the leader has."""
        if self._copy is None:
            return
        self._copy.check()
        if self._scan.gaps:
            lost = ", ".join(f"{first} to {stop - 1}" for first, stop in self._scan.gaps)
            log.error(
                "stream %s of vhost %s: the copy at this node is damaged, it lacks the offsets %s",
                self._asked.queue, self._asked.vhost, lost,
            )  # fmt: skip
            raise Corrupt(f"the copy of shard {self._asked.shard} is damaged")

    def _tell_gaps(self) -> None:
        asked, found = self._asked, self._scan.gaps
        where = f"{asked.queue} of vhost {asked.vhost}"
        lost = ", ".join(f"{first} to {stop - 1}" for first, stop in found)
        log.error(
            "stream %s: damaged (%d bytes), messages with the offsets %s are lost",
            where, self._scan.damaged_bytes, lost,
        )  # fmt: skip
        self._streams.tell_gaps(asked.shard, asked.queue_id, found)

    def close(self) -> None:
        self._scan.close()


def bounds(asked: Scan, there: Range) -> tuple[int, int]:
    """Return the range [start, stop) that is asked for. Raise Refused if it is not all there."""
    start = there.first if asked.start is None else asked.start
    stop = there.next if asked.stop is None else asked.stop
    if start < there.first:
        raise Refused(truncated(start, there))
    if start > there.next or stop > there.next or stop < start:
        reason = f"[{start}, {stop}) is not within [{there.first}, {there.next})"
        raise Refused(Answer(416, "range_not_satisfiable", reason, there._asdict()))
    return start, stop


def truncated(start: int, there: Range) -> Answer:
    reason = f"offset {start} is gone, the first that is there is {there.first}"
    return Answer(410, "truncated", reason, there._asdict())


def arrow_of() -> ModuleType:
    try:
        from shardmq.shardd.reader import arrow
    except ImportError:
        raise Refused(Answer(501, "not_implemented", NO_ARROW)) from None
    return arrow


def filter_of(asked: Scan) -> Filter | None:
    texts = {name: getattr(asked, name) for name in ("pattern", "key", "exchange")}
    given = {name: text.encode() for name, text in texts.items() if text is not None}
    if not given and asked.since is None and asked.until is None:
        return None
    until = (1 << 64) - 1 if asked.until is None else asked.until
    return Filter(**given, since=asked.since or 0, until=until)


def as_chunk(data: bytes) -> bytes:
    """Return the data as a chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def as_part(data: bytes) -> bytes:
    """Return the data as a part for a proxy, with its length before it."""
    return LENGTH.pack(len(data)) + data
