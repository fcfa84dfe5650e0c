_Bytes = bytes | bytearray | memoryview
_Run = tuple[int, int, int, bytes, bytes | None, int, int, bool]

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
def framed(
    messages: list[tuple[bytes, memoryview]],
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
def content(
    channel: int, method_payload: bytes, props: bytes, body: _Bytes, frame_bytes_max: int
) -> bytes: ...
def stored(buffer: _Bytes, table: _Bytes, index: int) -> bytes: ...
def read_stored(message: _Bytes) -> tuple[bytes, bytes, bytes, bytes]: ...
def split(blob: _Bytes, count: int) -> list[tuple[bytes, bytes, bytes]]: ...
def letters(
    blob: _Bytes, count: int
) -> list[tuple[tuple[bytes, bytes, bytes | None, int, int], int, bytes, bytes, bytes, bytes]]: ...
def fields(props: _Bytes) -> list[tuple[int, int, int]]: ...
def numbered(blob: _Bytes, offsets: _Bytes, name: bytes, cleaned: bool = False) -> bytes | None: ...
def released(blob: _Bytes, count: int) -> tuple[bytes, list[_Run]]: ...
