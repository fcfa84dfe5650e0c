"""Exchanges, queues and bindings as the AMQP method frames that declare, bind and delete them.

`definitions.amqp` keeps these frames, so any AMQP tool can read that log. They are encoded by hand,
because twenty thousand bindings a second go through here; tests compare them with pamqp.
`model/tables.py` says what a table may hold.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

from shardmq.broker.amqp.methods import decode_table, encode_table
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangeDelete,
    ExchangePut,
    Moving,
    QueueDelete,
    QueuePut,
    ShardOf,
)

FRAME_METHOD = 1
FRAME_END = 0xCE
EXCHANGE, QUEUE = 40, 50
DECLARE, DELETE_EXCHANGE, DELETE_QUEUE = 10, 20, 40
BIND_QUEUE, UNBIND_QUEUE = 20, 50
BIND_EXCHANGE, UNBIND_EXCHANGE = 30, 40

# Bits of exchange.declare and queue.declare (0-9-1, sections 1.6.2.1 and 1.7.2.1).
DURABLE, BIT_2, BIT_3 = 2, 4, 8
# A bit of queue.declare that AMQP does not use: the queue is paused.
PAUSED = 128

_HEAD: Final = struct.Struct(">BHI HHH")  # type, channel, payload bytes, class, method, ticket
_INT: Final = struct.Struct(">BHIHH")
_U32: Final = struct.Struct(">I")
_NO_TABLE: Final = bytes(4)

Definition = ExchangePut | ExchangeDelete | QueuePut | QueueDelete | BindingPut | BindingDelete


def encode_method(change: Definition) -> bytes:
    """Return the frame that makes a change.

    The vhost is not in it, nor the id, shard, owner and part of a queue.
    """
    match change:
        case BindingPut() | BindingDelete():
            return _encode_binding(change)
        case QueuePut():
            bits = (
                DURABLE * change.durable + BIT_2 * bool(change.owner) + BIT_3 * change.auto_delete
            )
            bits += PAUSED * change.paused
            return _frame(
                QUEUE,
                DECLARE,
                _short(change.name) + bytes((bits,)) + encode_table(change.arguments),
            )
        case QueueDelete():
            return _frame(QUEUE, DELETE_QUEUE, _short(change.name) + b"\0")
        case ExchangePut():
            bits = DURABLE * change.durable + BIT_2 * change.auto_delete + BIT_3 * change.internal
            body = (
                _short(change.name)
                + _short(change.type)
                + bytes((bits,))
                + encode_table(change.arguments)
            )
            return _frame(EXCHANGE, DECLARE, body)
        case ExchangeDelete():
            return _frame(EXCHANGE, DELETE_EXCHANGE, _short(change.name) + b"\0")


def _encode_binding(change: BindingPut | BindingDelete) -> bytes:
    if isinstance(change, BindingPut):
        return next(encode_bindings([change]))
    ends = _short(change.destination) + _short(change.source)
    key, table = _short(change.routing_key), encode_table(change.arguments)
    if change.kind == "exchange":
        return _frame(EXCHANGE, UNBIND_EXCHANGE, ends + key + b"\0" + table)
    return _frame(QUEUE, UNBIND_QUEUE, ends + key + table)  # the only one without a no-wait bit


def encode_bindings(puts: list[BindingPut]) -> Iterator[bytes]:
    """Yield the frames of bindings that have the same ends."""
    ends = _short(puts[0].destination) + _short(puts[0].source)
    ids = (EXCHANGE, BIND_EXCHANGE) if puts[0].kind == "exchange" else (QUEUE, BIND_QUEUE)
    for put in puts:
        key = put.routing_key.encode()
        body = b"%b%c%b\0%b" % (
            ends,
            len(key),
            key,
            encode_table(put.arguments) if put.arguments else _NO_TABLE,
        )
        yield _frame(*ids, body)


def decode_method(
    frame: bytes,
    vhost: str,
    queue_id: int,
    shard: int,
    owner: str,
    part: ShardOf | None = None,
    moving: Moving | None = None,
    born: int = 0,
) -> AnyChange:
    """Return the change that a frame makes. Raises ValueError for a frame that makes none."""
    _, _, payload_bytes, class_id, method_id = _INT.unpack_from(frame)
    if len(frame) != payload_bytes + 8 or frame[-1] != FRAME_END:
        raise ValueError("not one whole method frame")
    read = _Reader(frame, _HEAD.size)
    match class_id, method_id:
        case (40, 10):
            name, type, bits, arguments = read.short(), read.short(), read.octet(), read.table()
            durable, auto_delete, internal = (
                bool(bits & DURABLE),
                bool(bits & BIT_2),
                bool(bits & BIT_3),
            )
            return ExchangePut(vhost, name, type, durable, auto_delete, internal, arguments)
        case (40, 20):
            return ExchangeDelete(vhost, read.short())
        case (50, 10):
            name, bits, arguments = read.short(), read.octet(), read.table()
            durable, auto_delete = bool(bits & DURABLE), bool(bits & BIT_3)
            paused = bool(bits & PAUSED)
            beside = (owner, arguments, part, paused, moving, born)
            return QueuePut(vhost, name, queue_id, shard, durable, auto_delete, *beside)
        case (50, 40):
            return QueueDelete(vhost, read.short())
        case (50, 20) | (50, 50) | (40, 30) | (40, 40):
            return _decode_binding(read, vhost, class_id, method_id)
    raise ValueError(f"method {class_id}.{method_id} defines nothing")


def _decode_binding(
    read: _Reader, vhost: str, class_id: int, method_id: int
) -> BindingPut | BindingDelete:
    destination, source, key = read.short(), read.short(), read.short()
    if (class_id, method_id) != (QUEUE, UNBIND_QUEUE):
        read.octet()
    put = (class_id, method_id) in ((QUEUE, BIND_QUEUE), (EXCHANGE, BIND_EXCHANGE))
    kind = "queue" if class_id == QUEUE else "exchange"
    return (BindingPut if put else BindingDelete)(
        vhost, source, kind, destination, key, read.table()
    )


class _Reader:
    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def octet(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def short(self) -> str:
        count = self.octet()
        self._at += count
        return self._data[self._at - count : self._at].decode()

    def table(self) -> dict[str, Any]:
        (count,) = _U32.unpack_from(self._data, self._at)
        if count == 0:
            return {}
        return decode_table(self._data[self._at : self._at + _U32.size + count])


def _frame(class_id: int, method_id: int, body: bytes) -> bytes:
    return _HEAD.pack(FRAME_METHOD, 0, len(body) + 6, class_id, method_id, 0) + body + b"\xce"


def _short(text: str) -> bytes:
    data = text.encode()
    return bytes((len(data),)) + data
