"""broker/amqp/frames.pyx and contents.pyx in plain, slow, obvious Python."""

from __future__ import annotations

import struct
from collections.abc import Iterator

INCOMPLETE, OTHER, SETTLE, FULL = range(4)
HAS_HEADERS, MAY_HAVE_CC, HAS_USER_ID, BAD_EXPIRATION, DIRECT_REPLY_TO, BAD_PROPERTIES = (
    1,
    2,
    4,
    8,
    16,
    32,
)
MAY_HAVE_SEQUENCE, MAY_HAVE_LETTERS = 64, 128
ROWS_MAX, WHOLE_BYTES_MAX = 2048, 65536
NONE = 0xFFFFFFFF
ROW = struct.Struct("<IHHIIIIQIBBBBQ")
HEAD = struct.Struct(">BHI")
END = 0xCE

Facts = tuple[int, int, int, int]


class Stopped(Exception):
    """Not a whole publish: why, and how many bytes are needed to see more."""

    def __init__(self, why: int, needed: int = 0) -> None:
        super().__init__(why, needed)
        self.why = why
        self.needed = needed


# -- publishes -------------------------------------------------------------------------------------


def facts(props: bytes) -> Facts:
    """Return (ttl_ms, delivery_mode, priority, flags).

    If BAD_PROPERTIES is among the flags, only this flag counts.
    """
    ttl, mode, priority, flags = NONE, 0, 0xFF, 0
    if len(props) < 2:
        return ttl, mode, priority, BAD_PROPERTIES
    present = int.from_bytes(props[:2], "big")
    if present & 3:
        return ttl, mode, priority, BAD_PROPERTIES
    at = 2
    for bit in range(15, 1, -1):
        if not present >> bit & 1:
            continue
        if bit == 13:
            start = at + 4
            size = int.from_bytes(props[at:start], "big")
        elif bit in (12, 11, 6):
            start, size = at, 8 if bit == 6 else 1
        else:
            start = at + 1
            size = int.from_bytes(props[at:start], "big")
        at = start + size
        if start > len(props) or at > len(props):
            return ttl, mode, priority, BAD_PROPERTIES
        value = props[start:at]
        if bit == 13:
            flags |= HAS_HEADERS
            if b"\x02CC" in value or b"\x03BCC" in value:
                flags |= MAY_HAVE_CC
            if b"\x0ax-sequence" in value:
                flags |= MAY_HAVE_SEQUENCE
            if b"\x16x-dead-letter-exchange" in value:
                flags |= MAY_HAVE_LETTERS
        elif bit == 12:
            mode = value[0]
        elif bit == 11:
            priority = min(value[0], 0xFE)
        elif bit == 8:
            digits = 0 < len(value) <= 10 and all(character in b"0123456789" for character in value)
            if digits and int(value) < NONE:
                ttl = int(value)
            else:
                flags |= BAD_EXPIRATION
        elif bit == 4:
            flags |= HAS_USER_ID
        elif bit == 9 and value == b"amq.rabbitmq.reply-to":
            flags |= DIRECT_REPLY_TO
    if at != len(props):
        return ttl, mode, priority, BAD_PROPERTIES
    return ttl, mode, priority, flags


def _is_publish_line(payload: bytes) -> bool:
    """Return whether these are the bytes of a basic.publish that is not immediate.

    u16 60 | u16 40 | u16 ticket | u8 n, exchange | u8 m, key | u8 bits, the second of which is not
    set.
    """
    if len(payload) < 9:
        return False
    key = 7 + payload[6]
    if key + 1 >= len(payload):
        return False
    bits = key + 1 + payload[key]
    return bits + 1 == len(payload) and not payload[bits] & 2


def _frame(data: bytes, at: int) -> tuple[int, int, int]:
    """Type, channel, size of payload."""
    kind, channel, size = HEAD.unpack_from(data, at)
    return kind, channel, size


