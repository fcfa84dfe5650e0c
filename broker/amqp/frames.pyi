from typing import Any

INCOMPLETE: int
OTHER: int
SETTLE: int
FULL: int

HAS_HEADERS: int
MAY_HAVE_CC: int
MAY_HAVE_SEQUENCE: int
MAY_HAVE_LETTERS: int
HAS_USER_ID: int
BAD_EXPIRATION: int
DIRECT_REPLY_TO: int
BAD_PROPERTIES: int

CHANNEL_OPEN: int

_Bytes = bytes | bytearray | memoryview
Facts = tuple[int, int, int, int]

def scan(
    data: _Bytes, at: int, end: int, states: _Bytes, frame_bytes_max: int, message_bytes_max: int
) -> tuple[int, bytes, int, int, int]: ...
def room(size: int) -> bytearray: ...
def facts(props: _Bytes) -> Facts: ...
def row(
    line_off: int,
    line_len: int,
    channel: int,
    props_off: int,
    props_len: int,
    body_off: int,
    body_len: int,
    found: Facts,
) -> bytes: ...

class Incoming:
    state: Any
    channels: bytearray
    received_frame_bytes_max: int
    message_bytes_max: int
    buffer: Any
    next: Any
    part: Any
    at: int
    answers_channels: bool
    channels_max: int
    opened: int

def is_traced(data: _Bytes) -> bool: ...
def marked(buffer: _Bytes, table: _Bytes, chosen: list[int], now_ns: int) -> bytes | None: ...

class Sizes:
    classes: list[int]
    sum: int
    def add(self, table: bytes) -> None: ...

def settles(
    data: _Bytes, at: int, end: int
) -> tuple[int, int, list[tuple[int, int, int, bool]]]: ...
def binds(
    data: _Bytes, at: int, end: int, states: _Bytes
) -> tuple[int, int, list[tuple[str, str, str]], bool]: ...
def asking(table: _Bytes) -> set[int]: ...
def with_replies(buffer: _Bytes, table: _Bytes, names: dict[int, bytes]) -> tuple[bytes, bytes]: ...
def stamped(buffer: _Bytes, table: _Bytes, seconds: int) -> tuple[bytes, bytes] | None: ...
