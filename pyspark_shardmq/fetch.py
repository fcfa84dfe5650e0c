"""The broker over HTTP: list streams, read their rows as Arrow, publish batches of rows.

A `Broker` holds at most one connection and belongs to one thread. Troubles that may be over soon (a
connection that breaks, a shard that restarts, too many scans at once) are tried again, `retries`
times in a row; each wait is twice the last one, up to RETRY_WAIT_MAX_S. A scan that was cut off
goes on behind the last row it gave. Every other trouble is an error at once.

In a cluster the node that is asked for rows sends the scan to the node that has them (307). A
connection of its own goes there for one scan. Only nodes that the asked node lists are believed,
and they get no password: the URL says what may be read.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from pyspark_shardmq.offsets import DataLoss, Position, Range, ShardState
from pyspark_shardmq.options import Connection

if TYPE_CHECKING:
    import pyarrow as pa

RETRY_WAIT_MAX_S = 5.0
ANSWER_BYTES_MAX = 64 << 20  # the most that is read of an answer in JSON
# The most bytes of rows that one system call receives. Many kernels do not preempt a system call:
# to copy a whole batch into memory that was never touched keeps the processor for a millisecond
# or two, for which other processes of the host have to wait.
RECEIVE_BYTES_MAX = 64 << 10
# A node may send a scan to one that follows, and that one to the node that leads.
HOPS_MAX = 2
WAIT_MAX_MS = 30_000  # the longest that the broker lets a request wait for new rows


# The key of lost offsets in the metadata of an empty batch behind the rows: [[from, to], ...],
# where `to` is exclusive.
GAPS = b"shardmq.gaps"
Gap = tuple[int, int]


class BrokerError(RuntimeError):
    """The broker refused, or cannot be reached."""


class Transient(BrokerError):
    """The request failed for a reason that may be over soon; it is worth another try."""


class Untrusted(BrokerError):
    """The certificate is not accepted or TLS does not work; the request is not tried again."""


class StreamGone(DataLoss):
    """The stream of that id does not exist any more."""


class RowsExpired(DataLoss):
    """Retention has removed the rows before `first` from the log."""

    def __init__(self, one: Range, at: int, first: int) -> None:
        super().__init__(
            f"{one.queue}/{one.shard} has lost offsets {at} to {first - 1} to retention; "
            f"it begins at {first}"
        )
        self.first = first


class Damaged(DataLoss):
    """Rows within the log cannot be read, because the broker's files are damaged.

    All other rows of the range were given before this is raised.
    """

    def __init__(self, one: Range, gaps: Sequence[Gap]) -> None:
        lost = ", ".join(f"{start} to {end - 1}" for start, end in gaps)
        super().__init__(
            f"{one.queue}/{one.shard} has lost offsets {lost} to damage in the broker's files"
        )


class Published(NamedTuple):
    """The result of a publish, in which all rows were confirmed.

    known: how many rows a queue already had of the same producer; None where the rows have no
    producer, since the broker cannot tell then.
    """

    rows: int
    known: int | None


class StreamFacts(NamedTuple):
    """The state of a queue or stream exchange.

    ended: by the id of each stream that is no shard of the exchange any more, the offset behind its
    last row. queues: the names of the queues that are its shards.
    """

    shards: list[ShardState]
    ended: dict[str, int]
    queues: frozenset[str]


class Broker:
    """The HTTP API of one broker. Methods raise BrokerError where the broker refuses or is away."""

    def __init__(self, connection: Connection) -> None:
        self._settings = connection
        self._at = 0  # counts addresses: after each failed connection the next URL is used
        self._http: http.client.HTTPConnection | None = None
        self._nodes: frozenset[str] = frozenset()  # URLs of the nodes that scans may be sent to

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    # -- streams and positions ---------------------------------------------------------------------

    def names(self) -> dict[str, str | None]:
        """Return the streams and stream exchanges of the virtual host that the user may read.

        A queue that is a shard of a stream exchange has that exchange as its value, others None.
        """
        return {
            stream["name"]: stream.get("exchange")
            for stream in self._json("GET", self._path("streams"))
        }

    def inspect(
        self, name: str, after: Mapping[int, int] | None = None, wait_ms: int = 0
    ) -> StreamFacts:
        """Return the state of a queue or stream exchange.

        With `after` (offsets by shard) and `wait_ms`, the broker answers when a shard has rows at
        or behind its offset, when there is a shard that `after` lacks, or when the time is up.
        """
        query = {}
        if after is not None and wait_ms:
            query = {
                "after": ",".join(f"{s}:{n}" for s, n in sorted(after.items())),
                "wait_ms": str(min(wait_ms, WAIT_MAX_MS)),
            }
        found: StreamFacts = self._with_retries(lambda: self._inspect_once(name, query))
        return found

    def _inspect_once(self, name: str, query: dict[str, str]) -> StreamFacts:
        found = self._json_once("GET", self._path("streams", name), query)
        for shard in found["shards"]:
            if shard["next"] is None:
                raise Transient(f"shard {shard['shard']} of {name} is {shard['state']}")
        return StreamFacts(
            [ShardState(name, s["shard"], s["id"], s["first"], s["next"]) for s in found["shards"]],
            {ended["id"]: ended["next"] for ended in found.get("ended", [])},
            frozenset(s["queue"] for s in found["shards"]),
        )

    def offsets_at(self, name: str, time_ms: int) -> dict[int, int]:
        """Return by shard the offset of the first row that is not older than the time.

        Where all rows of a shard are older this is the offset behind its last row.
        """
        found = self._json(
            "GET", self._path("streams", name, "offset-for-time"), {"timestamp": str(time_ms)}
        )
        return {int(shard): offset for shard, offset in found["shards"].items()}

    def report_position(self, name: str, group: str, positions: Mapping[int, Position]) -> None:
        """Tell the broker by shard which row the readers of a group read next.

        This is tried only once, because the next call reports the positions anew.
        """
        shards = {
            str(shard): {"id": position.id, "next": position.next}
            for shard, position in positions.items()
        }
        body = json.dumps({"shards": shards}).encode()
        with self._answer(
            "PUT", self._path("streams", name, "groups", group), [], body, "application/json"
        ) as answer:
            text = _read(answer)
            if answer.status not in (200, 201, 204):
                raise _refusal("PUT", f"/api/streams/.../{name}/groups/{group}", answer, text)

    # -- rows out ----------------------------------------------------------------------------------

    def scan(
        self,
        one: Range,
        columns: Sequence[str],
        filters: Sequence[str] = (),
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a range in order, each once, with `offset` among their columns.

        Raises RowsExpired where the log begins behind the range's start, StreamGone where the
        stream does not exist any more, DataLoss where the log ends too early, and Damaged behind
        the last row where rows in between cannot be read. With fail_on_data_loss=False the rows
        that are there are given, and a line on standard error names each other loss than that of
        rows that retention took.
        """
        at = begun = one.start
        failures = 0
        gaps: list[Gap] = []
        asked = [*columns, *(["offset"] if "offset" not in columns else [])]
        while at < one.end:
            begun = at
            try:
                for batch in self._scan_once(one, at, asked, filters, gaps):
                    if batch.num_rows:
                        at = batch.column(batch.schema.get_field_index("offset"))[-1].as_py() + 1
                        failures = 0
                        yield batch
                break
            except RowsExpired as gone:
                if fail_on_data_loss:
                    raise
                at = gone.first
            except DataLoss as loss:
                if fail_on_data_loss:
                    raise
                print(f"shardmq: {loss}", file=sys.stderr)
                return
            except Transient as trouble:
                failures += 1
                self._wait(failures, trouble)
        if begun > one.start:  # gaps come last, so an answer that was cut off has not told its own
            gaps = self._gaps(replace(one, end=begun), filters) + gaps
        if gaps and fail_on_data_loss:
            raise Damaged(one, gaps)
        if gaps:
            print(f"shardmq: {Damaged(one, gaps)}", file=sys.stderr)

    def _gaps(self, one: Range, filters: Sequence[str]) -> list[Gap]:
        """Read the range once more to learn its gaps; none if retention has removed the range."""

        def once() -> list[Gap]:
            found: list[Gap] = []
            for _ in self._scan_once(one, one.start, ["offset"], filters, found):
                pass
            return found

        try:
            return list(self._with_retries(once))
        except DataLoss:
            return []

    def _scan_once(
        self, one: Range, at: int, columns: Sequence[str], filters: Sequence[str], gaps: list[Gap]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows from `at` on from one answer; add the lost offsets it names to `gaps`."""
        import pyarrow as pa

        query = [
            ("from", str(at)),
            ("to", str(one.end)),
            ("id", one.id),
            ("columns", ",".join(columns)),
        ]
        query += [("filter", text) for text in filters]
        is_complete = False
        with self._rows(one, query) as answer:
            _check_scan(one, at, answer)
            try:
                for batch, told in pa.ipc.open_stream(
                    AnswerBytes(answer)
                ).iter_batches_with_custom_metadata():
                    if told is not None and GAPS in told:
                        gaps += [
                            (max(start, at), min(end, one.end))
                            for start, end in json.loads(told[GAPS])
                        ]
                    yield batch
                answer.read()  # read the end of the body; raises if the answer was cut off
                is_complete = True
            except (pa.ArrowInvalid, OSError, http.client.HTTPException) as cut:
                raise Transient(f"a scan of {one.queue}/{one.shard} was cut off: {cut!r}") from None
            finally:
                if not is_complete:
                    self.close()

    @contextmanager
    def _rows(self, one: Range, query: list[tuple[str, str]]) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a scan, of the node that was asked or of the one it sends us to.

        A node that follows, and lacks rows by then, sends us on to the one that leads.
        """
        path = self._path("streams", one.queue, str(one.shard), "arrow")
        with self._answer("GET", path, query) as answer:
            if answer.status != 307:
                yield answer
                return
            _read(answer)
        location = answer.getheader("Location", "")
        for left in reversed(range(HOPS_MAX)):
            with self._rows_at(one, location) as answer:
                if answer.status != 307 or not left:
                    yield answer
                    return
                _read(answer)
            location = answer.getheader("Location", "")

    @contextmanager
    def _rows_at(self, one: Range, location: str) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer of a node that another one has sent us to."""
        url, target = _divided(location)
        if url not in self._nodes:
            found = self._json_once("GET", self._path("streams", one.queue), {})
            self._nodes = frozenset(url for urls in found.get("nodes", {}).values() for url in urls)
        if url not in self._nodes or urlsplit(url).scheme != urlsplit(self._url()).scheme:
            raise BrokerError(
                f"{self._url()} sends a scan to {url}, which is no node that it lists: not followed"
            )
        connection = self._connection_to(url)
        try:
            try:
                connection.request("GET", target)
                answer = connection.getresponse()
            except (OSError, http.client.HTTPException) as broken:
                raise _failure(url, broken) from None
            if answer.status in (401, 404):  # the ticket is too old, or the node starts
                raise Transient(f"{url} does not know what it was to give: {answer.status}")
            yield answer
        finally:
            connection.close()

    # -- rows in -----------------------------------------------------------------------------------

    def publish(
        self,
        exchange: str,
        rows: pa.RecordBatch,
        *,
        routing_key: str | None = None,
        mandatory: bool = True,
        producer: str | None = None,
        sequence: int = 0,
    ) -> Published:
        """Publish the rows and return when all of them are confirmed.

        Row i has the sequence number `sequence` + i of `producer`. A BrokerError says that rows
        went to no queue (with `mandatory`), or that a row differs from the stored row of the same
        sequence number.
        """
        query = {"mandatory": str(mandatory).lower()}
        if routing_key is not None:
            query["routing_key"] = routing_key
        if producer is not None:
            query |= {"producer": producer, "seq": str(sequence)}
        body = as_stream(rows)
        path = self._path("exchanges", exchange or "amq.default", "arrow")
        answer = self._json("POST", path, query, body)
        return Published(int(answer["confirmed"]), answer.get("known"))

    # -- one request -------------------------------------------------------------------------------

    def _path(self, kind: str, *names: str) -> str:
        return "/".join(
            ["/api", kind, *(quote(name, safe="") for name in (self._settings.vhost, *names))]
        )

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Any:
        return self._with_retries(lambda: self._json_once(method, path, query or {}, body))

    def _json_once(
        self, method: str, path: str, query: Mapping[str, str], body: bytes | None = None
    ) -> Any:
        with self._answer(method, path, list(query.items()), body) as answer:
            text = _read(answer)
            if answer.status == 200:
                return json.loads(text)
            raise _refusal(method, path, answer, text)

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: bytes | None = None,
        content_type: str = "application/vnd.apache.arrow.stream",
    ) -> Iterator[http.client.HTTPResponse]:
        target = f"{path}?{urlencode(query)}" if query else path
        headers = {"Authorization": "Basic " + self._credentials()}
        if body is not None:
            headers["Content-Type"] = content_type
        connection = self._connected()
        try:
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as broken:
            asked = self._url()
            self.close()
            self._at += 1
            raise _failure(asked, broken) from None
        yield answer

    def _credentials(self) -> str:
        return base64.b64encode(
            f"{self._settings.user}:{self._settings.password}".encode()
        ).decode()

    def _url(self) -> str:
        return self._settings.urls[self._at % len(self._settings.urls)]

    def _connected(self) -> http.client.HTTPConnection:
        if self._http is None:
            self._http = self._connection_to(self._url())
        return self._http

    def _connection_to(self, url: str) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        assert parts.hostname is not None
        return kind(parts.hostname, parts.port, timeout=self._settings.timeout_ms / 1000)

    def _with_retries(self, ask: Any) -> Any:
        failures = 0
        while True:
            try:
                return ask()
            except Transient as trouble:
                failures += 1
                self._wait(failures, trouble)

    def _wait(self, failures: int, trouble: Transient) -> None:
        if failures > self._settings.retries:
            raise BrokerError(f"tried {failures} times: {trouble}") from None
        time.sleep(min(self._settings.retry_wait_ms / 1000 * 2 ** (failures - 1), RETRY_WAIT_MAX_S))


class AnswerBytes:
    """The body of an answer as a file for Arrow, received in pieces of RECEIVE_BYTES_MAX."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def read(self, count: int) -> bytes | pa.Buffer:
        """Return `count` bytes, or fewer at the end of the body. Raises the errors of HTTP."""
        import pyarrow as pa

        if count <= RECEIVE_BYTES_MAX:
            return self._answer.read(count)
        buffer = pa.allocate_buffer(count)
        with memoryview(buffer) as view:
            done = 0
            while done < count and (
                got := self._answer.readinto(view[done : done + RECEIVE_BYTES_MAX])
            ):
                done += got
        return buffer if done == count else buffer.slice(0, done)

    def close(self) -> None:
        self.closed = True


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        text = answer.read(ANSWER_BYTES_MAX)
        answer.read()  # so that the connection can be used again
    except (OSError, http.client.HTTPException) as broken:
        raise Transient(f"an answer was cut off: {broken!r}") from None
    return text


def _divided(location: str) -> tuple[str, str]:
    """Return a location as the URL of a server and the target of a request to it."""
    scheme, _, rest = location.partition("://")
    server, slash, target = rest.partition("/")
    return f"{scheme}://{server}", slash + target


def _json_object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _failure(url: str, broken: OSError | http.client.HTTPException) -> BrokerError:
    """Return the error for a connection that broke; Transient if it may work again soon."""
    if isinstance(broken, ssl.SSLCertVerificationError):
        return Untrusted(f"{url}: the certificate is not accepted: {broken.verify_message}")
    if isinstance(broken, ssl.SSLError) and not isinstance(broken, CUT_OFF_TLS):
        return Untrusted(f"{url}: no TLS connection: {broken.reason or broken}")
    if isinstance(broken, http.client.BadStatusLine) and not isinstance(
        broken, http.client.RemoteDisconnected
    ):
        return BrokerError(
            f"{url}: what answers there does not speak HTTP: {str(broken)[:SHOWN_MAX]}"
        )
    if isinstance(broken, http.client.InvalidURL):
        return BrokerError(f"{url}: {broken}")
    return Transient(f"{url}: {broken!r}")


# Errors of TLS that only say that the connection ended; they are handled as without TLS.
CUT_OFF_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
SHOWN_MAX = 60
TRANSIENT_STATUSES = (429, 500, 502, 503, 504)
# The error of files that are damaged or of a later version. Another try would find the same files.
UNREADABLE = "unreadable"


def _refusal(method: str, path: str, answer: http.client.HTTPResponse, text: bytes) -> BrokerError:
    said = _json_object(text)
    reason = said.get("reason") or said.get("error") or answer.reason
    if answer.status == 422:
        return BrokerError(
            f"{said.get('unroutable')} of {said.get('rows')} rows went to no queue, "
            f"such as {json.dumps(said.get('sample'))} (mandatory=false lets them go)"
        )
    if "altered" in said:
        return BrokerError(
            f"{reason}: {said['altered']} of {said['rows']} rows, such as "
            f"{json.dumps(said.get('sample'))}. "
            "Other rows need a producer of another name (producerName, --name)"
        )
    is_transient = answer.status in TRANSIENT_STATUSES and said.get("error") != UNREADABLE
    kind = Transient if is_transient else BrokerError
    return kind(f"{method} {path}: {answer.status} {reason}")


def _check_scan(one: Range, at: int, answer: http.client.HTTPResponse) -> None:
    if answer.status == 200:
        return
    text = _read(answer)
    said = _json_object(text)
    if answer.status == 410:
        raise RowsExpired(one, at, int(said["first"]))
    if answer.status == 409:
        raise StreamGone(
            f"{one.queue}/{one.shard} was deleted and made anew (stream {one.id} is now "
            f"{said['id']}) before offsets {at} to {one.end - 1} were read"
        )
    if answer.status == 404:
        reason = said.get("reason") or answer.reason
        raise StreamGone(
            f"{one.queue}/{one.shard} is gone before offsets {at} to {one.end - 1} were read: "
            f"{reason}"
        )
    if answer.status == 416:
        raise DataLoss(
            f"{one.queue}/{one.shard} ends at offset {int(said['next']) - 1}, "
            f"offsets {at} to {one.end - 1} were to be read"
        )
    raise _refusal("GET", f"/api/streams/.../{one.queue}/{one.shard}/arrow", answer, text)


def as_stream(rows: pa.RecordBatch) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return bytes(sink.getvalue())
