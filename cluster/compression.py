"""The compression of what a leader of copies sends its followers: the methods and their bounds.

The libraries are imported when something is compressed or decompressed for the first time.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from typing import Final

# The package that each method needs.
MODULES: Final = {"lz4": "lz4", "zstd": "zstandard"}
PLAIN: Final = "none"  # the setting for no method
EXTRA: Final = "shardmq[compression]"  # of this package, which brings the libraries
# The level with the least work for the processor; higher ones save little of records of messages.
ZSTD_LEVEL: Final = 1
# What is shorter is sent as it is: it fills a packet of the network at most.
COMPRESSED_FROM_BYTES: Final = 1024
# What is longer is sent as it is. A follower decompresses nothing that says to be longer.
DECOMPRESSED_BYTES_MAX: Final = 8 << 20


class BadCompression(ValueError):
    """The bytes are not what a leader has compressed."""


def is_there(method: str) -> bool:
    """Return whether the library of a method is installed here; it is not imported for that."""
    return importlib.util.find_spec(MODULES[method]) is not None


@functools.cache
def methods() -> list[str]:
    """Return the methods that this process can decompress."""
    return [method for method in MODULES if is_there(method)]


def compress(method: str, data: bytes) -> bytes:
    """Return the data in compressed form. Any thread may call."""
    return _compressor(method)(data)


def decompress(method: str, data: bytes, size: int) -> bytes:
    """Return the `size` bytes that were compressed.

    Nothing beyond these bytes is allocated, whatever the data say. Raises BadCompression.
    """
    if method not in MODULES:
        raise BadCompression(f"the method {method!r} is not known")
    if not 0 < size <= DECOMPRESSED_BYTES_MAX:
        raise BadCompression(f"{size} bytes in compressed form")
    try:
        found = _decompressor(method)(data, size)
    except ImportError as error:
        raise BadCompression(str(error)) from None
    if len(found) != size:
        raise BadCompression(f"{len(found)} bytes in place of {size}")
    return found


@functools.cache
def _compressor(method: str) -> Callable[[bytes], bytes]:
    if method == "lz4":
        import lz4.block

        return functools.partial(lz4.block.compress, store_size=False)
    import zstandard

    local = threading.local()  # a compressor is of one thread

    def compress(data: bytes) -> bytes:
        try:
            compressor: zstandard.ZstdCompressor = local.compressor
        except AttributeError:
            compressor = local.compressor = zstandard.ZstdCompressor(ZSTD_LEVEL)
        found: bytes = compressor.compress(data)
        return found

    return compress


@functools.cache
def _decompressor(method: str) -> Callable[[bytes, int], bytes]:
    if method == "lz4":
        import lz4.block

        def decompress_lz4(data: bytes, size: int) -> bytes:
            try:
                found: bytes = lz4.block.decompress(data, uncompressed_size=size)
            except lz4.block.LZ4BlockError as error:
                raise BadCompression(str(error)) from None
            return found

        return decompress_lz4
    import zstandard

    def decompress_zstd(data: bytes, size: int) -> bytes:
        try:
            # The size that a frame says wins over any bound, so it is looked at before.
            said = zstandard.get_frame_parameters(data).content_size
            if said != size:
                raise BadCompression(f"a frame of {said} bytes in place of {size}")
            decompressor = zstandard.ZstdDecompressor(max_window_size=DECOMPRESSED_BYTES_MAX)
            found: bytes = decompressor.decompress(data, size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise BadCompression(str(error)) from None
        return found

    return decompress_zstd
