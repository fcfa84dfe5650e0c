OFFSET: int
TIMESTAMP: int
EXCHANGE: int
ROUTING_KEY: int
VALUE: int
HEADERS: int
PROPERTIES: int
PROPERTY_COLUMNS: tuple[str, ...]

class Arrays:
    nodes: int
    buffers: int
    def repeat(self, value: bytes, is_text: bool) -> None: ...

class Sink: ...

class Filter:
    def __init__(
        self,
        pattern: bytes | None = None,
        key: bytes | None = None,
        exchange: bytes | None = None,
        since: int = 0,
        until: int = ...,
    ) -> None: ...

class Columns:
    rows: int
    bytes: int
    position: int
    offset: int
    checked: int
    base: int
    used: int
    need: int
    damaged: bool
    full: bool
    def __init__(self, wanted: int, filter: Filter | None = None) -> None: ...
    def clear(self) -> None: ...
    def take(
        self,
        window: bytearray,
        base: int,
        used: int,
        position: int,
        checked: int,
        salt: int,
        offset: int,
        limit: int,
        rows_max: int,
        bytes_max: int,
        handle: int = -1,
        end: int = 0,
        piece: int = 0,
        sink: Sink | None = None,
    ) -> None: ...
    def flush(self, sink: Sink) -> None: ...
    @property
    def first_offset(self) -> int: ...
    def arrays(self) -> Arrays: ...
    def lay_out(self, column: int, to: Arrays) -> None: ...
