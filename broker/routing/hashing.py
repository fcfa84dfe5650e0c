"""Stable hashes and the maps made of them: pure functions, the same on every process, host and day.

Python's own hash() is salted per process; nothing here may use it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

_MASK = (1 << 64) - 1


def hash64(data: bytes | str) -> int:
    raw = data.encode() if isinstance(data, str) else data
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


def jump(key: int, buckets: int) -> int:
    """Return the bucket of a key by jump consistent hash (Lamping, Veach 2014).

    With one bucket more, a key stays or moves to the new bucket.
    """
    if buckets < 1:
        raise ValueError(f"{buckets} buckets")
    bucket, next = -1, 0
    while next < buckets:
        bucket = next
        key = (key * 2862933555777941757 + 1) & _MASK
        next = int((bucket + 1) * ((1 << 31) / ((key >> 33) + 1)))
    return bucket


# -- which destination of an exchange gets a message. The packer does the same in compiled code
# (shardd/wire/key_hash.h).


def mixed(bits: int) -> int:
    """Return the bits after Murmur3's finalizer: each bit of the result depends on all 64."""
    bits = (bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCD & _MASK
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53 & _MASK
    return bits ^ (bits >> 33)


def key_hash(key: bytes) -> int:
    """Return FNV-1a of 64 bits, mixed at the end."""
    found = 0xCBF29CE484222325
    for byte in key:
        found = (found ^ byte) * 0x100000001B3 & _MASK
    return mixed(found)


def modulus(bits: int, count: int) -> int:
    return bits % count


def rendezvous_weighted(hashed: int, members: Sequence[tuple[int, int]]) -> int:
    """Return the index of the winner of `members` (weight, seed).

    Each member draws an exponential time at the rate of its weight from the hash and its seed, and
    the first wins. So shares are exactly as the weights, and without a member only the keys of that
    member move.
    """
    return min(
        range(len(members)),
        key=lambda i: (_arrival(mixed(hashed ^ members[i][1]), members[i][0]), i),
    )


def jump_weighted(hashed: int, weights: Sequence[int]) -> int:
    """Return the index that jump hash leads to, if each has as many buckets as its weight.

    One more at the end takes its share of each. One less before the end moves those behind it too.
    """
    ends = list(accumulate(weights))
    return bisect_right(ends, jump(hashed, ends[-1]))


def _arrival(bits: int, weight: int) -> float:
    return -math.log(((bits >> 11) + 0.5) / (1 << 53)) / weight
