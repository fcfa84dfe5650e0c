"""The front door's copy of what exists, and its one line to the controller.

The copy begins with a snapshot; changes follow in order. Each change is in force here, with caches
emptied by the listener, before Applied says so. The copy stays in use while the controller is away:
messages flow, requests wait (catalog_requests.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import msgspec

from shardmq.broker.front_door.hot_state import NO_PIPE, BindRun, BindRuns
from shardmq.broker.front_door.links.binds_ahead import BindsAhead
from shardmq.broker.front_door.links.binds_pipe import BindsPipe, around_key, new_pipe
from shardmq.broker.front_door.links.catalog_requests import CatalogRequests, Reply
from shardmq.broker.front_door.links.control_stream import ControlStream
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import TOPOLOGY, AnyChange, is_only_more
from shardmq.broker.shared.control import (
    Alarmed,
    Answer,
    AnyControl,
    AnyRequest,
    Applied,
    Ask,
    AssignmentOrder,
    AssignmentOrders,
    BindMany,
    CancelConsumer,
    Changes,
    CloseConnection,
    ConnectionDown,
    ConnectionInfo,
    ConnectionsPassed,
    ConnectionUp,
    ConsumerHere,
    ConsumersHere,
    ControlMessage,
    DoorHello,
    DoorReport,
    Fence,
    OtherVersion,
    Outlived,
    Query,
    ShardsElsewhere,
    Snapshot,
    SnapshotPart,
    Span,
    SpansEnded,
)
from shardmq.cluster.versions import WIRE
from shardmq.shardd.wire.messages import WIRE_VERSION

log = logging.getLogger("shardmq.broker.front_door.links.catalog_link")

# Messages of the controller that are handled before other events of the loop get their turn: a read
# holds thousands of small ones.
MESSAGES_MAX = 100
# How long the controller may have to wait until it learns that changes are in force here, if nobody
# waits for them.
APPLIED_WAITS_S = 0.005
# How long the controller may have to wait until it learns of a connection, if there is nothing else
# to say. Connections that end sooner are only counted: some clients connect for each thing they do.
UP_WAITS_S = 0.002
# Changes applied between two looks at the sockets: a listing of 100,000 queues delays no message.
SLICE = 500
BACKOFF_FIRST_S = 0.02
# To look at a socket of the same host is cheap, and a controller that is back is missed by all
# doors.
BACKOFF_MAX_S = 0.2
# How long the end of a consumer, channel or connection waits for the queues that go with it.
REMOVED_S_MAX = 2.0
# Bytes that the controller has not read, beyond which it is told of no more spans.
SPANS_UNSENT_BYTES_MAX = 1 << 20


class Listener(Protocol):
    """The handler of messages from the controller. None of its methods may wait."""

    def receiving(self) -> None:
        """Hear that some messages are about to be handled.

        What they make the front door send to clients may leave together.
        """

    def received(self) -> None:
        """Hear that the messages are handled."""

    def logins_change(self) -> None:
        """Hear that what logins depend on is about to change: users, rights, vhosts, limits."""

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        """Forget what was routed by the old catalog: these changes are in force.

        None: a snapshot replaced everything.
        """

    def close_connection(self, owner: str, code: int, text: str) -> None: ...

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None: ...

    def totals(self) -> dict[str, float]: ...

    def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        """Return deliveries of a queue that wait for their ack, as DoorReport wants them."""

    def holders(self, queue_id: int) -> list[dict[str, Any]]:
        """Return who holds deliveries of a queue without an ack, as DoorReport wants them."""

    def alarmed(self, reason: str) -> None:
        """Hear of an alarm of the whole broker; an empty reason ends it."""

    def shards_elsewhere(self, message: ShardsElsewhere) -> None:
        """Hear which shards other nodes have."""

    def outlived(self) -> None:
        """Hear that controller and shards take this process for gone and go on without it."""

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        """Return connections, channels and counters, as DoorReport wants them."""

    def published(self) -> list[tuple[str, str, int, int]]:
        """Return what came to exchanges, as DoorReport wants it."""

    def of_vhosts(self) -> dict[str, dict[str, int]]:
        """Return the counters of vhosts, as DoorReport wants them."""

    def consumers_here(self) -> list[ConsumerHere]:
        """Return all consumers of virtual queues that the controller let in."""

    def assignment_orders(self, orders: list[AssignmentOrder]) -> None: ...

    def fence(self, number: int) -> None:
        """Answer with Fenced, some time later."""


class CatalogLink:
    """The copy of the catalog, and the line to the controller that keeps it in step.

    `catalog` is replaced by a snapshot, and gets what was bound ahead when somebody looks: look it
    up here each time, do not keep it. `up` says whether the controller is there and the copy is in
    step.
    """

    def __init__(
        self,
        path: str,
        *,
        door: int,
        incarnation: int,
        pid: int,
        listener: Listener,
        is_alone: bool = False,
    ) -> None:
        """Prepare. `is_alone` says that there is no other front door."""
        self._catalog = Catalog()
        self._coming = Catalog()  # what the next snapshot completes
        self._path = path
        self._door, self._incarnation, self._pid = door, incarnation, pid
        self._listener = listener
        self._boot = ""
        self._version = 0
        self._synced = asyncio.Event()
        # Ids of queues that somebody waits for to go.
        self._leaving: dict[asyncio.Future[None], set[int]] = {}
        self._connections: dict[str, Callable[[], ConnectionInfo]] = {}
        self._told: set[str] = set()  # connections that the last hello named
        # Connections that the controller was not told of yet, and how many of these are gone.
        self._unsaid: dict[str, None] = {}
        self._passed = 0
        self._ups_planned = False
        self._runs = BindRuns()
        self._requests = CatalogRequests(self._send, self._send_ahead, self._runs)
        # By whether a client waits for the binds.
        self._binds: dict[bool, BindsPipe | None] = {}
        # None where other front doors route, too: they have to hear of a binding first.
        self.ahead: BindsAhead | None = None
        if is_alone:
            self.ahead = BindsAhead(
                self._runs, self._requests, lambda: self._catalog, self._listener.catalog_changed
            )
        self._stream: ControlStream | None = None
        self._applied_unsaid = self._applied_planned = False
        self._controller_version = 0  # of a controller that speaks another wire version
        self._speaks = WIRE.most

    @property
    def catalog(self) -> Catalog:
        """Return the copy of the catalog, with all that is in force here."""
        if self.ahead is not None and self.ahead.collected:
            self.ahead.put_in()
        return self._catalog

    @property
    def up(self) -> bool:
        return self._requests.up

    # -- for the front door -----------------------------------------------------------------------

    def ask(self, request: AnyRequest, owner: str, user: str) -> asyncio.Future[Answer]:
        """Ask the controller; for one connection the order of asking is the order of doing.

        Connections take turns when more is asked than may be on its way at once. Cancelling the
        future takes back what has not been sent; what was sent is done, its answer is lost.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._requests.add(request, owner, user, answer)
        return answer

    def request(self, request: AnyRequest, owner: str, user: str) -> Reply:
        """Ask the same for a caller that does not wait but is called back."""
        answer = Reply()
        self._requests.add(request, owner, user, answer)
        return answer

    def connection_up(self, owner: str, info: Callable[[], ConnectionInfo]) -> None:
        """Tell the controller of a connection, or of what is new about it.

        `info` is called when the controller is told: before anything else is said, or UP_WAITS_S
        later.
        """
        is_new = owner not in self._connections
        self._connections[owner] = info
        if not self.up:
            return
        if not is_new:
            self._send(ConnectionUp(info()))
            return
        self._unsaid[owner] = None
        self._plan_ups()

    def _plan_ups(self) -> None:
        if not self._ups_planned:
            self._ups_planned = True
            asyncio.get_running_loop().call_later(UP_WAITS_S, self._say_planned_ups)

    def connection_down(self, owner: str) -> None:
        """Tell the controller that a connection is gone, and with it its exclusive queues.

        The caller has cancelled what the connection still asked: nothing may be declared after
        this.
        """
        if self._connections.pop(owner, None) is None or not self.up:
            return
        if owner in self._unsaid:
            del self._unsaid[owner]
            self._passed += 1
        else:
            self._send(ConnectionDown(owner))

    def connection_passed(self) -> None:
        """Count a connection that came and went before the controller was told of it."""
        if self.up:
            self._passed += 1
            self._plan_ups()

    def say(self, message: ControlMessage) -> None:
        """Tell the controller of consumers of virtual queues.

        What is said while the controller is away is in ConsumersHere when it is back.
        """
        if self.up:
            self._send(message)

    def say_spans(self, spans: list[Span]) -> bool:
        """Tell the controller of spans; return False if it is away or does not read."""
        if (
            not self.up
            or self._stream is None
            or self._stream.unsent_bytes > SPANS_UNSENT_BYTES_MAX
        ):
            return False
        self._send(SpansEnded(spans))
        return True

    async def removed(self, queue_ids: Iterable[int]) -> None:
        """Wait until the copy has none of these queues any more, at most REMOVED_S_MAX.

        While the controller is away nobody waits: declares wait too, behind what the front door
        then hears of these queues.
        """
        left = {
            queue_id for queue_id in queue_ids if self.catalog.queue_by_id(queue_id) is not None
        }
        if not left or not self.up:
            return
        gone = asyncio.get_running_loop().create_future()
        self._leaving[gone] = left
        try:
            await asyncio.wait((gone,), timeout=REMOVED_S_MAX)
        finally:
            del self._leaving[gone]

    async def synced(self) -> None:
        """Wait for the first snapshot: before it this door knows of no vhost."""
        await self._synced.wait()

    async def run(self) -> None:
        """Connect, stay connected, connect again; until cancelled."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            try:
                _, stream = await asyncio.get_running_loop().create_unix_connection(
                    lambda: ControlStream(self._take_few), self._path
                )
            except OSError:
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            else:
                if await self._outlive(stream):
                    backoff_s = BACKOFF_FIRST_S
                else:  # it took the hello and never answered: it is not well
                    backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            await asyncio.sleep(backoff_s)

    # -- one stream's life ------------------------------------------------------------------------

    async def _outlive(self, stream: ControlStream) -> bool:
        """Serve one stream to its end; return whether the copy was ever in step by it."""
        try:
            await self._serve(stream)
        except OSError as error:
            if not self._controller_version:
                log.warning(
                    "the controller is gone (%s); serving from the copy of version %d",
                    error,
                    self._version,
                )
        except msgspec.DecodeError:
            log.exception("what the controller says cannot be read; connecting again")
        finally:
            useful = self.up
            if useful:
                self._speaks = WIRE.most  # the next controller may be of another release
            self._requests.up = False
            self._stream = None
            self._runs.pipe = self._runs.waited_pipe = NO_PIPE
            for pipe in self._binds.values():
                if pipe is not None:
                    pipe.close()
            self._binds.clear()
            self._unsaid.clear()
            self._passed = 0
            stream.close()
        return useful

    async def _serve(self, stream: ControlStream) -> None:
        self._stream = stream
        self._coming = Catalog()
        hello = DoorHello(
            self._speaks,
            self._door,
            self._incarnation,
            self._pid,
            self._boot,
            self._version,
            [info() for info in self._connections.values()],
            WIRE.least if WIRE.least < self._speaks else 0,
        )
        # The hello is a picture of now; _in_step tells of connections that come while it is
        # answered.
        self._told = set(self._connections)
        if self.ahead is not None:
            for waited in (False, True):
                self._binds[waited] = new_pipe(self._path, self._door, self._incarnation, waited)
        self._send(hello)
        while True:
            await stream.heard()
            for at, message in enumerate(stream.messages(), 1):
                if at % MESSAGES_MAX == 0:
                    await asyncio.sleep(0)
                for _ in self._handle(message):
                    await asyncio.sleep(0)
            stream.go_on()

    def _take_few(self, stream: ControlStream) -> None:
        """Handle all that came, and send what there is to say in one write."""
        if stream is not self._stream:
            return  # the end of this stream is known: what it asked is asked again
        stream.hold()
        self._listener.receiving()
        try:
            for message in stream.messages():
                if type(message) is Answer:
                    self._requests.answered(message)
                    continue
                for _ in self._handle(message):
                    pass
        finally:
            stream.flush()
            self._listener.received()

    def _handle(self, message: AnyControl) -> Iterator[None]:
        """Handle a message; yield where others may have their turn in what takes long."""
        listener = self._listener
        match message:
            case Answer():
                self._requests.answered(message)
            case Changes():
                yield from self._apply(message)
                self._in_step()
            case SnapshotPart():
                yield from self._take_in(message.changes)
            case Snapshot():
                yield from self._replace(message)
                self._in_step()
            case Query() if message.unacked_of:
                unacked = listener.unacked(message.unacked_of)
                self._send(DoorReport(message.query, [], [], {}, unacked))
            case Query() if message.holders_of:
                holders = listener.holders(message.holders_of)
                self._send(DoorReport(message.query, [], [], {}, holders=holders))
            case Query() if message.totals_only:
                report = DoorReport(
                    message.query,
                    [],
                    [],
                    listener.totals(),
                    vhosts=listener.of_vhosts(),
                    door=self._door,
                )
                self._send(report)
            case Query():
                published = listener.published()
                report = DoorReport(
                    message.query,
                    *listener.report(),
                    exchanges=published,
                    vhosts=listener.of_vhosts(),
                    door=self._door,
                )
                self._send(report)
            case Fence():
                listener.fence(message.number)
            case AssignmentOrders():
                listener.assignment_orders(message.orders)
            case CloseConnection():
                listener.close_connection(message.owner, message.code, message.text)
            case CancelConsumer():
                listener.cancel_consumer(message.owner, message.channel, message.consumer_tag)
            case Alarmed():
                listener.alarmed(message.reason)
            case ShardsElsewhere():
                listener.shards_elsewhere(message)
            case Outlived():
                listener.outlived()
            case OtherVersion():
                self._refused(message.wire_version)
            case _:
                raise msgspec.DecodeError(f"{type(message).__name__} is nothing a controller says")

    def _refused(self, version: int) -> None:
        """Note that the controller speaks another wire version, and log each version once.

        The controller ends the stream. The next one may be of another process. If this process
        understands the version, it speaks that from the next hello on.
        """
        if version in WIRE:
            self._speaks = version
        elif version != self._controller_version:
            self._controller_version = version
            log.error(
                "the controller speaks wire version %d, this process speaks %d: "
                "restart all of one release",
                version,
                WIRE_VERSION,
            )

    def _send(self, message: ControlMessage) -> None:
        """Send a message. Without a stream it is dropped: the next hello makes up for it."""
        if self._stream is not None:
            if self._unsaid or self._passed:
                self._say_ups(self._stream)
            if type(message) is Applied:
                self._applied_unsaid = False
            self._stream.send(message)

    def _send_ahead(self, ask: Ask) -> BindRun | None:
        """Send binds ahead, which have left this process when the client is answered.

        Return the run that they begin. Return None, and do nothing, if the controller has not read
        the pipe for so long that the pipe is full. The stream would keep the request in this
        process then. Binds that a client waits for go by their pipe or not at all.
        """
        stream = self._stream
        if stream is None:
            return None
        assert isinstance(ask.what, BindMany)
        pipe = self._binds.get(ask.what.waited)
        if pipe is not None and pipe.takes(data := stream.encode(ask)):
            if not pipe.write(data):
                return None
            run = BindRun(self._runs, ask.what.vhost, ask.what.binds)
            run.go_on(partial(around_key, ask, run.source, run.queue, stream.encode))
            return run
        if ask.what.waited:
            return None
        stream.hold()
        try:
            self._send(ask)
        finally:
            stream.flush()
        return BindRun(self._runs, ask.what.vhost, ask.what.binds)

    def _say_ups(self, stream: ControlStream) -> None:
        for owner in self._unsaid:
            stream.send(ConnectionUp(self._connections[owner]()))
        if self._passed:
            stream.send(ConnectionsPassed(self._passed))
        self._unsaid.clear()
        self._passed = 0

    def _say_planned_ups(self) -> None:
        self._ups_planned = False
        if self._stream is not None and (self._unsaid or self._passed):
            self._say_ups(self._stream)

    # -- the catalog ------------------------------------------------------------------------------

    def _apply(self, message: Changes) -> Iterator[None]:
        for start in range(0, len(message.changes), SLICE):
            part = message.changes[start : start + SLICE]
            if not TOPOLOGY.issuperset(map(type, part)):
                self._listener.logins_change()
            ahead = self.ahead
            is_known = ahead is not None and ahead.has_all(part)
            if ahead is not None:
                ahead.decided(part)
            self.catalog.apply_all(part)
            # The listener hears of each slice: an old cache must not route what a slice changed.
            if not is_known:
                self._has_changed(part)
                if ahead is not None:
                    ahead.put_again()
            if start + SLICE < len(message.changes):
                yield
        self._version = message.version
        if message.waited:
            self._send(Applied(message.version))
        else:
            self._say_applied_later()

    def _say_applied_later(self) -> None:
        """Say Applied soon, once for many changes: saying it is work for both sides."""
        self._applied_unsaid = True
        if not self._applied_planned:
            self._applied_planned = True
            asyncio.get_running_loop().call_later(APPLIED_WAITS_S, self._say_applied)

    def _say_applied(self) -> None:
        self._applied_planned = False
        if self._applied_unsaid:
            self._send(Applied(self._version))

    def _take_in(self, changes: list[AnyChange]) -> Iterator[None]:
        """Apply changes to the catalog that the next snapshot completes."""
        for at, change in enumerate(changes, 1):
            self._coming.apply(change)
            if at % SLICE == 0:
                yield

    def _replace(self, message: Snapshot) -> Iterator[None]:
        yield from self._take_in(message.changes)
        self._listener.logins_change()
        self._catalog, self._coming = self._coming, Catalog()
        self._catalog.version = message.version
        self._boot, self._version = message.boot, message.version
        if self.ahead is not None:
            self.ahead.decided(None)
        self._has_changed(None)
        if self.ahead is not None:
            self.ahead.put_again()
        self._send(Applied(message.version))

    def _has_changed(self, changes: list[AnyChange] | None) -> None:
        self._listener.catalog_changed(changes)
        if is_only_more(changes):
            return
        for gone, left in self._leaving.items():
            left.intersection_update(
                [queue_id for queue_id in left if self.catalog.queue_by_id(queue_id) is not None]
            )
            if not left and not gone.done():
                gone.set_result(None)

    def _in_step(self) -> None:
        """Say who came and went since the hello, and ask again what is unanswered."""
        if self.up:
            return
        self._synced.set()
        self._controller_version = 0
        for pipe in self._binds.values():
            if pipe is not None:
                pipe.answered()
        self._runs.pipe, self._runs.waited_pipe = (
            NO_PIPE if (pipe := self._binds.get(waited)) is None else pipe.fd
            for waited in (False, True)
        )
        for owner in self._told - self._connections.keys():
            self._send(ConnectionDown(owner))
        for owner in self._connections.keys() - self._told:
            self._send(ConnectionUp(self._connections[owner]()))
        self._send(ConsumersHere(self._listener.consumers_here()))
        self._requests.ask_again()
