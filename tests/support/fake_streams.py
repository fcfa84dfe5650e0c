"""The broker's HTTP of streams and Arrow, in memory, with faults on order.

The Spark connector talks to it.

Streams are lists of rows; published rows are kept by queue, once for each producer and sequence, as
queues do it.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa

from pyspark_shardmq.matching import matches
from pyspark_shardmq.schema import COLUMNS, arrow_schema

BATCH_ROWS = 1000


class Shard:
    def __init__(self) -> None:
        self.id, self.first, self.rows = str(uuid.uuid4()), 0, []

    @property
    def next(self) -> int:
        return self.first + len(self.rows)

    def truncate(self, first: int) -> None:
        self.rows, self.first = self.rows[first - self.first :], first


class FakeStreams:
    """A fake of the HTTP API for streams.

    `faults` says how many of the next requests to a path with a text end without an answer, or in
    its middle.
    """

    def __init__(self) -> None:
        self.streams: dict[str, list[Shard]] = {}
        self.exchange_of: dict[str, str] = {}  # of a queue that is a shard of a stream exchange
        self.ended: dict[str, list[dict[str, Any]]] = {}  # shards that are no more, by stream
        self.wrong: dict[str, str] = {}  # names that are of no stream, and why
        self.published: dict[str, list[dict[str, Any]]] = {}
        self.seen: dict[str, int] = {}  # the highest sequence of each producer
        self.bodies: dict[tuple[str, int], bytes] = {}  # by producer and sequence
        self.duplicates = 0
        self.groups: dict[tuple[str, str], dict[int, tuple[str, int]]] = {}  # by stream and group
        self.faults: dict[str, int] = {}
        # offsets [from, to) of any shard that no scan gives
        self.damaged: list[tuple[int, int]] = []
        self.requests: list[str] = []
        self.lock = threading.Lock()

    def declare(self, name: str, shards: int = 1) -> list[Shard]:
        self.streams[name] = [Shard() for _ in range(shards)]
        return self.streams[name]

    def declare_exchange(self, name: str, shards: int) -> list[Shard]:
        """As `declare`; its shards can be read by their own names, too."""
        for i, shard in enumerate(self.declare(name, shards)):
            queue = f"sharding: {name} - {i}"
            self.streams[queue], self.exchange_of[queue] = [shard], name
        return self.streams[name]

    def shrink(self, name: str, count: int) -> None:
        """Shards are taken away: retention has emptied them."""
        kept, gone = self.streams[name][:count], self.streams[name][count:]
        self.streams[name] = kept
        told = [
            {"shard": i, "id": shard.id, "next": shard.next} for i, shard in enumerate(gone, count)
        ]
        self.ended.setdefault(name, []).extend(told)

    def append(self, name: str, count: int, **more: Any) -> None:
        """To the shards in turn; row i has the body "i"."""
        shards = self.streams[name]
        with self.lock:
            total = sum(shard.next for shard in shards)
            for number in range(total, total + count):
                row = {
                    "exchange": name,
                    "routing_key": f"key.{number % 7}",
                    "value": b"%d" % number,
                    "headers": None,
                }
                row |= {"timestamp": 1_700_000_000_000_000 + number * 1000, "properties": None}
                shards[number % len(shards)].rows.append(row | more)

    def takes_fault(self, path: str) -> bool:
        with self.lock:
            for text, left in self.faults.items():
                if text in path and left:
                    self.faults[text] -= 1
                    return True
        return False

    def take(
        self, exchange: str, rows: list[dict[str, Any]], producer: str | None, sequence: int
    ) -> tuple[int, int]:
        """(rows known before, those of them that were others), by their producer's numbers."""
        known = altered = 0
        with self.lock:
            kept = self.published.setdefault(exchange, [])
            for i, row in enumerate(rows):
                if producer is not None and sequence + i <= self.seen.get(producer, -1):
                    self.duplicates += 1
                    known += 1
                    altered += (
                        self.bodies.get((producer, sequence + i), row["value"]) != row["value"]
                    )
                    continue
                if producer is not None:
                    self.seen[producer] = sequence + i
                    self.bodies[producer, sequence + i] = row["value"]
                kept.append(row)
        return known, altered


