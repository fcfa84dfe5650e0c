"""Keep track of the processes that talk to a shard: front doors and the controller.

This file knows no socket and no clock.
"""

from __future__ import annotations

from shardmq.shardd.consumer_requests import ConsumerRequests
from shardmq.shardd.peers import Outgoing, Peer
from shardmq.shardd.registry import Registry
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m


class Membership:
    """The peers of one shard.

    `pid` is the process id of the shard, for people.
    """

    def __init__(self, registry: Registry, consumers: ConsumerRequests, pid: int) -> None:
        self._registry = registry
        self._consumers = consumers
        self._pid = pid
        # By peer; processes with lower incarnations are gone.
        self._incarnations: dict[int, int] = {}
        # By front door of this process, the memory from which it lends bodies.
        self._lent_here: dict[int, memoryview] = {}

    def lends_here(self, door: int, memory: memoryview) -> None:
        """Let the front door of this process lend bodies from this memory, from its Join on."""
        self._lent_here[door] = memory

    def first_words(self, endpoint: str) -> Outgoing:
        """Return the first Hello to the controller.

        The shard sends it at the start, before the controller has joined.
        """
        hello = m.Hello(self._pid, ready=False)
        epoch, number = self._registry.epoch, self._registry.number
        return Outgoing(endpoint, envelope.control(m.CONTROLLER, 0, epoch, number, hello))

    def join(self, head: envelope.Header, endpoint: str, now: int) -> None:
        """Take in a Join of a process that is new, or that does not know this epoch of the shard.

        A process that knows the epoch repeats its Join, and needs no answer: see `on_join`.
        """
        registry = self._registry
        if head.incarnation < self._incarnations.get(head.peer, 0):
            return  # a late message of a process that is gone
        self._incarnations[head.peer] = head.incarnation
        peer = registry.peers.get(head.peer)
        if peer is None or peer.incarnation != head.incarnation:
            self._remove(head.peer, now)
            peer = registry.peers[head.peer] = Peer(
                head.peer, head.incarnation, endpoint, registry.epoch, registry.number
            )
            registry.senders[peer.sender] = peer
            if head.peer in self._lent_here:
                peer.sees(self._lent_here[head.peer])
            if head.peer == m.CONTROLLER:
                if not registry.ready:  # the new controller names all queues again
                    registry.forget_queues()
                self._greet(peer)
                self._tell_closed()
                return
        if registry.ready or head.peer == m.CONTROLLER:
            self._greet(peer)

    def on_join(self, peer: Peer, join: m.Join, now: int) -> None:
        """Greet a controller that repeats its Join, as it may do until all queues are assigned."""
        if not self._registry.ready and peer.number == m.CONTROLLER:
            self._greet(peer)

    def on_front_door_gone(self, peer: Peer, gone: m.FrontDoorGone, now: int) -> None:
        if gone.incarnation < self._incarnations.get(gone.door, 0):
            return  # the next process of this front door is here
        self._incarnations[gone.door] = gone.incarnation + 1
        self._remove(gone.door, now)

    def _remove(self, number: int, now: int) -> None:
        """Forget a process that is gone, with all its consumers."""
        registry = self._registry
        peer = registry.peers.pop(number, None)
        if peer is not None:
            del registry.senders[peer.sender]
            # Segments may still need the bodies. Without them the memory goes now, not when the
            # garbage collector finds that the peer and its lender hold each other.
            peer.lender = None
            self._consumers.release(peer, list(peer.holders), now)
            registry.dead_letters.door_gone(number)
            registry.streams.peer_gone(number)
            registry.dedup.peer_gone(number, registry.peers)
            registry.reservations.peer_gone(number)

    def _greet(self, peer: Peer) -> None:
        peer.tell(m.Hello(self._pid, ready=self._registry.ready))
        if self._registry.alarm:
            peer.tell(m.Alarm(self._registry.alarm))

    def _tell_closed(self) -> None:
        """Tell the controller which queues are closed or have had a consumer.

        A former controller may have died with the news.
        """
        registry = self._registry
        closed = [queue.id for queue in registry.queues.used() if queue.closed]
        for queue_id in closed:
            registry.tell_controller(m.AutoDeleted(queue_id, "auto-delete"))
        for queue_id in sorted(registry.used.difference(closed)):
            registry.tell_controller(m.FirstConsumer(queue_id))

    # -- what exists, from the controller ----------------------------------------------------------

    def on_assign(self, peer: Peer, assign: m.Assign, now: int) -> None:
        registry = self._registry
        if registry.ready:
            registry.create(assign.queues, now)
            if assign.last:
                self._greet(peer)
            return
        registry.take_assigned(assign.queues, now)
        registry.used.update(assign.used)
        if not assign.last:
            return
        registry.recover(now)
        for each in registry.peers.values():
            self._greet(each)
        self._tell_closed()
