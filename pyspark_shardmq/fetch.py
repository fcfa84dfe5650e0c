"""The broker over HTTP: what streams there are, their rows as Arrow, batches of rows published.

One `Broker` holds at most one connection and belongs to one thread. What passes by itself (a connection that breaks,
a shard that starts anew, as many scans as allowed) is tried again, `retries` times in a row, each wait twice the last
up to RETRY_WAIT_MAX_S; a scan that was cut off goes on behind the last row it gave. All else is an error at once.
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
ANSWER_BYTES_MAX = 64 << 20  # of an answer in JSON
# Of rows, in one call of the kernel: many kernels take the processor from nobody in the middle of a call, and a batch
# in one piece, copied to memory that was never touched, is a millisecond or two that others on the host wait.
RECEIVE_BYTES_MAX = 64 << 10
WAIT_MAX_MS = 30_000  # the longest the broker lets one wait for news


# In the metadata of an empty batch behind the rows: [[from, to], ...], offsets that are lost, without `to`.
GAPS = b"shardmq.gaps"
Gap = tuple[int, int]


class BrokerError(RuntimeError):
    """The broker refused, or cannot be reached."""


class Passing(BrokerError):
    """A trouble that may be over soon."""


class Certificate(BrokerError):
    """The broker cannot be trusted, or does not speak TLS as it should: it is asked once."""


class Away(DataLoss):
    """The stream of that id is not there any more."""


class Gone(DataLoss):
    """Rows from before `first` are not in the log any more."""

    def __init__(self, one: Range, at: int, first: int) -> None:
        super().__init__(
            f"{one.queue}/{one.shard} has lost offsets {at} to {first - 1} to retention; it begins at {first}"
        )
        self.first = first


class Damaged(DataLoss):
    """Rows within the log cannot be read: the broker's files are damaged. All others were given."""

    def __init__(self, one: Range, gaps: Sequence[Gap]) -> None:
        lost = ", ".join(f"{start} to {end - 1}" for start, end in gaps)
        super().__init__(
            f"{one.queue}/{one.shard} has lost offsets {lost} to damage in the broker's files"
        )


class Published(NamedTuple):
    """Of rows that were published, all confirmed: how many a queue had before, of the same producer. None: the broker
    does not say (rows without a producer).
    """

    rows: int
    known: int | None


class Look(NamedTuple):
    """What the broker says of a queue or stream exchange.

    `ended`: by id, where streams ended that are not shards of it any more. `queues`: the names of its shards.
    """

    shards: list[ShardState]
    ended: dict[str, int]
    queues: frozenset[str]


