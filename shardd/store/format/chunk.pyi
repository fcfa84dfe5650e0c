from array import array

UNFILTERED: int
ANY: int
FILTERS_MAX: int
FILTER_NAME: bytes

class Packer:
    messages: int
    def pack(
        self,
        records: bytes | bytearray | memoryview,
        offset: int,
        filters: array[int] | None = None,
    ) -> tuple[bytearray, array[int]]: ...

def seal(chunks: bytearray, start: int, stop: int, salt: int, mark: int) -> None: ...
def chunk_at(
    window: bytearray, base: int, used: int, position: int, salt: int
) -> tuple[int, int, int, int]: ...

class Copier:
    position: int
    offset: int
    checked: int
    need: int
    damaged: bool
    full: bool
    def copy(
        self,
        window: bytearray,
        base: int,
        used: int,
        position: int,
        checked: int,
        salt: int,
        offset: int,
        limit: int,
        bytes_max: int,
        at_least_one: bool,
        wanted: array[int] | None,
        count_max: int = ...,
    ) -> tuple[bytes, array[int], array[int]]: ...

def expanded(runs: array[int], plus: int) -> array[int]: ...

class Scanner:
    offset: int
    end: int
    dirt: int
    timestamp: int
    newest: int
    last_chunk: int
    mark: int
    cursor: int
    need: int
    holes: list[tuple[int, int, tuple[int, ...]]]
    def __init__(
        self, salt: int, position: int, offset: int, newest: int, limit: int, every: int
    ) -> None: ...
    def feed(self, window: bytearray, used: int, last: bool) -> None: ...
    def cut(self, hole: int) -> None: ...
    def index(self) -> array[int]: ...

def records_of(records: bytes | bytearray | memoryview, queue_id: int) -> bytes: ...
def filters_of(records: bytes | bytearray | memoryview) -> array[int] | None: ...
def select(
    blob: bytes | bytearray | memoryview, offsets: array[int], sizes: array[int], wanted: array[int]
) -> tuple[bytes, array[int], array[int]]: ...
