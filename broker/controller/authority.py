"""The one writer of the catalog: check, log, sync, hand out, answer.

Requests are taken in batches, in the order they came: each is decided on the catalog as the ones before left it
(`decisions`), then the whole batch is logged, synced once if anything durable changed, and told to the front doors in
one message. A request is answered when every connected front door has applied its changes and its shard has done its
part; one of the only front door's own clients right behind the changes, which that door handles first. The next batch
does not wait for that, only for the sync.

A failed sync or write of the log ends `run` with its OSError: what is on disk is no longer known, a new process must
read it. A full disk does not: what makes the definitions grow is refused before it is decided.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import time
from asyncio import Future
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

from shardmq.broker.controller.access import hash_password
from shardmq.broker.controller.decisions import RESHAPING, Decision, Decisions
from shardmq.broker.controller.requests import (
    Closed,
    CutOff,
    Drained,
    OwnerGone,
    Pause,
    Removal,
    Restore,
    Settled,
)
from shardmq.broker.controller.stored.definitions import Definitions
from shardmq.broker.controller.without_effect import Lines
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import (
    OPEN,
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
from shardmq.broker.model.checks import (
    DELAYS_FOR,
    NO_ROOM,
    SERVER_NAMED_PREFIX,
    Refusal,
    check_owner,
    no_queue,
    not_purged,
)
from shardmq.broker.model.passwords import DEFAULT_ALGORITHM
from shardmq.broker.model.policies import NO_POLICIES, Policies, queue_arguments, queue_kind
from shardmq.broker.routing import hidden
from shardmq.broker.routing.placement import place
from shardmq.broker.shared.control import (
    Answer,
    AnyRequest,
    Bind,
    BindMany,
    ExchangeDeclare,
    QueueDeclare,
    QueueRemove,
    things_asked,
)
from shardmq.shardd.wire import messages as wire

BATCH_MAX = 2048  # requests that share one sync
INBOX_MAX = 16_384  # requests not yet decided; beyond it links stop reading
PURGE_STEP_MESSAGES = 10_000  # purged by one request, when not all of a queue is
CHANGED_QUEUES_MAX = (
    1000  # in one message to a shard, when policies change: its clients are not to wait for more
)
# A disk that takes less than this for so few may be waited for by the loop itself.
QUICK_SYNC_S, FEW_REQUESTS = 0.001, 4
USUAL_OF = 16  # syncs over which "usual" is taken
SERVER_NAME_BYTES = 16  # 22 characters of base64

CONNECTION_FORCED = 320
INTERNAL_ERROR = 541

# What somebody asks for that makes the definitions grow; all else is let through on a full disk.
GROWING = (QueueDeclare, ExchangeDeclare, Bind, BindMany, UserPut, PermissionPut, TopicPermissionPut, ParameterPut,
           VhostPut, Pause)  # fmt: skip
# What takes rows out of a file that is replaced whole.
SHRINKING = (UserDelete, PermissionDelete, TopicPermissionDelete, ParameterDelete, VhostDelete)

AnyAsk = (
    AnyRequest
    | AnyChange
    | Removal
    | OwnerGone
    | Pause
    | Drained
    | Restore
    | CutOff
    | Closed
    | Settled
)
AnswerTo = Callable[[int, str, dict[str, Any]], None]

log = logging.getLogger(__name__)


class ShardSilent(Exception):
    """A shard did not answer in time."""


class Doors(Protocol):
    """What the authority needs of the links to front doors."""

    def hand_out(self, version: int, changes: list[AnyChange], waited: bool = True) -> None:
        """`waited`: when_in_force will be called for it."""

    def when_in_force(self, version: int, then: Callable[[], None]) -> None:
        """Call `then` once `version` was handed out and every connected front door has applied it."""

    def say_together(self, say: Callable[[], None]) -> None:
        """What `say` says to front doors leaves at once, in one write to each."""

    def heard_by(self, owner: str) -> bool:
        """Whether this connection's front door is the only one: an answer to it comes behind all changes."""

    def close_connection(self, owner: str, code: int, text: str) -> None: ...


class Shards(Protocol):
    """What the authority needs of the links to shards. Requests outlive a restart of the shard, for a time."""

    count: int

    def request(self, shard: int, message: Callable[[int], wire.Message]) -> Future[Any]:
        """The Done, Refused or StatsReply to the message made with the request's number, or ShardSilent."""


