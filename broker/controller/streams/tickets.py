"""Tickets, by which a node reads a range of a stream for a client whom the leader has let in.

The leader checks the login and the rights of a client, and sends the client to the node that has
the stream, with a ticket in the URL. The ticket says all that the node needs to know: it is a
signed message, whose key all nodes have. So the client need not show a password there.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

import msgspec

from shardmq.shardd.wire.reader_protocol import Scan

# A client must have come by then. The clocks of nodes may differ: a node that takes a ticket for
# too old hands the client on to the leader, which made the ticket.
VALID_S: Final = 60.0
SIGNATURE_BYTES: Final = 16
TEXT_BYTES_MAX: Final = 8 << 10


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A range of a stream, and the id of the stream, to be read before `expires_s`.

    `expires_s` is in seconds of the clock of the node that made the ticket.
    """

    expires_s: float
    id: str
    scan: Scan


class Tickets:
    """Makes and reads tickets with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def text(self, id: str, scan: Scan, now_s: float) -> str:
        """Return a ticket as a part of a URL, valid for VALID_S from `now_s` (seconds) on."""
        body = msgspec.msgpack.encode(Ticket(now_s + VALID_S, id, scan))
        return base64.urlsafe_b64encode(self._signature(body) + body).decode().rstrip("=")

    def read(self, text: str, now_s: float) -> Ticket | None:
        """Return the ticket in a part of a URL; None if it is no valid one."""
        if len(text) > TEXT_BYTES_MAX or not text.isascii():
            return None
        try:
            data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except binascii.Error:
            return None
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(body)):
            return None
        try:
            ticket = msgspec.msgpack.decode(body, type=Ticket)
        except msgspec.MsgspecError:  # a node of another version has made it
            return None
        return ticket if now_s < ticket.expires_s else None

    def _signature(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, hashlib.sha256)[:SIGNATURE_BYTES]
