"""Encode and decode headers, control structs, settles, confirms and credit.

The kinds that carry messages themselves (PUBLISH, DELIVER) are in codec.pyx. All integers are
little endian.

    SETTLE     header | (u32 consumer, u32 kind, u64 first, u64 last)*
               delivery numbers of that consumer; with the kind ALLOT the credit of an allotment
    CONFIRMED  header | u64 batch | (u32 connection, u32 channel, u64 first, u64 last)*
               refused confirm numbers; with KNOWN or ALTERED in `channel` the messages
               are not refused, but were known before
    CREDIT     header | (u32 connection, u32 bytes)*
               connection 0 is for publishes, to a front door
    FREED      header | (u32 run, u32 holds)*
               of lent bodies, see bodies.pxi
    CONTROL    header | msgpack
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from shardmq.shardd.wire.messages import (
    CONFIRMED,
    CONTROL,
    CONTROLLER,
    CREDIT,
    FREED,
    HEADER_BYTES,
    SETTLE,
    WIRE_VERSION,
    Control,
)

_HEADER = struct.Struct("<BBHIII")
_HEADER_READ = struct.Struct("<BxHIII")
_SETTLE = struct.Struct("<IIQQ")
_REFUSED = struct.Struct("<IIQQ")
_BATCH = struct.Struct("<Q")
_EPOCH = struct.Struct("<I")
_CONFIRMED = struct.Struct("<BBHIIIQ")
_FREED = struct.Struct("<II")
_CREDIT = struct.Struct("<II")
# The largest number in one CREDIT entry; larger sums are split.
CREDIT_BYTES_MAX = 0xFFFFFFFF

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)

Buffer = bytes | bytearray | memoryview
# A message that was received. A view is valid until the next messages are taken from its source.
Message = bytes | memoryview
# A message to be sent, in one piece or in several.
Parts = bytes | list[Buffer]


def size_of(message: Parts) -> int:
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


class WireError(Exception):
    """The other process sent a message that cannot be read."""


class Header(NamedTuple):
    """The first 16 bytes of every message; see messages.py."""

    kind: int
    peer: int
    incarnation: int
    epoch: int
    shard: int


class OtherVersion(WireError):
    """A message is of another wire version. `head` is its header, which all versions share."""

    def __init__(self, version: int, head: Header) -> None:
        who = "the controller" if head.peer == CONTROLLER else f"front door {head.peer}"
        super().__init__(
            f"a message between {who} and shard {head.shard} is of wire version {version}, "
            f"this process speaks {WIRE_VERSION}: restart all of one release"
        )
        self.version = version
        self.head = head


_new_tuple = tuple.__new__  # does what Header(...) does, without a Python function in between


def header(kind: int, peer: int, incarnation: int, epoch: int, shard: int) -> bytes:
    return _HEADER.pack(kind, WIRE_VERSION, peer, incarnation, epoch, shard)


def sender(peer: int, incarnation: int, epoch: int, shard: int) -> bytes:
    """Return the header without its first byte, the kind.

    These bytes are the same in all messages of one process to one process.
    """
    return header(0, peer, incarnation, epoch, shard)[1:]


def read(message: Buffer) -> Header:
    """Return the header of a message.

    Raises WireError if the message is too short, and OtherVersion if its wire version is another.
    """
    if len(message) < HEADER_BYTES:
        raise WireError(f"{len(message)} bytes are no message")
    head: Header = _new_tuple(Header, _HEADER_READ.unpack_from(message))
    if message[1] != WIRE_VERSION:
        raise OtherVersion(message[1], head)
    return head


def readdressed(publish: bytes, epoch: int, batch: int) -> bytes:
    """Return a PUBLISH with another epoch and batch number.

    It was packed for one process of a shard, and is sent to the next process of that shard.
    """
    return b"".join(
        (publish[:8], _EPOCH.pack(epoch), publish[12:16], _BATCH.pack(batch), publish[24:])
    )


def control(peer: int, incarnation: int, epoch: int, shard: int, what: Control) -> bytes:
    return header(CONTROL, peer, incarnation, epoch, shard) + _encoder.encode(what)


def read_control(message: Buffer) -> Control:
    try:
        return _decoder.decode(memoryview(message)[HEADER_BYTES:])
    except msgspec.MsgspecError as error:
        raise WireError(str(error)) from error


def settles(
    peer: int, incarnation: int, epoch: int, shard: int, ranges: Iterable[tuple[int, int, int, int]]
) -> bytes:
    """Return a SETTLE.

    `ranges` are (consumer, kind, first, last) delivery numbers, both included.
    """
    return header(SETTLE, peer, incarnation, epoch, shard) + b"".join(
        [_SETTLE.pack(*r) for r in ranges]
    )


def read_settles(message: Buffer) -> list[tuple[int, int, int, int]]:
    return list(_SETTLE.iter_unpack(memoryview(message)[HEADER_BYTES:]))


def confirmed(
    peer: int,
    incarnation: int,
    epoch: int,
    shard: int,
    batch: int,
    refused: Collection[tuple[int, int, int, int]] = (),
) -> bytes:
    """Return a CONFIRMED: every batch up to `batch` is settled.

    `refused` has the (connection, channel, first, last) confirm numbers that were not taken.
    """
    head = _CONFIRMED.pack(CONFIRMED, WIRE_VERSION, peer, incarnation, epoch, shard, batch)
    return head + b"".join([_REFUSED.pack(*r) for r in refused]) if refused else head


def read_confirmed(message: Buffer) -> tuple[int, list[tuple[int, int, int, int]]]:
    (batch,) = _BATCH.unpack_from(message, HEADER_BYTES)
    if len(message) == HEADER_BYTES + _BATCH.size:  # the usual case: no message is refused
        return batch, []
    return batch, list(_REFUSED.iter_unpack(memoryview(message)[HEADER_BYTES + 8 :]))


def credit(
    peer: int, incarnation: int, epoch: int, shard: int, freed: Iterable[tuple[int, int]]
) -> bytes:
    parts = [header(CREDIT, peer, incarnation, epoch, shard)]
    for connection, count in freed:
        while count > CREDIT_BYTES_MAX:
            parts.append(_CREDIT.pack(connection, CREDIT_BYTES_MAX))
            count -= CREDIT_BYTES_MAX
        parts.append(_CREDIT.pack(connection, count))
    return b"".join(parts)


def freed(peer: int, incarnation: int, epoch: int, shard: int, holds: Mapping[int, int]) -> bytes:
    """Return a FREED message. `holds` says how many of each run are given back."""
    parts = [header(FREED, peer, incarnation, epoch, shard)]
    parts += [_FREED.pack(run, count) for run, count in holds.items()]
    return b"".join(parts)


def read_credit(message: Buffer) -> list[tuple[int, int]]:
    return list(_CREDIT.iter_unpack(memoryview(message)[HEADER_BYTES:]))
