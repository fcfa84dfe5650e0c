"""The messages between a leader and a follower, as frames over a stream.

A frame is a length (u32, little endian) and one message as MessagePack. The messages of the rules
are among them; the others carry what the rules do not look at.

A leader may compress operations and pieces, for a follower whose hello names the method.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from shardmq.cluster import compression
from shardmq.cluster.compression import BadCompression
from shardmq.cluster.operations import FileSums, Operation
from shardmq.cluster.rules import Ack, Compare, Continue, Hello, Leaving, Ping, Position, Refusal

FRAME_BYTES_MAX: Final = 64 << 20
# Compression pays if it leaves at most this part of the bytes.
PAYS_BELOW: Final = 0.9
LENGTH: Final = struct.Struct("<I")


# What a decoder raises; the text of a field may be none.
_BAD: Final = (msgspec.MsgspecError, UnicodeDecodeError)


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


class Compressed(msgspec.Struct, tag="compressed", array_like=True, frozen=True):
    """An Operations or a Piece, whose encoding has `size` bytes; the session is the one here."""

    session: int
    method: str
    size: int
    data: bytes


Data = Operations | Piece
FromFollower = Hello | Ack | Refusal | Leaving | Want
FromLeader = Continue | Compare | Ping | Data | Listing | Compared
Sent = FromFollower | FromLeader | Compressed

_encoder: Final = msgspec.msgpack.Encoder()
_FROM_FOLLOWER: Final = msgspec.msgpack.Decoder(FromFollower)
_FROM_LEADER: Final = msgspec.msgpack.Decoder(FromLeader | Compressed)
_DATA: Final = msgspec.msgpack.Decoder(Data)


def encode(message: Sent) -> bytearray:
    """Return the frame of a message."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return frame


def compressed(message: Data, method: str) -> Compressed | None:
    """Return a message in compressed form; None if that does not pay. Any thread may call."""
    data = _encoder.encode(message)
    if not compression.COMPRESSED_FROM_BYTES <= len(data) <= compression.DECOMPRESSED_BYTES_MAX:
        return None
    found = compression.compress(method, data)
    if len(found) > len(data) * PAYS_BELOW:
        return None
    return Compressed(message.session, method, len(data), found)


def from_follower(data: bytes | memoryview) -> FromFollower:
    """Return a message of a follower. Raises BadFrame."""
    try:
        message: FromFollower = _FROM_FOLLOWER.decode(data)
    except _BAD as error:
        raise BadFrame(str(error)) from None
    return message


def from_leader(data: bytes | memoryview) -> FromLeader:
    """Return a message of the leader, decompressed. Raises BadFrame, or BadCompression."""
    try:
        message: FromLeader | Compressed = _FROM_LEADER.decode(data)
    except _BAD as error:
        raise BadFrame(str(error)) from None
    if not isinstance(message, Compressed):
        return message
    plain = compression.decompress(message.method, message.data, message.size)
    try:
        found: Data = _DATA.decode(plain)
    except _BAD as error:
        raise BadCompression(str(error)) from None
    return msgspec.structs.replace(found, session=message.session)