def _publish(
    data: bytes, start: int, states: bytes, frame_max: int, message_max: int
) -> tuple[bytes, int]:
    """Return the row of the publish at `start`, and the position where the publish ends."""
    at = start
    if len(data) - at < 7:
        raise Stopped(INCOMPLETE, 7)
    kind, channel, size = _frame(data, at)
    if kind != 1 or size > frame_max - 8 or channel >= len(states) or states[channel] != 1:
        raise Stopped(OTHER)
    if len(data) - at < size + 8:
        raise Stopped(INCOMPLETE, size + 8)
    payload = data[at + 7 : at + 7 + size]
    if data[at + 7 + size] != END or payload[:2] != b"\0\x3c" or size < 4:
        raise Stopped(OTHER)
    if payload[2:4] != b"\0\x28":
        raise Stopped(SETTLE if payload[2:4] in (b"\0\x50", b"\0\x5a", b"\0\x78") else OTHER)
    if not _is_publish_line(payload):
        raise Stopped(OTHER)
    line_off, line_len = at + 13, size - 6
    at += size + 8
    if len(data) - at < 7:
        raise Stopped(INCOMPLETE, at - start + 7)
    kind, number, size = _frame(data, at)
    if kind != 2 or number != channel or size < 14 or size > frame_max - 8:
        raise Stopped(OTHER)
    if len(data) - at < size + 8:
        raise _later(at - start + size + 8)
    class_id, _, body_len = struct.unpack_from(">HHQ", data, at + 7)
    if data[at + 7 + size] != END or class_id != 60 or body_len > message_max:
        raise Stopped(OTHER)
    props_off, props_len = at + 19, size - 12
    found = facts(data[props_off : props_off + props_len])
    if found[3] & BAD_PROPERTIES:
        raise Stopped(OTHER)
    at += size + 8
    body_off = at if body_len else 0
    left, body_frames = body_len, 0
    while left:
        if len(data) - at < 7:
            raise _later(at - start + left + 8)
        kind, number, size = _frame(data, at)
        if kind != 3 or number != channel or not 0 < size <= left or size + 8 > frame_max:
            raise Stopped(OTHER)
        if len(data) - at < size + 8:
            raise _later(at - start + left + 8)
        if data[at + 7 + size] != END:
            raise Stopped(OTHER)
        left -= size
        at += size + 8
        body_frames += 1
    row = ROW.pack(
        line_off,
        line_len,
        channel,
        props_off,
        props_len,
        body_off,
        body_frames,
        body_len,
        *found,
        0,
        0,
    )
    return row, at


def _later(needed: int) -> Stopped:
    return Stopped(OTHER if needed > WHOLE_BYTES_MAX else INCOMPLETE, needed)


def scan(
    data: bytes, at: int, end: int, states: bytes, frame_max: int, message_max: int
) -> tuple[int, bytes, int, int, int]:
    """As frames.scan; the bytes needed are told only with INCOMPLETE."""
    rows: list[bytes] = []
    try:
        while len(rows) < ROWS_MAX:
            row, at = _publish(data[:end], at, states, frame_max, message_max)
            rows.append(row)
    except Stopped as stopped:
        return (
            at,
            b"".join(rows),
            len(rows),
            stopped.why,
            stopped.needed if stopped.why == INCOMPLETE else 0,
        )
    return at, b"".join(rows), len(rows), FULL, 0


# -- settles ---------------------------------------------------------------------------------------


def settles(data: bytes, at: int, end: int) -> tuple[int, int, list[tuple[int, int, int, bool]]]:
    """One range for each settle, then neighbours joined. Without the bound on ranges."""
    found: list[tuple[int, int, int, bool]] = []
    channel = None
    while end - at >= 21:
        kind, number, size = _frame(data, at)
        method = data[at + 7 : at + 11]
        settle = {b"\0\x3c\0\x50": 0, b"\0\x3c\0\x5a": 90, b"\0\x3c\0\x78": 120}.get(method)
        if (
            kind != 1
            or size != 13
            or data[at + 20] != END
            or settle is None
            or channel not in (None, number)
        ):
            break
        channel = number
        bits = data[at + 19]
        multiple = bool(bits & 1) and settle != 90
        what = 0
        if settle:
            what = 2 if bits & (1 if settle == 90 else 2) else 1
        tag = int.from_bytes(data[at + 11 : at + 19], "big")
        found.append((what, tag, tag, multiple))
        at += 21
    return at, channel or 0, _joined(found)


def _joined(found: list[tuple[int, int, int, bool]]) -> list[tuple[int, int, int, bool]]:
    ranges: list[tuple[int, int, int, bool]] = []
    for what, tag, _, multiple in found:
        if (
            ranges
            and not multiple
            and not ranges[-1][3]
            and (what, tag) == (ranges[-1][0], ranges[-1][2] + 1)
        ):
            ranges[-1] = (what, ranges[-1][1], tag, False)
        else:
            ranges.append((what, tag, tag, multiple))
    return ranges


# -- binds -----------------------------------------------------------------------------------------


def binds(
    data: bytes, at: int, end: int, states: bytes
) -> tuple[int, int, list[tuple[str, str, str]], bool]:
    """As frames.binds, without the bound on how many."""
    found: list[tuple[str, str, str]] = []
    alike = None
    while end - at >= 22:
        kind, number, size = _frame(data, at)
        payload, mark = data[at + 7 : min(at + 7 + size, end)], data[at + 7 + size : at + 8 + size]
        if (
            kind != 1
            or at + 8 + size > end
            or mark != bytes([END])
            or payload[:4] != b"\0\x32\0\x14"
        ):
            break
        if number >= len(states) or states[number] != 1:
            break
        names, rest = [], payload[6:]
        for _ in range(3):
            names.append(rest[1 : 1 + rest[0]] if rest else b"")
            rest = rest[1 + rest[0] :] if rest else rest
        if len(rest) != 5 or rest[1:] != bytes(4) or alike not in (None, (number, rest[0] & 1)):
            break
        try:
            queue, exchange, key = (name.decode() for name in names)
        except UnicodeDecodeError:
            break
        alike = number, rest[0] & 1
        found.append((exchange, queue, key))
        at += size + 8
    number, nowait = alike or (0, 0)
    return at, number, found, bool(nowait)


