"""The front door as a process: listeners, passes of the event loop, start and drain; the only file that starts things.

A *pass* is one turn of the event loop over everything that is readable. What it produced leaves at its end, together:
confirms, one batch per shard, one write per client. While clients send little at a time, and often, passes keep a
distance (`tick_us`): the loop sleeps but for what the shards say, and what clients have sent meanwhile is done in one
go. A client that sends rarely never waits. See pace.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from typing import Any

import uvloop

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door import login
from shardmq.broker.front_door.connection.client import Client
from shardmq.broker.front_door.connection.output import Stream
from shardmq.broker.front_door.connection.transport import Transport
from shardmq.broker.front_door.consume.consuming import Consuming
from shardmq.broker.front_door.consume.rewinding import Rewinding
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.catalog_link import CatalogLink
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.pace import Pace, Reads
from shardmq.broker.front_door.proxy import Balancers, Greeting, Peer
from shardmq.broker.front_door.publish.confirms import known_frame
from shardmq.broker.front_door.publish.dead_letters import DeadLettering
from shardmq.broker.front_door.publish.once import Once
from shardmq.broker.front_door.publish.publishing import Publishing
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.front_door.time_slices import TimeSlices
from shardmq.broker.front_door.tls import Handshake
from shardmq.broker.model import checks
from shardmq.broker.model.changes import AnyChange, ParameterPut, is_only_more
from shardmq.broker.shared import certificates
from shardmq.broker.shared.certificates import Certificates
from shardmq.broker.shared.cluster_name import cluster_name
from shardmq.broker.shared.config import BrokerConfig, ConfigError, read_config
from shardmq.broker.shared.control import ConsumerHere, Fenced, SeatOrder
from shardmq.broker.shared.logins import Logins
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.memory import AfterBursts, collect_seldom, give_back, keep_warm
from shardmq.supervisor import notify
from shardmq.supervisor.logs import set_level

log = logging.getLogger("shardmq.broker.front_door.server")

# One read takes at most this from a socket; one buffer serves all clients.
READ_BYTES = 256 << 10
# Connections taken from the listening socket before the others get their turn.
ACCEPT_BURST = 64
ACCEPT_AGAIN_S = 1.0
INSIDE_BACKLOG = 128
TICK_S = 1.0
JOIN_S = 0.1
DRAIN_S = 5.0
# While all reads are full a shard's batch waits until it has that many bytes: what it costs whatever is in it is then
# little beside what each message costs. Where a read has something for several shards each waits for more: half of it
# is about the former.
BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN = 128 << 10, 192 << 10
IPV4_AS_IPV6 = "::ffff:"
WHOLE_BROKER = -1  # in the place of a shard's number


class Door:
    """One front door. Also hears what the shards say (shard_link.Events)."""

    # More than Python keeps in an object without a dictionary beside it.
    __slots__ = (
        "_alarms", "_balancers", "_certificates", "_dead_letters_scheduled", "_end_scheduled", "_fed",
        "_feeders", "_fences", "_greetings", "_handshakes", "_held", "_held_back", "_in_pass",
        "_last_id", "_linking", "_listeners", "_memory", "_pace", "_tls_listeners", "alarm",
        "borrowers", "catalog_link", "clients", "config", "consuming", "counts", "dead_lettering", "delivery", "dirty",
        "incarnation", "links", "logins", "loop", "now", "publishing", "read_buffer", "reads", "replies", "rewinding",
        "server_properties", "slices", "tracing",
    )  # fmt: skip

    def __init__(self, config: BrokerConfig) -> None:
        self.config = config
        self.incarnation = wire.incarnation_at(time.monotonic_ns())
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        self._memory = AfterBursts()
        self.links = ShardLinks(config, self.incarnation, self)
        self.catalog_link = CatalogLink(
            f"{config.runtime_dir}/control.sock",
            door=config.door,
            incarnation=self.incarnation,
            pid=os.getpid(),
            listener=self,
        )
        self.logins = Logins()
        self.server_properties: dict[str, Any] = login.server_properties(
            cluster_name(self.catalog_link.catalog)
        )
        self.counts = Counts()
        self.tracing = Tracing(self.catalog_link, self.links)
        once = Once(self.links) if config.doors > 1 else None
        self.replies = Replies(self.links, self.counts)
        self.publishing = Publishing(
            self.catalog_link,
            self.links,
            self.counts,
            set_timestamp=config.set_timestamp,
            once=once,
            replies=self.replies,
        )
        self.consuming = Consuming(self.links, self.catalog_link.say, self.counts, self.replies)
        self.delivery = self.consuming.delivery
        self.dead_lettering = DeadLettering(self.catalog_link, self.links)
        self.rewinding = Rewinding(self.catalog_link, self.links)
        self.clients: dict[int, Client] = {}
        self.dirty: list[Transport] = []  # have something to write
        self.borrowers: list[Transport] = []  # were given messages that lie in a ring
        self._dead_letters_scheduled = False
        self.alarm = ""
        self._alarms: dict[int, str] = {}
        self._feeders: dict[
            Client, int
        ] = {}  # who published in this pass, and to which shards (bit mask)
        self._fed = 0  # to which shards any of them did
        self._held: list[set[Client]] = [set() for _ in range(config.shards)]
        self._held_back = [0] * config.shards  # how often publishers had to wait
        self._last_id = 0
        self._in_pass = False
        self._end_scheduled = False
        self._pace = Pace(config.tick_us / 1e6)
        self.reads = Reads()
        self.slices = TimeSlices(time.perf_counter, self.loop.call_soon)
        self._listeners: list[socket.socket] = []
        self._tls_listeners: list[socket.socket] = []
        self._certificates = None if config.tls is None else Certificates(config.tls)
        self._handshakes: set[Handshake] = set()
        self._fences: set[asyncio.Task[None]] = set()
        self._balancers = Balancers(config.proxy_protocol_from)
        self._greetings: set[Greeting] = set()

    # -- passes ------------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Before the first read of a pass: keep the distance, if reads are small and passes come fast."""
        if self._in_pass:
            return
        wait = self._pace.distance(time.perf_counter(), time.thread_time())
        if wait > 0:
            self.links.hear_for(wait)
        self._in_pass = True
        self.now = self.loop.time()
        self.schedule_end_of_pass()

    def read_was_large(self, full: bool) -> None:
        """`full`: there is more where it came from."""
        self._pace.was_large()
        if full:
            self.reads.full += 1
        else:
            self.reads.short += 1

    def work_is_left(self) -> None:
        """Of a client whose time slice is over: the next pass comes at once."""
        self._pace.was_large()

    def came(self, things: int) -> None:
        self._pace.came(things)

    def schedule_end_of_pass(self) -> None:
        if not self._end_scheduled:
            self._end_scheduled = True
            self.loop.call_soon(self._scheduled_end)

    def _scheduled_end(self) -> None:
        if self._end_scheduled:
            self.end_of_pass()

    def end_of_pass(self) -> None:
        self._in_pass = self._end_scheduled = False
        if self.publishing.answers_due:
            self.publishing.end_of_pass()
        if self._fed:
            self._hold_feeders()
        if self.dirty:
            self._write_out()
        if self.reads.may_wait() and self.links.flush(BATCH_BYTES_MIN, SHARED_BATCH_BYTES_MIN):
            # In the turn after the next one: before, every socket is looked at.
            self.loop.call_soon(self.loop.call_soon, self._flush_held, self.reads.held)
        else:
            self.reads.held = 0
            self.links.flush()

    def _flush_held(self, held: int) -> None:
        """Unless there was another pass since batches began to wait, or one has begun, they leave."""
        if not self._in_pass and self.reads.held == held:
            self.reads.held = 0
            self.links.flush()

    def _write_out(self) -> None:
        dirty, self.dirty = self.dirty, []
        for client in dirty:
            try:
                client.flush()
            except Exception:
                log.exception("%s: cannot be written to", client.name)
                client.disconnect()

    def receiving(self) -> None:
        """Messages of shards are about to be handled: this pass ends in `received`."""
        self._end_scheduled = True

    received = end_of_pass  # the shards' messages of this burst are handled

    def own_deliveries(self) -> None:
        """What clients have not taken of messages that lie in a ring is copied."""
        for client in self.borrowers:
            client.output.own()
        self.borrowers.clear()

    # -- back pressure ---------------------------------------------------------------------------------------

    def fed(self, client: Client, shards: int) -> None:
        """`client` published to these shards (bit mask) in this pass."""
        self._fed |= shards
        self._feeders[client] = self._feeders.get(client, 0) | shards

    def _hold_feeders(self) -> None:
        fed, self._fed = self._fed, 0
        for shard in self.links.crowded(fed):
            feeders = [client for client, shards in self._feeders.items() if shards >> shard & 1]
            for client in feeders:
                client.pause(1 << shard)
            self._held_back[shard] += len(feeders)
            self._held[shard].update(feeders)
        self._feeders.clear()

    def publish_room(self, shard: int) -> None:
        held, self._held[shard] = self._held[shard], set()
        for client in held:
            client.resume(1 << shard)

    # -- what the shards say -------------------------------------------------------------------------------

    def away(self, shard: int) -> None:
        self.consuming.away(shard)

    def known(self, connection: int, channel: int, first: int, last: int, altered: bool) -> None:
        client = self.clients.get(connection)
        if client is not None and client.trusted:
            client.write(known_frame(channel, first, last, altered))

    def restarted(self, shard: int) -> None:
        self._set_alarm(shard, "")
        self.consuming.restarted(shard)
        if self.publishing.once is not None:
            self.publishing.once.restarted(shard)

    def told(self, shard: int, what: wire.Control) -> None:
        if isinstance(what, wire.Cancelled):
            self.consuming.cancelled(what.consumer)
        elif isinstance(what, wire.Ungranted):
            self.consuming.ungranted(what.consumer, what.count, what.wants)
        elif isinstance(what, wire.Passed):
            self.consuming.virtual.passed(what.consumer, what.offset)
        elif isinstance(what, wire.Overdue):
            self._close_overdue(what)
        elif isinstance(what, wire.OnceBecame) and self.publishing.once is not None:
            self.publishing.once.told(shard, what)
        elif isinstance(what, wire.DeadLetters):
            self.dead_lettering.receive(shard, what)
            if not self._dead_letters_scheduled:
                self._dead_letters_scheduled = True
                self.loop.call_soon(self._publish_dead_letters)
        elif isinstance(what, wire.Alarm):
            self.links.set_stalled(shard, what.reason == wire.DISK_STALLED)
            self._set_alarm(shard, what.reason)

    def _close_overdue(self, what: wire.Overdue) -> None:
        client = self.clients.get(what.connection)
        if client is not None:
            client.fail(
                ChannelException(406, checks.overdue(what.channel, what.timeout_ms), 0, 0),
                what.channel,
            )

    def _publish_dead_letters(self) -> None:
        """Batch by batch, each in a turn of the loop of its own."""
        self._dead_letters_scheduled = self.dead_lettering.publish_next()
        if self._dead_letters_scheduled:
            self.loop.call_soon(self._publish_dead_letters)
        self.end_of_pass()

    def _set_alarm(self, shard: int, reason: str) -> None:
        if reason:
            self._alarms[shard] = reason
        else:
            self._alarms.pop(shard, None)
        alarm = " & ".join(sorted(set(self._alarms.values())))
        if alarm != self.alarm:
            log.warning("alarm: %s", alarm or "over")
            self.alarm = alarm
            for client in list(self.clients.values()):
                client.alarm_changed()

    # -- what the controller says ------------------------------------------------------------------------

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        only_more = is_only_more(changes)
        self.publishing.catalog_changed(something_went=not only_more)
        if only_more:
            return
        self.server_properties = {
            **self.server_properties,
            "cluster_name": cluster_name(self.catalog_link.catalog),
        }
        tracing = self.tracing.catalog_changed()
        self.publishing.tracing = self.consuming.tracing = self.replies.tracing = tracing
        if changes is None:
            self._set_alarm(WHOLE_BROKER, "")  # the controller says so again if there still is one
        if changes is None or any(
            isinstance(change, ParameterPut) and not change.vhost for change in changes
        ):
            for client in self.clients.values():
                client.tell_channels()

    def alarmed(self, reason: str) -> None:
        self._set_alarm(WHOLE_BROKER, reason)

    def close_connection(self, owner: str, code: int, text: str) -> None:
        for client in list(self.clients.values()):
            if client.owner == owner:
                client.close(ConnectionException(code, text, 0, 0))

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None:
        for client in list(self.clients.values()):
            if client.owner == owner:
                client.cancel_consumer(channel, tag)

    def totals(self) -> dict[str, float]:
        """Of everything since the start, and how many there are now."""
        channels = [
            channel
            for client in self.clients.values()
            if client.is_open and not client.trusted
            for channel in client.channels.values()
        ]
        unroutable = self.publishing.unroutable_dropped + self.dead_lettering.unroutable
        counters = {**self.counts.report(), "unroutable_dropped": float(unroutable)}
        counters["logins_refused_unseen"] = float(self.logins.refused_unseen)
        counters["duplicates"] = float(self.publishing.duplicates)
        counters["connections"] = sum(
            client.is_open and not client.trusted for client in self.clients.values()
        )
        counters["channels"] = len(channels)
        counters["publishers"] = sum(channel.published > 0 for channel in channels)
        for reason, count in self.dead_lettering.published.items():
            counters[f"dead_lettered_{reason}"] = float(count)
        for shard, held_back in enumerate(self._held_back):
            counters[f"publishers_waiting.{shard}"] = len(self._held[shard])
            counters[f"publishers_held_back.{shard}"] = held_back
        counters |= self.links.numbers()
        return counters

    def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        return self.consuming.unacked_of(queue_id, self.loop.time())

    def consumers_here(self) -> list[ConsumerHere]:
        return self.consuming.virtual.here()

    def seat_orders(self, orders: list[SeatOrder]) -> None:
        self.consuming.virtual.obey(orders, self.catalog_link.catalog)
        self.schedule_end_of_pass()

    def fence(self, number: int) -> None:
        task = asyncio.create_task(self._answer_fence(number))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _answer_fence(self, number: int) -> None:
        await self.links.fence()
        self.catalog_link.say(Fenced(number))

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        connections: list[dict[str, Any]] = []
        channels: list[dict[str, Any]] = []
        for client in self.clients.values():
            if not client.is_open or client.trusted:
                continue
            connections.append(client.report())
            channels += [channel.report(client.owner) for channel in client.channels.values()]
        return connections, channels, self.totals()

    def published(self) -> list[tuple[str, str, int, int]]:
        """Return what came to exchanges: vhost, exchange, messages published to it, messages to queues."""
        return self.publishing.exchange_counts.report()

    # -- start and stop --------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._linking = self.loop.create_task(self.catalog_link.run())
        await self.catalog_link.synced()
        await self.links.start()
        for fd in (*self.config.listen_fds, *self.config.tls_listen_fds):
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
            self._listeners.append(listener)
            self.loop.add_reader(fd, self._accept, listener)
        self._tls_listeners = self._listeners[len(self.config.listen_fds) :]

        self._listen_inside()

    def _listen_inside(self) -> None:
        """For the controller alone: the runtime directory, and this socket, are the broker's user's."""
        path = f"{self.config.runtime_dir}/door-{self.config.door}.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.setblocking(False)
        listener.listen(INSIDE_BACKLOG)
        self._listeners.append(listener)
        self.loop.add_reader(listener.fileno(), self._accept_inside, listener)

    def _accept_inside(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # gone again, or out of file descriptors: the controller says so
        sock.setblocking(False)
        self._last_id += 1
        client = self.clients[self._last_id] = Client(self, sock, Peer("", 0), self._last_id)
        client.trusted = True

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BURST):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors: some will be closed
                log.error("cannot accept: %s", error)
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Who comes by IPv4 to a listener for both has that address all the same.
            peer = Peer(address[0].removeprefix(IPV4_AS_IPV6), address[1])
            secure = listener in self._tls_listeners
            if peer.host in self._balancers:
                self._greet(sock, peer, secure)
            else:
                self._let_in(sock, peer, secure)

    def _greet(self, sock: socket.socket, peer: Peer, secure: bool) -> None:
        def entered(greeting: Greeting) -> None:
            self._greetings.discard(greeting)
            self._let_in(sock, greeting.peer, secure)

        self._greetings.add(
            Greeting(
                self.loop,
                sock,
                peer,
                timeout_s=self.config.handshake_timeout_s,
                entered=entered,
                left=self._greetings.discard,
            )
        )

    def _let_in(self, sock: socket.socket, peer: Peer, secure: bool) -> None:
        if secure:
            self._shake_hands(sock, peer)
        else:
            self._enter(sock, peer)

    def _enter(self, sock: Stream, peer: Peer, tls: login.TlsPeer | None = None) -> None:
        self._last_id += 1
        self.clients[self._last_id] = Client(self, sock, peer, self._last_id, tls)

    def _shake_hands(self, sock: socket.socket, peer: Peer) -> None:
        assert self._certificates is not None
        self._handshakes.add(
            Handshake(
                self.loop,
                sock,
                peer,
                self._certificates.context,
                timeout_s=self.config.handshake_timeout_s,
                entered=self._hands_shaken,
                left=self._handshakes.discard,
            )
        )

    def _hands_shaken(self, handshake: Handshake) -> None:
        self._handshakes.discard(handshake)
        sock, given = handshake.sock, handshake.sock.certificate()
        assert self.config.tls is not None
        peer = login.TlsPeer(
            sock.version(),
            sock.cipher(),
            certificates.login_name(given, self.config.tls),
            bool(given),
            certificates.distinguished_name(given),
            certificates.distinguished_name(given, "issuer"),
        )
        self._enter(sock, handshake.peer, peer)

    def reload(self) -> None:
        """Settings, as the supervisor tells them anew, and certificates, as they are on disk now; for new
        connections."""
        if (section := notify.new_section()) is not None:
            try:
                self.config = read_config(["--config", section])
            except ConfigError as error:
                log.error("settings stay as they were: %s", error)
            self._balancers = Balancers(self.config.proxy_protocol_from)
            set_level(self.config.log_level)
            for client in self.clients.values():
                client.tell_channels()
        if self._certificates is None or self.config.tls is None:
            return
        try:
            self._certificates.reload(self.config.tls)
            log.info("certificates are read anew")
        except ConfigError as error:
            log.error("certificates stay as they were: %s", error)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self.loop.add_reader(listener.fileno(), self._accept, listener)

    def connected(self) -> int:
        """Open connections of clients, for the limit of this front door."""
        return sum(client.is_open and not client.trusted for client in self.clients.values())

    def forget(self, client: Client) -> None:
        self.clients.pop(client.id, None)
        self.links.forget(client.id)
        self._feeders.pop(client, None)
        for held in self._held:
            held.discard(client)
        self.schedule_end_of_pass()

    async def tick(self) -> None:
        """Heartbeats and the watchdog."""
        while True:
            await asyncio.sleep(TICK_S)
            self.now = self.loop.time()
            for client in list(self.clients.values()):
                client.tick(self.now)
            notify.watchdog()
            self._memory.look(self.catalog_link.catalog.version)

    async def join(self) -> None:
        """Keep telling the shards where this front door is."""
        while True:
            await asyncio.sleep(JOIN_S)
            self.links.tick()
            if self.publishing.once is not None:
                self.publishing.once.look_after(self.loop.time())

    def outlived(self) -> None:
        log.error(
            "the controller took this process for gone and gave others what it held: it ends, and begins anew"
        )
        signal.raise_signal(signal.SIGTERM)  # its clients are told to come again

    async def drain(self) -> None:
        """No new clients; those there are told to go."""
        for listener in self._listeners:
            self.loop.remove_reader(listener.fileno())
            listener.close()
        for handshake in self._handshakes:
            handshake.close()
        for greeting in self._greetings:
            greeting.close()
        error = ConnectionException(
            320, "broker forced connection closure with reason 'shutdown'", 0, 0
        )
        for client in list(self.clients.values()):
            client.close(error)
        until = self.loop.time() + DRAIN_S
        while self.clients and self.loop.time() < until:
            await asyncio.sleep(0.01)
        for client in list(self.clients.values()):
            client.disconnect()
        self.end_of_pass()
        self.rewinding.close()
        self.links.stop()
        self._linking.cancel()


async def serve(config: BrokerConfig) -> None:
    """Run a front door until SIGTERM, or until the supervisor is gone."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    lifeline = notify.lifeline_fd()
    if lifeline is not None:
        loop.add_reader(lifeline, stopped.set)
    door = Door(config)
    loop.add_signal_handler(signal.SIGHUP, door.reload)
    joining = loop.create_task(door.join())
    starting = loop.create_task(door.start())
    stopping = loop.create_task(stopped.wait())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        starting.result()
        notify.ready(pid=str(os.getpid()))
        give_back()
    ticking = loop.create_task(door.tick())
    await stopping
    if lifeline is not None:
        loop.remove_reader(lifeline)
    notify.stopping()
    for task in (starting, ticking, joining):
        task.cancel()
    await door.drain()


def run(config: BrokerConfig) -> None:
    keep_warm()
    collect_seldom()
    uvloop.run(serve(config))
