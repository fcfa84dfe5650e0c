"""Stable hashes and the maps made of them: pure functions, the same on every process, host and day.

Python's own hash() is salted per process; nothing here may use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

_MASK = (1 << 64) - 1


def hash64(data: bytes | str) -> int:
    raw = data.encode() if isinstance(data, str) else data
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


def jump(key: int, buckets: int) -> int:
    """Jump consistent hash (Lamping, Veach 2014): with one bucket more, a key stays or moves to the new one."""
    if buckets < 1:
        raise ValueError(f"{buckets} buckets")
    bucket, next = -1, 0
    while next < buckets:
        bucket = next
        key = (key * 2862933555777941757 + 1) & _MASK
        next = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


def rendezvous(key: str, members: Iterable[str]) -> str:
    """The member that the key ranks highest: without another member, only that member's keys move."""
    # Lengths in front, so that ("ab", "c") and ("a", "bc") differ; the name breaks a tie.
    return max(members, key=lambda member: (hash64(f"{len(key)}:{key}{member}"), member))