# -- stored messages -------------------------------------------------------------------------------


def read_stored(message: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return (exchange, key, props, body).

    Bytes behind them belong to another message. Raises ValueError when some are missing.
    """
    return next(_each(message, 1))


def _each(blob: bytes, count: int) -> Iterator[tuple[bytes, bytes, bytes, bytes]]:
    at = 0
    for _ in range(count):
        if len(blob) - at < 10:
            raise ValueError
        body_len, props_len = struct.unpack_from("<II", blob, at)
        at += 8
        parts = []
        for _ in range(2):
            if at >= len(blob):
                raise ValueError
            parts.append(blob[at + 1 : at + 1 + blob[at]])
            at += 1 + blob[at]
        parts += [blob[at : at + props_len], blob[at + props_len : at + props_len + body_len]]
        at += props_len + body_len
        if at > len(blob):
            raise ValueError
        yield parts[0], parts[1], parts[2], parts[3]


def stored(data: bytes, table: bytes, index: int) -> bytes:
    line, line_len, _, props, props_len, body, body_frames, body_len, *_ = ROW.unpack_from(
        table, index * ROW.size
    )
    parts = b""
    for _ in range(body_frames):
        size = _frame(data, body)[2]
        parts += data[body + 7 : body + 7 + size]
        body += size + 8
    names = data[line : line + line_len - 1]
    return struct.pack("<II", body_len, props_len) + names + data[props : props + props_len] + parts


def _one(kind: int, channel: int, payload: bytes) -> bytes:
    return HEAD.pack(kind, channel, len(payload)) + payload + bytes([END])


def _short(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def content(channel: int, method: bytes, props: bytes, body: bytes, frame_max: int) -> bytes:
    part = frame_max - 8
    head = struct.pack(">HHQ", 60, 0, len(body)) + props
    bodies = b"".join(_one(3, channel, body[at : at + part]) for at in range(0, len(body), part))
    return _one(1, channel, method) + _one(2, channel, head) + bodies


def deliveries(
    blob: bytes, count: int, channel: int, ctag: bytes, tag: int, redelivered: bool, frame_max: int
) -> bytes:
    out = b""
    for number, (exchange, key, props, body) in enumerate(_each(blob, count)):
        numbers = struct.pack(">Q?", tag + number, redelivered)
        method = (
            struct.pack(">HH", 60, 60) + _short(ctag) + numbers + _short(exchange) + _short(key)
        )
        out += content(channel, method, props, body, frame_max)
    return out


def passed_on(
    data: bytes,
    table: bytes,
    first: int,
    count: int,
    channel: int,
    ctag: bytes,
    tag: int,
    frame_max: int,
) -> bytes:
    blob = b"".join(stored(data, table, index) for index in range(first, first + count))
    return deliveries(blob, count, channel, ctag, tag, False, frame_max)


def is_traced(data: bytes) -> bool:
    """Return whether a header of a sampled trace may be anywhere in these bytes."""
    return any(
        data[at : at + 12] == b"\x0btraceparent"
        and data[at + 12 : at + 13] in (b"S", b"x")
        and int.from_bytes(data[at + 13 : at + 17], "big") >= 55
        and len(data) >= at + 72
        and _is_odd(data[at + 71])
        for at in range(len(data))
    )


def _is_odd(digit: int) -> bool:
    """Return whether a digit of 0 to 9 and a to f is odd. Others are as their codes are."""
    return digit % 2 == 1 if digit <= ord("9") else digit % 2 == 0


def marked(data: bytes, table: bytes, chosen: list[int], now_ns: int) -> bytes | None:
    rows = [list(row) for row in ROW.iter_unpack(table)]
    found = {at for at, row in enumerate(rows) if is_traced(data[row[3] : row[3] + row[4]])} | set(
        chosen
    )
    for at in found:
        rows[at][11] |= HAS_USER_ID
        rows[at][13] = now_ns
    return b"".join(ROW.pack(*row) for row in rows) if found else None


def get_ok(
    message: bytes, channel: int, tag: int, redelivered: bool, remaining: int, frame_max: int
) -> bytes:
    exchange, key, props, body = read_stored(message)
    numbers = struct.pack(">Q?", tag, redelivered)
    method = (
        struct.pack(">HH", 60, 71)
        + numbers
        + _short(exchange)
        + _short(key)
        + struct.pack(">I", remaining)
    )
    return content(channel, method, props, body, frame_max)


def fields(props: bytes) -> list[tuple[int, int, int]]:
    """(bit, start, end) of each property. ValueError when the list is broken."""
    if len(props) < 2 or props[1] & 3:
        raise ValueError
    at, found = 2, []
    for bit in range(15, 1, -1):
        if int.from_bytes(props[:2], "big") >> bit & 1:
            if bit == 13:
                size = 4 + int.from_bytes(props[at : at + 4], "big")
            else:
                size = {12: 1, 11: 1, 6: 8}.get(bit) or 1 + sum(props[at : at + 1])
            found.append((bit, at, at + size))
            at += size
            if at > len(props):
                raise ValueError
    if at != len(props):
        raise ValueError
    return found
