"""The control link to front doors: a server on RUNTIME_DIR/control.sock.

The links tell each front door what exists: a snapshot, then each batch of changes. They take its
requests and its news of connections, and know which version of the catalog it has applied.
`when_in_force` alone decides whether every front door routes by a version. After a restart of the
controller that includes the front doors that have not come back yet, because they route by the copy
they have. A front door that does not apply changes in time, or does not read, loses its link, and
gets a snapshot when it comes back.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from shardmq.broker.controller.peers import binds_pipe
from shardmq.broker.controller.peers.binds_pipe import BindsPipe, together
from shardmq.broker.model.changes import AnyChange
from shardmq.broker.shared.control import (
    CONTROL_BYTES_MAX,
    Alarmed,
    Answer,
    AnyControl,
    Applied,
    Ask,
    AssignmentGivenUp,
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
    ConsumerLeave,
    ConsumersHere,
    ControlMessage,
    DoorHello,
    DoorReport,
    Fence,
    Fenced,
    MarkPassed,
    OtherVersion,
    Outlived,
    Query,
    ShardElsewhere,
    ShardsElsewhere,
    Snapshot,
    SnapshotPart,
    Span,
    SpansEnded,
    node_of,
)
from shardmq.cluster.versions import WIRE, Range, highest_common
from shardmq.shardd.wire.messages import WIRE_VERSION
from shardmq.shardd.wire.recent import RecentKeys

SOCKET_NAME = "control.sock"
SNAPSHOT_PART_CHANGES = 4096
UNREAD_BYTES_MAX = 256 << 20  # sent to one front door and not read; then its link is cut
# The longest that a front door may take to apply changes, and to take in a snapshot of 100,000
# queues on a busy machine. After that it holds up nobody any more.
APPLY_S_MAX = 10.0
SNAPSHOT_S_MAX = 60.0
# A refused front door tries again several times a second. One that has not for so long is gone.
REFUSED_S_MAX = 10.0
FENCE_S_MAX = 5.0  # a shard may be away; whoever wants a fence asks again
REPORT_S_MAX = 2.0
# How long a front door of another node may be cut off before it counts as gone.
CUT_OFF_S_MAX = 6.0
# How long after a start a front door that has not come back holds up what the others ask for.
RETURN_S_MAX = 3.0
PREFIX = struct.Struct("<I")

log = logging.getLogger(__name__)


class ProtocolError(Exception):
    """A front door sent what it must not send, so its link ends."""


class Handler(Protocol):
    """The controller, as the links call it."""

    def snapshot(self) -> tuple[int, list[AnyChange]]: ...

    def door_up(self, door: int, incarnation: int, connections: list[ConnectionInfo]) -> None: ...

    def door_gone(self, door: int, incarnation: int) -> None: ...

    def connection_up(self, info: ConnectionInfo) -> None: ...

    def connection_down(self, owner: str) -> None: ...

    def connections_passed(self, door: int, count: int) -> None:
        """Count connections that came to a front door and went before they were told of."""

    def spans_ended(self, spans: list[Span]) -> None: ...

    def asked(self, ask: Ask, answer: Callable[[int, str, dict[str, Any]], None]) -> None: ...

    def consuming(
        self,
        door: int,
        incarnation: int,
        news: ConsumersHere | ConsumerLeave | AssignmentGivenUp | MarkPassed,
    ) -> None:
        """Take news of the consumers of virtual queues at a front door."""

    def handed_out(self, changes: list[AnyChange]) -> None:
        """Note that changes are on their way to every front door; what is said now comes behind."""

    def has_room(self) -> bool:
        """Return whether more may be asked; if not, nothing is read until room() returns."""

    async def room(self) -> None: ...


class FrontDoorLink:
    """The link to a connected front door.

    told: the newest version that was sent.
    applied: the newest version that the front door has applied.
    behind_since: the loop time of the oldest change not applied; 0 if there is none.
    is_relayed: whether another node relays it.
    lost: when the stream of a relayed one has ended, the timer until it counts as gone.
    binds: the pipes by which it tells of binds ahead.
    """

    def __init__(self, hello: DoorHello, transport: asyncio.Transport) -> None:
        self.number = hello.door
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.told = 0
        self.applied = 0
        self.behind_since = 0.0
        self.is_relayed = transport.get_extra_info("opening") is not None
        self.lost: asyncio.TimerHandle | None = None
        self.binds: list[BindsPipe] = []
        self._transport = transport
        self._out: list[bytes] = []
        self._flush_planned = False

    def send(self, message: ControlMessage) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes with all that is sent in this pass of the loop, in one write."""
        self._out.append(data)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self.flush)

    def gather(self) -> None:
        """Hold back what is sent until the caller calls flush()."""
        self._flush_planned = True

    def read_binds(self) -> None:
        """Take all binds ahead that the front door has told of."""
        for pipe in self.binds:
            pipe.read()

    def close_binds(self) -> None:
        """Take all that is in the pipes, and no more."""
        for pipe in self.binds:
            pipe.close()

    def flush(self) -> None:
        self._flush_planned = False
        transport = self._transport
        if not self._out or transport.is_closing():
            self._out.clear()
            return
        transport.write(b"".join(self._out))
        self._out.clear()
        if transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            log.error(
                "front door %d does not read: %d bytes wait; its link is cut",
                self.number,
                UNREAD_BYTES_MAX,
            )
            transport.abort()

    def cut(self) -> None:
        self._transport.abort()


