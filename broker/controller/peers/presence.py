"""The connections of all front doors, as they report them: for listings, limits and closing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shardmq.broker.shared.control import ConnectionInfo, node_of


class Connected(NamedTuple):
    of_vhost: int
    of_user: int
    of_all: int


class Presence:
    """Connections by owner, which is "door.incarnation.connection".

    connections_max: the most connections of the broker; 0 for no limit.
    channels_max: the most channels of the broker; 0 for no limit.
    opened: connections since the controller's start, and those that it found open then, by the
        number of the node that they are at.
    """

    def __init__(self) -> None:
        self.connections_max = 0
        self.channels_max = 0
        self._connections: dict[str, ConnectionInfo] = {}
        self.opened: Counter[int] = Counter()

    def up(self, info: ConnectionInfo) -> None:
        if info.owner not in self._connections:
            self.opened[node_of(door_of(info.owner))] += 1
        self._connections[info.owner] = info

    def channels_beside(self, owner: str, user: str) -> tuple[int, int]:
        """Return the numbers of channels of all other connections, and of this user's others."""
        others = [info for info in self._connections.values() if info.owner != owner]
        return sum(info.channels for info in others), sum(
            info.channels for info in others if info.user == user
        )

    def has_channels(self, owner: str, channels: int) -> None:
        info = self._connections.get(owner)
        if info is not None:
            self._connections[owner] = msgspec.structs.replace(info, channels=channels)

    def down(self, owner: str) -> None:
        self._connections.pop(owner, None)

    def door_up(self, door: int, connections: Iterable[ConnectionInfo]) -> None:
        """Take the connections of a front door that is here: it has those that it says now."""
        known = set(self.door_gone(door))
        for info in connections:
            self.up(info)
            self.opened[node_of(door)] -= info.owner in known

    def door_gone(self, door: int) -> list[str]:
        """Forget the connections of a front door, and return their owners."""
        gone = [owner for owner in self._connections if door_of(owner) == door]
        for owner in gone:
            del self._connections[owner]
        return gone

    def connections(self) -> list[ConnectionInfo]:
        return list(self._connections.values())

    def connection(self, owner: str) -> ConnectionInfo | None:
        return self._connections.get(owner)

    def by_name(self, name: str) -> ConnectionInfo | None:
        """Return a connection by the name that clients see: "peer:port -> host:port"."""
        return next((info for info in self._connections.values() if info.name == name), None)

    def owners(self, user: str | None = None, vhost: str | None = None) -> list[str]:
        return [
            info.owner
            for info in self._connections.values()
            if user in (None, info.user) and vhost in (None, info.vhost)
        ]

    def before(self, owner: str) -> Connected:
        """Return how many connections came up before this one."""
        own = self._connections.get(owner)
        of_vhost = of_user = of_all = 0
        for info in self._connections.values():
            if own is None or info is own:
                break
            of_all += 1
            of_vhost += info.vhost == own.vhost
            of_user += info.user == own.user
        return Connected(of_vhost, of_user, of_all)


def door_of(owner: str) -> int:
    return int(owner.split(".", 1)[0])
