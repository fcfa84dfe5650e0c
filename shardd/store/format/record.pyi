from array import array

class Arrival:
    queue_id: int
    entries: array[int]
    body_bytes: int
    facts: array[int] | None
    indexes: array[int] | None
    times: array[int] | None
    marks: int
    kinds: int
    def __init__(
        self,
        queue_id: int,
        entries: array[int],
        body_bytes: int,
        facts: array[int] | None = None,
        indexes: array[int] | None = None,
        times: array[int] | None = None,
        marks: int = 0,
        kinds: int = 0,
    ) -> None: ...

def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int: ...
def crc32c_narrow(data: bytes | bytearray | memoryview, crc: int = 0) -> int: ...
def crc32c_tables(data: bytes | bytearray | memoryview, crc: int = 0) -> int: ...

class Abstracts:
    def __init__(self, start: int, capacity: int, share_max: int) -> None: ...
    def until(self, end: int) -> bytes | None: ...

class Batch:
    messages: int
    def plan(self, records: bytes | bytearray | memoryview, checked: bool = False) -> int: ...
    def put(
        self,
        records: bytes | bytearray | memoryview,
        target: bytearray,
        position: int,
        segment: int,
        salt: int,
        indexes: bool,
        abstracts: Abstracts | None = None,
    ) -> tuple[list[Arrival], tuple[int, int, int]]: ...
    def fit(self, start: int, room: int) -> int: ...
    def counts(self, start: int, stop: int) -> tuple[int, int, int]: ...
    def copy(
        self,
        records: bytes | bytearray | memoryview,
        start: int,
        stop: int,
        target: bytearray,
        position: int,
        salt: int,
        abstracts: Abstracts | None = None,
    ) -> None: ...
    def take(self, pieces: list[tuple[int, int, int, int]], indexes: bool) -> list[Arrival]: ...
    def facts(self, records: bytes | bytearray | memoryview, arrivals: list[Arrival]) -> None: ...

def copy_out(
    source: bytearray,
    base: int,
    used: int,
    entries: array[int],
    start: int,
    stop: int,
    bytes_max: int,
    at_least_one: bool,
) -> tuple[bytes, array[int]]: ...
def look_at(
    source: bytearray, used: int, entries: array[int], start: int, stop: int, bytes_max: int
) -> tuple[bytes | memoryview, array[int]]: ...
def pieces_out(
    pieces: list[bytes], bytes_max: int, at_least_one: bool
) -> tuple[bytes, array[int], bool]: ...
def message_bytes_at(source: bytearray, offset: int) -> int: ...
def only_segment(entries: array[int]) -> int: ...
def segment_runs(entries: array[int]) -> list[tuple[int, int, int]]: ...
def settled_pairs(queue_id: int, entries: array[int], start: int, stop: int) -> bytes: ...
def mark_redelivered(entries: array[int], marks: array[int]) -> None: ...
def redelivered(entries: array[int]) -> array[int]: ...
