"""Compaction scans segments as shardd/store/format/scanning.pxi does, in slow, obvious Python."""

from __future__ import annotations

from collections.abc import Collection

from tests.reference.record import Record, decode_record

RECORD_MESSAGES_MAX = 256
RECORD_BYTES_MAX = 1 << 20


def survivors(
    data: bytes,
    start: int,
    settled: Collection[tuple[int, int]],
    dead_until: int,
    queue_ids: Collection[int] | None,
    room_before: int,
) -> tuple[list[Record], list[tuple[int, int]]]:
    """Return the records of the messages that are still needed, and the moves of these messages.

    `data` are the bytes of a segment, read from `start` on. The moves have the old and the new
    place of each message, in order, when the new records begin at `room_before`.
    """
    left: list[tuple[tuple[object, ...], int, bytes]] = []
    at = start
    while (found := decode_record(data, at)) is not None:
        record, offsets, at = found
        for offset, message in zip(offsets, record.messages, strict=True):
            queues = tuple(
                queue
                for queue in record.queues
                if (queue, offset) not in settled and (queue_ids is None or queue in queue_ids)
            )
            if queues and offset >= dead_until:
                left.append(
                    (
                        (queues, record.timestamp, record.ttl_ms, record.priority, record.flags),
                        offset,
                        message,
                    )
                )
    records: list[Record] = []
    moves: list[tuple[int, int]] = []
    group: list[bytes] = []
    end = room_before
    for i, (kind, offset, message) in enumerate(left):
        head = 28 + 4 * len(kind[0])  # type: ignore[arg-type]
        moves.append((offset, end + head + sum(map(len, group))))
        group.append(message)
        size = head + sum(map(len, group))
        follows = i + 1 < len(left) and left[i + 1][0] == kind
        if (
            follows
            and len(group) < RECORD_MESSAGES_MAX
            and size + len(left[i + 1][2]) <= RECORD_BYTES_MAX
        ):
            continue
        records.append(Record(kind[0], tuple(group), *kind[1:]))  # type: ignore[arg-type]
        end += len(records[-1].encode())
        group = []
    return records, moves
