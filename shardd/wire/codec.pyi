from collections.abc import Callable, Iterable

from shardmq.shardd.wire.envelope import Buffer, Parts
from shardmq.shardd.wire.messages import Publish, Weighed
from shardmq.shardd.wire.shared_memory import BodyMemory

TARGETS: int
NOWHERE: int
CALLER: int
HERE: int
RENDEZVOUS: int
MODULUS: int
CHANCE: int
JUMP: int
DONE: int
CHANNEL: int
UNKNOWN: int
ASK: int
UNROUTABLE: int
NEAR: int
FULL: int
HAS_BCC: int
OWN_LETTERS: int

def read_publish(message: Buffer) -> Publish: ...
def run_of(message: Buffer, ordinal: int) -> tuple[int, int, int]: ...
def runs_of(message: Buffer, ordinals: Iterable[int]) -> list[tuple[int, int, int, int]]: ...

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
        weight: int = 0,
        lent: bool = False,
    ) -> None: ...
    def own(self) -> None: ...
    @property
    def size(self) -> int: ...
    def take(self) -> bytes | None: ...
    def take_parts(self) -> Parts | None: ...

def read_deliveries(
    message: Buffer,
) -> list[tuple[int, int, int, int, bool, int, memoryview | Weighed, int, bool]]: ...

class Tally:
    @property
    def sum(self) -> int: ...
    @property
    def counts(self) -> list[int]: ...
    def add(self, value: int) -> None: ...

class Published:
    def add(self, exchange: bytes, came: int, left: int) -> None: ...
    def report(self) -> dict[bytes, tuple[int, int]]: ...
    def forget(self, gone: Callable[[bytes], bool]) -> None: ...

class Routes:
    def __init__(self, seed: int = 1, published: Published | None = None) -> None: ...
    def __len__(self) -> int: ...
    def clear(self) -> None: ...
    def learn_spread(
        self, exchange: bytes, how: int, members: list[tuple[int, int, int, int, bool]]
    ) -> bool: ...
    def learn_exchange(
        self,
        exchange: bytes,
        kind: int,
        targets: list[tuple[int, list[int]]],
        durable: bool,
        reach: int = 0,
    ) -> bool: ...
    def learn(
        self,
        line: bytes,
        kind: int,
        targets: list[tuple[int, list[int]]],
        durable: bool,
        reach: int = 0,
    ) -> None: ...

def key_hash(key: bytes) -> int: ...
def jump_winner(hashed: int, weights: list[int]) -> int: ...
def winners(hashes: list[int], members: list[tuple[int, int]]) -> list[int]: ...
def winner(hashed: int, members: list[tuple[int, int]]) -> int: ...

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
