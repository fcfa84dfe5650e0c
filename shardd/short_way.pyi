from collections.abc import Callable
from typing import Any

from shardmq.shardd.wire.codec import DeliveryWriter, Tally
from shardmq.shardd.wire.shared_memory import Taker

UNPOLLED_MAX: int
RING: int

class HeldState:
    batch: int
    sync: int

class PeerState:
    taken: int
    has_news: bool
    has_freed: bool
    writer: DeliveryWriter

class SyncsState:
    begun: int
    ended: int
    wanted: bool

class DeadLettersState:
    idle: bool

class ShortWay(Taker):
    is_on: bool
    given: int
    now: int
    allot: Callable[[Any, int, int, int, int], None]
    def __init__(
        self,
        *,
        senders: dict[Any, Any],
        queues: dict[int, Any],
        dirty: dict[Any, None],
        dirty_stores: set[Any],
        peers: dict[int, Any],
        redeeming: dict[int, int],
        syncs: SyncsState,
        batch_messages: Tally,
        batch_bytes: Tally,
        kinds: tuple[type, ...],
        states: tuple[Any, ...],
        timers: list[tuple[int, int]],
        dead_letters: DeadLettersState,
        credit_bytes: int,
        turn_bytes: int,
        queue_bytes: int,
        behind_messages: int,
        behind_bytes: int,
        watches: dict[Any, Any],
        is_on: bool = True,
    ) -> None: ...
    def receive(self, message: bytes | memoryview, now: int) -> bool: ...
    def turn_end(self, now: int) -> list[Any] | None: ...
    def serve(self, given: int) -> int: ...
    def answers(self) -> list[Any]: ...

class PlainPasses:
    taken: int
    def __init__(
        self,
        way: ShortWay,
        descriptor: int,
        heard: dict[int, Any],
        lanes: dict[str, Any],
        most: int,
        send: Callable[[list[Any]], None],
    ) -> None: ...
    def run(
        self, wait_ms: int, came: bool, look: Callable[[], int] | None
    ) -> list[tuple[int, int]] | None: ...
