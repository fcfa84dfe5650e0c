from typing import Any

OFFSET: int
TIMESTAMP: int
EXCHANGE: int
ROUTING_KEY: int
VALUE: int
HEADERS: int
PROPERTIES: int
PROPERTY_COLUMNS: tuple[str, ...]

class Memory:
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

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
    ) -> None: ...
    def offset_buffers(self) -> tuple[Memory]: ...
    def timestamp_buffers(self) -> tuple[Memory]: ...
    def text_buffers(self, column: int) -> tuple[Memory, Memory]: ...
    def header_buffers(
        self,
    ) -> tuple[int, Memory, Memory, int, tuple[Memory, Memory], tuple[Memory, Memory], tuple[Memory, Memory]]: ...
    def property_buffers(self) -> list[Any]: ...
