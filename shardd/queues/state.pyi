from array import array
from typing import Any

class Counters:
    __slots__: tuple[str, ...]
    acked: int
    delivered: int
    delivered_auto: int
    got: int
    got_auto: int
    got_empty: int
    let_go: int
    published: int
    redelivered: int
    repeated: int
    def __init__(self) -> None: ...
    def add(self, other: Counters) -> None: ...

class Window:
    full: int
    room: int
    consumers: int
    blocked: dict[Any, None]
    served: Any
    def __init__(self, room: int) -> None: ...
    def unblocked(self) -> list[Any]: ...
    def forget(self, queue: object) -> None: ...
    def free(self, count: int) -> None: ...

class Unacked:
    count: int
    def __init__(self) -> None: ...
    @property
    def next_number(self) -> int: ...
    @property
    def first_number(self) -> int: ...
    @property
    def first_entry(self) -> int: ...
    @property
    def lowest(self) -> int: ...
    def add(self, entries: array[int], sizes: array[int]) -> int: ...
    def skip(self, count: int) -> int: ...
    def settle(self, first: int, last: int) -> tuple[array[int], int]: ...
    def held(self) -> array[int]: ...
    def take_all(self) -> tuple[array[int], int]: ...
    def take_until(self, last: int) -> tuple[array[int], int]: ...

class ConsumerState:
    # A queue.Queue. The type is not named here because queue.py imports this module.
    queue: Any
    peer: object
    window: Window
    unacked: Unacked
    number: int
    connection: int
    channel: int
    prefetch: int
    priority: int
    no_ack: bool
    detached: bool

class ConsumersState:
    room: int
    has_allotments: bool

class BacklogState:
    id: int
    ready_count: int
    ready_bytes: int
    unacked_count: int
    unacked_bytes: int
    marks: int
    kinds: int
    counters: Counters
    durable: bool
    hides: bool
    is_watched: bool
    has_no_rule: bool

class DispatchState:
    is_stuck: bool
    share: float
    def note_stuck(self, is_stuck: bool, now: int) -> None: ...
    def share_at(self, now: int) -> float: ...

class QueueState:
    id: int
    deleted: bool
