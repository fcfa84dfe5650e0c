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

class Sizes:
    classes: list[int]
    sum: int
    def add(self, table: bytes) -> None: ...

def settles(
    data: _Bytes, at: int, end: int, frame_bytes_max: int
) -> tuple[int, int, list[tuple[int, int, int, bool]]]: ...
def deliveries(
    blob: _Bytes,
    count: int,
    channel: int,
    consumer_tag: bytes,
    first_tag: int,
    redelivered: bool,
    frame_bytes_max: int,
) -> bytes: ...
def delivery_parts(
    blob: _Bytes,
    count: int,
    channel: int,
    consumer_tag: bytes,
    first_tag: int,
    redelivered: bool,
    frame_bytes_max: int,
) -> list[bytes | memoryview]: ...
def passed_on(
    buffer: _Bytes,
    table: _Bytes,
    first: int,
    count: int,
    channel: int,
    consumer_tag: bytes,
    first_tag: int,
    frame_bytes_max: int,
) -> bytes: ...
def get_ok(
    message: _Bytes, channel: int, tag: int, redelivered: bool, remaining: int, frame_bytes_max: int
) -> bytes: ...
def content(channel: int, method_payload: bytes, props: bytes, body: _Bytes, frame_bytes_max: int) -> bytes: ...
def stored(buffer: _Bytes, table: _Bytes, index: int) -> bytes: ...
def read_stored(message: _Bytes) -> tuple[bytes, bytes, bytes, bytes]: ...
def split(blob: _Bytes, count: int) -> list[tuple[bytes, bytes, bytes]]: ...
def letters(
    blob: _Bytes, count: int
) -> list[tuple[tuple[bytes, bytes, bytes | None, int, int], int, bytes, bytes, bytes, bytes]]: ...
def asking(table: _Bytes) -> set[int]: ...
def with_replies(buffer: _Bytes, table: _Bytes, names: dict[int, bytes]) -> tuple[bytes, bytes]: ...
def stamped(buffer: _Bytes, table: _Bytes, seconds: int) -> tuple[bytes, bytes] | None: ...
