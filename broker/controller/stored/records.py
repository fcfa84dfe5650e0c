"""The bytes of `definitions.amqp`, a log of exchanges, queues and bindings as AMQP frames.

Little endian:

    header  8s magic | u32 format (of versions.CATALOG) | u32 crc32 of the rest
            u64 version | u32 last queue id | u8 n, boot id[n]
    record  u32 length of what follows the checksum | u32 crc32 of it
            u64 version | u32 queue id | u16 shard
            u8 flags (1 = durable, 2 = part of an exchange, 4 = with cuts, 8 = moving,
                16 = a stream that has moved)
            u8 n, vhost[n] | u8 n, owner[n]
            part: u8 n, exchange[n] | u8 n, binding key[n] | u8 n, state or state:held[n]
                  u16 index
            cuts: u16 n, n times u32 number | u64 offset | u8 gains
            moving: u32 queue id | u16 shard | u8 step
            stream that has moved: u32 first queue id
            method frame

The log ends at its first broken record.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardmq.broker.controller.peers.method_frames import (
    Definition,
    decode_method,
    encode_bindings,
    encode_method,
)
from shardmq.broker.controller.stored.errors import DefinitionsError
from shardmq.broker.model.changes import (
    OPEN,
    AnyChange,
    BindingPut,
    Cut,
    Moving,
    QueuePut,
    ShardOf,
)
from shardmq.cluster.versions import CATALOG

MAGIC = b"SHARDDEF"
RECORD_BYTES_MAX = 64 << 20
BARE_RECORD_BYTES_MAX = 2048  # of a record without arguments: its fields and names
RESUME_BYTES_MAX = 1 << 20  # how far behind a broken record a whole one is looked for
DURABLE, PART, CUTS, MOVING, BORN = 1, 2, 4, 8, 16

_HEADER: Final = struct.Struct("<8sII QI")
HEAD_BYTES: Final = _HEADER.size + 1  # the least that a log has
_CHECKED_FROM = 16  # the checksum of the header covers what comes after this
_RECORD: Final = struct.Struct("<II QIHB")
_LENGTHS = 8
_CHECKSUM: Final = struct.Struct("<II")  # the first two fields of a record, and the others
_CHECKED: Final = struct.Struct("<QIHB")
_INDEX: Final = struct.Struct("<H")
_COUNT: Final = struct.Struct("<H")
_CUT: Final = struct.Struct("<IQ?")
_MOVING: Final = struct.Struct("<IHB")
_BORN: Final = struct.Struct("<I")


class Record(NamedTuple):
    """A record of the file.

    `end` is the offset at which the next record begins. `last_queue_id` is the largest queue id in
    the record, 0 if there is none: a queue that moves has two.
    """

    end: int
    version: int
    flags: int
    last_queue_id: int
    change: AnyChange


def encode_record(change: Definition, version: int, durable: bool, queue: Any) -> bytes:
    """Return the record of a change; `queue` is the queue that it puts or deletes, if any."""
    known = isinstance(queue, QueuePut)
    vhost = change.vhost.encode()
    owner = queue.owner.encode() if known else b""
    names = bytes((len(vhost),)) + vhost + bytes((len(owner),)) + owner
    id, shard = (queue.id, queue.shard) if known else (0, 0)
    part = change.part if isinstance(change, QueuePut) else None
    cuts = part.cuts if part is not None else ()
    moving = change.moving if isinstance(change, QueuePut) else None
    flags = DURABLE * durable | PART * (part is not None) | CUTS * bool(cuts)
    born = change.born if isinstance(change, QueuePut) else 0
    flags |= MOVING * (moving is not None) | BORN * bool(born)
    record = _CHECKED.pack(version, id, shard, flags) + names
    if part is not None:
        state = f"{part.state}:{part.held}" if part.held else part.state
        texts = [text.encode() for text in (part.exchange, part.key, state)]
        record += b"".join(bytes((len(text),)) + text for text in texts) + _INDEX.pack(part.index)
    if cuts:
        record += _COUNT.pack(len(cuts))
        record += b"".join(_CUT.pack(cut.number, cut.offset, cut.gains) for cut in cuts)
    if moving is not None:
        record += _MOVING.pack(moving.id, moving.shard, moving.step)
    if born:
        record += _BORN.pack(born)
    record += encode_method(change)
    return _CHECKSUM.pack(len(record), zlib.crc32(record)) + record


def encode_binding_records(puts: list[BindingPut], version: int, durable: bool) -> list[bytes]:
    """Return the records of bindings that have the same ends; `version` is that of the first."""
    vhost = puts[0].vhost.encode()
    names = bytes((len(vhost),)) + vhost + b"\0"
    records = []
    for at, frame in enumerate(encode_bindings(puts), version):
        record = _CHECKED.pack(at, 0, 0, DURABLE * durable) + names + frame
        records.append(_CHECKSUM.pack(len(record), zlib.crc32(record)) + record)
    return records


def record_bytes_max(change: Definition) -> int:
    """Return the most bytes that the record of a change can have."""
    arguments = getattr(change, "arguments", None)
    part = change.part if isinstance(change, QueuePut) else None
    cuts = _CUT.size * len(part.cuts) if part is not None else 0
    return BARE_RECORD_BYTES_MAX + cuts + (len(encode_method(change)) if arguments else 0)


def records(data: bytes, at: int) -> Iterator[Record]:
    """Yield the records from `at` on, up to the first that is not whole."""
    while at + _RECORD.size <= len(data):
        length, crc, version, queue_id, shard, flags = _RECORD.unpack_from(data, at)
        end = at + _LENGTHS + length
        if (
            # Zeros, which a power cut may leave behind the end, have the right checksum.
            not _RECORD.size - _LENGTHS < length <= RECORD_BYTES_MAX
            or end > len(data)
            or zlib.crc32(data[at + _LENGTHS : end]) != crc
        ):
            return
        vhost, after = _short_at(data, at + _RECORD.size)
        owner, after = _short_at(data, after)
        part = None
        if flags & PART:
            part, after = _part_at(data, after, bool(flags & CUTS))
        moving = None
        if flags & MOVING:
            moving = Moving(*_MOVING.unpack_from(data, after))
            after += _MOVING.size
        born = 0
        if flags & BORN:
            (born,) = _BORN.unpack_from(data, after)
            after += _BORN.size
        change = decode_method(data[after:end], vhost, queue_id, shard, owner, part, moving, born)
        last_queue_id = queue_id if moving is None else max(queue_id, moving.id)
        yield Record(end, version, flags, last_queue_id, change)
        at = end


def next_record(data: bytes, at: int) -> int | None:
    """Return where a whole record begins again behind a broken one.

    A crash tears the end of the log only. So whole records behind a broken one mean that something
    else broke it.
    """
    for start in range(at, min(len(data) - _RECORD.size, at + RESUME_BYTES_MAX)):
        length, crc, *_ = _RECORD.unpack_from(data, start)
        end = start + _LENGTHS + length
        may_be = _RECORD.size - _LENGTHS < length <= RECORD_BYTES_MAX and end <= len(data)
        if may_be and zlib.crc32(data[start + _LENGTHS : end]) == crc:
            return start
    return None


def encode_header(version: int, last_queue_id: int, boot: str, format: int) -> bytes:
    name = boot.encode()
    head = _HEADER.pack(MAGIC, format, 0, version, last_queue_id)
    rest = head[_CHECKED_FROM:] + bytes((len(name),)) + name
    return struct.pack("<8sII", MAGIC, format, zlib.crc32(rest)) + rest


def format_of(data: bytes, path: Path) -> int:
    """Return the format of a log from its first bytes. Raises DefinitionsError."""
    if len(data) < HEAD_BYTES or data[:8] != MAGIC:
        raise DefinitionsError(f"{path}: not a definitions log")
    return int(_HEADER.unpack_from(data)[1])


def read_header(data: bytes, path: Path) -> tuple[int, int, str, int]:
    """Return version, last queue id, boot id and where the records begin.

    A log comes into being by a rename, so its header is never torn. Raises DefinitionsError.
    """
    format = format_of(data, path)
    if format not in CATALOG:
        read = str(CATALOG).partition(" ")[2]
        raise DefinitionsError(f"{path}: format {format}, this broker reads {read}")
    _, _, crc, version, last_queue_id = _HEADER.unpack_from(data)
    boot, at = _short_at(data, _HEADER.size)
    if zlib.crc32(data[_CHECKED_FROM:at]) != crc:
        raise DefinitionsError(f"{path}: the header is broken")
    return version, last_queue_id, boot, at


def _part_at(data: bytes, at: int, has_cuts: bool) -> tuple[ShardOf, int]:
    exchange, at = _short_at(data, at)
    key, at = _short_at(data, at)
    text, at = _short_at(data, at)
    state, _, held = text.partition(":")
    (index,) = _INDEX.unpack_from(data, at)
    at += _INDEX.size
    cuts = []
    if has_cuts:
        (count,) = _COUNT.unpack_from(data, at)
        at += _COUNT.size
        for _ in range(count):
            cuts.append(Cut(*_CUT.unpack_from(data, at)))
            at += _CUT.size
    return ShardOf(exchange, index, key, state, int(held or OPEN), tuple(cuts)), at


def _short_at(data: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + data[at]
    return data[at + 1 : end].decode(), end
