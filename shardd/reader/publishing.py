"""Publish the rows of an Arrow IPC stream as messages.

The rows are read, checked as a whole, and published through a front door. The call is answered when
all messages are confirmed. pyarrow is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from shardmq.shardd.reader.buffers import Column, Publishes
from shardmq.shardd.reader.door import Closed, Outcome, Session, Unavailable
from shardmq.shardd.reader.scanning import Refused
from shardmq.shardd.store.format.columns import PROPERTY_COLUMNS
from shardmq.shardd.wire.reader_protocol import Answer, Publish

# The bytes of frames that are made at a time, while earlier frames are on their way.
FRAMES_BYTES = 1 << 20
# The most bytes of frames of a call that are kept between the check of its rows and their
# publishing. Later frames are made a second time when they are sent.
KEPT_BYTES_MAX = 8 << 20
SAMPLE_ROWS_MAX = 10
NAMES = ("value", "routing_key", "exchange", "headers", "properties")
NUMBERS = {
    "delivery_mode": pa.int32(),
    "priority": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
}
HEADER = {"key": pa.string(), "type": pa.string(), "value": pa.binary()}
CLOSED_STATUS = {404: (404, "not_found"), 403: (401, "not_authorised")}


def publish(call: Publish, body: bytes, answer_s: float) -> Answer:
    """Publish the rows in `body`; return the answer to the call. Raise Refused.

    The call ends if the front door is silent for `answer_s` seconds.
    """
    batch = read(body)
    if batch.num_rows == 0:
        return answer_of(Outcome(), batch, call)
    try:
        session = Session(call.door, call.user, call.vhost)
    except Closed as closed:
        raise Refused(Answer(401, "not_authorised", closed.text)) from None
    except Unavailable as error:
        raise Refused(Answer(503, "unavailable", str(error))) from None
    try:
        publishes = publishes_of(batch, call, session.frame_bytes_max)
        outcome = session.publish(publishes.rows, framed(publishes), answer_s)
    except Closed as closed:
        raise Refused(closed_by(closed, call)) from None
    except Unavailable as error:
        raise Refused(Answer(503, "unavailable", f"{error}; rows may be in or not")) from None
    finally:
        session.close()
    return answer_of(outcome, batch, call)


def framed(publishes: Publishes) -> Callable[[], bytearray]:
    """Return a function that returns the frames of all rows, piece by piece, then nothing.

    All frames are made before the first piece is returned, so that one bad row stops the whole
    call. Raise Refused for a bad row.
    """
    kept: list[bytearray] = []
    row = behind = size = 0
    try:
        while row < publishes.rows:
            frames, row = publishes.encode(row, FRAMES_BYTES)
            if size < KEPT_BYTES_MAX:
                kept.append(frames)
                size, behind = size + len(frames), row
    except ValueError as error:
        raise Refused(Answer(400, "bad_request", str(error))) from None
    kept.reverse()

    def more() -> bytearray:
        nonlocal behind
        if kept:
            return kept.pop()
        frames, behind = (
            publishes.encode(behind, FRAMES_BYTES)
            if behind < publishes.rows
            else (bytearray(), behind)
        )
        return frames

    return more


def read(body: bytes) -> Any:
    """Return one record batch of the rows, with types as they are published.

    It has those columns of NAMES that are there. Raise Refused.
    """
    try:
        with pa.ipc.open_stream(body) as stream:
            table = stream.read_all()
        table.validate()
    except (pa.ArrowInvalid, pa.ArrowException, OSError, EOFError) as error:
        raise Refused(Answer(400, "bad_request", f"no Arrow IPC stream: {error}")) from None
    unknown = [name for name in table.column_names if name not in NAMES]
    if (
        unknown
        or table.column_names.count("value") != 1
        or len(set(table.column_names)) != table.num_columns
    ):
        said, more = ", ".join(table.column_names), ", ".join(NAMES[1:])
        reason = f"columns {said}: there must be value, once, and may be {more}"
        raise Refused(Answer(400, "bad_request", reason))
    columns = {name: _as_published(name, table.column(name)) for name in table.column_names}
    if columns["value"].null_count:
        raise Refused(
            Answer(400, "bad_request", f"value: {columns['value'].null_count} rows are null")
        )
    return pa.RecordBatch.from_pydict(columns)


def _as_published(name: str, column: Any) -> Any:
    try:
        found = column.combine_chunks()
        if isinstance(found, pa.ChunkedArray):
            found = pa.concat_arrays(found.chunks) if found.num_chunks else pa.array([], found.type)
        if name == "headers":
            element = pa.struct(list(HEADER.items()))
            return found.cast(pa.list_(pa.field("element", element)))
        if name == "properties":
            return _properties(found)
        return found.cast(pa.binary() if name == "value" else pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise Refused(Answer(400, "bad_request", f"{name}: {error}")) from None


def _properties(found: Any) -> Any:
    if not pa.types.is_struct(found.type):
        raise pa.ArrowTypeError(f"a struct is expected, not {found.type}")
    names = [field.name for field in found.type]
    for name in names:
        if name not in PROPERTY_COLUMNS:
            raise pa.ArrowTypeError(f"there is no property '{name}'")
    # After `flatten` the fields are null where the struct is null.
    columns = dict(zip(names, found.flatten(), strict=True))
    kinds = {name: NUMBERS.get(name, pa.string()) for name in PROPERTY_COLUMNS}
    return pa.StructArray.from_arrays(
        [
            columns[name].cast(kind) if name in columns else pa.nulls(len(found), kind)
            for name, kind in kinds.items()
        ],
        names=list(kinds),
    )


# -- columns of the compiled loop --------------------------------------------------------------


def publishes_of(batch: Any, call: Publish, frame_bytes_max: int) -> Publishes:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    headers, properties = columns.get("headers"), columns.get("properties")
    try:
        return Publishes(
            _column(columns["value"]),
            call.exchange.encode(),
            call.routing_key.encode(),
            call.mandatory,
            frame_bytes_max,
            routing_key=_column(columns["routing_key"]) if "routing_key" in columns else None,
            exchange=_column(columns["exchange"]) if "exchange" in columns else None,
            headers=None if headers is None else _headers(headers),
            properties=None
            if properties is None
            else [_column(_plain(child)) for child in properties.flatten()],
            producer=None if call.producer is None else call.producer.encode(),
            sequence=call.sequence,
        )
    except ValueError as error:
        raise Refused(Answer(400, "bad_request", str(error))) from None


def _plain(array: Any) -> Any:
    """Return the array with an offset of 0."""
    return (
        pa.concat_arrays([array]) if array.offset == 0 else pa.array(array.to_pylist(), array.type)
    )


def _column(array: Any) -> Column:
    assert array.offset == 0
    bits, values, *data = array.buffers()
    width = 8 if pa.types.is_timestamp(array.type) else 4
    if not data:
        return Column(len(array), bits, values or b"", None, width)
    return Column(len(array), bits, values or bytes(4), data[0] or b"")


def _headers(array: Any) -> tuple[Column, Column, Column, Column]:
    bits, ends = array.buffers()[:2]
    entries = array.values
    key, type, value = (_column(_plain(child)) for child in entries.flatten())
    return Column(len(array), bits, ends or bytes(4), b""), key, type, value


# -- the answer to the call --------------------------------------------------------------------


def answer_of(outcome: Outcome, batch: Any, call: Publish) -> Answer:
    rows = batch.num_rows
    confirmed = rows - len(outcome.nacked) - len(outcome.returned)
    told: dict[str, Any] = {"rows": rows, "confirmed": confirmed}
    if call.producer is not None:
        known = len(outcome.known.difference(outcome.nacked))
        told |= {"stored": confirmed - known, "known": known}
    if outcome.altered:
        sample = [_row(batch, call, tag - 1) for tag in sorted(outcome.altered)[:SAMPLE_ROWS_MAX]]
        told |= {"altered": len(outcome.altered), "sample": sample}
        return Answer(
            409,
            "conflict",
            f"producer '{call.producer}' sent other rows before, by the same numbers",
            told,
        )
    if outcome.nacked:
        sample = [_row(batch, call, tag - 1) for tag in outcome.nacked[:SAMPLE_ROWS_MAX]]
        told |= {"rejected": len(outcome.nacked), "sample": sample}
        reason = (
            f"{len(outcome.nacked)} of {rows} rows were refused by a queue, or their shard was lost"
        )
        return Answer(503, "rejected", reason, told)
    if outcome.returned:
        told |= {
            "unroutable": len(outcome.returned),
            "sample": _returned_rows(outcome, batch, call),
        }
        return Answer(
            422, "unroutable", f"{len(outcome.returned)} of {rows} rows went to no queue", told
        )
    return Answer(200, more=told)


def _row(batch: Any, call: Publish, row: int) -> dict[str, Any]:
    return {
        "row": row,
        "exchange": _name(batch, "exchange", row, call.exchange),
        "routing_key": _name(batch, "routing_key", row, call.routing_key),
    }


def _name(batch: Any, column: str, row: int, otherwise: str) -> str:
    said = batch.column(column)[row].as_py() if column in batch.schema.names else None
    return otherwise if said is None else str(said)


def _returned_rows(outcome: Outcome, batch: Any, call: Publish) -> list[dict[str, Any]]:
    """Return the rows that were returned, in order, as far as their names tell.

    A returned message does not say its row, so a row with the same names stands for it. Rows with
    the same names share their fate.
    """
    found: list[dict[str, Any]] = []
    start = 0
    for returned in outcome.returned[:SAMPLE_ROWS_MAX]:
        row = _next_named(batch, call, start, returned.exchange, returned.routing_key)
        if row < 0:
            break
        found.append(
            {"row": row, "exchange": returned.exchange, "routing_key": returned.routing_key}
        )
        start = row + 1
    return found


def _next_named(batch: Any, call: Publish, start: int, exchange: str, key: str) -> int:
    left = batch.slice(start)
    named = [
        _equal(left, "exchange", call.exchange, exchange),
        _equal(left, "routing_key", call.routing_key, key),
    ]
    at = pc.index(pc.and_(*named), pa.scalar(True)).as_py()
    return start + int(at) if at >= 0 else -1


def _equal(batch: Any, column: str, otherwise: str, wanted: str) -> Any:
    if column not in batch.schema.names:
        return pa.repeat(pa.scalar(otherwise == wanted), batch.num_rows)
    return pc.equal(pc.fill_null(batch.column(column), otherwise), wanted)


def closed_by(closed: Closed, call: Publish) -> Answer:
    if closed.code in CLOSED_STATUS:
        return Answer(*CLOSED_STATUS[closed.code], closed.text)
    if call.producer is not None and closed.code == 406:
        return Answer(503, "rejected", f"{closed.text}; send the same again")
    return Answer(503 if closed.code in (320, 541) else 400, "refused", closed.text)
