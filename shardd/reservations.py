"""Set room aside in queues for transactions that front doors are about to commit.

A queue that refuses publishes when it is full must not take half of a transaction. So the front
door asks first. Either all messages fit, and their room is set aside, or none of them is sent. Room
that was set aside counts as used for all other publishes. A reservation ends when its front door
says so, or is gone. This file knows no clock and no AMQP.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardmq.shardd.queues import Queue


class _Room:
    """The room that one queue has set aside for one transaction, and that is not used yet."""

    __slots__ = ("body_bytes", "messages")

    def __init__(self, messages: int, body_bytes: int) -> None:
        self.messages = messages
        self.body_bytes = body_bytes

    def use(self, messages: int, body_bytes: int) -> tuple[int, int]:
        """Take room for these messages; return the messages and bytes of room taken."""
        used = min(messages, self.messages), min(body_bytes, self.body_bytes)
        self.messages -= used[0]
        self.body_bytes -= used[1]
        return used


class Reservations:
    """All reservations of one shard, by front door and by the number that the front door chose."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], dict[Queue, _Room]] = {}
        # by front door, the number of the transaction that it publishes now
        self.redeeming: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._made)

    def reserve(
        self, peer: int, number: int, wanted: Sequence[tuple[Queue, Sequence[int]]]
    ) -> bool:
        """Set room aside in all these queues, or in none; return whether there was room.

        `wanted` has the body bytes of each message.
        """
        made = self._made.setdefault((peer, number), {})
        for queue, sizes in wanted:
            if not queue.admission().reserve(sizes):
                self.end(peer, number)
                return False
            made[queue] = _Room(len(sizes), sum(sizes))
        return True

    def redeem(self, peer: int, number: int) -> None:
        """Assign the publishes of this front door to a transaction, from now on.

        A number of 0 ends that.
        """
        if (peer, number) in self._made:
            self.redeeming[peer] = number
        elif not number:
            self.redeeming.pop(peer, None)

    def use(self, peer: int, queue: Queue, messages: int, body_bytes: int) -> bool:
        """Free the room that was set aside for messages that have just come to the queue.

        The messages take the room now. Returns whether there was any set aside.
        """
        room = self._made[peer, self.redeeming[peer]].get(queue)
        # The front door may know other arguments of the queue.
        if room is None or not queue.backlog.rules.may_refuse:
            return False
        queue.admission().unreserve(*room.use(messages, body_bytes))
        return True

    def rooms_taken(self, peer: int) -> set[int]:
        """Return the ids of the queues that take all publishes of this front door now."""
        return (
            {queue.id for queue in self._made[peer, self.redeeming[peer]]}
            if peer in self.redeeming
            else set()
        )

    def end(self, peer: int, number: int) -> None:
        """Free the rest of a reservation, if there is one."""
        for queue, room in self._made.pop((peer, number), {}).items():
            queue.admission().unreserve(room.messages, room.body_bytes)
        if self.redeeming.get(peer) == number:
            del self.redeeming[peer]

    def peer_gone(self, peer: int) -> None:
        """Free all room that this front door had set aside."""
        for owner, number in [key for key in self._made if key[0] == peer]:
            self.end(owner, number)
