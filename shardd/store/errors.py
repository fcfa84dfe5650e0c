"""Name the errors of a store that are not our own mistake; each has one answer."""


class StoreError(Exception):
    """Base class of the errors that this folder raises on purpose."""


class DiskFull(StoreError):
    """There is no room for another segment, and nothing was appended.

    Reading and settling go on. The caller may try again later.
    """


class StoreFailed(StoreError):
    """A write or sync failed, so it is not known what is on disk.

    The store takes no more messages. The next recovery finds out what is there.
    """


class Corrupt(StoreError):
    """The bytes read back are not the bytes that were written."""


class Closed(StoreError):
    """The store was closed, or not recovered yet."""


class FormatTooNew(StoreError):
    """The files were written by a later version than this one."""


def refuse_newer(name: str, version: int, known: int = 1) -> None:
    """Raise FormatTooNew when a header with a good crc has a later format.

    Guessing at a later format could lose its messages.
    """
    if version > known:
        raise FormatTooNew(f"{name} has format {version}, this program knows up to {known}")
