"""Keep track of the processes that talk to a shard: front doors and the controller.

This file knows no socket and no clock.
"""

from __future__ import annotations

from shardmq.shardd.consumer_requests import ConsumerRequests
from shardmq.shardd.peers import SESSION, Outgoing, Peer
from shardmq.shardd.registry import Registry
from shardmq.shardd.wire import envelope
from shardmq.shardd.wire import messages as m

EPOCH_MAX = (1 << 31) - 1


class Membership:
    """The peers of one shard.

    `pid` is the process id of the shard, for people.
    """

    def __init__(self, registry: Registry, consumers: ConsumerRequests, pid: int) -> None:
        self._registry = registry
        self._consumers = consumers
        self._pid = pid
        # By peer; processes and sessions with lower incarnations are gone.
        self._incarnations: dict[int, int] = {}
        self._gone: dict[int, int] = {}  # by front door, the last process that is gone
        self._term = 0  # of the controller that leads
        self._last_epoch = registry.epoch
        # What processes are told that the shard refuses; who sends this empties it.
        self.last_words: list[Outgoing] = []
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

    def join(self, head: envelope.Header, join: m.Join, now: int) -> bool:
        """Take in a Join of a process that is new, or that does not know this epoch of the shard.

        A process that knows the epoch repeats its Join, and needs no answer: see `on_join`. Returns
        whether the peer is there now, with this incarnation.
        """
        registry, number, incarnation = self._registry, head.peer, head.incarnation
        process = join.process or incarnation
        is_newer_term = number == m.CONTROLLER and join.term > self._term
        if number == m.CONTROLLER and join.term < self._term:
            return False  # another controller leads since then
        if self._gone.get(number) == process:
            who = number, incarnation, registry.epoch, registry.number
            self._refuse(join.endpoint, who, process)
            return False
        if incarnation < self._incarnations.get(number, 0) and not is_newer_term:
            return False  # a late message of a process or session that is gone
        if number == m.CONTROLLER:
            self._term = join.term
        self._incarnations[number] = incarnation
        peer = registry.peers.get(number)
        if peer is None or peer.incarnation != incarnation or is_newer_term:
            self._remove(number, now, may_return=peer is not None and peer.process == process)
            epoch = registry.epoch
            if join.endpoint.startswith(SESSION):
                epoch = self._next_epoch()
                self._incarnations[number] += 1  # each session joins once
            peer = registry.peers[number] = Peer(
                number, incarnation, join.endpoint, epoch, registry.number, process
            )
            registry.senders[peer.sender] = peer
            if number in self._lent_here:
                peer.sees(self._lent_here[number])
            if number == m.CONTROLLER:
                if not registry.ready:  # the new controller names all queues again
                    registry.forget_queues()
                self._greet(peer)
                self._tell_closed()
                return True
        if registry.ready or number == m.CONTROLLER:
            self._greet(peer)
        return True

    def _next_epoch(self) -> int:
        """Return an epoch that no peer of this process has had. Others begin at a random one."""
        self._last_epoch = self._last_epoch % EPOCH_MAX + 1
        return self._last_epoch

    def lowest_incarnation(self, number: int) -> int:
        """Return the lowest incarnation of a peer that the shard takes."""
        return self._incarnations.get(number, 0)

    def session_ended(self, endpoint: str, now: int) -> None:
        """Forget the peer that had this session, if it has no newer one."""
        for peer in self._registry.peers.values():
            if peer.endpoint == endpoint:
                self._remove(peer.number, now, may_return=True)
                return

    def on_join(self, peer: Peer, join: m.Join, now: int) -> None:
        """Greet a controller that repeats its Join, as it may do until all queues are assigned."""
        if not self._registry.ready and peer.number == m.CONTROLLER:
            self._greet(peer)

    def on_front_door_gone(self, peer: Peer, gone: m.FrontDoorGone, now: int) -> None:
        self._gone[gone.door] = gone.incarnation
        present = self._registry.peers.get(gone.door)
        if present is not None and present.process == gone.incarnation:
            self._incarnations[gone.door] = present.incarnation + 1
            self._remove(gone.door, now)
            self._refuse(present.endpoint, present.who, present.process)
        self._consumers.expect_no_more(gone.door, gone.incarnation)

    def _refuse(self, endpoint: str, who: tuple[int, int, int, int], process: int) -> None:
        """Tell a process that the controller takes for gone, in case that it is still there."""
        message = envelope.control(*who, m.TakenForGone(process))
        self.last_words.append(Outgoing(endpoint, message))

    def _remove(self, number: int, now: int, may_return: bool = False) -> None:
        """Forget a process that is gone, with all its consumers.

        `may_return` says that only its session has ended. A front door then attaches its consumers
        again in the next one, so auto-delete queues wait for them.
        """
        registry = self._registry
        peer = registry.peers.pop(number, None)
        if peer is not None:
            del registry.senders[peer.sender]
            # Segments may still need the bodies. Without them the memory goes now, not when the
            # garbage collector finds that the peer and its lender hold each other.
            peer.lender = None
            if may_return and number != m.CONTROLLER:
                self._consumers.expect(peer)
            self._consumers.release(peer, list(peer.holders), now)
            registry.dead_letters.door_gone(number)
            registry.streams.peer_gone(number)
            registry.dedup.peer_gone(number, registry.peers)
            registry.reservations.peer_gone(number)

    def _greet(self, peer: Peer) -> None:
        peer.tell(m.Hello(self._pid, ready=self._registry.ready))
        if self._registry.alarm:
            peer.tell(m.Alarm(self._registry.alarm))

    def ask_to_pause(self) -> None:
        """Ask the front doors to send nothing more, because another process serves the shard next.

        `are_paused` is true when all have answered.
        """
        for peer in self._front_doors():
            peer.tell(m.Hello(self._pid, ready=False, leaving=True))

    @property
    def are_paused(self) -> bool:
        return all(peer.is_paused for peer in self._front_doors())

    def on_paused(self, peer: Peer, paused: m.Paused, now: int) -> None:
        peer.is_paused = True

    def _front_doors(self) -> list[Peer]:
        peers = self._registry.peers
        return [peer for number, peer in peers.items() if number != m.CONTROLLER]

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
