from shardd.wire.envelope import Buffer

DONE: int
CHANNEL: int
UNKNOWN: int
ASK: int
UNROUTABLE: int
TARGETS: int
NOWHERE: int
CALLER: int

class Routes:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...
    def learn(self, line: bytes, kind: int, targets: list[tuple[int, list[int]]], durable: bool) -> None: ...

class Packer:
    shards: int
    def __init__(self, shards: int) -> None: ...
    def pack(
        self,
        routes: Routes,
        buffer: Buffer,
        table: Buffer,
        start: int,
        connection: int,
        first_seq: int,
        now_ms: int,
    ) -> tuple[int, int]: ...
    def add_stored(
        self,
        shard: int,
        ids: list[int],
        message: Buffer,
        connection: int,
        channel: int,
        seq: int,
        now_ms: int,
        ttl_ms: int,
        priority: int,
        persistent: bool,
        needs_sync: bool,
    ) -> None: ...
    def take_touched(self) -> int: ...
    def pending(self, shard: int) -> int: ...
    def messages(self, shard: int) -> int: ...
    def take(self, shard: int, peer: int, incarnation: int, epoch: int, batch: int) -> bytes | None: ...
    def drop(self, shard: int) -> None: ...

class Publish:
    batch: int
    needs_sync: bool
    messages: int
    records: memoryview

def read_publish(message: Buffer) -> Publish: ...
def run_of(message: Buffer, ordinal: int) -> tuple[int, int, int]: ...
def first_queue_ids(records: Buffer) -> list[int]: ...

class DeliveryWriter:
    def __init__(self, peer: int, incarnation: int, epoch: int, shard: int) -> None: ...
    def add(
        self,
        connection: int,
        channel: int,
        consumer: int,
        first_number: int,
        redelivered: bool,
        count: int,
        blob: Buffer,
    ) -> None: ...
    @property
    def size(self) -> int: ...
    def take(self) -> bytes | None: ...

def read_deliveries(message: Buffer) -> list[tuple[int, int, int, int, bool, int, memoryview]]: ...
def crc32c(data: Buffer) -> int: ...
