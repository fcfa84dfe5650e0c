"""Clients that keep a broker busy while its processes are killed.

They tell a ledger everything that they are told.

Each is a thread with a connection of its own that comes back when it is lost. Publishers never
repeat a message and begin a new key with each connection, so a repeat, or a change of order, is the
broker's.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeGuard, TypeVar

from pamqp import base, commands, frame

from tests.support.history import make_body
from tests.support.ledger import ACKED, NACKED, Ledger
from tests.support.raw_client import HEADER, content_header, method, raw_frame
from tests.support.real_broker import Address

# A client that hears nothing for so long, though it is owed something, was forgotten.
SILENCE_S = 60.0
COME_BACK_S = 0.05
# Messages of one queue that wait for delivery; whoever publishes to it rests then.
BACKLOG_MAX = 500
READ_BYTES = 1 << 18
FRAME_BODY_BYTES = 100_000
DOWN = " is down or inaccessible"
# basic.deliver, basic.get-ok, basic.ack, basic.nack: taken apart here, all else by pamqp.
DELIVER, GET_OK, ACK, NACK = 0x003C003C, 0x003C0047, 0x003C0050, 0x003C0078
PERSISTENT = b"\x10\x00\x02"  # property flags and delivery-mode 2
_FRAME = struct.Struct(">BHI")


class Lost(Exception):
    """The connection ended, as it may when something is killed."""


class Complaint(Exception):
    """The broker did what it never may."""


class LoadClient:
    """One connection with one channel. Frames are read in bulk: there are many."""

    def __init__(self, at: Address) -> None:
        self.at = at
        try:
            self.sock = socket.create_connection((at.host, at.port), 5)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise Lost(str(error)) from None
        self._buffer = b""
        self._frames: deque[tuple[int, bytes]] = deque()
        try:
            self._shake_hands(at.user)
        except BaseException:
            self.sock.close()
            raise

    def _shake_hands(self, user: str) -> None:
        self.send(HEADER)
        self.expect(commands.Connection.Start)
        login = f"\0{user}\0{user}"
        self.send(method(0, commands.Connection.StartOk({}, "PLAIN", login, "en_US")))
        offered = self.expect(commands.Connection.Tune)
        self.send(method(0, commands.Connection.TuneOk(offered.channel_max, offered.frame_max, 0)))
        self.ask(0, commands.Connection.Open("/"), commands.Connection.OpenOk)
        self.ask(1, commands.Channel.Open(), commands.Channel.OpenOk)

    def close(self) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        try:
            self.sock.settimeout(SILENCE_S)
            self.sock.sendall(data)
        except TimeoutError:
            raise Complaint(f"nothing was read for {SILENCE_S:g} s") from None
        except OSError as error:
            raise Lost(str(error)) from None

    def frames(self, wait_s: float) -> Iterator[tuple[int, bytes]]:
        """(type, payload) of what is there; waits for the first no longer than `wait_s`."""
        if not self._frames:
            self._fill(wait_s)
        while self._frames:
            yield self._frames.popleft()

    def _fill(self, wait_s: float) -> None:
        self.sock.settimeout(max(wait_s, 0.001))
        try:
            more = self.sock.recv(READ_BYTES)
        except TimeoutError:
            return
        except OSError as error:
            raise Lost(str(error)) from None
        if not more:
            raise Lost("end of stream")
        data = self._buffer + more
        at, size = 0, len(data)
        while at + 7 <= size:
            kind, _, length = _FRAME.unpack_from(data, at)
            if at + 8 + length > size:
                break
            if data[at + 7 + length] != 0xCE:
                raise Complaint("a frame without its end")
            if kind != 8:
                self._frames.append((kind, data[at + 7 : at + 7 + length]))
            at += 8 + length
        self._buffer = data[at:]

    def next_frame(self, wait_s: float = SILENCE_S) -> tuple[int, bytes]:
        end = time.monotonic() + wait_s
        while True:
            for found in self.frames(end - time.monotonic()):
                return found
            if time.monotonic() >= end:
                raise Complaint(f"no answer for {wait_s:g} s")

    def expect(self, kind: type) -> object:
        """Return the answer to a method; contents that come before it are passed to `pending`."""
        while True:
            found = self.next_frame()
            if found[0] == 1 and int.from_bytes(found[1][:4], "big") not in (
                DELIVER,
                GET_OK,
                ACK,
                NACK,
            ):
                what = decode(found[1])
                if isinstance(what, commands.Connection.Close) or _is_down(what):
                    raise Lost(what.reply_text)
                if not isinstance(what, kind):
                    raise Complaint(f"{kind.__name__} expected, {what!r} {dict(what)} came")  # type: ignore[call-overload]
                return what
            self.pending(found)

    def pending(self, found: tuple[int, bytes]) -> None:
        raise Complaint(f"a frame nobody waits for: {found!r:.200}")

    def ask(self, channel: int, what: base.Frame, answer: type) -> object:
        self.send(method(channel, what))
        try:
            return self.expect(answer)
        except Complaint as complaint:
            text = f"{complaint}, for {type(what).__name__} {dict(what)} at {self.at.host}"
            raise Complaint(text) from None


def _is_down(said: object) -> TypeGuard[commands.Channel.Close]:
    """Return whether a question was refused because the node of its queue is away."""
    return isinstance(said, commands.Channel.Close) and said.reply_text.endswith(DOWN)


AnyClient = TypeVar("AnyClient", bound=LoadClient)


def decode(payload: bytes) -> object:
    return frame.unmarshal(raw_frame(1, 0, payload))[2]


def publishing(exchange: str, key: str) -> Callable[[bytes], bytes]:
    """From a body to all frames of its publish."""
    head = method(1, commands.Basic.Publish(exchange=exchange, routing_key=key))

    def made(body: bytes) -> bytes:
        parts = [
            raw_frame(3, 1, body[at : at + FRAME_BODY_BYTES])
            for at in range(0, len(body), FRAME_BODY_BYTES)
        ]
        return head + content_header(1, len(body), props=PERSISTENT) + b"".join(parts)

    return made


class Worker:
    """A thread that works until it is told to stop; `paused` workers keep their connection."""

    def __init__(self, name: str, at: Address, ledger: Ledger, seed: str) -> None:
        self.name, self.at, self.ledger = name, at, ledger
        self.queues: tuple[str, ...] = ()
        self.elsewhere: tuple[Address, ...] = ()  # where it may come back when it is lost
        self.random = random.Random(f"{seed} {name}")
        self.going = True
        self.idle = threading.Event()  # paused, and nothing is outstanding
        self._client: LoadClient | None = None
        self._may_work = threading.Event()
        self._may_work.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def pause(self) -> None:
        self.idle.clear()
        self._may_work.clear()

    def resume(self) -> None:
        self._may_work.set()

    @property
    def paused(self) -> bool:
        return not self._may_work.is_set()

    def _rests(self) -> bool:
        """Return whether its consumers are far behind.

        They are to meet kills, not a backlog of minutes.
        """
        return max(map(self.ledger.waiting, self.queues)) > BACKLOG_MAX

    def connect(self, kind: type[AnyClient]) -> AnyClient:
        """Return a new connection of this worker, which ends when the worker is stopped."""
        made = kind(self.at)
        self._client = made
        return made

    def stop(self) -> None:
        """End at once: no answer is waited for any more."""
        self.going = False
        self._may_work.set()
        if self._client is not None:
            with contextlib.suppress(OSError):  # it is closed
                self._client.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * SILENCE_S)
        if self._thread.is_alive():
            self.ledger.complain(f"{self.name} does not end")

    def _run(self) -> None:
        while self.going:
            try:
                self.session()
            except Lost:
                time.sleep(COME_BACK_S)
                if self.elsewhere:
                    self.at = self.random.choice(self.elsewhere)
            except Complaint as complaint:
                self.ledger.complain(f"{self.name}: {complaint}")
                return
            except BaseException as error:
                self.ledger.complain(f"{self.name}: {error!r}")
                raise

    def session(self) -> None:
        raise NotImplementedError


class Publisher(Worker):
    """A publisher of persistent messages with confirms, a window of them at a time.

    `queues` are all that one message reaches.
    """

    def __init__(
        self, name: str, at: Address, ledger: Ledger, seed: str, exchange: str, key: str,
        queues: tuple[str, ...], *, window_max: int = 100, padding_max: int = 200,
        rest_s: float = 0.02,
    ) -> None:  # fmt: skip
        super().__init__(name, at, ledger, seed)
        self._frames = publishing(exchange, key)
        self.queues, self.window_max, self.padding_max, self.rest_s = (
            queues,
            window_max,
            padding_max,
            rest_s,
        )
        self.sessions = 0

    def session(self) -> None:
        client = self.connect(LoadClient)
        try:
            client.ask(1, commands.Confirm.Select(), commands.Confirm.SelectOk)
            self.sessions += 1
            self._publish(client, f"{self.name}.{self.sessions}")
        finally:
            client.close()

    def _publish(self, client: LoadClient, key: str) -> None:
        waiting: dict[int, None] = {}
        heard_at = time.monotonic()
        while self.going or waiting:
            if self.paused and not waiting:
                self.idle.set()
                self._may_work.wait(0.2)
            elif self.going and not self.paused and not waiting and self._rests():
                time.sleep(0.02)
            elif self.going and not self.paused and len(waiting) < self.window_max:
                if not waiting:
                    heard_at = time.monotonic()
                self._publish_some(client, key, waiting)
            if waiting:
                if self._hear(client, key, waiting):
                    heard_at = time.monotonic()
                elif time.monotonic() - heard_at > SILENCE_S:
                    raise Complaint(f"no confirm for {SILENCE_S:g} s, {len(waiting)} outstanding")

    def _publish_some(self, client: LoadClient, key: str, waiting: dict[int, None]) -> None:
        data = []
        for _ in range(self.random.randint(1, self.window_max - len(waiting))):
            number = self.ledger.was_published(key, self.queues)
            waiting[number] = None
            data.append(
                self._frames(make_body(key, number, self.random.randint(0, self.padding_max)))
            )
        client.send(b"".join(data))
        if self.random.random() < 0.5:
            time.sleep(self.random.uniform(0, self.rest_s))

    def _hear(self, client: LoadClient, key: str, waiting: dict[int, None]) -> bool:
        """Whether there was something."""
        heard = False
        for kind, payload in client.frames(0.1):
            heard = True
            what = int.from_bytes(payload[:4], "big") if kind == 1 else 0
            if what not in (ACK, NACK):
                said = decode(payload) if kind == 1 else payload
                if isinstance(said, commands.Connection.Close):
                    raise Lost(said.reply_text)
                raise Complaint(f"{said!r:.200} among confirms")
            tag, multiple = int.from_bytes(payload[4:12], "big"), payload[12] & 1
            numbers = [number for number in waiting if number <= tag] if multiple else [tag]
            self.ledger.was_answered(key, numbers, ACKED if what == ACK else NACKED)
            for number in numbers:
                waiting.pop(number, None)
        return heard


class Transactor(Worker):
    """A client with transactions over several queues.

    Messages of a commit with commit-ok count as confirmed, on each queue.
    """

    def __init__(
        self, name: str, at: Address, ledger: Ledger, seed: str, queues: tuple[str, ...]
    ) -> None:
        super().__init__(name, at, ledger, seed)
        self.queues = queues
        self.sessions = 0

    def session(self) -> None:
        client = self.connect(LoadClient)
        try:
            client.ask(1, commands.Tx.Select(), commands.Tx.SelectOk)
            self.sessions += 1
            while self.going:
                if self.paused:
                    self.idle.set()
                    self._may_work.wait(0.2)
                elif self._rests():
                    time.sleep(0.02)
                elif not self._commit(client):
                    return
        finally:
            client.close()

    def _commit(self, client: LoadClient) -> bool:
        """Publish and commit a transaction.

        Return False if it was refused, which closes the channel.
        """
        numbers: dict[str, list[int]] = {}
        for queue in self.queues:
            key = f"{self.name}.{self.sessions}.{queue}"
            made = publishing("", queue)
            for _ in range(self.random.randint(1, 5)):
                number = self.ledger.was_published(key, (queue,))
                numbers.setdefault(key, []).append(number)
                client.send(made(make_body(key, number)))
        client.send(method(1, commands.Tx.Commit()))
        kind, payload = client.next_frame()
        said = decode(payload) if kind == 1 else payload
        match said:
            case commands.Tx.CommitOk():
                for key, committed in numbers.items():
                    self.ledger.was_answered(key, committed, ACKED)
            case commands.Channel.Close():
                return False
            case commands.Connection.Close():
                raise Lost(said.reply_text)
            case _:
                raise Complaint(f"{said!r:.200} for a commit")
        time.sleep(self.random.uniform(0, 0.02))
        return True


class ConsumerClient(LoadClient):
    """Its deliveries, in order, while it also asks for other things."""

    def __init__(self, at: Address) -> None:
        # tag, redelivered, body, not before
        self.deliveries: deque[tuple[int, bool, bytes, float]] = deque()
        # Deliveries wait in buffers on their way. What comes behind an answer was handed out after
        # the question.
        self.since = time.monotonic()
        self._left = 0
        self._head = (0, False)
        self._parts: list[bytes] = []
        super().__init__(at)

    def pending(self, found: tuple[int, bytes]) -> None:
        kind, payload = found
        what = int.from_bytes(payload[:4], "big") if kind == 1 else 0
        if what in (DELIVER, GET_OK):
            at = 5 + payload[4] if what == DELIVER else 4
            self._head = int.from_bytes(payload[at : at + 8], "big"), bool(payload[at + 8])
        elif kind == 2:
            self._left = int.from_bytes(payload[4:12], "big")
            self._parts = []
            self._end()
        elif kind == 3:
            self._left -= len(payload)
            self._parts.append(payload)
            self._end()
        else:
            said = decode(payload)
            if isinstance(said, commands.Connection.Close):
                raise Lost(said.reply_text)
            raise Complaint(f"{said!r:.200} among deliveries")

    def expect_message(self) -> bool:
        """Wait for the answer to a basic.get; return whether it is a message.

        The message is then among `deliveries`.
        """
        before = len(self.deliveries)
        while len(self.deliveries) == before:
            kind, payload = self.next_frame()
            if kind == 1 and isinstance(decode(payload), commands.Basic.GetEmpty):
                return False
            self.pending((kind, payload))
        return True

    def _end(self) -> None:
        if self._left <= 0:
            self.deliveries.append((*self._head, b"".join(self._parts), self.since))

    def look(self, queue: str) -> int:
        """Ready messages, says its shard, behind all that was sent to it before."""
        asked_at = time.monotonic()
        answer = self.ask(
            1, commands.Queue.Declare(queue=queue, passive=True), commands.Queue.DeclareOk
        )
        assert isinstance(answer, commands.Queue.DeclareOk)
        self.since = asked_at
        return answer.message_count

    def wait(self, wait_s: float) -> None:
        for found in self.frames(wait_s):
            self.pending(found)


class Consumer(Worker):
    """A worker that acknowledges in groups, sometimes cumulatively.

    The worker asks the shard of the queue whether the acks have arrived: a passive declare is
    handled behind them. `away_s` is how long it stays away between visits, so that its queue fills
    meanwhile. `gives_back` is the share of its messages that it rejects with requeue.
    """

    def __init__(
        self, name: str, at: Address, ledger: Ledger, seed: str, queue: str,
        *, away_s: float = 0.0, gives_back: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(name, at, ledger, seed)
        self.queue, self.away_s, self.gives_back = queue, away_s, gives_back
        self.hurry = False  # no staying away any more

    def session(self) -> None:
        client = self.connect(ConsumerClient)
        try:
            # Of the consumer, or of its channel: the shard deals these out by grants.
            of_channel = self.random.random() < 0.3
            prefetch = self.random.choice([4, 20, 50, 200])
            client.ask(1, commands.Basic.Qos(0, prefetch, of_channel), commands.Basic.QosOk)
            self.ledger.consumer_came(self.queue)
            client.ask(1, commands.Basic.Consume(queue=self.queue), commands.Basic.ConsumeOk)
            until = time.monotonic() + self.random.uniform(0.2, 1.5)
            while self.going and (self.hurry or not self.away_s or time.monotonic() < until):
                self._take(client)
        finally:
            client.close()
        end = time.monotonic() + self.away_s * self.random.random()
        while self.going and not self.hurry and time.monotonic() < end:
            time.sleep(0.02)

    def _take(self, client: ConsumerClient) -> None:
        client.wait(0.0 if client.deliveries else 0.05)
        self._settle(client)

    def _settle(self, client: ConsumerClient) -> None:
        known: list[tuple[str, int, float]] = []
        tags = []
        returned = []
        for _ in range(self.random.randint(1, 50)):
            if not client.deliveries:
                break
            tag, redelivered, body, since = client.deliveries.popleft()
            found = self.ledger.was_delivered(
                self.queue, body, redelivered, time.monotonic(), since
            )
            if self.random.random() < self.gives_back:
                returned.append(tag)
            else:
                tags.append(tag)
                known.append((*found, since))
        if returned:
            client.send(b"".join(method(1, commands.Basic.Reject(tag, True)) for tag in returned))
        if tags:
            if not returned and self.random.random() < 0.5:
                client.send(method(1, commands.Basic.Ack(tags[-1], True)))
            else:
                client.send(b"".join(method(1, commands.Basic.Ack(tag, False)) for tag in tags))
            client.look(self.queue)
            self.ledger.was_settled(self.queue, known, time.monotonic())


class Getter(Consumer):
    """Asks for one message after the other."""

    def session(self) -> None:
        client = self.connect(ConsumerClient)
        self.ledger.consumer_came(self.queue)
        try:
            while self.going:
                for _ in range(self.random.randint(1, 10)):
                    client.send(method(1, commands.Basic.Get(queue=self.queue)))
                    if not client.expect_message():
                        time.sleep(0.02)
                        break
                self._settle(client)
        finally:
            client.close()


class Declarer(Worker):
    """A client that declares, binds and deletes durable queues.

    It also comes and goes with queues that must go with it.
    """

    def __init__(self, name: str, at: Address, ledger: Ledger, seed: str) -> None:
        super().__init__(name, at, ledger, seed)
        self.there: set[str] = set()  # their declare-ok came
        self.gone: set[str] = set()  # their delete-ok came
        self.passing: set[str] = set()  # exclusive and auto-delete: gone when all is still
        self._auto_delete: set[str] = set()
        self._number = 0

    def session(self) -> None:
        client = self.connect(ConsumerClient)
        try:
            for _ in range(self.random.randint(1, 6)):
                if self.paused:
                    self.idle.set()
                    self._may_work.wait(0.2)
                elif self.going:
                    self.random.choice([self._declare, self._declare, self._delete, self._pass])(
                        client
                    )
                    time.sleep(self.random.uniform(0, 0.1))
        finally:
            client.close()

    def forget_auto_delete(self) -> None:
        """Let auto-delete queues stay: whoever knew that they were used died with their users."""
        self.passing -= self._auto_delete

    def _next(self) -> str:
        self._number += 1
        return f"{self.name}-{self._number}"

    def _declare(self, client: LoadClient) -> None:
        name = self._next()
        client.ask(1, commands.Queue.Declare(queue=name, durable=True), commands.Queue.DeclareOk)
        client.ask(
            1,
            commands.Queue.Bind(queue=name, exchange="amq.topic", routing_key=name),
            commands.Queue.BindOk,
        )
        self.there.add(name)

    def _delete(self, client: LoadClient) -> None:
        if self.there:
            name = self.random.choice(sorted(self.there))
            self.there.remove(name)  # before it is known: the answer may be lost
            client.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)
            self.gone.add(name)

    def _pass(self, client: LoadClient) -> None:
        exclusive = self.random.random() < 0.5
        name = self._next()
        (self.passing if exclusive else self._auto_delete).add(name)
        what = commands.Queue.Declare(queue=name, exclusive=exclusive, auto_delete=not exclusive)
        client.ask(1, what, commands.Queue.DeclareOk)
        client.ask(
            1,
            commands.Basic.Consume(queue=name, consumer_tag=name, no_ack=True),
            commands.Basic.ConsumeOk,
        )
        self.passing.add(name)  # an auto-delete queue goes when it has had a consumer
        client.send(publishing("", name)(b"passing"))
        if not exclusive and self.random.random() < 0.5:
            client.ask(1, commands.Basic.Cancel(name), commands.Basic.CancelOk)
