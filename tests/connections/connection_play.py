"""A connection of the front door without sockets.

Lists and fakes stand for the shards and the controller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from pamqp import base, commands, frame

from shardmq.broker.amqp import Publishes
from shardmq.broker.front_door.alarms import Alarms
from shardmq.broker.front_door.connection.connection import ClientConnection
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.hot_state import LinksState
from shardmq.broker.front_door.loop import PassLoop
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import TlsPeer
from shardmq.broker.front_door.topology.steps import StepRunner
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import ExchangePut, PermissionPut, QueuePut, UserPut, VhostPut
from shardmq.broker.shared.config import BrokerConfig
from shardmq.broker.shared.control import Answer
from shardmq.broker.shared.logins import TakesLong
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.shared_memory import BodyMemory
from tests.amqp.bytes_of import HEADER, method

FD = 5
NOW = 100.0


class Timer:
    """A call that is due later; like asyncio's, it holds nothing when it is cancelled."""

    def __init__(self, at: float, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.at = at
        self._call: Callable[..., Any] | None = call
        self._args = args

    def cancel(self) -> None:
        self._call, self._args = None, ()

    def run(self) -> None:
        if self._call is not None:
            self._call(*self._args)


class Aio:
    """An event loop that watches no descriptors and whose time stands still until it is set."""

    def __init__(self) -> None:
        self.now = NOW
        self.readers: dict[int, Callable[[], None]] = {}
        self.writers: dict[int, Callable[[], None]] = {}
        self.soon: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self.later: list[Timer] = []

    def time(self) -> float:
        return self.now

    def add_reader(self, fd: int, call: Callable[[], None]) -> None:
        self.readers[fd] = call

    def remove_reader(self, fd: int) -> bool:
        return self.readers.pop(fd, None) is not None

    def add_writer(self, fd: int, call: Callable[[], None]) -> None:
        self.writers[fd] = call

    def remove_writer(self, fd: int) -> bool:
        return self.writers.pop(fd, None) is not None

    def call_soon(self, call: Callable[..., Any], *args: Any) -> None:
        self.soon.append((call, args))

    def call_later(self, seconds: float, call: Callable[..., Any], *args: Any) -> Timer:
        self.later.append(Timer(self.now + seconds, call, args))
        return self.later[-1]

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def turn(self) -> None:
        """Call what was to be called soon, but not what that adds."""
        for _ in range(len(self.soon)):
            call, args = self.soon.popleft()
            call(*args)

    def run(self) -> None:
        while self.soon:
            self.turn()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        due = [timer for timer in self.later if timer.at <= self.now]
        self.later = [timer for timer in self.later if timer.at > self.now]
        for timer in due:
            timer.run()


class Sock:
    """A socket that gives what is in `unread` and takes `room` bytes."""

    def __init__(self) -> None:
        self.unread: deque[bytes | OSError] = deque()
        self.taken = b""
        self.room = 1 << 30
        self.is_closed = False
        self.error: OSError | None = None  # of the next write

    def fileno(self) -> int:
        return FD

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 5672

    def recv_into(self, buffer: memoryview) -> int:
        if not self.unread:
            raise BlockingIOError
        data = self.unread.popleft()
        if isinstance(data, OSError):
            raise data
        if len(data) > len(buffer):
            self.unread.appendleft(data[len(buffer) :])
            data = data[: len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def send(self, data: bytes | memoryview) -> int:
        return self.sendmsg([data])

    def sendmsg(self, chunks: list[bytes | memoryview]) -> int:
        if self.error is not None:
            raise self.error
        some = b"".join(chunks)[: self.room]
        if not some:
            raise BlockingIOError
        self.taken += some
        self.room -= len(some)
        return len(some)

    def shutdown(self, how: int) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Shards(LinksState):
    """The links to shards that answer when they are told to."""

    def __init__(self, count: int = 2) -> None:
        self.links = [
            SimpleNamespace(shard=at, epoch=1, up=True, away_since=None, node="")
            for at in range(count)
        ]
        self.asked: list[tuple[int, wire.Message, asyncio.Future[Any]]] = []  # and not answered
        self.said: list[Any] = []  # to the shards
        self.acks: list[tuple[int, ...]] = []
        self.allotted: list[tuple[int, int, int]] = []  # number, allowed and mode
        self.acks_wait = False
        self.on_acks_waited: Callable[[], None] = lambda: None
        self.credits: list[tuple[int, int, int, int]] = []
        self.flushed: list[tuple[int, ...]] = []
        self.heard_for: list[float] = []
        self.inbox = SimpleNamespace(hear_for=self.heard_for.append)
        self.crowd: list[int] = []
        self.left_behind = False
        self.forgotten: list[int] = []
        self.ready: dict[int, int] = {}  # messages by queue id
        self.bodies: BodyMemory | None = None

    def ask(self, shard: int, make: Callable[[int], wire.Message]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((shard, make(len(self.asked) + 1), future))
        return future

    def unless_away(self, shard: int, answer: asyncio.Future[Any]) -> asyncio.Future[Any]:
        return answer

    def went_away(self, shard: int) -> None:
        assert shard < len(self.links)

    async def ask_in_epoch(
        self, shard: int, make: Callable[[int], wire.Message]
    ) -> tuple[int, Any]:
        epoch = self.links[shard].epoch
        return epoch, await self.ask(shard, make)

    async def count(self, queue: QueuePut) -> tuple[int, int]:
        return self.ready.get(queue.id, 0), 0

    def answer(self, answer: Any) -> wire.Message:
        """Answer the oldest question; return it."""
        _, what, future = self.asked.pop(0)
        if not future.done():
            future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(
                answer
            )
        return what

    def tell(self, shard: int, what: wire.Message) -> None:
        self.said.append(what)

    def is_up(self, shard: int) -> bool:
        return bool(self.links[shard].up)

    def settle(
        self, shard: int, epoch: int, consumer: int, kind: int, first: int, last: int
    ) -> None:
        self.acks.append((shard, consumer, kind, first, last))

    def ack(
        self, shard: int, epoch: int, consumer: int, first: int, last: int, together: int
    ) -> None:
        self.acks.append((shard, consumer, wire.ACK, first, last, together))

    def allot(self, shard: int, allotment: int, allowed: int, mode: int) -> None:
        self.allotted.append((allotment, allowed, mode))

    def wait_for_acks(self) -> None:
        self.acks_wait = True

    def credit(self, shard: int, epoch: int, connection: int, count: int) -> None:
        self.credits.append((shard, epoch, connection, count))

    def flush(self, *least: int) -> bool:
        if self.freed:
            self.share_freed()
        bounded = any(least)
        self.flushed.append(least if bounded else ())
        return self.left_behind and bounded

    def crowded(self, fed: int) -> list[int]:
        return [shard for shard in self.crowd if fed >> shard & 1]

    def forget(self, connection: int) -> None:
        self.forgotten.append(connection)


class Line:
    """The line to the controller, and the copy of the catalog."""

    def __init__(self) -> None:
        self.catalog = Catalog()
        for change in (
            VhostPut("/"), UserPut("guest", ""), PermissionPut("/", "guest", ".*", ".*", ".*"),
            QueuePut("/", "a", 1, 0), QueuePut("/", "b", 2, 1),
            ExchangePut("/", "direct", "direct"),
        ):  # fmt: skip
            self.catalog.apply(change)
        self.up: list[Any] = []
        self.down: list[str] = []
        self.gone: list[int] = []
        self.asked: list[tuple[Any, asyncio.Future[Answer]]] = []
        self.said: list[Any] = []

    def connection_up(self, owner: str, info: Callable[[], Any]) -> None:
        self.up.append(info())

    def connection_down(self, owner: str) -> None:
        self.down.append(owner)

    async def removed(self, queues: list[int]) -> None:
        self.gone += queues

    def ask(self, request: Any, owner: str, user: str) -> asyncio.Future[Answer]:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.asked.append((request, answer))
        return answer

    request = ask
    ahead = None  # binds wait for their answers

    def answer(self, code: int = 0, text: str = "", **result: Any) -> Any:
        request, answer = self.asked.pop(0)
        answer.set_result(Answer(1, code, text, result))
        return request

    def say(self, what: Any) -> None:
        self.said.append(what)


class Publishing:
    """Publishes `at_once` messages of an event in a slice, and writes down which."""

    def __init__(self) -> None:
        self.at_once = 1 << 30
        self.published: list[tuple[int, int]] = []  # first and last of what each slice did
        self.confirms_due: list[Confirms] = []
        self.error: Exception | None = None
        self.effects: list[Published] = []  # what the next calls return
        self.deferred: list[tuple[int, int]] = []  # channel and messages

    def publish(
        self, session: Any, cache: Any, channels: Any, event: Publishes, now_ms: int, is_over: Any
    ) -> Published:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        done, event.done = event.done, min(event.count, event.done + self.at_once)
        self.published.append((done, event.done))
        return self.effects.pop(0) if self.effects else Published()

    async def publish_deferred(
        self, session: Any, channels: Any, channel: Any, event: Publishes, task: Any
    ) -> None:
        self.deferred.append((channel.number, event.count))
        task.carry_out(Published())

    def route_cache(self, vhost: str, user: str) -> Any:
        return (vhost, user)

    def confirms(self, client: Any, channel: int) -> Confirms:
        return Confirms(client, channel, self.confirms_due)


class Logins:
    """Every password is right but "wrong"; "slow" takes a while."""

    def __init__(self) -> None:
        self.slow: asyncio.Future[str] | None = None

    def at_once(self, put: Any, user: str, password: str, host: str, now: float) -> str:
        if password == "slow":
            raise TakesLong(user, password)
        return "wrong password" if password == "wrong" else ""

    async def slowly(self, put: Any, user: str, password: str, host: str, now: float) -> str:
        self.slow = asyncio.get_running_loop().create_future()
        return await self.slow


class Play:
    """One connection and all it stands on."""

    def __init__(
        self, *, tls: TlsPeer | None = None, trusted: bool = False, tick_us: int = 0, **config: Any
    ) -> None:
        self.aio = Aio()
        self.sock = Sock()
        self.shards = Shards()
        self.line = Line()
        self.publishing = Publishing()
        self.config = BrokerConfig(
            runtime_dir="nowhere", door=0, shards=[0, 1], listen_fds=[], boot="1", **config
        )
        self.loop = PassLoop(self.aio, self.shards, self.publishing, shards=2, tick_us=tick_us)  # type: ignore[arg-type]
        counts = Counts()
        self.logins = Logins()
        self.services = Services(
            config=self.config,
            incarnation=7,
            loop=self.loop,
            shards=self.shards,  # type: ignore[arg-type]
            catalog_link=self.line,  # type: ignore[arg-type]
            counts=counts,
            logins=self.logins,  # type: ignore[arg-type]
            alarms=Alarms(),
            publishing=self.publishing,  # type: ignore[arg-type]
            consuming=Consuming(self.shards, self.line, self.loop, counts),  # type: ignore[arg-type]
            steps=StepRunner(self.line, self.shards),  # type: ignore[arg-type]
            server_properties={},
        )
        self.ended: list[ClientConnection] = []
        self.count_of_connected = 0
        self.connection = ClientConnection(
            self.services, self, self.sock, Peer("127.0.0.1", 4000), 9, tls,
            trusted=trusted  # type: ignore[arg-type]
        )  # fmt: skip
        self._seen = 0

    # -- the registry

    def connected(self) -> int:
        return self.count_of_connected

    def forget(self, connection: ClientConnection) -> None:
        self.ended.append(connection)

    # -- the client

    def read(self, data: bytes) -> None:
        """Receive bytes from the client, and run the pass to its end."""
        self.sock.unread.append(data)
        reader = self.aio.readers.get(FD)
        if reader is not None:
            reader()
        self.aio.run()

    def says(self, channel: int, what: base.Frame) -> list[Any]:
        """Receive a method from the client; return what the client has got since."""
        self.read(method(channel, what))
        return self.got()

    async def settled(self) -> list[Any]:
        """Let tasks go on until they wait for others; return what the client has got since."""
        for _ in range(20):
            await asyncio.sleep(0)
            self.aio.run()
        return self.got()

    def got(self) -> list[Any]:
        """Return the methods that the client has got since this was last asked for."""
        found = []
        data = self.sock.taken[self._seen :]
        while data:
            size, _, what = frame.unmarshal(data)
            data = data[size:]
            found.append(what)
        self._seen = len(self.sock.taken)
        return found

    def names(self) -> list[str]:
        return [what.name for what in self.got()]

    def log_in(self, password: str = "guest", **properties: Any) -> None:
        self.read(HEADER)
        response = f"\0guest\0{password}"
        self.read(method(0, commands.Connection.StartOk(properties, "PLAIN", response, "en_US")))

    def open(self, channels: int = 1, **properties: Any) -> None:
        """Open the connection and so many channels, which count as used."""
        self.log_in(**properties)
        self.read(
            method(0, commands.Connection.TuneOk(2047, 131072, 60))
            + method(0, commands.Connection.Open("/"))
        )
        for number in range(1, channels + 1):
            self.read(method(number, commands.Channel.Open()))
        self.connection.channels.meet_all(self.connection)
        assert self.connection.session.is_open
        self.got()


WANTS_ALL = {"capabilities": {"consumer_cancel_notify": True, "connection.blocked": True}}
