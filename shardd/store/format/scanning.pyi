from array import array
from collections.abc import Callable, Collection

from shardmq.shardd.store.format.record import Arrival

def scan(
    segment: bytearray, start: int, stop: int, salt: int
) -> tuple[bytes, int, list[tuple[int, int]]]: ...
def sound_until(data: bytearray, start: int, stop: int, salt: int) -> tuple[int, int]: ...
def torn_bytes(segment: bytearray, end: int, stop: int) -> int: ...

class Collector:
    def __init__(
        self,
        queue_ids: Collection[int],
        timed: Collection[int],
        note: Callable[[int, int], None] | None = None,
    ) -> None: ...
    def add(
        self, abstracts: bytes, segment: int, pairs: bytes, flags: int
    ) -> tuple[int, int, int, int]: ...
    def take(self) -> list[Arrival]: ...

class Survivors:
    records: int
    messages: int
    references: int
    def __init__(self, number: int, salt: int, header_bytes: int) -> None: ...
    @property
    def size(self) -> int: ...
    def add(
        self,
        data: bytearray,
        abstracts: bytes,
        number: int,
        settled: bytes,
        dead_until: int,
        queue_ids: array[int] | None,
    ) -> tuple[array[int], array[int]]: ...
    def ranges(
        self,
        abstracts: bytes,
        end: int,
        settled: bytes,
        dead_until: int,
        queue_ids: array[int] | None,
    ) -> list[tuple[int, int]]: ...
    def take(self) -> bytearray: ...

def moved_entries(
    known: array[int], placed: array[int], entries: array[int], start: int, stop: int
) -> array[int]: ...
def moved_pairs(known: array[int], placed: array[int], number: int, pairs: bytes) -> bytes: ...
def moved_again(
    known: array[int], between: array[int], from_there: array[int], placed: array[int]
) -> tuple[array[int], array[int]]: ...
