_Bytes = bytes | bytearray | memoryview
_Run = tuple[int, int, int, bytes, bytes | None, int, int, bool]

def released(blob: _Bytes, count: int) -> tuple[bytes, list[_Run]]: ...
