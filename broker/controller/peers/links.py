"""The control link to front doors: a server on RUNTIME_DIR/control.sock.

Says to each door what exists (a snapshot, then each batch of changes), takes its requests and its news of
connections, and knows how far each door has come: `when_in_force` is the one place where "every front door routes by
it" is decided. After a restart that includes doors that are still to come back: they route by the copy they have. A
door that does not apply changes in time, or does not read, loses its link and gets a snapshot when
it is back.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from shardmq.broker.model.changes import AnyChange
from shardmq.broker.shared.control import (
    CONTROL_BYTES_MAX,
    Alarmed,
    Answer,
    AnyControl,
    Applied,
    Ask,
    CancelConsumer,
    Changes,
    CloseConnection,
    ConnectionDown,
    ConnectionInfo,
    ConnectionUp,
    ConsumerLeave,
    ConsumersHere,
    ControlMessage,
    DoorHello,
    DoorReport,
    Fence,
    Fenced,
    Outlived,
    Query,
    SeatGivenUp,
    SeatOrder,
    SeatOrders,
    SeatPassed,
    Snapshot,
    SnapshotPart,
)

SOCKET_NAME = "control.sock"
SNAPSHOT_PART_CHANGES = 4096
UNREAD_BYTES_MAX = 256 << 20  # of one door; then its link is cut
APPLY_S_MAX = 10.0  # a door that has not applied changes after that long holds up nobody any more
SNAPSHOT_S_MAX = (
    60.0  # ... and to take in everything there is: 100,000 queues, on a machine that is busy
)
FENCE_S_MAX = 5.0  # then it is asked again: a shard may be away
REPORT_S_MAX = 2.0
RETURN_S_MAX = 3.0  # after a start, how long a front door that is not here yet holds up what the others ask for
PREFIX = struct.Struct("<I")

log = logging.getLogger(__name__)


class ProtocolError(Exception):
    """A front door says what it must not: its link ends."""


class Handler(Protocol):
    """What the links tell the controller."""

    def snapshot(self) -> tuple[int, list[AnyChange]]: ...

    def door_up(self, door: int, incarnation: int, connections: list[ConnectionInfo]) -> None: ...

    def door_gone(self, door: int, incarnation: int) -> None: ...

    def connection_up(self, info: ConnectionInfo) -> None: ...

    def connection_down(self, owner: str) -> None: ...

    def asked(self, ask: Ask, answer: Callable[[int, str, dict[str, Any]], None]) -> None: ...

    def consuming(
        self,
        door: int,
        incarnation: int,
        news: ConsumersHere | ConsumerLeave | SeatGivenUp | SeatPassed,
    ) -> None:
        """Of the consumers of virtual queues there."""

    def handed_out(self, changes: list[AnyChange]) -> None:
        """These changes are on their way to every front door: what is said to one now comes behind them."""

    def has_room(self) -> bool:
        """Whether more may be asked. Else no more is read until room() returns."""

    async def room(self) -> None: ...


class Door:
    """One connected front door."""

    def __init__(self, hello: DoorHello, transport: asyncio.Transport) -> None:
        self.number = hello.door
        self.incarnation = hello.incarnation
        self.pid = hello.pid
        self.told = 0
        self.applied = 0
        self.behind_since = 0.0  # loop time of the oldest change not applied; 0 when none
        self._transport = transport
        self._out: list[bytes] = []
        self._flush_planned = False

    def send(self, message: ControlMessage) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Leaves with everything else said in this turn of the loop: thousands of answers are one write."""
        self._out.append(data)
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self.flush)

    def gather(self) -> None:
        """Whoever calls this will call flush() when it has said all it has to say now."""
        self._flush_planned = True

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
    """Its link was cut, though the process went on: what it holds was given to others."""


