"""One TCP client: bytes to events, events to their handlers; slow readers are held back.

Publish path, 1 of 5. Before: the socket. After: broker/front_door/publish/publishing.py.

Each channel's work is done in the order it arrived (channel_work.py). A client is not read while its shards have no
room for its publishes, its own output is not taken (transport.py), or too much work is queued.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING

from pamqp import base, commands

from shardmq.broker.amqp import (
    Binds,
    ChannelException,
    ChannelOpenOk,
    Connection,
    ConnectionException,
    Event,
    Failed,
    Method,
    Open,
    Publishes,
    Settles,
    StartOk,
    copies_by_channel,
    things_in,
)
from shardmq.broker.front_door import login
from shardmq.broker.front_door.connection.channel import HANDLERS, Channel
from shardmq.broker.front_door.connection.channel_work import ChannelWork
from shardmq.broker.front_door.connection.output import Stream, close_behind_output
from shardmq.broker.front_door.connection.transport import CLOSE_TIMEOUT_S, PAUSE_LOGIN, PAUSE_SLICE
from shardmq.broker.front_door.proxy import Peer
from shardmq.broker.front_door.publish.scope import Scope
from shardmq.broker.front_door.topology import methods, queues, reply_queue
from shardmq.broker.front_door.topology.pipeline import Pipeline
from shardmq.broker.model import checks
from shardmq.broker.shared.control import ChannelClose, ChannelOpen, ConnectionInfo, ConnectionOpen
from shardmq.broker.shared.logins import TakesLong
from shardmq.shardd.wire import messages as wire

if TYPE_CHECKING:
    from shardmq.broker.front_door.consume.rewinding import Rewinding
    from shardmq.broker.front_door.links.catalog_link import CatalogLink
    from shardmq.broker.front_door.links.shard_links import ShardLinks
    from shardmq.broker.front_door.server import Door
    from shardmq.broker.model.catalog import Catalog
    from shardmq.broker.model.changes import QueuePut

log = logging.getLogger("shardmq.broker.front_door.connection.client")

# What becomes of publishes that were kept for their channel's turn.
Publish = Callable[["Client", Channel, Publishes], Coroutine[None, None, None] | None]

# A read of at least this much is worth a pass of its own: no waiting for more.
FULL_READ_BYTES = 64 << 10
# What the last read, a full one, left of a message is put before the next one, up to so much: looked at as one piece
# of bytes they are one event, with a message at the seam of two they were two.
AGAIN_BYTES_MAX = 64 << 10
# What one range of a queued Settles event takes.
RANGE_BYTES = 160
# What one bind of a queued Binds event takes.
BIND_BYTES = 320
# Messages one client is being got (basic.get) at once, on all its channels: each may be as large as messages may be.
GETS_MAX = 16


class Client(ChannelWork):
    """One connection. `id`: used once in this front door's life; `tls`: what its handshake told, if it has one."""

    __slots__ = (
        "_begun", "_handshake", "_more_comes", "auth_mechanism", "channels", "connected_at", "gets", "owner",
        "received_bytes", "relayed", "scope", "tls", "trusted", "user", "vhost",
    )  # fmt: skip

    def __init__(
        self, door: Door, sock: Stream, peer: Peer, number: int, tls: login.TlsPeer | None = None
    ) -> None:
        config = door.config
        amqp = Connection(
            frame_bytes_max=config.frame_bytes_max,
            channels_max=config.channels_max,
            heartbeat_s=config.heartbeat_s,
            mechanisms=login.mechanisms(tls),
            server_properties=door.server_properties,
            message_bytes_max=config.message_bytes_max,
        )
        super().__init__(door, sock, peer, number, amqp)
        self.owner = f"{config.door}.{door.incarnation}.{number}"
        self.tls = tls
        # It is the controller: who it speaks for was proved there, and it counts in no listing and no limit.
        self.trusted = False
        self.relayed = peer.relayed
        self.user = ""
        self.vhost = ""
        self.auth_mechanism = ""
        self.scope: Scope | None = None
        self.channels: dict[int, Channel] = {}
        self.connected_at = time.time()
        self.received_bytes = 0
        self._more_comes = False  # the last read filled the buffer
        self._begun: Publishes | None = None  # of which some messages are still to be published
        self.gets = asyncio.Semaphore(GETS_MAX)
        self._handshake = door.loop.call_later(config.handshake_timeout_s, self._handshake_too_slow)
        door.loop.add_reader(self.fd, self._readable)
        if tls is not None:
            door.loop.call_soon(
                self._readable
            )  # its first bytes may have come with the end of the handshake

    @property
    def catalog(self) -> Catalog:
        return self.door.catalog_link.catalog

    @property
    def rewinding(self) -> Rewinding:
        return self.door.rewinding

    @property
    def catalog_link(self) -> CatalogLink:
        return self.door.catalog_link

    @property
    def shards(self) -> ShardLinks:
        return self.door.links

    # -- in ---------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        door = self.door
        door.begin_pass()
        if self.lost or self._paused:  # meanwhile
            return
        buffer, begun = door.read_buffer, 0
        if self._more_comes and (unread := self.amqp.unread):
            begun = len(unread) if len(unread) <= AGAIN_BYTES_MAX else 0
            buffer[:begun] = unread[:begun]
        try:
            count = self.sock.recv_into(buffer[begun:] if begun else buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.disconnect()
            return
        if count == 0:
            self.disconnect()
            return
        self._more_comes = begun + count == len(buffer)
        if count >= FULL_READ_BYTES:
            door.read_was_large(self._more_comes)
        else:
            door.reads.short += 1
        self.received_bytes += count
        self.last_received = door.now
        self.amqp.receive_data(buffer[: begun + count], begun)
        self._handle_events()

    def _handle_events(self) -> None:
        """Handle what was read until nothing is left of it or the client's time slice is over."""
        things, slices, next_event = 0, self.door.slices, self.amqp.next_event
        slices.begin()
        event = self._begun or next_event()
        while event is not None:
            try:
                if isinstance(event, Publishes) and not self.lost:
                    done = event.done
                    self._on_publishes(event)
                    things += event.done - done  # the next slice counts the others
                else:
                    things += things_in(event)
                    self._handle(event)
            except (ChannelException, ConnectionException) as error:
                self.fail(error, 0)
            except Exception:
                self._fail_internally()
            # What it sent already is looked at once we know who it is.
            waits = self._paused and self._paused & PAUSE_LOGIN
            if self._begun is not None or waits or slices.is_over():
                self._end_slice()
                break
            event = next_event()
        else:
            if self._paused:
                self.resume(PAUSE_SLICE)
        self.door.came(things)
        self._gather()

    def _end_slice(self) -> None:
        """Keep what is left of the read, whose bytes those of the next client will overwrite."""
        if self._begun is not None:
            self._begun.keep()
        self.amqp.keep_unread()
        self.pause(PAUSE_SLICE)
        self.door.work_is_left()
        self._schedule_slice()

    def _next_slice(self) -> None:
        """Go on with what was read, unless there is another reason not to read: its end comes here again."""
        self._slice_scheduled = False
        if self._paused == PAUSE_SLICE and not self.lost:
            self.door.begin_pass()
            if self._paused == PAUSE_SLICE and not self.lost:  # still
                self._handle_events()

    def _handle(self, event: Event) -> None:
        if self.lost:
            return
        if isinstance(event, Settles):
            channel = self.channels.get(event.channel)
            if channel is not None and channel.is_open:
                self._do(
                    channel,
                    lambda: self._settle(channel, event.ranges),
                    len(event.ranges) * RANGE_BYTES,
                )
        elif isinstance(event, Method):
            self._on_method(event.channel, event.method)
        elif isinstance(event, Binds):
            self._on_binds(event)
        elif isinstance(event, Failed):
            self.fail(event.exception, event.channel)
        elif isinstance(event, StartOk):
            self._log_in(event)
        elif isinstance(event, Open):
            self._open(event.vhost)

    def _on_publishes(self, event: Publishes) -> None:
        """Publish as many of the event's messages as the time slice lets; `_begun` is the event with the others."""
        self.published = True
        if self.door.alarm:
            self._block()
        busy = (
            {channel.number for channel in self._waiting}
            if self._waiting and not event.done
            else frozenset()
        )
        event.without = event.without or busy
        self._begun = None
        for number, rest in self.door.publishing.publishes(self, event, self.door.slices.is_over):
            self._later(number, rest, self.door.publishing.publish_once)
        if busy:
            for number, copy in copies_by_channel(event, busy).items():
                self._later(number, copy, self._publish_copy)
        if event.done < event.count:
            self._begun = event

    def _later(self, number: int, copy: Publishes, publish: Publish) -> None:
        """In its turn among the channel's work."""
        channel = self.channels.get(number)
        if channel is not None:
            self._do(
                channel, partial(publish, self, channel, copy), len(copy.buffer) + len(copy.table)
            )

    @staticmethod
    async def _publish_copy(client: Client, channel: Channel, copy: Publishes) -> None:
        """Publish what waited for its channel, slice by slice; nothing else of the channel is done meanwhile."""
        publishing = client.door.publishing
        client.begin_slice()
        while channel.is_open:
            for _, rest in publishing.publishes(
                client, copy, client.slice_is_over
            ):  # all is the channel's
                await publishing.publish_once(client, channel, rest)
            if copy.done == copy.count:
                return
            await client.next_slice()

    def _pipeline(self, channel: Channel) -> Pipeline:
        if channel.pipeline is None:
            channel.pipeline = Pipeline(
                self,
                self,
                channel,
                say=partial(self.send, channel.number),
                idle=lambda: self._go_on(channel),
                failed=lambda error: self._pipeline_failed(channel, error),
            )
        return channel.pipeline

    def _pipeline_failed(self, channel: Channel, error: Exception) -> None:
        if not isinstance(error, (ChannelException, ConnectionException)):
            log.error("%s: internal error", self.name, exc_info=error)
            error = ConnectionException(541, "internal error", 0, 0)
        self.fail(error, channel.number)
        self._go_on(channel)

    # -- methods -----------------------------------------------------------------------------------------------

    def _on_method(self, number: int, method: base.Frame) -> None:
        if number == 0:
            self._on_connection_method(method)
            return
        if isinstance(method, commands.Channel.Open):
            self._open_channel(number)
            return
        channel = self.channels.get(number)
        if channel is None:
            return
        if isinstance(method, commands.Channel.CloseOk):
            self._drop_channel(channel)
        elif isinstance(method, commands.Channel.Close):
            if channel.is_open:
                self._do(channel, lambda: self._close_channel(channel))
            else:  # both sides closed it
                self.send(number, commands.Channel.CloseOk())
                self._drop_channel(channel)
        elif not channel.is_open:
            return
        elif type(method) in methods.METHODS:
            self._do(channel, method)
        else:
            self._do(channel, lambda: self._channel_method(channel, method))

    def _on_binds(self, binds: Binds) -> None:
        channel = self.channels.get(binds.channel)
        if channel is not None and channel.is_open:
            self._do(channel, binds, len(binds.ends) * BIND_BYTES)

    def _on_connection_method(self, method: base.Frame) -> None:
        if isinstance(method, commands.Connection.Close):
            self.closing = True
            if self._waiting:
                self._close_when_idle = True  # what was said before it is done before it
            else:
                self._start(self._close_politely())
        elif isinstance(method, commands.Connection.CloseOk):
            self.disconnect()
        elif isinstance(method, commands.Connection.UpdateSecret):
            self.send(
                0, commands.Connection.UpdateSecretOk()
            )  # a password does not expire: nothing to renew

    def _channel_method(
        self, channel: Channel, method: base.Frame
    ) -> Coroutine[None, None, None] | None:
        if not channel.is_open:
            return None
        handler = HANDLERS.get(type(method))
        if handler is None:
            raise ConnectionException(
                503, "unimplemented method", method.index >> 16, method.index & 0xFFFF
            )
        return handler(self, channel, method)

    def _settle(self, channel: Channel, ranges: list[tuple[int, int, int, bool]]) -> None:
        if channel.is_open:
            self.door.consuming.settles(channel, ranges)

    def publishing_channel(self, number: int) -> Channel | None:
        channel = self.channels.get(number)
        return channel if channel is not None and channel.is_open else None

    def readable_queue(self, channel: Channel, name: str, method: tuple[int, int]) -> QueuePut:
        """The queue a consume or get names, if it is there and this user may read it."""
        name = name or channel.last_queue
        try:
            return queues.readable_queue(self, self.catalog, name)
        except checks.Refusal as refusal:
            raise ChannelException(refusal.code, refusal.text, *method) from None

    def queue_name(self, channel: Channel, name: str) -> str:
        """That a consume or get names; "" for the one declared last."""
        return checks.clean_name(name or channel.last_queue)

    def shard_queues(
        self, channel: Channel, name: str, method: tuple[int, int]
    ) -> tuple[QueuePut, ...]:
        """Of the virtual queue a consume or get names, if this user may read it; none: it is another queue."""
        try:
            return queues.readable_shards(self, self.catalog, self.queue_name(channel, name))
        except checks.Refusal as refusal:
            raise ChannelException(refusal.code, refusal.text, *method) from None

    async def reply_queue(self, channel: Channel) -> QueuePut | None:
        """A new queue for the replies to this channel; None when the channel was closed meanwhile."""
        try:
            queue = await reply_queue.open_reply_queue(self, self.catalog_link)
            if channel.is_open:
                return queue
            await reply_queue.close_reply_queue(self, self.catalog_link, queue.name)
        except checks.Refusal as refusal:
            raise methods.failure(commands.Basic.Consume, refusal) from None
        return None

    # -- opening and closing -----------------------------------------------------------------------------

    def _log_in(self, said: StartOk, known: str | None = None) -> None:
        """`known`: the verdict on the password, if it took a while."""
        if self.trusted and said.response.decode() in self.catalog.users:
            self.user, self.auth_mechanism = said.response.decode(), said.mechanism
            self.amqp.tune()
            return

        def verdict(user: str, password: str) -> str:
            put = self.catalog.users.get(user)
            if known is not None:
                return known
            return self.door.logins.at_once(
                put, user, password, self.peer_host, self.door.loop.time()
            )

        try:
            self.user = login.authenticate(
                said.mechanism,
                said.response,
                said.client_properties,
                self.catalog,
                verdict=verdict,
                peer_host=self.peer_host,
                relayed=self.relayed,
                loopback_users=self.door.config.loopback_users,
                tls=self.tls,
            )
        except TakesLong as asked:
            self.pause(PAUSE_LOGIN)
            self._start(self._log_in_slowly(said, asked))
            return
        except login.LoginRefused as refused:
            self.door.counts.logins_failed += 1
            if not refused.said:
                log.warning("%s: login refused: %s", self.name, refused.reason)
            if refused.tell:
                self.close(refused.answer)
            else:
                self.disconnect()
            return
        self.door.counts.logins_succeeded += 1
        self.auth_mechanism = said.mechanism
        self.amqp.tune()

    async def _log_in_slowly(self, said: StartOk, asked: TakesLong) -> None:
        user = self.catalog.users.get(asked.user)
        known = await self.door.logins.slowly(
            user, asked.user, asked.password, self.peer_host, self.door.loop.time()
        )
        if not self.lost:
            self._log_in(said, known)
            self._gather()
            self.resume(PAUSE_LOGIN)

    def _open(self, vhost: str) -> None:
        vhost = vhost or "/"
        connected = 0 if self.trusted else self.door.connected()
        login.check_open(
            self.catalog, self.user, vhost, connected, self.door.config.connections_max
        )
        self.vhost = vhost
        if not self.trusted:
            self.door.catalog_link.connection_up(self.info())
            if self.door.config.connections_are_limited or login.has_limits(
                self.catalog, self.user, vhost
            ):
                self.pause(PAUSE_LOGIN)
                self._start(self._open_within_limits())
                return
        self._be_open()

    async def _open_within_limits(self) -> None:
        """How many there are at all front doors is known to the controller."""
        answer = await self.catalog_link.ask(
            ConnectionOpen(self.vhost, self.user), self.owner, self.user
        )
        if self.lost:
            return
        if answer.code:
            self.door.catalog_link.connection_down(self.owner)
            self.fail(login.not_allowed(answer.text), 0)
        else:
            self._be_open()
        self._gather()
        self.resume(PAUSE_LOGIN)

    def _open_channel(self, number: int) -> None:
        channel = self.channels[number] = Channel(number)
        self.door.counts.channels_opened += 1
        if self.counts_channels:
            self._do(channel, lambda: self._open_channel_within_limits(channel))
        else:
            self.send(number, ChannelOpenOk())

    @property
    def counts_channels(self) -> bool:
        """Whether a limit asks how many channels it has. The controller knows how many there are at all front doors."""
        if self.trusted:
            return False
        return self.door.config.channel_max_per_node > 0 or login.has_channel_limit(
            self.catalog, self.user
        )

    async def _open_channel_within_limits(self, channel: Channel) -> None:
        ask = ChannelOpen(self.vhost, self.user, len(self.channels))
        answer = await self.catalog_link.ask(ask, self.owner, self.user)
        if self.lost or self.closing:
            return
        if answer.code:
            self.fail(
                ConnectionException(answer.code, answer.text, *login.CHANNEL_OPEN), channel.number
            )
        elif channel.is_open:
            self.send(channel.number, ChannelOpenOk())

    def tell_channels(self) -> None:
        """There is a limit that was not there before, or a channel less."""
        if self.is_open and self.counts_channels:
            self.door.catalog_link.connection_up(self.info())

    def _be_open(self) -> None:
        self.is_open = True
        self._handshake.cancel()
        self.scope = self.door.publishing.scope(self.vhost, self.user)
        self.send(0, commands.Connection.OpenOk())

    def _handshake_too_slow(self) -> None:
        log.warning("%s: no handshake within %g s", self.name, self.door.config.handshake_timeout_s)
        self.disconnect()

    def _close_channel(self, channel: Channel) -> Coroutine[None, None, None] | None:
        """channel.close by the client: requeue first, answer then, so that what follows sees the messages."""
        released = self._end_channel(channel)
        if released or self.counts_channels:
            return self._close_channel_behind(channel, released)
        self._answer_close(channel)
        return None

    async def _close_channel_behind(
        self, channel: Channel, released: list[asyncio.Future[wire.Control]]
    ) -> None:
        await self.catalog_link.removed(await _closed_by(released))
        if self.counts_channels:
            await self.catalog_link.ask(
                ChannelClose(self.vhost, len(self.channels) - 1), self.owner, self.user
            )
        self._answer_close(channel)

    def _answer_close(self, channel: Channel) -> None:
        self.send(channel.number, commands.Channel.CloseOk())
        self._drop_channel(channel)

    def _drop_channel(self, channel: Channel) -> None:
        channel.is_open = False
        self._let_go_of(channel)
        if self.channels.get(channel.number) is channel:
            del self.channels[channel.number]
            self.tell_channels()

    def _let_go_of(self, channel: Channel) -> None:
        """Forget the work of a channel that has ended.

        What is queued refers to the client and the channel: left there, both would live until the garbage
        collector finds them, which looks seldom.
        """
        channel.work.clear()
        if channel.pipeline is not None:
            channel.pipeline.close()
            channel.pipeline = None
        self._waiting.discard(channel)

    async def _close_politely(self) -> None:
        """connection.close by the client: everything of it goes, then the answer: whoever declares queues of the same
        names behind it gets others."""
        closed = await _closed_by(
            [future for channel in self.channels.values() for future in self._end_channel(channel)]
        )
        self._say_down()
        await self.catalog_link.removed(
            [*closed, *(queue.id for queue in self.catalog.queues_of(self.owner))]
        )
        self.send(0, commands.Connection.CloseOk())
        self._gather()
        self._flush_then_disconnect()

    def _end_channel(self, channel: Channel) -> list[asyncio.Future[wire.Control]]:
        channel.is_open = False
        if channel.pipeline is not None:
            channel.pipeline.close()
        if channel.confirms is not None:
            channel.confirms.closed = True
        return self.door.consuming.release(channel)

    def fail(self, error: ChannelException | ConnectionException, number: int) -> None:
        """Answer what the client did wrong: one place for all."""
        if self.closing or self.lost:
            return
        channel = self.channels.get(number)
        if isinstance(error, ChannelException) and channel is not None:
            if channel.is_open:
                self._end_channel(channel)  # its release is asked for; nobody has to wait
                self.amqp.close_channel(number, error)
                self._go_on(channel)
        else:
            log.info("%s: closed: %s", self.name, error)
            self.close(
                error
                if isinstance(error, ConnectionException)
                else ConnectionException(504, str(error), 0, 0)
            )
        self._gather()

    def close(self, error: ConnectionException) -> None:
        """connection.close by us; the socket goes when the client has answered, or after a while."""
        if self.closing:
            return
        self.closing = True
        for channel in self.channels.values():
            self._end_channel(channel)
        self.amqp.close(error)
        self.resume(~PAUSE_SLICE)
        self._gather()
        self.door.loop.call_later(CLOSE_TIMEOUT_S, self.disconnect)

    def disconnect(self, politely: bool = False) -> None:
        """The socket's end, for whatever reason. `politely`: what was written last is to be read."""
        if self.lost:
            return
        self.lost = True
        self._handshake.cancel()
        self._begun = None
        for channel in list(self.channels.values()):
            self._end_channel(channel)
            self._let_go_of(channel)
        self.channels.clear()
        self._say_down()
        self.door.loop.remove_reader(self.fd)
        if self._writing:
            self.door.loop.remove_writer(self.fd)
        for task in self._tasks:
            task.cancel()
        if politely:
            # Whoever gets close-ok closes; some clients take an end that comes at once for a broken connection.
            close_behind_output(self.door.loop, self.sock, shut=self.scope is None)
        else:
            self.sock.close()
        self.door.forget(self)

    def _say_down(self) -> None:
        self.is_open = False
        self.door.catalog_link.connection_down(self.owner)

    # -- what others want of it ------------------------------------------------------------------------------

    def feeds(self, shards: int) -> None:
        self.door.fed(self, shards)

    def cancel_consumer(self, number: int, tag: str) -> None:
        """By an operator, in its turn among what the client asks for."""
        channel = self.channels.get(number)
        if channel is not None:
            self._do(channel, partial(self._cancel_consumer, channel, tag))

    async def _cancel_consumer(self, channel: Channel, tag: str) -> None:
        if tag in channel.consumers:
            await self.door.consuming.cancel(self, channel, commands.Basic.Cancel(tag, True))
            self.notify_cancel(channel.number, tag)

    def notify_cancel(self, channel: int, tag: str) -> None:
        if not self._can("consumer_cancel_notify"):
            return
        say = partial(self.send, channel, commands.Basic.Cancel(tag, True))
        known = self.channels.get(channel)
        if known is not None and known.pipeline is not None and known.pipeline.busy:
            # Behind the answer to the delete that may be the reason: clients that wait for it take nothing else well.
            known.work.appendleft(say)
            self._waiting.add(known)
        else:
            say()

    # -- what operators see ----------------------------------------------------------------------------------

    def info(self) -> ConnectionInfo:
        return ConnectionInfo(
            owner=self.owner,
            name=self.name,
            user=self.user,
            vhost=self.vhost,
            peer_host=self.peer_host,
            peer_port=self.peer_port,
            host=self.host,
            port=self.port,
            protocol="AMQP 0-9-1",
            auth_mechanism=self.auth_mechanism,
            tls=self.tls is not None,
            frame_max=self.amqp.frame_bytes_max,
            channel_max=self.amqp.channels_max,
            heartbeat_s=self.amqp.heartbeat_s,
            connected_at_ms=int(self.connected_at * 1000),
            client_properties=self.amqp.client_properties,
            channels=len(self.channels),
            **(self.tls.shown() if self.tls is not None else {}),
        )

    def report(self) -> dict[str, object]:
        """Counters of the connection, for listings."""
        state = "blocked" if self.blocked else "flow" if self._paused else "running"
        return {
            "owner": self.owner,
            "channels": len(self.channels),
            "recv_oct": self.received_bytes,
            "send_oct": self.output.written,
            "send_pend": self.output.pending,
            "state": state,
        }


async def _closed_by(released: list[asyncio.Future[wire.Control]]) -> list[int]:
    """The ids of the queues that go with what is released, when the shards have requeued what was held."""
    answers = [await future for future in released]
    return [
        queue for answer in answers if isinstance(answer, wire.Released) for queue in answer.closed
    ]
