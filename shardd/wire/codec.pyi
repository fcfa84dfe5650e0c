from shardd.wire.envelope import Buffer, Parts

class Publish:
    batch: int
    wanted: bool
    needs_sync: bool
    messages: int
    records: memoryview
    queue_ids: list[int]
    in_sequence: bool

def read_publish(message: Buffer) -> Publish: ...
def run_of(message: Buffer, ordinal: int) -> tuple[int, int, int]: ...

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
        times: int = 0,
        hides: bool = False,
    ) -> None: ...
    def own(self) -> None: ...
    @property
    def size(self) -> int: ...
    def take(self) -> bytes | None: ...
    def take_parts(self) -> Parts | None: ...

def read_deliveries(message: Buffer) -> list[tuple[int, int, int, int, bool, int, memoryview, int, bool]]: ...
