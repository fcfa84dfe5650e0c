from array import array

_Bytes = bytes | bytearray | memoryview

FILTER_NAME: bytes

def records_of(records: _Bytes, queue_id: int) -> bytes: ...
def filters_of(records: _Bytes) -> array[int] | None: ...
def select(
    blob: _Bytes, offsets: array[int], sizes: array[int], wanted: array[int]
) -> tuple[bytes, array[int], array[int]]: ...
