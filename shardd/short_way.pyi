from typing import Any

from shardmq.shardd.wire.codec import DeliveryWriter, Tally

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

class ShortWay:
    is_on: bool
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
        credit_bytes: int,
        is_on: bool = True,
    ) -> None: ...
    def receive(self, message: bytes | memoryview) -> bool: ...
    def serve(self, given: int, bytes_max: int) -> int: ...
    def answers(self) -> list[Any]: ...
