from typing_extensions import Buffer

class Column:
    rows: int
    def __init__(
        self,
        rows: int,
        bits: Buffer | None,
        values: Buffer,
        data: Buffer | None = None,
        width: int = 4,
    ) -> None: ...

class Publishes:
    rows: int
    def __init__(
        self,
        value: Column,
        default_exchange: bytes,
        default_key: bytes,
        mandatory: bool,
        frame_bytes_max: int,
        routing_key: Column | None = None,
        exchange: Column | None = None,
        headers: tuple[Column, Column, Column, Column] | None = None,
        properties: list[Column | None] | None = None,
        producer: bytes | None = None,
        sequence: int = 0,
    ) -> None: ...
    def encode(self, row: int, bytes_max: int) -> tuple[bytearray, int]: ...
