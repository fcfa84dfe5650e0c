"""shardd/store/format/stream_append.pxi in plain, slow, obvious Python."""

from __future__ import annotations

import struct

from pamqp import header

from shardmq.shardd.store.streams import filter_of
from tests.reference.record import decode_record, split_messages

NAME = "x-stream-filter-value"


def records_of(records: bytes, queue_id: int) -> bytes:
    found, at = b"", 0
    while (decoded := decode_record(records, at)) is not None:
        record, _, end = decoded
        if queue_id in record.queues:
            found += records[at:end]
        at = end
    return found


def filter_at(message: bytes) -> int:
    size = struct.unpack_from("<I", message, 4)[0]
    n = message[8]
    at = 10 + n + message[9 + n]
    properties = header.ContentHeader()
    properties.unmarshal(bytes(12) + message[at : at + size])
    value = (properties.properties.headers or {}).get(NAME)
    return filter_of(value.encode()) if isinstance(value, str) else 0


def filters_of(records: bytes) -> list[int] | None:
    found, at, some = [], 0, False
    while (decoded := decode_record(records, at)) is not None:
        record, _, at = decoded
        found += [filter_at(message) for message in record.messages]
        some = some or any(NAME.encode() in message for message in record.messages)
    return found if some else None


def select(blob: bytes, offsets: list[int], wanted: list[int]) -> list[tuple[int, bytes]]:
    messages = zip(offsets, split_messages(blob), strict=True)
    return [(offset, message) for offset, message in messages if filter_at(message) in wanted]
