"""The messages between a leader and a follower, as frames over a stream.

A frame is a length (u32, little endian) and one message as MessagePack. The messages of the rules
are among them; the others carry what the rules do not look at.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

import msgspec

from shardmq.cluster.operations import FileSums, Operation
from shardmq.cluster.rules import Ack, Compare, Continue, Hello, Ping, Position, Refusal

FRAME_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")


class BadFrame(Exception):
    """The bytes are no frame of this protocol."""


class Operations(msgspec.Struct, tag="operations", array_like=True, frozen=True):
    """Operations without a gap, of one term. The leader sends them after Continue or Compared."""

    session: int
    at: Position
    operations: list[Operation]


class Listing(msgspec.Struct, tag="listing", array_like=True, frozen=True):
    """The files of the leader at the position `at`. It follows Compare; the answer is Want."""

    session: int
    at: Position
    folders: list[str]
    files: list[FileSums]


class Want(msgspec.Struct, tag="want", array_like=True, frozen=True):
    """The pieces that differ, by their file in the order of the listing."""

    session: int
    pieces: list[tuple[str, list[int]]]


class Piece(msgspec.Struct, tag="piece", array_like=True, frozen=True):
    """Bytes of a file, as they were at some moment since the listing."""

    session: int
    path: str
    position: int
    data: bytes


class Compared(msgspec.Struct, tag="compared", array_like=True, frozen=True):
    """All pieces were sent. With the operations up to `whole_at` the copy can be used."""

    session: int
    whole_at: int


FromFollower = Hello | Ack | Refusal | Want
FromLeader = Continue | Compare | Ping | Operations | Listing | Piece | Compared

_encoder: Final = msgspec.msgpack.Encoder()
FROM_FOLLOWER: Final = msgspec.msgpack.Decoder(FromFollower)
FROM_LEADER: Final = msgspec.msgpack.Decoder(FromLeader)


def encode(message: FromFollower | FromLeader) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the bytes of the next message. Raises BadFrame, or what the stream raises."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > FRAME_BYTES_MAX:
        raise BadFrame(f"a frame of {length} bytes")
    return await reader.readexactly(length)
