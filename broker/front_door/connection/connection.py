"""Hand the events of a connection to their handlers and carry out the results.

Publish path, 1 of 5. Before: the socket. After: broker/front_door/publish/publish.py.
What is plain of a read is done before it comes here (short_way.pyx).

The AMQP library makes events of the bytes that were read. Each is given to what handles it; what it
returns or raises is carried out here, and nowhere else: replies, failures, the end. A connection
holds its socket (socket.py), its channels (channels.py), their work in order (work_queue.py), and
what is known of it (session.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Final, Protocol

from pamqp import base, commands

from shardmq.broker.amqp import (
    Binds,
    ChannelException,
    Connection,
    ConnectionException,
    Event,
    Failed,
    Method,
    Open,
    Opened,
    Publishes,
    Settles,
    StartOk,
    copies_by_channel,
    things_in,
)
from shardmq.broker.amqp.methods import unchecked
from shardmq.broker.front_door import login
from shardmq.broker.front_door.connection.channel import Channel, Outcome, Reply
from shardmq.broker.front_door.connection.channel_methods import HANDLERS
from shardmq.broker.front_door.connection.channels import (
    CLOSE_OK,
    OPEN_OK,
    Channels,
    Releases,
    closed_by,
)
from shardmq.broker.front_door.connection.opening import Greeted, Greeting, Handshake, Opening
from shardmq.broker.front_door.connection.output import Output, Stream
from shardmq.broker.front_door.connection.socket import (
    PAUSE_ALARM,
    PAUSE_CLOSE,
    PAUSE_LOGIN,
    PAUSE_SLICE,
    ClientSocket,
)
from shardmq.broker.front_door.connection.work_queue import WorkQueue
from shardmq.broker.front_door.consume.consumers import EndedConsumer
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.publish.effects import Published
from shardmq.broker.front_door.publish.route_cache import RouteCache
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Newcomer, Session, TlsPeer
from shardmq.broker.front_door.topology import methods

log = logging.getLogger("shardmq.broker.front_door.connection.connection")

# What one range of a queued Settles event takes, in bytes.
RANGE_BYTES = 160
# What one bind of a queued Binds event takes, in bytes.
BIND_BYTES = 320
# Messages one client is being got (basic.get) at once on all its channels. Each may be as large as
# messages may be.
GETS_MAX = 16

NOBODY_NEW: Final = Newcomer()
CONNECTION_OPEN_OK: Final = commands.Connection.OpenOk()
CONNECTION_CLOSE_OK: Final = commands.Connection.CloseOk()


class Registry(Protocol):
    """All connections of this front door."""

    def connected(self) -> int:
        """Return how many clients have an open connection."""

    def forget(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""


class ClientConnection:
    """A connection of a client or the controller. `id` is used once in a front door's life.

    It is the receiver for consuming (consume/consumers.py).
    """

    # More than Python keeps in an object without a dictionary beside it.
    __slots__ = (
        "_begun", "_gets", "_opening", "_registry", "begin_slice", "blocked", "channels", "feeds",
        "id", "next_slice", "published", "route_cache", "send", "services",
        "session", "slice_is_over", "socket", "work", "write", "write_delivery",
    )  # fmt: skip

    def __init__(
        self,
        services: Services,
        registry: Registry,
        sock: Stream,
        peer: Peer,
        number: int,
        tls: TlsPeer | None = None,
        *,
        trusted: bool = False,
        newcomer: Newcomer = NOBODY_NEW,
    ) -> None:
        """Begin a connection, or go on from a newcomer (anteroom.pxi).

        `tls` is what a TLS handshake told; `trusted` as in Session.
        """
        config, loop, links = services.config, services.loop, services.shards
        self.id = number
        self.services = services
        self._registry = registry
        self.session = Session(
            number,
            f"{config.door}.{services.incarnation}.{number}",
            peer,
            sock.getsockname(),
            tls,
            trusted=trusted,
        )
        amqp = Connection(
            frame_bytes_max=config.frame_bytes_max,
            channels_max=config.channels_max,
            heartbeat_s=config.heartbeat_s,
            mechanisms=login.mechanisms(tls),
            server_properties=services.server_properties,
            message_bytes_max=config.message_bytes_max,
            room=loop.room,
        )
        socket = self.socket = ClientSocket(
            loop,
            links,
            sock,
            number,
            self.session.name,
            amqp,
            on_data=self.handle_events,
            on_end=self.disconnect,
        )
        self.work = WorkQueue(services, self.session, socket, self)
        self.channels = Channels(services, self.session, self.work, amqp)
        # The routes this user may take, once the vhost is open.
        self.route_cache: RouteCache | None = None
        self.published = False  # by way of Python; the inlet knows of the short way
        self.blocked = False  # was told of an alarm
        self._begun: Publishes | None = None  # some of its messages are still to be published
        self._gets: asyncio.Semaphore | None = None
        # What publishing and consuming use as if it were ours, without a call between.
        self.send, self.write, self.feeds = socket.send, socket.write, socket.feeds
        self.write_delivery = socket.write_delivery
        self.next_slice = socket.next_slice
        self.begin_slice, self.slice_is_over = loop.slices.begin, loop.slices.is_over
        # None when the connection is open: the two hold each other.
        self._opening: Opening | None = Opening(
            services,
            self.session,
            amqp,
            connected=registry.connected,
            disconnect=self.disconnect,
            newcomer=newcomer,
        )
        if newcomer.open is not None:
            self._go_on_with(self._opening.hand_on(newcomer, newcomer.open))
        if tls is not None:  # its first bytes may have come with the end of the TLS handshake
            loop.aio.call_soon(socket.readable)

    @property
    def output(self) -> Output:
        return self.socket.output

    @property
    def gets(self) -> asyncio.Semaphore:
        if self._gets is None:
            self._gets = asyncio.Semaphore(GETS_MAX)
        return self._gets

    # -- events ----------------------------------------------------------------------------------

    def handle_events(self) -> None:
        """Handle what was read until nothing is left or the client's time slice is over."""
        socket, is_over = self.socket, self.slice_is_over
        things, next_event = 0, socket.amqp.next_event
        self.begin_slice()
        event = self._begun or next_event()
        while event is not None:
            try:
                if isinstance(event, Publishes) and not socket.lost:
                    done = event.done
                    self._on_publishes(event)
                    things += event.done - done  # the next slice counts the others
                else:
                    things += things_in(event)
                    self._handle(event)
            except (ChannelException, ConnectionException) as error:
                self.fail(error, 0)
            except Exception as error:
                self.work.fail_internally(error)
            # What the client has sent already is looked at when its login is decided.
            waits = socket.paused and socket.paused & PAUSE_LOGIN
            if self._begun is not None or waits or is_over():
                if self._begun is not None:
                    self._begun.keep()
                socket.end_slice()
                break
            event = next_event()
        else:
            if socket.amqp.reopening:  # the next slice comes when the channel is closed
                socket.pause(PAUSE_CLOSE | PAUSE_SLICE)
            elif socket.paused:
                socket.resume(PAUSE_SLICE)
        if socket.amqp.opened:
            self.services.counts.channels_opened += socket.amqp.opened
            socket.amqp.opened = 0
        self.services.loop.pace.came(things)
        socket.gather()

    def _handle(self, event: Event) -> None:
        if self.socket.lost:
            return
        if isinstance(event, Settles):
            channel = self.channels.by_number.get(event.channel)
            if channel is not None and channel.is_open:
                self.work.do(
                    channel,
                    lambda: self._settle(channel, event.ranges),
                    len(event.ranges) * RANGE_BYTES,
                )
        elif isinstance(event, Method):
            if event.channel:
                self._on_channel_method(event.channel, event.method)
            else:
                self._on_connection_method(event.method)
        elif isinstance(event, Opened):
            self.channels.open(self, event.channel)
            self.socket.gather()  # open-ok, before anything else of the channel is written
        elif isinstance(event, Binds):
            bound = self.channels.opened(event.channel)
            if bound is not None:
                self.work.do(bound, event, len(event.ends) * BIND_BYTES)
        elif isinstance(event, Failed):
            self.fail(event.exception, event.channel)
        elif self._opening is not None:
            if isinstance(event, StartOk):
                self._go_on_with(self._opening.log_in(event))
            elif isinstance(event, Open):
                self._go_on_with(self._opening.open(event.vhost))

    def _settle(self, channel: Channel, ranges: list[tuple[int, int, int, bool]]) -> None:
        if channel.is_open:
            self.services.consuming.acks.settle(channel.consuming, ranges)

    def _on_publishes(self, event: Publishes) -> None:
        """Publish as many messages as the time slice lets; `_begun` has the others."""
        self.published = True
        if self.services.alarms.text:
            self._block()
        waiting = self.work.waiting
        busy = {each.number for each in waiting} if waiting and not event.done else frozenset()
        event.without = event.without or busy
        self._begun = None
        published = self.services.publishing.publish(
            self.session,
            self.route_cache,
            self.channels.by_number,
            event,
            time.time_ns() // 1_000_000,
            self.slice_is_over,
        )
        self.carry_out(published)
        for number, rest in published.deferred:
            self._publish_later(number, rest, self._publish_deferred)
        if busy:
            for number, copy in copies_by_channel(event, busy).items():
                self._publish_later(number, copy, self._publish_copy)
        if event.done < event.count:
            self._begun = event

    def _publish_later(
        self,
        number: int,
        copy: Publishes,
        publish: Callable[[ClientConnection, Channel, Publishes], Coroutine[None, None, None]],
    ) -> None:
        """Publish messages when it is their turn among the channel's work."""
        channel = self.channels.by_number.get(number)
        if channel is not None:
            size = len(copy.buffer) + len(copy.table)
            self.work.do(channel, partial(publish, self, channel, copy), size)

    def carry_out(self, published: Published) -> None:
        """Do what publishing asks for, but for what is deferred: the caller sees to that."""
        if published.fed:
            self.services.loop.fed(self.socket, published.fed)
        if published.is_plain:
            return
        for frames in published.frames:
            self.write(frames)
        for requester, frames, fed in published.replies:
            client = requester.consumer.client
            client.write(frames)
            requester.unwritten_bytes = 0
            if fed:
                client.feeds(fed)
        for number, error in published.failed.items():
            self.fail(error, number)

    @staticmethod
    async def _publish_deferred(
        client: ClientConnection, channel: Channel, event: Publishes
    ) -> None:
        """Publish messages that have to wait for the answer of a shard."""
        by_number = client.channels.by_number
        await client.services.publishing.publish_deferred(
            client.session, by_number, channel, event, client
        )

    @staticmethod
    async def _publish_copy(client: ClientConnection, channel: Channel, copy: Publishes) -> None:
        """Publish what waited for its channel, slice by slice.

        Nothing else of the channel is done meanwhile.
        """
        publishing = client.services.publishing
        client.begin_slice()
        while channel.is_open:
            published = publishing.publish(
                client.session,
                client.route_cache,
                client.channels.by_number,
                copy,
                time.time_ns() // 1_000_000,
                client.slice_is_over,
            )
            client.carry_out(published)
            for _, rest in published.deferred:  # of this channel, all of it
                await client._publish_deferred(client, channel, rest)
            if copy.done == copy.count:
                return
            await client.next_slice()

    # -- methods ---------------------------------------------------------------------------------

    def _on_channel_method(self, number: int, method: base.Frame) -> None:
        if isinstance(method, commands.Channel.Open):
            opened = self.channels.open(self, number)
            self.services.counts.channels_opened += 1
            if self.channels.are_counted:
                self.work.do(opened, partial(self.channels.admit, opened))
            else:
                self.send(number, OPEN_OK)
            return
        channel = self.channels.by_number.get(number)
        if channel is None:
            return
        if isinstance(method, commands.Channel.CloseOk):
            self.channels.drop(channel)
        elif isinstance(method, commands.Channel.Close):
            if not channel.is_open:  # both sides closed it
                self.send(number, CLOSE_OK)
                self.channels.drop(channel)
            else:
                self.work.do(channel, partial(self.channels.close, channel))
        elif not channel.is_open:
            return
        elif type(method) in methods.METHODS:
            self.work.do(channel, method)
        else:
            self.work.do(channel, lambda: self._do_method(channel, method))

    def _on_connection_method(self, method: base.Frame) -> None:
        if isinstance(method, commands.Connection.Close):
            self.socket.closing = True
            self.work.when_idle(self._close_politely)
        elif isinstance(method, commands.Connection.CloseOk):
            self.disconnect()
        elif isinstance(method, commands.Connection.UpdateSecret):
            # A password does not expire: there is nothing to renew.
            self.send(0, commands.Connection.UpdateSecretOk())

    def _do_method(self, channel: Channel, method: base.Frame) -> Outcome:
        if not channel.is_open:
            return None
        handler = HANDLERS.get(type(method))
        if handler is None:
            ids = method.index >> 16, method.index & 0xFFFF
            raise ConnectionException(503, "unimplemented method", *ids)
        return handler(self, channel, method)

    def answer(self, number: int, reply: Reply) -> None:
        """Send the reply of a method: another method, or frames that are ready."""
        if isinstance(reply, bytes):
            self.write(reply)
        elif reply is not None:
            self.send(number, reply)

    # -- opening and closing ---------------------------------------------------------------------

    def _go_on_with(self, handshake: Handshake) -> None:
        """Do what the handshake asks for."""
        if handshake is Greeting.TUNE:
            self.socket.amqp.tune()
        elif handshake is Greeting.HANG_UP:
            self.disconnect()
        elif isinstance(handshake, ConnectionException):
            self.close(handshake)
        elif handshake is not Greeting.OPEN_OK:
            self.socket.pause(PAUSE_LOGIN)
            self.work.start(self._wait_for(handshake))
        elif self._opening is not None:
            self._opening.close()
            self._opening = None
            session = self.session
            session.is_open = True
            self.channels.begin(self)
            self.route_cache = self.services.publishing.route_cache(session.vhost, session.user)
            if (short_way := self.services.short_way) is not None:
                inlet = short_way.inlet(
                    self.socket,
                    self.channels.by_number,
                    self.work.waiting,
                    self.route_cache,
                    self.work.bind_at_once,
                    self.work.fail_internally,
                )
                self.socket.frame_bytes_max = session.frame_bytes_max
                self.socket.go_short_way(inlet)
            opened = CONNECTION_OPEN_OK
            if session.is_direct:  # a bridge hears what listings call it, in a reserved field
                opened = unchecked(commands.Connection.OpenOk, known_hosts=session.name)
            self.send(0, opened)

    async def _wait_for(self, handshake: Coroutine[None, None, Greeted]) -> None:
        try:
            self._go_on_with(await handshake)
        except ConnectionException as error:
            self.fail(error, 0)
        self.socket.gather()
        self.socket.resume(PAUSE_LOGIN)

    def fail(self, error: ChannelException | ConnectionException, number: int) -> None:
        """Answer what the client did wrong: close the channel or the connection."""
        socket = self.socket
        if socket.lost:
            return
        channel = self.channels.by_number.get(number)
        if isinstance(error, ChannelException) and channel is not None:
            if not channel.is_open:
                return
            self.channels.end(channel)  # its release is asked for; nobody has to wait
            socket.amqp.close_channel(number, error)
            self.work.go_on(channel)
        elif socket.closing:
            return
        else:
            log.info("%s: closed: %s", self.session.name, error)
            if isinstance(error, ChannelException):
                error = ConnectionException(504, str(error), 0, 0)
            self.close(error)
        socket.gather()

    def close(self, error: ConnectionException) -> None:
        """Send connection.close; the socket goes when the client has answered, or after a while."""
        socket = self.socket
        if socket.closing:
            return
        socket.closing = True
        self.channels.end_all()
        socket.amqp.close(error)
        socket.resume(~PAUSE_SLICE)
        socket.gather()
        socket.close_later()

    def _close_politely(self) -> None:
        """Answer connection.close of the client, when all that is the connection's has gone.

        Who declares queues of the same names behind the answer gets other queues.
        """
        released = self.channels.end_all()
        if released or self.services.catalog.queues_of(self.session.owner):
            self.work.start(self._close_behind(released))
        else:
            self._say_closed()

    async def _close_behind(self, released: Releases) -> None:
        closed = await closed_by(released)
        self._say_down()
        owned = (queue.id for queue in self.services.catalog.queues_of(self.session.owner))
        await self.services.catalog_link.removed([*closed, *owned])
        self._say_closed()

    def _say_closed(self) -> None:
        self._say_down()
        self.send(0, CONNECTION_CLOSE_OK)

    def disconnect(self) -> None:
        """End the connection and close its socket, for whatever reason."""
        socket = self.socket
        if socket.lost:
            return
        socket.lost = True
        if self._opening is not None:
            self._opening.close()
            self._opening = None
        self._begun = None
        self.channels.clear()
        self._say_down()
        self.work.close()
        socket.close(shut=self.route_cache is None)
        self._registry.forget(self)

    def _say_down(self) -> None:
        self.session.is_open = False
        self.services.catalog_link.connection_down(self.session.owner)

    # -- what others want of it ------------------------------------------------------------------

    def cancel_consumer(self, number: int, tag: str) -> None:
        """Cancel a consumer for an operator, in order with what the client asks for."""
        channel = self.channels.by_number.get(number)
        if channel is not None:
            self.work.do(channel, partial(self._cancel_consumer, channel, tag))

    async def _cancel_consumer(self, channel: Channel, tag: str) -> None:
        if tag in channel.consuming.consumers:
            deleted = await self.services.consuming.cancel(channel.consuming, tag)
            if deleted:
                await self.services.catalog_link.removed(deleted)
            self.consumer_ended(EndedConsumer(self, channel.number, tag, None))

    def consumer_ended(self, ended: EndedConsumer) -> None:
        """Send basic.cancel, if the client wants to know that a consumer was cancelled."""
        self.answer(ended.channel, ended.consume_ok)
        if not self.session.can("consumer_cancel_notify"):
            return
        say = partial(self.send, ended.channel, commands.Basic.Cancel(ended.tag, True))
        known = self.channels.by_number.get(ended.channel)
        if known is not None and known.pipeline is not None and known.pipeline.busy:
            # The reason may be a delete that is not answered yet. Clients that wait for the answer
            # do not take other methods well.
            self.work.do_next(known, say)
        else:
            say()

    def alarm_changed(self) -> None:
        """Hold a publisher while there is an alarm, and tell it so."""
        is_on = self.services.alarms.text
        inlet = self.socket.inlet
        if is_on and (self.published or (inlet is not None and inlet.published)):
            self._block()
        elif self.blocked and not is_on:
            self.blocked = False
            if self.session.can("connection.blocked"):
                self.send(0, commands.Connection.Unblocked())
            self.socket.resume(PAUSE_ALARM)

    def _block(self) -> None:
        if not self.blocked:
            self.blocked = True
            if self.session.can("connection.blocked"):
                self.send(0, commands.Connection.Blocked(self.services.alarms.text))
            self.socket.pause(PAUSE_ALARM)

    def report(self) -> dict[str, object]:
        """Return the counters of the connection for listings."""
        state = "blocked" if self.blocked else "flow" if self.socket.paused else "running"
        return {
            "owner": self.session.owner,
            "channels": len(self.channels.all(self)),
            "recv_oct": self.socket.received_bytes,
            "recv_cnt": self.socket.reads,
            "send_oct": self.output.written,
            "send_cnt": self.output.writes,
            "send_pend": self.output.pending,
            "state": state,
        }