class Broker:
    def __init__(self, connection: Connection) -> None:
        self._settings = connection
        self._at = 0  # which address; the next one after a failure to connect
        self._http: http.client.HTTPConnection | None = None

    def close(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    # -- what there is -----------------------------------------------------------------------------------

    def names(self) -> dict[str, str | None]:
        """All queues of type stream and stream exchanges of the virtual host that the user may read; of a queue that
        is a shard of a stream exchange, that exchange.
        """
        return {
            stream["name"]: stream.get("exchange")
            for stream in self._json("GET", self._path("streams"))
        }

    def look(self, name: str, after: Mapping[int, int] | None = None, wait_ms: int = 0) -> Look:
        """With `wait_ms`, not before a shard has news behind `after`, or one is there that `after` lacks, or the time
        is up.
        """
        query = {}
        if after is not None and wait_ms:
            query = {
                "after": ",".join(f"{s}:{n}" for s, n in sorted(after.items())),
                "wait_ms": str(min(wait_ms, WAIT_MAX_MS)),
            }
        found: Look = self._patiently(lambda: self._look_once(name, query))
        return found

    def _look_once(self, name: str, query: dict[str, str]) -> Look:
        found = self._json_once("GET", self._path("streams", name), query)
        for shard in found["shards"]:
            if shard["next"] is None:
                raise Passing(f"shard {shard['shard']} of {name} is {shard['state']}")
        return Look(
            [ShardState(name, s["shard"], s["id"], s["first"], s["next"]) for s in found["shards"]],
            {ended["id"]: ended["next"] for ended in found.get("ended", [])},
            frozenset(s["queue"] for s in found["shards"]),
        )

    def offsets_at(self, name: str, time_ms: int) -> dict[int, int]:
        """By shard: the first row not older; one behind the last where all are."""
        found = self._json(
            "GET", self._path("streams", name, "offset-for-time"), {"timestamp": str(time_ms)}
        )
        return {int(shard): offset for shard, offset in found["shards"].items()}

    def reached(self, name: str, group: str, positions: Mapping[int, Position]) -> None:
        """By shard: the next row that those who read the stream under that name want. Tried once: the next call says
        it anew.
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

    # -- rows out ----------------------------------------------------------------------------------------

    def scan(
        self,
        one: Range,
        columns: Sequence[str],
        filters: Sequence[str] = (),
        fail_on_data_loss: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a range in order, each once, with `offset` among their columns. Gone where the log begins
        behind its start, DataLoss where the stream is away, Damaged behind the last row where rows between cannot be
        read; with fail_on_data_loss=False what is there is given, and the loss is logged.
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
            except Gone as gone:
                if fail_on_data_loss:
                    raise
                at = gone.first
            except DataLoss as loss:
                if fail_on_data_loss:
                    raise
                print(f"shardmq: {loss}", file=sys.stderr)
                return
            except Passing as trouble:
                failures += 1
                self._wait(failures, trouble)
        if begun > one.start:  # an answer that is cut off has not told its gaps
            gaps = self._gaps(replace(one, end=begun), filters) + gaps
        if gaps and fail_on_data_loss:
            raise Damaged(one, gaps)
        if gaps:
            print(f"shardmq: {Damaged(one, gaps)}", file=sys.stderr)

    def _gaps(self, one: Range, filters: Sequence[str]) -> list[Gap]:
        """Read the range once more for its gaps alone. What retention took meanwhile has none."""

        def once() -> list[Gap]:
            found: list[Gap] = []
            for _ in self._scan_once(one, one.start, ["offset"], filters, found):
                pass
            return found

        try:
            return list(self._patiently(once))
        except DataLoss:
            return []

    def _scan_once(
        self, one: Range, at: int, columns: Sequence[str], filters: Sequence[str], gaps: list[Gap]
    ) -> Iterator[pa.RecordBatch]:
        """The rows from `at` on, as one answer gives them; what it says is lost is added to `gaps`."""
        import pyarrow as pa

        query = [
            ("from", str(at)),
            ("to", str(one.end)),
            ("id", one.id),
            ("columns", ",".join(columns)),
        ]
        query += [("filter", text) for text in filters]
        whole = False
        with self._answer(
            "GET", self._path("streams", one.queue, str(one.shard), "arrow"), query
        ) as answer:
            _check_scan(one, at, answer)
            try:
                for batch, told in pa.ipc.open_stream(
                    Received(answer)
                ).iter_batches_with_custom_metadata():
                    if told is not None and GAPS in told:
                        gaps += [
                            (max(start, at), min(end, one.end))
                            for start, end in json.loads(told[GAPS])
                        ]
                    yield batch
                answer.read()  # the end in order; what was cut off raises
                whole = True
            except (pa.ArrowInvalid, OSError, http.client.HTTPException) as cut:
                raise Passing(f"a scan of {one.queue}/{one.shard} was cut off: {cut!r}") from None
            finally:
                if not whole:
                    self.close()

    # -- rows in -----------------------------------------------------------------------------------------

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
        """Row i has the sequence number `sequence` + i of its producer. Returns when all rows are confirmed."""
        query = {"mandatory": str(mandatory).lower()}
        if routing_key is not None:
            query["routing_key"] = routing_key
        if producer is not None:
            query |= {"producer": producer, "seq": str(sequence)}
        body = as_stream(rows)
        path = self._path("exchanges", exchange or "amq.default", "arrow")
        answer = self._json("POST", path, query, body)
        return Published(int(answer["confirmed"]), answer.get("known"))

    # -- one request -------------------------------------------------------------------------------------

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
        return self._patiently(lambda: self._json_once(method, path, query or {}, body))

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
            raise _trouble(asked, broken) from None
        yield answer

    def _credentials(self) -> str:
        return base64.b64encode(
            f"{self._settings.user}:{self._settings.password}".encode()
        ).decode()

    def _url(self) -> str:
        return self._settings.urls[self._at % len(self._settings.urls)]

    def _connected(self) -> http.client.HTTPConnection:
        if self._http is None:
            parts = urlsplit(self._url())
            kind = (
                http.client.HTTPSConnection
                if parts.scheme == "https"
                else http.client.HTTPConnection
            )
            assert parts.hostname is not None
            self._http = kind(parts.hostname, parts.port, timeout=self._settings.timeout_ms / 1000)
        return self._http

    def _patiently(self, ask: Any) -> Any:
        failures = 0
        while True:
            try:
                return ask()
            except Passing as trouble:
                failures += 1
                self._wait(failures, trouble)

    def _wait(self, failures: int, trouble: Passing) -> None:
        if failures > self._settings.retries:
            raise BrokerError(f"tried {failures} times: {trouble}") from None
        time.sleep(min(self._settings.retry_wait_ms / 1000 * 2 ** (failures - 1), RETRY_WAIT_MAX_S))


class Received:
    """The bytes of an answer as Arrow reads them, in pieces of RECEIVE_BYTES_MAX at most. Raises what `answer` does."""

    closed = False

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def read(self, count: int) -> bytes | pa.Buffer:
        """Fewer than `count` bytes at the end only."""
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
        raise Passing(f"an answer was cut off: {broken!r}") from None
    return text


def _said(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _trouble(url: str, broken: OSError | http.client.HTTPException) -> BrokerError:
    """What a broken connection means: only what may be over soon is Passing."""
    if isinstance(broken, ssl.SSLCertVerificationError):
        return Certificate(f"{url}: the certificate is not accepted: {broken.verify_message}")
    if isinstance(broken, ssl.SSLError) and not isinstance(broken, CUT_OFF_TLS):
        return Certificate(f"{url}: no TLS connection: {broken.reason or broken}")
    if isinstance(broken, http.client.BadStatusLine) and not isinstance(
        broken, http.client.RemoteDisconnected
    ):
        return BrokerError(
            f"{url}: what answers there does not speak HTTP: {str(broken)[:SHOWN_MAX]}"
        )
    if isinstance(broken, http.client.InvalidURL):
        return BrokerError(f"{url}: {broken}")
    return Passing(f"{url}: {broken!r}")


# A connection that ends in the middle of TLS, as without it.
CUT_OFF_TLS = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
SHOWN_MAX = 60
PASSING = (429, 500, 502, 503, 504)
# What the broker says of files that are damaged or of a later version: they are the same the next time.
UNREADABLE = "unreadable"


def _refusal(method: str, path: str, answer: http.client.HTTPResponse, text: bytes) -> BrokerError:
    said = _said(text)
    reason = said.get("reason") or said.get("error") or answer.reason
    if answer.status == 422:
        return BrokerError(
            f"{said.get('unroutable')} of {said.get('rows')} rows went to no queue, "
            f"such as {json.dumps(said.get('sample'))} (mandatory=false lets them go)"
        )
    if "altered" in said:
        return BrokerError(
            f"{reason}: {said['altered']} of {said['rows']} rows, such as {json.dumps(said.get('sample'))}. "
            "Other rows need a producer of another name (producerName, --name)"
        )
    kind = Passing if answer.status in PASSING and said.get("error") != UNREADABLE else BrokerError
    return kind(f"{method} {path}: {answer.status} {reason}")


def _check_scan(one: Range, at: int, answer: http.client.HTTPResponse) -> None:
    if answer.status == 200:
        return
    text = _read(answer)
    said = _said(text)
    if answer.status == 410:
        raise Gone(one, at, int(said["first"]))
    if answer.status == 409:
        raise Away(
            f"{one.queue}/{one.shard} was deleted and made anew (stream {one.id} is now {said['id']}) "
            f"before offsets {at} to {one.end - 1} were read"
        )
    if answer.status == 404:
        reason = said.get("reason") or answer.reason
        raise Away(
            f"{one.queue}/{one.shard} is gone before offsets {at} to {one.end - 1} were read: {reason}"
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
