"""The versions of what the nodes of a cluster say to each other, and of what they all must read.

A release understands a range of versions of each kind. Two nodes use the highest version that both
understand, so nodes of two releases work together while a cluster is upgraded. Nodes that have no
version of some kind in common refuse each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct


class Range(Struct, frozen=True, array_like=True):
    """The versions from `least` to `most`, both included."""

    least: int
    most: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.least <= version <= self.most

    def __str__(self) -> str:
        is_one = self.least == self.most
        return f"version {self.most}" if is_one else f"versions {self.least} to {self.most}"


# Streams between controllers (cluster/streams.py) and what their services say.
STREAMS: Final = Range(1, 1)
# Messages between front doors, controllers and shards (shardd/wire/messages.py). The highest is
# WIRE_VERSION there.
WIRE: Final = Range(2, 2)
# The files of the definitions (broker/controller/stored), which followers copy.
CATALOG: Final = Range(1, 1)


class Versions(Struct, frozen=True):
    """The versions that a node understands."""

    streams: Range
    wire: Range
    catalog: Range


def own_versions() -> Versions:
    """Return the versions that this release understands."""
    return Versions(STREAMS, WIRE, CATALOG)


KINDS: Final = {
    "streams": "the streams between nodes",
    "wire": "the messages to shards and front doors",
    "catalog": "the files of the definitions",
}


def highest_common(ranges: Iterable[Range]) -> int | None:
    """Return the highest version that is in all of these ranges, of which there is at least one."""
    found = list(ranges)
    most = min(each.most for each in found)
    return most if most >= max(each.least for each in found) else None


def disagreement(one: str, of_one: Versions, other: str, of_other: Versions) -> str:
    """Return why two nodes, by their names, cannot work together; "" if they can."""
    for kind, said in KINDS.items():
        ranges: tuple[Range, Range] = getattr(of_one, kind), getattr(of_other, kind)
        if highest_common(ranges) is None:
            return f"{one} understands {ranges[0]} of {said}, {other} {ranges[1]}"
    return ""