class _Stream(asyncio.Protocol):
    """The bytes of one front door. What it says is handled as it comes, in the turn of the loop that has read it."""

    def __init__(self, links: DoorLinks) -> None:
        self._links = links
        self._unread = bytearray()
        self._door: Door | None = None
        self._waiting: asyncio.Task[None] | None = None  # for room

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            asyncio.Transport, transport
        )  # uvloop's have its methods, not its class
        self._links.streams.add(self)

    def data_received(self, data: bytes) -> None:
        self._unread += data
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
    """All connected front doors. `handler` is set before `start`."""

    def __init__(self, boot: str, doors: int = 0) -> None:
        self.alarm = ""
        """`doors`: how many are expected, numbered from 0."""
        self.handler: Handler | None = None
        self._boot = boot
        self._doors: dict[int, Door] = {}
        self._gone: dict[
            int, int
        ] = {}  # incarnations that were taken for gone, the last of each number
        self._expected = set(range(doors))  # and not seen since the start
        self._handed_out = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._reports: dict[int, _Gathering] = {}
        self._query = 0
        self._all = frozenset(range(doors))
        self._fences: dict[int, _Fence] = {}
        self._server: asyncio.Server | None = None
        self._check: asyncio.TimerHandle | None = None
        self._return: asyncio.TimerHandle | None = None
        self.streams: set[_Stream] = set()

    async def start(self, runtime_dir: Path, version: int = 0) -> None:
        """Listen. `version`: of the catalog as it was loaded, which is in force as it stands."""
        self._handed_out = version
        path = runtime_dir / SOCKET_NAME
        path.unlink(missing_ok=True)
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _Stream(self), path, backlog=128
        )
        self._look_for_laggards()
        self._return = asyncio.get_running_loop().call_later(RETURN_S_MAX, self._expect_no_more)

    def _expect_no_more(self) -> None:
        self._expected.clear()
        self._settle()

    async def stop(self) -> None:
        if self._check is not None:
            self._check.cancel()
        if self._return is not None:
            self._return.cancel()
        if self._server is not None:
            self._server.close()
        # They outlive this process with all they hold: the shards are not to be told that they are gone.
        self._doors.clear()
        for stream in list(self.streams):
            stream.transport.abort()
        while self.streams:
            await asyncio.sleep(0)

    def doors(self) -> list[Door]:
        return list(self._doors.values())

    # -- changes out -----------------------------------------------------------------------------------

    def hand_out(self, version: int, changes: list[AnyChange], waited: bool = True) -> None:
        self._handed_out = version
        data = encode(Changes(version, changes, waited)) if self._doors else b""
        now = asyncio.get_running_loop().time()
        for door in list(self._doors.values()):
            if door.told < version:  # else its snapshot held them
                door.told = version
                door.behind_since = door.behind_since or now
                door.send_bytes(data)
        if self.handler is not None:
            self.handler.handed_out(changes)
        self._settle()

    def say_together(self, say: Callable[[], None]) -> None:
        """What `say` says to front doors leaves at once, in one write to each."""
        doors = self.doors()
        for door in doors:
            door.gather()
        try:
            say()
        finally:
            for door in doors:
                door.flush()

    def heard_by(self, owner: str) -> bool:
        """Whether this connection's front door is the only one: an answer to it comes behind all changes."""
        if len(self._doors) != 1 or self._expected or not owner:
            return False
        return int(owner.partition(".")[0]) in self._doors

    def when_in_force(self, version: int, then: Callable[[], None]) -> None:
        """Calls come with versions that never fall."""
        self._waiting.append((version, then))
        self._settle()

    def close_connection(self, owner: str, code: int, text: str) -> None:
        door = self._doors.get(int(owner.split(".", 1)[0]))
        if door is not None:
            door.send(CloseConnection(owner, code, text))

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None:
        door = self._doors.get(int(owner.split(".", 1)[0]))
        if door is not None:
            door.send(CancelConsumer(owner, channel, tag))

    def give_orders(self, door: int, incarnation: int, orders: list[SeatOrder]) -> None:
        """To a front door that is gone there is nothing to say."""
        found = self._doors.get(door)
        if found is not None and found.incarnation == incarnation:
            found.send(SeatOrders(orders))

    def set_alarm(self, reason: str) -> None:
        """Of the whole broker; each door is told, and those that come."""
        if reason != self.alarm:
            self.alarm = reason
            for door in self._doors.values():
                door.send(Alarmed(reason))

    def _settle(self) -> None:
        if self._expected or not self._waiting:
            return
        in_force = min((door.applied for door in self._doors.values()), default=self._handed_out)
        in_force = min(in_force, self._handed_out)
        while self._waiting and self._waiting[0][0] <= in_force:
            self._waiting.popleft()[1]()

    def _look_for_laggards(self) -> None:
        loop = asyncio.get_running_loop()
        self._check = loop.call_later(1.0, self._look_for_laggards)
        for door in list(self._doors.values()):
            allowed_s = APPLY_S_MAX if door.applied else SNAPSHOT_S_MAX
            if door.behind_since and loop.time() - door.behind_since > allowed_s:
                log.error(
                    "front door %d applied no change for %d s; its link is cut",
                    door.number,
                    allowed_s,
                )
                door.cut()

    # -- reports ---------------------------------------------------------------------------------------

    async def reports(self, totals_only: bool = False) -> list[DoorReport]:
        """What the doors say of their connections and channels; those that are silent for REPORT_S_MAX are left out."""
        return await self._gather(totals_only=totals_only)

    async def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        """Deliveries of its consumers that wait for their ack."""
        return [row for report in await self._gather(unacked_of=queue_id) for row in report.unacked]

    async def _gather(self, **what: Any) -> list[DoorReport]:
        self._query += 1
        gathering = self._reports[self._query] = _Gathering(len(self._doors))
        query = self._query
        try:
            for door in self._doors.values():
                door.send(Query(query, **what))
            await asyncio.wait_for(gathering.complete.wait(), REPORT_S_MAX)
        except TimeoutError:
            log.warning("%d front doors did not report", gathering.wanted - len(gathering.reports))
        finally:
            del self._reports[query]
        return gathering.reports

    async def fence(self) -> bool:
        """Whether within FENCE_S_MAX the shards have taken in what any front door routed by what was in force before
        this call. A front door that is away may still route by what it knew: then no."""
        if not self._all <= self._doors.keys():
            return False
        self._query += 1
        number, fence = self._query, _Fence({door.number for door in self._doors.values()})
        self._fences[number] = fence
        try:
            for door in self._doors.values():
                door.send(Fence(number))
            await asyncio.wait_for(fence.complete.wait(), FENCE_S_MAX)
        except TimeoutError:
            return False
        finally:
            del self._fences[number]
        return not fence.broken

    # -- one door ----------------------------------------------------------------------------------------

    def enter(self, message: AnyControl, transport: asyncio.Transport) -> Door:
        if not isinstance(message, DoorHello):
            raise ProtocolError(f"{type(message).__name__} before DoorHello")
        assert self.handler is not None
        if message.incarnation <= self._gone.get(message.door, -1):
            raise _TakenForGone(message.door)
        door = Door(message, transport)
        old = self._doors.get(door.number)
        if old is not None:
            old.cut()
            self._forget(old, back=old.incarnation == door.incarnation)
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
        log.info("front door %d (pid %d) is here", door.number, door.pid)
        return door

    def leave(self, door: Door) -> None:
        """Once per door; a newer one of its number stays."""
        if self._doors.get(door.number) is door:
            self._forget(door, back=False)

    def _forget(self, door: Door, back: bool) -> None:
        """`back`: the same process has a new link already, and nothing of what it holds is anybody else's."""
        del self._doors[door.number]
        assert self.handler is not None
        if not back:
            self._gone[door.number] = door.incarnation
            self.handler.door_gone(door.number, door.incarnation)
        for fence in self._fences.values():
            fence.lost(door.number)
        self._settle()

    def receive(self, door: Door, message: AnyControl) -> None:
        assert self.handler is not None
        match message:
            case Ask():
                id = message.id
                self.handler.asked(
                    message, lambda code, text, result: door.send(Answer(id, code, text, result))
                )
            case Applied():
                door.applied = message.version
                if door.applied >= door.told:
                    door.behind_since = 0.0
                else:
                    door.behind_since = asyncio.get_running_loop().time()
                self._settle()
            case ConnectionUp():
                self.handler.connection_up(message.info)
            case ConnectionDown():
                self.handler.connection_down(message.owner)
            case ConsumersHere() | ConsumerLeave() | SeatGivenUp() | SeatPassed():
                self.handler.consuming(door.number, door.incarnation, message)
            case Fenced():
                if message.number in self._fences:
                    self._fences[message.number].passed(door.number)
            case DoorReport():
                if message.query in self._reports:
                    self._reports[message.query].add(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} from a front door")


class _Fence:
    """Front doors whose word is missing."""

    def __init__(self, doors: set[int]) -> None:
        self._doors = doors
        self.complete = asyncio.Event()
        self.broken = False

    def passed(self, door: int) -> None:
        self._doors.discard(door)
        if not self._doors:
            self.complete.set()

    def lost(self, door: int) -> None:
        """Whether it, or who comes after it, had routed all by the new bindings is not known."""
        self.broken = True
        self.complete.set()


class _Gathering:
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
    """The whole messages at the front of `unread`, which are removed from it."""
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
            messages.append(_decoder.decode(view[at + PREFIX.size : end]))
            at = end
    del unread[:at]
    return messages