class Connections(Protocol):
    def owners(self, user: str | None = None, vhost: str | None = None) -> list[str]: ...


UNDECIDED = Decision()  # never changed


class _Asked:
    """One request: then its result, and how much it still waits for."""

    __slots__ = ("answer", "code", "decision", "missed", "owner", "request", "text", "waits")

    def __init__(self, request: AnyAsk, owner: str, answer: AnswerTo, missed: int = 0) -> None:
        """`missed`: the id of a queue that was in the catalog, but at its shard no more."""
        self.request = request
        self.owner = owner
        self.answer = answer
        self.decision = UNDECIDED
        self.code = 0
        self.text = ""
        self.waits = 0
        self.missed = missed

    def refuse(self, code: int, text: str) -> None:
        self.code, self.text = code, text

    def one_came(self) -> None:
        self.waits -= 1
        if self.waits == 0:
            self.answer(
                self.code, self.text, {} if self.code == INTERNAL_ERROR else self.decision.result
            )

    def shard_came(self, reply: Future[Any]) -> None:
        """A shard's part is done, or it is known that it will not be: the request succeeds or says why not."""
        error = reply.exception()
        if error is not None:
            self.refuse(INTERNAL_ERROR, str(error))
        elif isinstance(reply.result(), wire.Done):
            done = reply.result()
            if "messages" in self.decision.result:
                self.decision.result["messages"] += done.messages
            if "consumers" in self.decision.result:
                self.decision.result["consumers"] += done.consumers
        self.one_came()


class _Creation(NamedTuple):
    """A queue that a request makes."""

    asked: _Asked
    queue: QueuePut


def _takes_away(decision: Decision) -> bool:
    """Whether something is left to be done when nobody routes by what was."""
    return bool(decision.drop or decision.drop_vhost or decision.close_vhost or decision.close_user)


