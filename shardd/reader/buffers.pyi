from typing_extensions import Buffer

from shardmq.shardd.reader.ipc import BatchHead
from shardmq.shardd.store.format.columns import Arrays, Sink

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

class Sender(Sink):
    def __init__(
        self,
        arrays: Arrays,
        head: BatchHead,
        handle: int,
        chunked: bool,
        timeout_ms: int,
        pause_bytes: int,
    ) -> None: ...
    def take_sent(self) -> int: ...
