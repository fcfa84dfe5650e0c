"""The one writer of the catalog: it checks, logs, syncs, hands out and answers.

Requests are taken in batches, in the order they came. Each is decided on the catalog as the ones
before it left it (`decisions/`). Then the whole batch is logged, synced once if anything durable
changed, and told to the front doors in one message. A request is answered when every connected
front door has applied its changes and the shards have done their part (`shard_orders.py`). If there
is only one front door, a request of its clients is answered right behind the changes, which that
front door handles first. The next batch waits for the sync, and for nothing else.

If the log cannot be written or synced, `run` ends with the OSError: what is on disk is not known
any more, and a new process must read it. A full disk is no such error: what makes the definitions
grow is refused then.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from asyncio import Future
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Any, cast

from shardmq.broker.controller.decisions.decision import Decision
from shardmq.broker.controller.decisions.decisions import Decisions
from shardmq.broker.controller.decisions.stream_exchanges import RESHAPING
from shardmq.broker.controller.peers.links import DoorLinks
from shardmq.broker.controller.peers.presence import Presence
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.controller.pending import (
    INTERNAL_ERROR,
    UNDECIDED,
    AnswerTo,
    AnyAsk,
    Pending,
    no_answer,
)
from shardmq.broker.controller.requests import (
    Move,
    OwnerGone,
    Pause,
    Removal,
    SuperStreamDeclare,
)
from shardmq.broker.controller.shard_orders import Creations, ShardOrders
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.stored.key_ring import KeyRing
from shardmq.broker.controller.without_effect import EffectWarnings
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingPut,
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    QueueDelete,
    QueuePut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.checks import NO_ROOM, SERVER_NAMED_PREFIX, Refusal
from shardmq.broker.model.copies import asked_by
from shardmq.broker.model.passwords import DEFAULT_ALGORITHM
from shardmq.broker.model.policies import NO_POLICIES, Policies
from shardmq.broker.routing.placement import Placement, Places
from shardmq.broker.shared.control import (
    Answer,
    Bind,
    BindMany,
    ExchangeDeclare,
    QueueDeclare,
    things_asked,
)
from shardmq.cluster.replicas import Replicas
from shardmq.shardd.wire import messages as wire

BATCH_MAX = 2048  # requests that share one sync
INBOX_MAX = 16_384  # requests not yet decided; beyond it the links stop reading
# The loop itself waits for the disk when a batch is at most so long and syncs usually take less
# than QUICK_SYNC_S.
QUICK_SYNC_S, FEW_REQUESTS = 0.001, 4
# How long requests wait for others if they are in force at a front door and nobody waits for them.
IN_FORCE_WAITS_S = 0.002
USUAL_OF = 16  # the weight of a new sync in the moving average is one part in so many
SERVER_NAME_BYTES = 16  # 22 characters of base64

CONNECTION_FORCED = 320

# Requests that make the definitions grow. All others are let through on a full disk.
GROWING = (
    QueueDeclare,
    ExchangeDeclare,
    Bind,
    BindMany,
    UserPut,
    PermissionPut,
    TopicPermissionPut,
    ParameterPut,
    VhostPut,
    Pause,
    Move,
    SuperStreamDeclare,
)
# Requests that take rows out of a file that is replaced whole.
SHRINKING = (UserDelete, PermissionDelete, TopicPermissionDelete, ParameterDelete, VhostDelete)

log = logging.getLogger(__name__)


def _takes_away(decision: Decision) -> bool:
    """Return whether something is left to do when no front door routes by the old catalog."""
    return bool(decision.drop or decision.drop_vhost or decision.close_vhost or decision.close_user)


def is_in_force(request: AnyAsk) -> bool:
    """Return whether the only front door has done what it asks for."""
    return type(request) is BindMany and request.in_force


def is_answered(request: AnyAsk) -> bool:
    """Return whether the only front door has also answered its client."""
    return type(request) is BindMany and request.in_force and not request.waited


def _all_ahead(decided: list[Pending]) -> set[str]:
    """Return the connections that asked for all of this, if all are binds ahead that are done."""
    if not all(is_in_force(pending.request) and not pending.code for pending in decided):
        return set()
    return {pending.owner for pending in decided}


def server_name() -> str:
    """Return a name for a queue that was declared without one."""
    random = secrets.token_bytes(SERVER_NAME_BYTES)
    return SERVER_NAMED_PREFIX + base64.urlsafe_b64encode(random).decode()[:22]


class Authority:
    """The writer of the catalog, its inbox of requests, and the way of each to its answer."""

    def __init__(
        self,
        catalog: Catalog,
        definitions: Definitions,
        front_doors: DoorLinks,
        shards: ShardLinks,
        connections: Presence,
        placement: Placement,
        hashing_algorithm: str = DEFAULT_ALGORITHM,
    ) -> None:
        """Prepare; `hashing_algorithm` is that of new passwords."""
        self.catalog = catalog
        self.hashing_algorithm = hashing_algorithm
        self.churn: Counter[type] = Counter()  # requests that were not refused, and changes
        self._placement = placement
        self._definitions = definitions
        self._front_doors = front_doors
        self._connections = connections
        self._inbox: deque[Pending] = deque()
        self._inbox_things = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._caught_up = asyncio.Event()  # no request waits that is in force at a front door
        self._caught_up.set()
        self._usual_sync_s = QUICK_SYNC_S  # a moving average; not known to be quick at first
        self._is_short_of_room = False  # it was logged that the disk is full
        self._lines = EffectWarnings()
        self._orders = ShardOrders(catalog, shards, self._put_back, definitions.write)
        self._decisions = Decisions(
            catalog,
            definitions.new_queue_id,
            server_name,
            placement,
            self._orders.leaving,
        )

    # -- taking requests -----------------------------------------------------------------------

    def submit(self, request: AnyAsk, owner: str, answer: AnswerTo, asked_at: str = "") -> None:
        """Take a request; `answer(code, text, result)` is called once.

        The requests of one owner are decided in the order in which they are submitted.
        """
        self._inbox.append(Pending(request, owner, answer, asked_at=asked_at))
        self._inbox_things += things_asked(request)
        if not is_answered(request) or self._inbox_things >= BATCH_MAX:
            self._arrived.set()
        elif self._caught_up.is_set():
            self._caught_up.clear()
            asyncio.get_running_loop().call_later(IN_FORCE_WAITS_S, self._arrived.set)
        if self._inbox_things >= INBOX_MAX:
            self._room.clear()

    def _put_back(self, requests: Iterable[Pending], first: bool) -> None:
        """Put requests into the inbox, before what is there or behind."""
        found = list(requests)
        if first:
            self._inbox.extendleft(reversed(found))
        else:
            self._inbox.extend(found)
        self._inbox_things += sum(things_asked(each.request) for each in found)
        self._arrived.set()

    async def caught_up(self) -> None:
        """Wait until the catalog has all that is in force at front doors."""
        for door in self._front_doors.doors():
            door.read_binds()
        if not self._caught_up.is_set():
            self._arrived.set()
            await self._caught_up.wait()

    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until requests may be submitted; this keeps the inbox within its bound."""
        await self._room.wait()

    async def ask(self, request: AnyAsk, owner: str = "", asked_at: str = "") -> Answer:
        """Carry out a request, and return when its outcome is in force at all front doors.

        The caller has checked the rights of whoever asks. `asked_at` is the name of the node whose
        HTTP API was asked.
        """
        await self.room()
        answered: Future[Answer] = asyncio.get_running_loop().create_future()

        def answer(code: int, text: str, result: dict[str, Any]) -> None:
            if not answered.done():
                answered.set_result(Answer(0, code, text, result))

        self.submit(request, owner, answer, asked_at)
        return await answered

    def connection_gone(self, owner: str) -> None:
        """Delete the exclusive queues of a connection, after what it has asked for before."""
        if self._inbox or self._orders.hold_of(owner) or self.catalog.queues_of(owner):
            self.submit(OwnerGone(owner), owner, no_answer)

    def queue_gone(self, id: int, reason: str) -> None:
        """Delete a queue whose shard says so: its last consumer is gone, or it has expired."""
        log.info("queue %d goes: %s", id, reason)
        self.submit(Removal([id]), "", no_answer)

    # -- the loop ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out requests until cancelled. Raises OSError when the log cannot be kept."""
        while True:
            await self._arrived.wait()
            batch = self._take_batch()
            changes, decided = self._decide(batch)
            self._definitions.flush()
            await self._sync(len(batch))
            self._front_doors.say_together(partial(self._tell, changes, decided))

    def _take_batch(self) -> list[Pending]:
        batch: list[Pending] = []
        things = 0
        while self._inbox and things < BATCH_MAX:
            batch.append(self._inbox.popleft())
            things += things_asked(batch[-1].request)
        self._inbox_things -= things
        if not self._inbox:
            self._arrived.clear()
            self._caught_up.set()
        if self._inbox_things < INBOX_MAX // 2:
            self._room.set()
        return batch

    def _decide(self, batch: list[Pending]) -> tuple[list[AnyChange], list[Pending]]:
        """Decide each request, change the catalog, and start what the shards have to do at once.

        Returns the changes, and the requests that are decided: a conditional delete comes back when
        its shard has answered, and with it what its owner has asked since.
        """
        changes: list[AnyChange] = []
        decided: list[Pending] = []
        creations: Creations = {}
        for pending in batch:
            if self._orders.holds(pending):
                continue
            pending.waits = 1  # until the changes are in force
            if self._decide_one(pending, creations):
                changes.extend(pending.decision.changes)
            if pending.decision.first is None:
                decided.append(pending)
        for shard, of_shard in creations.items():
            self._orders.create(shard, of_shard)
        return changes, decided

    def _decide_one(self, pending: Pending, creations: Creations) -> bool:
        """Decide a request, and return whether it was not refused as a whole."""
        request = pending.request
        pending.decision = UNDECIDED  # a conditional delete comes here twice
        try:
            decision = pending.decision = self._decisions.decide(
                request, pending.owner, pending.asked_at
            )
        except Refusal as refusal:
            pending.refuse(refusal.code, refusal.text)
            return False
        except Exception:  # nothing has changed yet, so no other request fails
            log.exception("%s cannot be decided", type(request).__name__)
            pending.refuse(INTERNAL_ERROR, "internal error")
            return False
        if decision.changes and self._lacks_room(pending):
            return False
        if decision.refused is not None:
            pending.refuse(decision.refused.code, decision.refused.text)
        vhost = self.catalog.vhost(decision.policies_of)
        before = vhost.policies if vhost is not None else NO_POLICIES
        self.churn[type(request)] += 1
        if isinstance(request, SuperStreamDeclare):
            self.churn[QueueDeclare] += len(request.keys)
        if (
            pending.owner
            and isinstance(request, QueueDeclare | ExchangeDeclare)
            and request.arguments
        ):
            self.warn_of(*decision.changes)  # the HTTP API, which has no owner, calls it itself
        self._apply(decision.changes)
        if (
            decision.lost_shards
            or decision.next_steps
            or not RESHAPING.isdisjoint(map(type, decision.changes))
        ):
            self._reshape(decision, before)
        if vhost is not None:
            self._orders.policy_walks.begin(pending, vhost, before)
        self._orders.plan(pending, creations)
        return True

    def _lacks_room(self, pending: Pending) -> bool:
        """Refuse a request for want of room, if there is none, before anything has changed."""
        if is_answered(pending.request):
            return False  # it is, and is kept in memory at least
        grows = isinstance(pending.request, GROWING)
        if not grows and not isinstance(pending.request, SHRINKING):
            return False
        lacking = self._definitions.lacks_room(pending.decision.changes, grows)
        if lacking:
            pending.decision = UNDECIDED
            pending.refuse(NO_ROOM, lacking)
        if bool(lacking) != self._is_short_of_room and (lacking or grows):
            self._is_short_of_room = bool(lacking)
            if lacking:
                name = type(pending.request).__name__
                log.error("%s and whatever else needs room is refused: %s", name, lacking)
            else:
                log.info("there is room for definitions again")
        return bool(lacking)

    def warn_of(self, *things: AnyAsk) -> None:
        """Log which parts of these requests, or of what they made, have no effect.

        In a flood of them not all is logged.
        """
        for line in self._lines.of(things, time.monotonic(), self.most_copies):
            log.warning("%s", line)

    def _apply(self, changes: list[AnyChange]) -> None:
        if not changes:
            return
        for kind, run in groupby(changes, type):
            same = list(run)
            self.churn[kind] += len(same)
            if kind is BindingPut:
                puts = cast(list[BindingPut], same)
                self._definitions.add_bindings(puts, self.catalog)
                self.catalog.put_bindings(puts)
                continue
            for change in same:
                self._definitions.add(change, self.catalog)
                self.catalog.apply(change)

    def _reshape(self, decision: Decision, before: Policies) -> None:
        """Have stream exchanges follow what was decided, as part of the same decision."""
        more = self._decisions.reshape(decision, before)
        self._apply(more.changes)
        decision.changes += more.changes
        decision.create += more.create
        decision.drop += more.drop
        for note in (*decision.notes, *more.notes):
            log.warning("%s", note)

    async def _sync(self, requests: int) -> None:
        """Return when what must last is on stable storage. Raises OSError."""
        sync = self._definitions.sync_job(self.catalog)
        if sync is None:
            return
        began = time.monotonic()
        is_quick = self._usual_sync_s < QUICK_SYNC_S and not self._definitions.waits_for_others
        if requests <= FEW_REQUESTS and is_quick:
            sync()  # to wake a thread, and to be woken by it, takes longer
        else:
            await asyncio.get_running_loop().run_in_executor(None, sync)
        self._usual_sync_s += (time.monotonic() - began - self._usual_sync_s) / USUAL_OF

    def _tell(self, changes: list[AnyChange], decided: list[Pending]) -> None:
        """Hand out what a batch changed, and answer when that is in force.

        The answer goes out at once if the connection hears the changes before it and no other front
        door routes.
        """
        at_once: list[Pending] = []
        later: list[Pending] = []
        for pending in decided:
            if is_in_force(pending.request):  # before the changes, whatever else waits
                pending.reply()
                continue
            hears = self._front_doors.heard_by(pending.owner) and not _takes_away(pending.decision)
            (at_once if hears else later).append(pending)
        version = self.catalog.version
        if changes:
            by = _all_ahead(decided)
            self._front_doors.hand_out(version, changes, waited=bool(later), by=by)
        for pending in at_once:
            pending.one_came()
        if later:
            self._front_doors.when_in_force(version, lambda: self._in_force(later))

    def _in_force(self, decided: list[Pending]) -> None:
        """Do what had to wait until every front door has applied a batch."""
        for pending in decided:
            try:
                if _takes_away(pending.decision):
                    self._take_away(pending)
            except Exception:  # the catalog has changed, and the other requests are not to blame
                log.exception("%s cannot be carried out", type(pending.request).__name__)
                pending.refuse(INTERNAL_ERROR, "internal error")
            pending.one_came()

    def _take_away(self, pending: Pending) -> None:
        """Remove from the shards what a decision removes, and close connections."""
        decision = pending.decision
        self._orders.remove(pending)
        if vhost := decision.close_vhost:
            text = f"vhost '{vhost}' is deleted"
            for owner in self._connections.owners(vhost=vhost):
                self.close_connection(owner, text)
        if user := decision.close_user:
            for owner in self._connections.owners(user=user):
                self.close_connection(owner, f"user '{user}' is deleted")

    def close_connection(self, owner: str, reason: str = "Closed via management plugin") -> None:
        self._front_doors.close_connection(owner, CONNECTION_FORCED, reason)

    # -- what others ask -----------------------------------------------------------------------

    @property
    def places(self) -> Places:
        """The shards that new queues are placed on, and the nodes that are to have queues."""
        return self._placement.without(self.catalog.drained_nodes)

    @property
    def keys(self) -> KeyRing:
        """The keys that encrypt the secrets of parameters."""
        return self._definitions.keys

    @property
    def most_copies(self) -> Replicas:
        """The most copies that a shard has, and the most nodes that must be in sync for one."""
        return self._placement.most

    def asked(self, queue: QueuePut) -> Replicas:
        """Return the copies that a queue asks for."""
        return asked_by(queue, self.catalog.vhost(queue.vhost), self._placement.replicas.others)

    async def tell_shards(self, queues: list[QueuePut]) -> list[QueuePut]:
        return await self._orders.tell(queues)

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return self._orders.queues_of(shard)

    def queue_churn(self) -> dict[str, float]:
        """Return counts since the start of this process.

        The queues of a deleted vhost go with it and are not counted.
        """
        return {
            "queues_declared": self.churn[QueueDeclare],
            "queues_created": self.churn[QueuePut],
            "queues_deleted": self.churn[QueueDelete],
        }