class Authority:
    def __init__(
        self,
        catalog: Catalog,
        definitions: Definitions,
        doors: Doors,
        shards: Shards,
        connections: Connections,
        hashing_algorithm: str = DEFAULT_ALGORITHM,
    ) -> None:
        """`hashing_algorithm`: of new passwords."""
        self.catalog = catalog
        self.hashing_algorithm = hashing_algorithm
        self._definitions = definitions
        self._doors = doors
        self._shards = shards
        self._connections = connections
        self._inbox: deque[_Asked] = deque()
        self._inbox_things = 0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._usual_sync_s = QUICK_SYNC_S  # of late; not known to be quick at first
        self._is_short = False  # of room: said once
        self._lines = Lines()
        self._held: dict[str, deque[_Asked]] = {}
        # Queues whose shard was asked whether they may go, how often; and those it must be told of again if they may
        # not. To tell it before could make anew what it has just deleted.
        self._leaving: Counter[int] = Counter()
        self.churn: Counter[type] = (
            Counter()
        )  # requests that were not refused and changes, for metrics
        self._changed_leaving: set[int] = set()
        self._decisions = Decisions(
            catalog,
            definitions.new_queue_id,
            self.server_name,
            self._shard_for,
            shards.count,
            self._leaving,
        )
        self._creating: dict[int, Future[Any] | None] = {}  # by queue id; None: not sent yet

    # -- taking requests -----------------------------------------------------------------------------

    def submit(self, request: AnyAsk, owner: str, answer: AnswerTo) -> None:
        """Take a request; `answer(code, text, result)` is called once. Of one owner they are decided in this order."""
        self._inbox.append(_Asked(request, owner, answer))
        self._inbox_things += things_asked(request)
        self._arrived.set()
        if self._inbox_things >= INBOX_MAX:
            self._room.clear()

    def has_room(self) -> bool:
        return self._room.is_set()

    async def room(self) -> None:
        """Wait until requests may be submitted: what keeps the inbox within its bound."""
        await self._room.wait()

    async def ask(self, request: AnyAsk, owner: str = "") -> Answer:
        """Returns when the outcome is in force at all front doors. Rights were checked."""
        await self.room()
        answered: Future[Answer] = asyncio.get_running_loop().create_future()

        def answer(code: int, text: str, result: dict[str, Any]) -> None:
            if not answered.done():
                answered.set_result(Answer(0, code, text, result))

        self.submit(request, owner, answer)
        return await answered

    # -- the loop ------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._arrived.wait()
            batch = self._take_batch()
            changes, decided = self._decide(batch)
            self._definitions.flush()
            await self._sync(len(batch))
            self._doors.say_together(partial(self._tell, changes, decided))

    async def _sync(self, requests: int) -> None:
        """What must last is on stable storage, or this raises."""
        sync = self._definitions.sync_job(self.catalog)
        if sync is None:
            return
        began = time.monotonic()
        if requests <= FEW_REQUESTS and self._usual_sync_s < QUICK_SYNC_S:
            sync()  # the two wake-ups of a thread take longer
        else:
            await asyncio.get_running_loop().run_in_executor(None, sync)
        self._usual_sync_s += (time.monotonic() - began - self._usual_sync_s) / USUAL_OF

    def _tell(self, changes: list[AnyChange], decided: list[_Asked]) -> None:
        """Hand out what a batch changed, answer when that is in force: where who asked hears the changes before the
        answer, and nobody else routes, at once."""
        at_once: list[_Asked] = []
        later: list[_Asked] = []
        for asked in decided:
            hears = self._doors.heard_by(asked.owner) and not _takes_away(asked.decision)
            (at_once if hears else later).append(asked)
        version = self.catalog.version
        if changes:
            self._doors.hand_out(version, changes, waited=bool(later))
        for asked in at_once:
            asked.one_came()
        if later:
            self._doors.when_in_force(version, lambda: self._in_force(later))

    def _take_batch(self) -> list[_Asked]:
        batch: list[_Asked] = []
        things = 0
        while self._inbox and things < BATCH_MAX:
            batch.append(self._inbox.popleft())
            things += things_asked(batch[-1].request)
        self._inbox_things -= things
        if not self._inbox:
            self._arrived.clear()
        if self._inbox_things < INBOX_MAX // 2:
            self._room.set()
        return batch

    def _decide(self, batch: list[_Asked]) -> tuple[list[AnyChange], list[_Asked]]:
        """Decide each, change the catalog, start what the shards have to do at once."""
        changes: list[AnyChange] = []
        decided: list[_Asked] = []
        to_create: dict[int, list[_Creation]] = {}
        for asked in batch:
            if asked.owner in self._held:
                self._held[asked.owner].append(asked)
                continue
            decided.append(asked)
            asked.waits = 1  # for being in force
            try:
                decision = asked.decision = self._decisions.decide(asked.request, asked.owner)
            except Refusal as refusal:
                asked.refuse(refusal.code, refusal.text)
                continue
            except Exception:  # nothing has changed yet: one request that we did not foresee is the only one that fails
                log.exception("%s cannot be decided", type(asked.request).__name__)
                asked.refuse(INTERNAL_ERROR, "internal error")
                continue
            if decision.changes and self._lacks_room(asked):
                continue
            if decision.refused is not None:
                asked.refuse(decision.refused.code, decision.refused.text)
            before = self._policies(decision.policies_of)
            self.churn[type(asked.request)] += 1
            if (
                asked.owner
                and isinstance(asked.request, QueueDeclare | ExchangeDeclare)
                and asked.request.arguments
            ):
                self.warn_of(
                    *decision.changes
                )  # the HTTP API, which has no owner, calls it by itself
            self._apply(decision.changes)
            if (
                decision.bereft
                or decision.follow
                or not RESHAPING.isdisjoint(map(type, decision.changes))
            ):
                self._reshape(decision, before)
            changes.extend(decision.changes)
            if decision.policies_of:
                self._apply_policies(asked, decision.policies_of, before)
            if decision.first is not None:
                decided.pop()
                self._create_first(decision.first, to_create)
                self._ask_shard_first(asked, decision.first)
            elif decision.create:
                for queue in decision.create:
                    if queue.id in self._leaving:
                        self._changed_leaving.add(queue.id)
                        continue
                    to_create.setdefault(queue.shard, []).append(_Creation(asked, queue))
                    self._creating[queue.id] = None
            else:
                self._wait_for_queue(asked, to_create)
        for shard, creations in to_create.items():
            self._create(shard, creations)
        return changes, decided

    def _lacks_room(self, asked: _Asked) -> bool:
        """Whether it is refused for want of room, before anything has changed."""
        grows = isinstance(asked.request, GROWING)
        if not grows and not isinstance(asked.request, SHRINKING):
            return False
        lacking = self._definitions.lacks_room(asked.decision.changes, grows)
        if lacking:
            asked.decision = UNDECIDED
            asked.refuse(NO_ROOM, lacking)
        if bool(lacking) != self._is_short and (lacking or grows):
            self._is_short = bool(lacking)
            if lacking:
                log.error(
                    "%s and whatever else needs room is refused: %s",
                    type(asked.request).__name__,
                    lacking,
                )
            else:
                log.info("there is room for definitions again")
        return bool(lacking)

    def warn_of(self, *things: AnyAsk) -> None:
        """Log what of these requests that were taken, or of what they made, has no effect; in a flood not all of it."""
        for line in self._lines.of(things, time.monotonic()):
            log.warning("%s", line)

    def _apply(self, changes: list[AnyChange]) -> None:
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
        """Stream exchanges follow what was decided, in the same step."""
        more = self._decisions.reshape(decision, before)
        self._apply(more.changes)
        decision.changes += more.changes
        decision.create += more.create
        decision.drop += more.drop
        for note in (*decision.notes, *more.notes):
            log.warning("%s", note)

    def _in_force(self, decided: list[_Asked]) -> None:
        """Every front door has applied a batch: what had to wait for that is done now."""
        for asked in decided:
            if _takes_away(asked.decision):
                self._finish_removal(asked)
            asked.one_came()

    # -- at the shards -------------------------------------------------------------------------------

    def _create(self, shard: int, creations: list[_Creation]) -> None:
        """One message for all new queues of a batch on one shard."""
        queues = [creation.queue for creation in creations]
        done = self._shards.request(
            shard, lambda n: wire.CreateQueues(n, [self._spec(queue) for queue in queues])
        )
        for asked, queue in creations:
            self._creating[queue.id] = done
            asked.waits += 1
            done.add_done_callback(asked.shard_came)

        def created(_: Future[Any]) -> None:
            for queue in queues:
                self._creating.pop(queue.id, None)

        done.add_done_callback(created)

    def _policies(self, vhost: str) -> Policies:
        found = self.catalog.vhost(vhost)
        return found.policies if found is not None else NO_POLICIES

    def _apply_policies(self, asked: _Asked, vhost_name: str, before: Policies) -> None:
        """Queues whose effective arguments are others now: their shards are told, in messages of a bounded size."""
        by_shard: dict[int, list[QueuePut]] = {}
        for queue in changed_queues(self.catalog.vhosts[vhost_name], before):
            if queue.id in self._leaving:
                self._changed_leaving.add(queue.id)
            else:
                by_shard.setdefault(queue.shard, []).append(queue)
        for shard, queues in by_shard.items():
            for start in range(0, len(queues), CHANGED_QUEUES_MAX):
                specs = [self._spec(queue) for queue in queues[start : start + CHANGED_QUEUES_MAX]]
                self._request(asked, shard, lambda n, specs=specs: wire.CreateQueues(n, specs))  # type: ignore[misc]

    def _wait_for_queue(self, asked: _Asked, to_create: dict[int, list[_Creation]]) -> None:
        """A declare of a queue that exists wants its counts; a bind only that it is there."""
        counted = asked.decision.count
        for queue in asked.decision.uses if counted is None else [counted]:
            self._create_first(queue, to_create)
            if counted is not None:
                self._ask_counts(asked, counted)
            elif (creation := self._creating.get(queue.id)) is not None:
                asked.waits += 1
                creation.add_done_callback(asked.shard_came)

    def _create_first(self, queue: QueuePut, to_create: dict[int, list[_Creation]]) -> None:
        """What a shard is asked about a queue that this batch makes must come behind its creation."""
        if queue.id in self._creating and self._creating[queue.id] is None:
            self._create(queue.shard, to_create.pop(queue.shard))

    def _ask_counts(self, asked: _Asked, queue: QueuePut) -> None:
        """Of a queue that somebody declares who finds it there. One that its shard has given up (its last consumer is
        gone, it has expired, it was deleted on a condition) is about to leave the catalog too: what says so came before
        the refusal and is in the inbox. Behind that the declare is decided anew, and makes another queue."""

        def counted(reply: Future[Any]) -> None:
            refused = reply.exception() is None and isinstance(reply.result(), wire.Refused)
            if refused and asked.missed != queue.id:
                self._inbox.append(
                    _Asked(asked.request, asked.owner, asked.answer, missed=queue.id)
                )
                self._inbox_things += 1
                self._arrived.set()
                asked.answer = _no_answer
            asked.shard_came(reply)

        asked.waits += 1
        # Behind the queue's own creation, if that is under way: links keep their order.
        self._shards.request(queue.shard, lambda n: wire.Count(n, queue.id)).add_done_callback(
            counted
        )

    def _request(self, asked: _Asked, shard: int, message: Callable[[int], wire.Message]) -> None:
        asked.waits += 1
        self._shards.request(shard, message).add_done_callback(asked.shard_came)

    def _ask_shard_first(self, asked: _Asked, queue: QueuePut) -> None:
        """A conditional delete: only the shard knows whether the queue is unused or empty. What its connection asks
        meanwhile is held, so that its order stays."""
        ask = asked.request
        assert isinstance(ask, QueueRemove | Drained)
        if asked.owner:
            self._held[asked.owner] = deque()
        self._leaving[queue.id] += 1
        gone = self._shards.request(
            queue.shard,
            lambda n: wire.DeleteQueue(n, queue.id, if_unused=ask.if_unused, if_empty=ask.if_empty),
        )
        gone.add_done_callback(lambda gone: self._shard_decided(asked, queue, gone))

    def _shard_decided(self, asked: _Asked, queue: QueuePut, gone: Future[Any]) -> None:
        held = self._held.pop(asked.owner, deque())
        error, reply = gone.exception(), None if gone.exception() else gone.result()
        refused = (
            reply
            if isinstance(reply, wire.Refused) and reply.code != no_queue("", "").code
            else None
        )
        self._answered_leaving(queue, stays=error is not None or refused is not None)
        if error is not None:
            asked.answer(INTERNAL_ERROR, str(error), {})
        elif refused is not None:
            asked.answer(
                refused.code, f"queue '{queue.name}' in vhost '{queue.vhost}' {refused.text}", {}
            )
        else:
            messages = reply.messages if isinstance(reply, wire.Done) else 0
            asked.request = Removal([queue.id], at_shard=True, messages=messages)
            held.appendleft(asked)
        self._inbox.extendleft(reversed(held))
        self._inbox_things += sum(things_asked(each.request) for each in held)
        self._arrived.set()

    def _answered_leaving(self, queue: QueuePut, stays: bool) -> None:
        self._leaving[queue.id] -= 1
        if self._leaving[queue.id] > 0 and stays:
            return
        del self._leaving[queue.id]
        changed = queue.id in self._changed_leaving
        self._changed_leaving.discard(queue.id)
        now = self.catalog.queue_by_id(queue.id)
        if changed and stays and now is not None:
            self._shards.request(queue.shard, lambda n: wire.CreateQueues(n, [self._spec(now)]))

    def _finish_removal(self, asked: _Asked) -> None:
        decision = asked.decision
        for queue in decision.drop:
            self._request(asked, queue.shard, lambda n, id=queue.id: wire.DeleteQueue(n, id))  # type: ignore[misc]
        if decision.drop_vhost:
            vhost = decision.drop_vhost
            for shard in range(self._shards.count):
                self._request(asked, shard, lambda n: wire.DropVhost(n, vhost))
        if decision.close_vhost:
            text = f"vhost '{decision.close_vhost}' is deleted"
            self._close(self._connections.owners(vhost=decision.close_vhost), text)
        if decision.close_user:
            self._close(
                self._connections.owners(user=decision.close_user),
                f"user '{decision.close_user}' is deleted",
            )

    def _close(self, owners: list[str], text: str) -> None:
        for owner in owners:
            self._doors.close_connection(owner, CONNECTION_FORCED, text)

    async def told(self, queues: list[QueuePut]) -> list[QueuePut]:
        """Those of them that their shards know as they are in the catalog now. Raises ShardSilent."""
        by_shard: dict[int, list[wire.QueueSpec]] = {}
        for queue in queues:
            if queue.id not in self._leaving and self.catalog.queue_by_id(queue.id) == queue:
                by_shard.setdefault(queue.shard, []).append(self._spec(queue))
        asked = [
            self._shards.request(shard, lambda n, specs=specs: wire.CreateQueues(n, specs))  # type: ignore[misc]
            for shard, specs in by_shard.items()
        ]
        await asyncio.gather(*asked)
        return [queue for queue in queues if self._is_known(queue)]

    def _is_known(self, queue: QueuePut) -> bool:
        """Nothing is on its way to its shard that might have been decided since."""
        on_the_way = queue.id in self._creating or queue.id in self._leaving
        return not on_the_way and self.catalog.queue_by_id(queue.id) == queue

    # -- what links report ---------------------------------------------------------------------------

    def connection_gone(self, owner: str) -> None:
        """Its exclusive queues go, after what it asked for before."""
        self.submit(OwnerGone(owner), owner, _no_answer)

    def queue_gone(self, id: int, reason: str) -> None:
        """Its shard says that it is to go: last consumer gone, or expired."""
        log.info("queue %d goes: %s", id, reason)
        self.submit(Removal([id]), "", _no_answer)

    def queues_of_shard(self, shard: int) -> list[wire.QueueSpec]:
        return [self._spec(queue) for queue in self.catalog.index.all() if queue.shard == shard]

    def queue_churn(self) -> dict[str, float]:
        """Since the start of this process; a vhost's queues go with it, uncounted."""
        return {
            "queues_declared": self.churn[QueueDeclare],
            "queues_created": self.churn[QueuePut],
            "queues_deleted": self.churn[QueueDelete],
        }

    # -- by name, for the HTTP API: each returns when it is in force ------------------------------------

    async def put_vhost(self, put: VhostPut) -> Answer:
        return await self.ask(put)

    async def delete_vhost(self, name: str) -> Answer:
        """Its queues and their messages go, its connections are closed."""
        return await self.ask(VhostDelete(name))

    async def put_user(
        self,
        name: str,
        password: str | None = None,
        password_hash: str = "",
        tags: list[str] | None = None,
        hashing_algorithm: str = "",
    ) -> Answer:
        """With a password or its hash; with neither, no password is right for this user."""
        hashing_algorithm = hashing_algorithm or self.hashing_algorithm
        if password is not None:
            loop = asyncio.get_running_loop()
            password_hash = await loop.run_in_executor(
                None, hash_password, password, None, hashing_algorithm
            )
        return await self.ask(UserPut(name, password_hash, hashing_algorithm, tags or []))

    async def delete_user(self, name: str) -> Answer:
        """Permissions go, connections are closed."""
        return await self.ask(UserDelete(name))

    async def put_permission(
        self, vhost: str, user: str, configure: str, write: str, read: str
    ) -> Answer:
        return await self.ask(PermissionPut(vhost, user, configure, write, read))

    async def delete_permission(self, vhost: str, user: str) -> Answer:
        return await self.ask(PermissionDelete(vhost, user))

    async def put_topic_permission(
        self, vhost: str, user: str, exchange: str, write: str, read: str
    ) -> Answer:
        return await self.ask(TopicPermissionPut(vhost, user, exchange, write, read))

    async def delete_topic_permission(
        self, vhost: str, user: str, exchange: str | None = None
    ) -> Answer:
        """Of one exchange, or of all."""
        return await self.ask(TopicPermissionDelete(vhost, user, exchange))

    async def put_parameter(self, vhost: str, component: str, name: str, value: Any) -> Answer:
        return await self.ask(ParameterPut(vhost, component, name, value))

    async def declare_exchange(
        self,
        vhost: str,
        name: str,
        type: str,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> Answer:
        return await self.ask(
            ExchangeDeclare(vhost, name, type, durable, auto_delete, internal, arguments or {})
        )

    async def declare_queue(
        self,
        vhost: str,
        name: str,
        durable: bool = True,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
    ) -> Answer:
        return await self.ask(
            QueueDeclare(vhost, name, durable, auto_delete, False, arguments or {})
        )

    async def delete_queue(
        self, vhost: str, name: str, if_unused: bool = False, if_empty: bool = False
    ) -> Answer:
        return await self.ask(QueueRemove(vhost, name, if_unused, if_empty))

    async def pause_queue(self, vhost: str, name: str, paused: bool) -> Answer:
        return await self.ask(Pause(vhost, name, paused))

    async def bind(
        self,
        vhost: str,
        source: str,
        kind: str,
        destination: str,
        routing_key: str = "",
        arguments: dict[str, Any] | None = None,
    ) -> Answer:
        return await self.ask(Bind(vhost, source, kind, destination, routing_key, arguments or {}))

    async def purge_queue(self, vhost: str, name: str) -> Answer:
        """Answer.result: {"messages": the ready ones that went}."""
        queue = self.catalog.queue(vhost, name)
        if queue is None:
            missing = no_queue(vhost, name)
            return Answer(0, missing.code, missing.text)
        try:
            check_owner(queue, "")
        except Refusal as refusal:
            return Answer(0, refusal.code, refusal.text)
        try:
            reply = await self._shards.request(queue.shard, lambda n: wire.Purge(n, queue.id))
        except ShardSilent as error:
            return Answer(0, INTERNAL_ERROR, str(error))
        if isinstance(reply, wire.Refused) and reply.code == NO_ROOM:
            refused = not_purged(queue, reply.text)
            return Answer(0, refused.code, refused.text)
        return Answer(0, result={"messages": reply.messages if isinstance(reply, wire.Done) else 0})

    async def purge_first(self, vhost: str, name: str, count: int) -> Answer:
        """Purge the messages of a classic queue that are next to be delivered, `count` at the most.

        Answer.result: {"messages": how many went}. They go in steps, so that no other message waits long for it.
        """
        queue, gone = self.catalog.queue(vhost, name), 0
        while queue is not None and gone < count:
            step = min(count - gone, PURGE_STEP_MESSAGES)
            try:
                reply = await self._shards.request(
                    queue.shard,
                    lambda n, id=queue.id, step=step: wire.PurgeFirst(n, id, step),  # type: ignore[misc]
                )
            except ShardSilent as error:
                return Answer(0, INTERNAL_ERROR, str(error))
            purged = reply.messages if isinstance(reply, wire.Done) else 0
            gone += purged
            if purged < step:
                return Answer(0, result={"messages": gone})
            queue = self.catalog.queue(vhost, name)
        if queue is None and not gone:
            missing = no_queue(vhost, name)
            return Answer(0, missing.code, missing.text)
        return Answer(0, result={"messages": gone})

    def close_connection(self, owner: str, reason: str = "Closed via management plugin") -> None:
        self._doors.close_connection(owner, CONNECTION_FORCED, reason)

    # -- choosing ------------------------------------------------------------------------------------

    def _shard_for(self, vhost: str, queue: str) -> int:
        return place(vhost, queue, self._shards.count)

    def _spec(self, queue: QueuePut) -> wire.QueueSpec:
        """As its shard must know it: with its effective arguments."""
        arguments = self.catalog.queue_arguments(queue)
        if DELAYS_FOR in arguments and not hidden.is_of_exchange(queue.name):
            arguments = {key: value for key, value in arguments.items() if key != DELAYS_FOR}
        exclusive = bool(queue.owner)
        return wire.QueueSpec(
            queue.id,
            queue.vhost,
            queue.name,
            queue.durable,
            queue.auto_delete,
            exclusive,
            arguments,
            queue.paused,
            queue.part is not None and queue.part.held != OPEN,
        )

    @staticmethod
    def server_name() -> str:
        return (
            SERVER_NAMED_PREFIX
            + base64.urlsafe_b64encode(secrets.token_bytes(SERVER_NAME_BYTES)).decode()[:22]
        )


def changed_queues(vhost: Vhost, before: Policies) -> list[QueuePut]:
    """Those whose effective arguments `before` were others than they are now."""
    may_differ = vhost.policies.may_differ(before)
    changed = []
    for queue in vhost.queues.values():
        kind = queue_kind(queue.arguments)
        if may_differ(kind, queue.name):
            earlier = queue_arguments(queue.arguments, before.of(kind, queue.name).definition)
            if earlier != vhost.queue_arguments(queue):
                changed.append(queue)
    return changed


def _no_answer(code: int, text: str, result: dict[str, Any]) -> None:
    """For what nobody waits for."""
