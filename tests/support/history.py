"""Messages that were published, confirmed, delivered and acknowledged.

The checks here must hold whatever was killed meanwhile.

A body is `key:number:checksum`: numbers count up per key (one publisher each), so order and foreign
bytes show.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field


def make_body(key: str, number: int, padding: int = 0) -> bytes:
    text = f"{key}:{number}:{'x' * padding}".encode()
    return text + b":%08x" % zlib.crc32(text)


def read_body(body: bytes) -> tuple[str, int]:
    text, _, checksum = body.rpartition(b":")
    if checksum != b"%08x" % zlib.crc32(text):
        raise AssertionError(f"a body nobody published: {body[:80]!r}")
    key, number, _ = text.decode().split(":", 2)
    return key, int(number)


@dataclass
class History:
    """Written by publishers and consumers of several threads; checked when all is still."""

    published: set[tuple[str, int]] = field(default_factory=set)
    confirmed: set[tuple[str, int]] = field(default_factory=set)
    delivered: dict[str, list[tuple[int, bool]]] = field(default_factory=lambda: defaultdict(list))
    acked: set[tuple[str, int]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def was_published(self, key: str, number: int) -> None:
        with self._lock:
            self.published.add((key, number))

    def was_confirmed(self, key: str, number: int) -> None:
        with self._lock:
            self.confirmed.add((key, number))

    def was_delivered(self, body: bytes, redelivered: bool) -> tuple[str, int]:
        key, number = read_body(body)
        with self._lock:
            self.delivered[key].append((number, redelivered))
        return key, number

    def was_acked(self, key: str, number: int) -> None:
        with self._lock:
            self.acked.add((key, number))

    # -- what must be true -------------------------------------------------------------------------

    def missing(self) -> set[tuple[str, int]]:
        """Return the messages that are confirmed and not (yet) delivered."""
        with self._lock:
            arrived = {(key, number) for key, seen in self.delivered.items() for number, _ in seen}
            return self.confirmed - arrived

    def check_nothing_confirmed_is_lost(self) -> None:
        missing = sorted(self.missing())
        assert not missing, (
            f"{len(missing)} confirmed messages were never delivered, first {missing[:5]}"
        )

    def check_nothing_foreign_arrived(self) -> None:
        arrived = {(key, number) for key, seen in self.delivered.items() for number, _ in seen}
        foreign = sorted(arrived - self.published)
        assert not foreign, f"delivered but never published: {foreign[:5]}"

    def check_order_per_key(self) -> None:
        """Check that first deliveries come in the order of publishing.

        Messages marked as redelivered may come again later.
        """
        for key, seen in self.delivered.items():
            fresh = [number for number, redelivered in seen if not redelivered]
            assert fresh == sorted(fresh), f"key {key}: out of order at {_first_fall(fresh)}"

    def check_repeats_are_marked(self, confirms_lost: bool = False) -> None:
        """Check that a second delivery is marked as redelivered.

        With lost confirms there is no check, because a publisher may have published a message
        twice.
        """
        if confirms_lost:
            return
        for key, seen in self.delivered.items():
            fresh = Counter(number for number, redelivered in seen if not redelivered)
            twice = [number for number, count in fresh.items() if count > 1]
            assert not twice, f"key {key}: delivered twice without a mark: {twice[:5]}"

    def check(self) -> None:
        self.check_nothing_foreign_arrived()
        self.check_nothing_confirmed_is_lost()
        self.check_order_per_key()
        self.check_repeats_are_marked()


def _first_fall(numbers: list[int]) -> tuple[int, int]:
    return next((a, b) for a, b in itertools.pairwise(numbers) if b < a)
