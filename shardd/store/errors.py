"""What can go wrong with a store that is not our own mistake; each has one answer."""


class StoreError(Exception):
    """Base of what this folder raises on purpose."""


class DiskFull(StoreError):
    """No room for another segment. Nothing was appended; reading and settling go on; trying again later is right."""


class StoreFailed(StoreError):
    """A write or sync failed: what is on disk is unknown. The store takes no more; recovery decides."""


class Corrupt(StoreError):
    """Bytes read back are not what was written."""


class Closed(StoreError):
    """The store was closed, or not recovered yet."""


class FormatTooNew(StoreError):
    """The files were written by a later version than this one."""
