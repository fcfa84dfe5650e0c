from shardmq.shardd.wire.envelope import Buffer, Parts
from shardmq.shardd.wire.routes import Routes
from shardmq.shardd.wire.shared_memory import BodyMemory

DONE: int
CHANNEL: int
UNKNOWN: int
ASK: int
UNROUTABLE: int
NEAR: int
FULL: int
HAS_BCC: int
OWN_LETTERS: int

class Packer:
    shards: int
    in_sequence: bool
    near_queue: int
    unroutable: int
    near_count: int
    def __init__(self, shards: int) -> None: ...
    def lend_from(self, bodies: BodyMemory) -> None: ...
    def may_lend(self, shard: int, may: bool) -> None: ...
    def pack(
        self,
        routes: Routes,
        buffer: Buffer,
        table: Buffer,
        start: int,
        connection: int,
        first_seq: int,
        now_ms: int,
        lasting: bool = False,
        far_queue: int = 0,
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
        count: int = 1,
        in_sequence: bool = False,
        marks: int = 0,
    ) -> None: ...
    def take_touched(self) -> int: ...
    def waiting(self) -> int: ...
    def pending(self, shard: int) -> int: ...
    def weight(self, shard: int) -> int: ...
    def messages(self, shard: int) -> int: ...
    def take(
        self, shard: int, peer: int, incarnation: int, epoch: int, batch: int, wanted: bool = True
    ) -> bytes | None: ...
    def take_parts(
        self, shard: int, peer: int, incarnation: int, epoch: int, batch: int, wanted: bool = True
    ) -> Parts | None: ...
    def drop(self, shard: int) -> None: ...

def place_of(props: Buffer) -> tuple[bytes, int] | None: ...
def crc32c(data: Buffer) -> int: ...