@contextmanager
def serving(streams: FakeStreams) -> Iterator[str]:
    class Handler(_Handler):
        state = streams

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeStreams
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        parts, query = self._parts()
        self.state.requests.append(self.path)
        if self.state.takes_fault(self.path) and parts[-1] != "arrow":
            self.close_connection = True
            return
        if len(parts) == 2:
            self._json(200, [self._listed(name) for name in self.state.streams])
        elif parts[2] not in self.state.streams:
            reason = self.state.wrong.get(parts[2], f"no stream {parts[2]}")
            self._json(404, {"error": "Object Not Found", "reason": reason})
        elif parts[-1] == "arrow" and int(parts[3]) >= len(self.state.streams[parts[2]]):
            self._json(
                404,
                {"error": "Object Not Found", "reason": f"'{parts[2]}' has no shard {parts[3]}"},
            )
        elif parts[-1] == "arrow":
            self._scan(parts[2], int(parts[3]), query)
        elif parts[-1] == "offset-for-time":
            self._at_time(parts[2], int(query["timestamp"][0]))
        else:
            ended = self.state.ended.get(parts[2], [])
            self._json(200, {"name": parts[2], "shards": self._shards(parts[2]), "ended": ended})

    def do_POST(self) -> None:
        parts, query = self._parts()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        rows = pa.ipc.open_stream(body).read_all().to_pylist()
        producer = query.get("producer", [None])[0]
        if "unroutable" in parts[2]:
            sample = [{"row": 0, "exchange": parts[2], "routing_key": ""}]
            self._json(
                422,
                {
                    "rows": len(rows),
                    "confirmed": len(rows),
                    "unroutable": len(rows),
                    "sample": sample,
                },
            )
            return
        known, altered = self.state.take(parts[2], rows, producer, int(query.get("seq", ["0"])[0]))
        if self.state.takes_fault(self.path):  # taken, and nobody is told
            self.close_connection = True
            return
        said: dict[str, Any] = {"rows": len(rows), "confirmed": len(rows)}
        if producer is not None:
            said |= {"stored": len(rows) - known, "known": known}
        if altered:
            reason = f"producer '{producer}' sent other rows before, by the same numbers"
            said |= {"altered": altered, "error": "conflict", "reason": reason, "sample": []}
        self._json(409 if altered else 200, said)

    def do_PUT(self) -> None:
        parts, _ = self._parts()
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["shards"]
        if self.state.takes_fault(self.path):
            self.close_connection = True
            return
        group = self.state.groups.setdefault((parts[2], parts[4]), {})
        group.update(
            {int(shard): (reached["id"], reached["next"]) for shard, reached in said.items()}
        )
        self.send_response(204)
        self.end_headers()

    def _parts(self) -> tuple[list[str], dict[str, list[str]]]:
        """Return the parts of the path behind /api/, and the query.

        In /api/streams/VHOST/NAME/... NAME is the third part.
        """
        split = urlsplit(self.path)
        return [unquote(part) for part in split.path.split("/")[2:]], parse_qs(split.query)

    def _listed(self, name: str) -> dict[str, Any]:
        shown = {"name": name, "kind": "queue", "shards": len(self.state.streams[name])}
        exchange = self.state.exchange_of.get(name)
        return shown if exchange is None else shown | {"exchange": exchange}

    def _shards(self, name: str) -> list[dict[str, Any]]:
        is_exchange = name in self.state.exchange_of.values()
        return [
            {
                "shard": i,
                "queue": f"sharding: {name} - {i}" if is_exchange else name,
                "id": s.id,
                "first": s.first,
                "next": s.next,
                "state": "running",
            }
            for i, s in enumerate(self.state.streams[name])
        ]

    def _json(self, status: int, found: Any) -> None:
        text = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _at_time(self, name: str, ms: int) -> None:
        shards = {}
        for i, shard in enumerate(self.state.streams[name]):
            later = (
                n for n, row in enumerate(shard.rows, shard.first) if row["timestamp"] >= ms * 1000
            )
            shards[str(i)] = next(later, shard.next)
        self._json(200, {"timestamp": ms, "shards": shards})

    def _scan(self, name: str, index: int, query: dict[str, list[str]]) -> None:
        shard = self.state.streams[name][index]
        start, end = int(query["from"][0]), int(query["to"][0])
        facts = {"first": shard.first, "next": shard.next, "id": shard.id}
        if query.get("id", [shard.id])[0] != shard.id:
            self._json(409, facts)
        elif start < shard.first:
            self._json(410, facts)
        elif not start <= end <= shard.next:
            self._json(416, facts)
        else:
            self._send_rows(name, index, shard, start, end, query)

    def _send_rows(
        self, name: str, index: int, shard: Shard, start: int, end: int, query: dict[str, list[str]]
    ) -> None:
        asked = query["columns"][0].split(",")
        names = [column for column in COLUMNS if column in asked]
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        cut = self.state.takes_fault(self.path)
        lost = {n for low, high in self.state.damaged for n in range(low, high)}
        out = _Chunks(self.wfile)
        with pa.ipc.new_stream(out, arrow_schema(names)) as writer:
            for low in range(start, end, BATCH_ROWS):
                high = min(low + BATCH_ROWS, end)
                rows = [
                    {"queue": name, "shard": index, "offset": n, **shard.rows[n - shard.first]}
                    for n in range(low, high)
                    if n not in lost
                ]
                batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(list(COLUMNS)))
                kept = batch.filter(matches(batch, query.get("filter", [])))
                writer.write_batch(kept.select(names))
                if cut:
                    out.closed = True
                    self.close_connection = True
                    return
            gaps = [
                [max(low, start), min(high, end)]
                for low, high in self.state.damaged
                if low < end and high > start
            ]
            if gaps:
                nothing = pa.RecordBatch.from_pylist([], schema=arrow_schema(names))
                writer.write_batch(nothing, custom_metadata={"shardmq.gaps": json.dumps(gaps)})
        self.wfile.write(b"0\r\n\r\n")


class _Chunks:
    """A file whose writes are the chunks of an HTTP answer."""

    closed = False

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        data = bytes(data)
        if data and not self.closed:
            self._file.write(b"%x\r\n%b\r\n" % (len(data), data))
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        pass