class _TakenForGone(Exception):
    """A front door whose link was cut comes back: what it holds was given to others meanwhile."""


class _Refused(Exception):
    """A front door speaks another wire version.

    `version` is the one that it should speak.
    """

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


class _Stream(asyncio.Protocol):
    """The bytes from one front door, handled in the pass of the loop that has read them."""

    def __init__(self, links: DoorLinks) -> None:
        self._links = links
        self._unread = bytearray()
        self._door: FrontDoorLink | None = None
        self._waiting: asyncio.Task[None] | None = None  # waits for room in the inbox

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport, and another class.
        self.transport = cast(asyncio.Transport, transport)
        self._links.streams.add(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if self._door is not None:
            self._door.read_binds()  # what this process hears next may come behind these
        try:
            for message in take_messages(self._unread):
                self._take(message)
        except (msgspec.MsgspecError, ProtocolError) as error:
            log.warning(
                "control link of front door %s: %s", self._door.number if self._door else "?", error
            )
            self.transport.abort()
        except _TakenForGone as door:
            log.warning(
                "front door %s comes back after it was taken for gone; it is to begin anew", door
            )
            self.transport.write(encode(Outlived()))
            self.transport.close()
        except _Refused as refused:
            self.transport.write(encode(OtherVersion(refused.version)))
            self.transport.close()
        finally:
            if self._door is not None:
                self._door.flush()
        assert self._links.handler is not None
        if self._waiting is None and not self._links.handler.has_room():
            self.transport.pause_reading()
            self._waiting = asyncio.get_running_loop().create_task(self._go_on())

    def _take(self, message: AnyControl) -> None:
        if self._door is None:
            self._door = self._links.enter(message, self.transport)
        else:
            self._door.gather()
            self._links.receive(self._door, message)

    async def _go_on(self) -> None:
        assert self._links.handler is not None
        await self._links.handler.room()
        self._waiting = None
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._links.streams.discard(self)
        if self._waiting is not None:
            self._waiting.cancel()
        if error is not None:
            log.warning(
                "control link of front door %s: %s", self._door.number if self._door else "?", error
            )
        if self._door is not None:
            self._links.leave(self._door)


class DoorLinks:
    """The links to all connected front doors; set `handler` before `start`."""

    def __init__(self, boot: str, doors: Iterable[int] = ()) -> None:
        """Prepare for the front doors with these numbers."""
        self.alarm = ""
        self.handler: Handler | None = None
        self._directory = Path()
        self._boot = boot
        self._doors: dict[int, FrontDoorLink] = {}
        self._gone: dict[int, int] = {}  # by number, the last incarnation that was taken for gone
        self._all = frozenset(doors)
        self._expected = set(self._all)  # front doors not seen since the start
        self._missed: set[int] = set()  # those of them that others were not to wait for any longer
        self._handed_out = 0
        # The shards of the cluster by the number of the node that leads them.
        self._elsewhere: dict[int, list[ShardElsewhere]] = {}
        self._shards: list[int] | None = None  # the numbers of all of them, if they are known
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._reports: dict[int, _Gathering] = {}
        self._query = 0
        self._fences: dict[int, _Fence] = {}
        self._server: asyncio.Server | None = None
        self._check: asyncio.TimerHandle | None = None
        self._return: asyncio.TimerHandle | None = None
        self.streams: set[_Stream] = set()
        # Refused front doors: the wire version of each, and when it tried last (loop time).
        self._others: dict[int, tuple[int, float]] = {}
        self._refused = RecentKeys()  # number and incarnation of front doors

    async def start(self, runtime_dir: Path, version: int = 0) -> None:
        """Listen. `version` is that of the catalog as it was loaded, which is in force already."""
        self._handed_out = version
        self._directory = runtime_dir
        path = runtime_dir / SOCKET_NAME
        path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(
            self.connection, path, backlog=128
        )
        self._cut_laggards()
        self._return = asyncio.get_running_loop().call_later(RETURN_S_MAX, self._expect_no_more)

    def _expect_no_more(self) -> None:
        # On one host nobody else has told a front door anything: it is only late.
        if len(set(map(node_of, self._all))) > 1:
            self._missed |= self._expected
        self._expected.clear()
        self._call_what_is_in_force()

    async def stop(self) -> None:
        if self._check is not None:
            self._check.cancel()
        if self._return is not None:
            self._return.cancel()
        if self._server is not None:
            self._server.close()
        for door in self._doors.values():
            door.close_binds()
        # Front doors outlive this process with all they hold, so nobody is told that they are gone.
        self._doors.clear()
        self._server = None
        for stream in list(self.streams):
            stream.transport.abort()
        while self.streams:
            await asyncio.sleep(0)

    def connection(self) -> asyncio.Protocol:
        """Return the protocol of a new connection. Its first message names the front door."""
        return _Stream(self)

    def doors(self) -> list[FrontDoorLink]:
        """Return the links that are there; a front door that is cut off has none."""
        return [door for door in self._doors.values() if door.lost is None]

    # -- to the front doors --------------------------------------------------------------------

    def hand_out(
        self,
        version: int,
        changes: list[AnyChange],
        waited: bool = True,
        by: Collection[str] = (),
    ) -> None:
        """Send the changes that lead to `version` to every front door.

        `waited` says that `when_in_force` will be called for the version. `by`: clients of these
        connections were put in force ahead, and nobody else has changed anything. A front door has
        these changes if it has all of the connections. If it has applied all before, too, it is not
        told of the version.
        """
        self._handed_out = version
        has_them = bool(by) and _are_of_one_door(self._doors, by)
        doors = [door for door in self._doors.values() if door.told < version]
        if has_them and not waited and not any(door.behind_since for door in doors):
            for door in doors:
                door.told = door.applied = version
        elif doors:
            data = encode(Changes(version, [] if has_them else changes, waited))
            now = asyncio.get_running_loop().time()
            for door in doors:  # the snapshot of any other had the changes
                door.told = version
                door.behind_since = door.behind_since or now
                door.send_bytes(data)
        if self.handler is not None:
            self.handler.handed_out(changes)
        self._call_what_is_in_force()

    def say_together(self, say: Callable[[], None]) -> None:
        """Call `say`, and send what it says to front doors in one write to each."""
        doors = self.doors()
        for door in doors:
            door.gather()
        try:
            say()
        finally:
            for door in doors:
                door.flush()

    def heard_by(self, owner: str) -> bool:
        """Return whether this connection's front door is the only one.

        An answer to the connection then comes behind all changes.
        """
        if len(self._doors) != 1 or self._expected or not owner:
            return False
        return int(owner.partition(".")[0]) in self._doors

    def when_in_force(self, version: int, then: Callable[[], None]) -> None:
        """Call `then` once every front door has applied `version`, which never falls."""
        self._waiting.append((version, then))
        self._call_what_is_in_force()

    def close_connection(self, owner: str, code: int, text: str) -> None:
        door = self._doors.get(int(owner.split(".", 1)[0]))
        if door is not None:
            door.send(CloseConnection(owner, code, text))

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None:
        door = self._doors.get(int(owner.split(".", 1)[0]))
        if door is not None:
            door.send(CancelConsumer(owner, channel, tag))

    def give_orders(self, door: int, incarnation: int, orders: list[AssignmentOrder]) -> None:
        """Send orders about consumers of virtual queues, if that front door is still there."""
        found = self._doors.get(door)
        if found is not None and found.incarnation == incarnation:
            found.send(AssignmentOrders(orders))

    def learn(
        self,
        nodes: Mapping[int, list[ShardElsewhere]],
        doors: Iterable[int],
        shards: Iterable[int] | None = None,
    ) -> None:
        """Take the shards of all nodes and the numbers of the front doors of those that live.

        Each front door hears of the shards of other nodes than its own. `shards` has the numbers of
        all shards, also of those that nobody leads; None if they are not known.
        """
        self._elsewhere = dict(nodes)
        self._shards = None if shards is None else sorted(shards)
        self._all = frozenset(doors)
        for door in self._doors.values():
            self._tell_shards(door)

    def _tell_shards(self, door: FrontDoorLink) -> None:
        own = node_of(door.number)
        shards = [each for node, of in self._elsewhere.items() if node != own for each in of]
        here = [each.number for each in self._elsewhere.get(own, ())]
        door.send(ShardsElsewhere(shards, here, self._shards))

    def set_alarm(self, reason: str) -> None:
        """Tell each front door, and those that come, the alarm of the broker; "" ends it."""
        if reason != self.alarm:
            self.alarm = reason
            for door in self._doors.values():
                door.send(Alarmed(reason))

    def _call_what_is_in_force(self) -> None:
        """Make the calls of `when_in_force` whose version every front door has applied."""
        if self._expected or not self._waiting:
            return
        in_force = min((door.applied for door in self._doors.values()), default=self._handed_out)
        in_force = min(in_force, self._handed_out)
        while self._waiting and self._waiting[0][0] <= in_force:
            _, then = self._waiting.popleft()
            try:
                then()
            except Exception:  # no fault of the front door whose message led here
                log.exception("what waited for a version of the catalog has failed")

    def _cut_laggards(self) -> None:
        """Cut the links of front doors that have not applied changes in time, once per second."""
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(1.0, self._cut_laggards)
        for door in list(self._doors.values()):
            allowed_s = APPLY_S_MAX if door.applied else SNAPSHOT_S_MAX
            if door.behind_since and loop.time() - door.behind_since > allowed_s:
                log.error(
                    "front door %d applied no change for %d s; its link is cut",
                    door.number,
                    allowed_s,
                )
                door.cut()

    # -- questions to the front doors ----------------------------------------------------------

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        """Return what front doors say of their connections and channels.

        Front doors that do not answer within REPORT_S_MAX are left out.
        """
        return await self._gather(totals_only=totals_only)

    async def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        """Return the deliveries of a queue that wait for their acks."""
        return [row for report in await self._gather(unacked_of=queue_id) for row in report.unacked]

    async def holders(self, queue_id: int) -> list[dict[str, Any]]:
        """Return the consumers that hold deliveries of a queue without an ack."""
        return [row for report in await self._gather(holders_of=queue_id) for row in report.holders]

    async def _gather(self, **what: Any) -> list[DoorReport]:
        self._query += 1
        doors = self.doors()
        gathering = self._reports[self._query] = _Gathering(len(doors))
        query = self._query
        try:
            for door in doors:
                door.send(Query(query, **what))
            await asyncio.wait_for(gathering.complete.wait(), REPORT_S_MAX)
        except TimeoutError:
            log.warning("%d front doors did not report", gathering.wanted - len(gathering.reports))
        finally:
            del self._reports[query]
        return gathering.reports

    async def fence(self) -> bool:
        """Wait until the shards have all that front doors routed by what was in force before.

        Returns False when this takes longer than FENCE_S_MAX, and when a front door is away: it may
        still route by what it knew.
        """
        doors = self.doors()
        if not self._all <= {door.number for door in doors}:
            return False
        self._query += 1
        number, fence = self._query, _Fence({door.number for door in doors})
        self._fences[number] = fence
        try:
            for door in doors:
                door.send(Fence(number))
            await asyncio.wait_for(fence.complete.wait(), FENCE_S_MAX)
        except TimeoutError:
            return False
        finally:
            del self._fences[number]
        return not fence.broken

    # -- from one front door -------------------------------------------------------------------

    def enter(self, message: AnyControl, transport: asyncio.Transport) -> FrontDoorLink:
        """Take the first message of a front door, and send it all that exists."""
        if not isinstance(message, DoorHello):
            raise ProtocolError(f"{type(message).__name__} before DoorHello")
        if message.wire_version not in WIRE:
            known = Range(message.wire_least or message.wire_version, message.wire_version)
            agreed = highest_common((known, WIRE))
            if agreed is None:
                self._refuse(message)
            raise _Refused(agreed or WIRE_VERSION)
        self._others.pop(message.door, None)
        assert self.handler is not None
        if message.incarnation == self._gone.get(message.door):
            raise _TakenForGone(message.door)
        if message.door in self._missed:
            self._missed.discard(message.door)
            if message.boot:  # it routes by what it knew, and others were answered without it
                self._gone[message.door] = message.incarnation
                self.handler.door_gone(message.door, message.incarnation)
                raise _TakenForGone(message.door)
        door = FrontDoorLink(message, transport)
        if not door.is_relayed:
            take = partial(_take_binds, self.handler, door)
            pipes = (
                binds_pipe.opened(self._directory, door.number, door.incarnation, take, waited)
                for waited in (False, True)
            )
            door.binds = [pipe for pipe in pipes if pipe is not None]
        old = self._doors.get(door.number)
        if old is not None:
            old.cut()
            self._forget(old, back=old.incarnation == door.incarnation)
        if self._elsewhere:
            self._tell_shards(door)
        version, changes = self.handler.snapshot()
        door.told = version
        door.behind_since = asyncio.get_running_loop().time()
        last = max(0, len(changes) - 1) // SNAPSHOT_PART_CHANGES * SNAPSHOT_PART_CHANGES
        for start in range(0, last, SNAPSHOT_PART_CHANGES):
            door.send(SnapshotPart(changes[start : start + SNAPSHOT_PART_CHANGES]))
        door.send(Snapshot(self._boot, version, changes[last:]))
        if self.alarm:
            door.send(Alarmed(self.alarm))
        self._doors[door.number] = door
        self._expected.discard(door.number)
        self.handler.door_up(door.number, door.incarnation, message.connections)
        self._call_what_is_in_force()
        log.info("front door %d (pid %d) is here", door.number, door.pid)
        return door

    @property
    def other_versions(self) -> dict[int, int]:
        """Return the wire versions of the front doors that are refused at present, by number."""
        since = asyncio.get_running_loop().time() - REFUSED_S_MAX
        return {door: version for door, (version, at) in self._others.items() if at > since}

    def _refuse(self, hello: DoorHello) -> None:
        """Note that a front door speaks another wire version. The front door tries again and again.

        One line in the log is enough for each process.
        """
        now = asyncio.get_running_loop().time()
        self._others[hello.door] = hello.wire_version, now
        if self._refused.add((hello.door, hello.incarnation)):
            log.error(
                "front door %d (pid %d) speaks wire version %d, this process speaks %d: "
                "restart all of one release",
                hello.door,
                hello.pid,
                hello.wire_version,
                WIRE_VERSION,
            )

    def leave(self, door: FrontDoorLink) -> None:
        """Forget a link that has ended, if its front door has no newer one.

        The stream of a relayed front door may have been cut. It is waited for for a while, because
        a front door that counts as gone must begin anew, and its clients with it.
        """
        if self._doors.get(door.number) is not door:
            return
        if door.is_relayed and self._server is not None:
            loop = asyncio.get_running_loop()
            door.lost = loop.call_later(CUT_OFF_S_MAX, self._give_up, door)
        else:
            self._forget(door, back=False)

    def _give_up(self, door: FrontDoorLink) -> None:
        if self._doors.get(door.number) is door:
            log.warning("front door %d has been cut off for %g s", door.number, CUT_OFF_S_MAX)
            self._forget(door, back=False)

    def _forget(self, door: FrontDoorLink, back: bool) -> None:
        """Forget a link.

        `back`: the same process has a new link and keeps what it holds. The caller puts that link
        in its place and then calls what is in force: until the front door has applied what it
        missed, it routes by an old catalog.
        """
        if door.lost is not None:
            door.lost.cancel()
        door.close_binds()
        del self._doors[door.number]
        assert self.handler is not None
        if not back:
            self._gone[door.number] = door.incarnation
            self.handler.door_gone(door.number, door.incarnation)
        for fence in self._fences.values():
            fence.lost(door.number)
        if not back:
            self._call_what_is_in_force()

    def receive(self, door: FrontDoorLink, message: AnyControl) -> None:
        """Handle a message of a front door that has entered. Raises ProtocolError."""
        assert self.handler is not None
        match message:
            case Ask():
                id = message.id
                self.handler.asked(
                    message, lambda code, text, result: door.send(Answer(id, code, text, result))
                )
            case Applied():
                door.applied = max(door.applied, message.version)
                if door.applied >= door.told:
                    door.behind_since = 0.0
                else:
                    door.behind_since = asyncio.get_running_loop().time()
                self._call_what_is_in_force()
            case ConnectionUp():
                self.handler.connection_up(message.info)
            case ConnectionDown():
                self.handler.connection_down(message.owner)
            case ConnectionsPassed():
                self.handler.connections_passed(door.number, message.count)
            case ConsumersHere() | ConsumerLeave() | AssignmentGivenUp() | MarkPassed():
                self.handler.consuming(door.number, door.incarnation, message)
            case Fenced():
                if message.number in self._fences:
                    self._fences[message.number].passed(door.number)
            case SpansEnded():
                self.handler.spans_ended(message.spans)
            case DoorReport():
                if message.query in self._reports:
                    self._reports[message.query].add(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} from a front door")


def _are_of_one_door(doors: Mapping[int, FrontDoorLink], owners: Collection[str]) -> bool:
    """Return whether there is one front door, and all of these connections are its own."""
    if len(doors) != 1:
        return False
    (door,) = doors.values()
    return all(owner.startswith(f"{door.number}.{door.incarnation}.") for owner in owners)


def _take_binds(handler: Handler, door: FrontDoorLink, data: bytes) -> None:
    """Take requests out of the pipe of a front door, which writes each of them whole."""
    try:
        asks = binds_in(take_messages(bytearray(data)))
    except (msgspec.MsgspecError, ProtocolError) as error:
        log.warning("pipe of front door %d: %s", door.number, error)
        door.cut()
        return
    for ask, count in together(asks):
        handler.asked(ask, partial(_answer, door, ask.id, count))


def _answer(
    door: FrontDoorLink, id: int, count: int, code: int, text: str, result: dict[str, Any]
) -> None:
    """Answer so many of the binds of a request."""
    door.send(Answer(id, code, text, {"binds": count, **result}))


def binds_in(messages: list[AnyControl]) -> list[Ask]:
    """Return the binds ahead that these messages ask for. Raises ProtocolError for others."""
    asks: list[Ask] = []
    for message in messages:
        if not (isinstance(message, Ask) and isinstance(message.what, BindMany)):
            raise ProtocolError(f"{type(message).__name__} where binds belong")
        if not (message.what.in_force and message.what.binds):
            raise ProtocolError("binds that somebody waits for, or none")
        asks.append(message)
    return asks


class _Fence:
    """A fence, and the front doors that have not passed it yet."""

    def __init__(self, doors: set[int]) -> None:
        self._doors = doors
        self.complete = asyncio.Event()
        self.broken = False

    def passed(self, door: int) -> None:
        self._doors.discard(door)
        if not self._doors:
            self.complete.set()

    def lost(self, door: int) -> None:
        """Break the fence: nobody knows any more by which bindings that front door has routed."""
        self.broken = True
        self.complete.set()


class _Gathering:
    """The reports of front doors, as far as they have come."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.reports: list[DoorReport] = []
        self.complete = asyncio.Event()
        if not wanted:
            self.complete.set()

    def add(self, report: DoorReport) -> None:
        self.reports.append(report)
        if len(self.reports) >= self.wanted:
            self.complete.set()


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyControl] = msgspec.msgpack.Decoder(AnyControl)


def encode(message: ControlMessage) -> bytes:
    data = _encoder.encode(message)
    return PREFIX.pack(len(data)) + data


def take_messages(unread: bytearray) -> list[AnyControl]:
    """Remove the whole messages at the front of `unread`, and return them."""
    messages: list[AnyControl] = []
    at = 0
    with memoryview(unread) as view:
        while at + PREFIX.size <= len(view):
            (count,) = PREFIX.unpack_from(view, at)
            if count > CONTROL_BYTES_MAX:
                raise ProtocolError(f"a message of {count} bytes, {CONTROL_BYTES_MAX} are the most")
            end = at + PREFIX.size + count
            if end > len(view):
                break
            messages.append(_decode(view[at + PREFIX.size : end]))
            at = end
    del unread[:at]
    return messages


def _decode(data: memoryview) -> AnyControl:
    """Return a message. Raises MsgspecError, but not for a DoorHello of another wire version."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError:
        match msgspec.msgpack.decode(data):
            case ["door-hello", int(version), int(door), int(incarnation), int(pid), *_]:
                if version != WIRE_VERSION:
                    return DoorHello(version, door, incarnation, pid, "", 0)
        raise
