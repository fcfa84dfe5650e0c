"""The channels of one connection: opened, closed, counted where a limit asks for it."""

from __future__ import annotations

import asyncio
from functools import partial
from operator import attrgetter
from typing import Final

from pamqp import commands

from shardmq.broker.amqp import ChannelOpenOk, Connection, ConnectionException
from shardmq.broker.front_door import login
from shardmq.broker.front_door.connection.channel import Channel, Outcome, Reply
from shardmq.broker.front_door.connection.work_queue import WorkQueue
from shardmq.broker.front_door.consume.consumers import Receiver
from shardmq.broker.front_door.services import Services
from shardmq.broker.front_door.session import Session
from shardmq.broker.shared.control import ChannelClose, ChannelOpen
from shardmq.shardd.wire import messages as wire

OPEN_OK: Final = ChannelOpenOk()
CLOSE_OK: Final = commands.Channel.CloseOk()

Releases = list[asyncio.Future[wire.Control]]


class Channels:
    """The channels of one connection, by number."""

    __slots__ = ("_amqp", "_services", "_session", "_work", "by_number")

    def __init__(
        self, services: Services, session: Session, work: WorkQueue, amqp: Connection
    ) -> None:
        self._amqp = amqp
        self._services = services
        self._session = session
        self._work = work
        self.by_number: dict[int, Channel] = {}

    def opened(self, number: int) -> Channel | None:
        """Return the channel, None if it is not open: what is said on it is dropped."""
        channel = self.by_number.get(number)
        return channel if channel is not None and channel.is_open else None

    def open(self, client: Receiver, number: int) -> Channel:
        """Begin a channel. The answer to channel.open is OPEN_OK, or that of admit()."""
        self.by_number[number] = Channel(client, number)
        return self.by_number[number]

    def all(self, client: Receiver) -> list[Channel]:
        """Return all open channels by number, also those that were never used."""
        unused = [Channel(client, number) for number in self._amqp.untold()]
        return sorted([*self.by_number.values(), *unused], key=attrgetter("number"))

    def begin(self, client: Receiver) -> None:
        """Decide who answers channel.open.

        The AMQP library does as long as no limit asks how many channels there are, and here only
        channels that are used are known. With a limit all are.
        """
        self._amqp.answers_channels = not self.are_counted
        if self.are_counted:
            self.meet_all(client)

    def meet_all(self, client: Receiver) -> None:
        """Know of all open channels from now on."""
        for number in self._amqp.untold(tell=True):
            self.open(client, number)

    @property
    def are_counted(self) -> bool:
        """Return whether a limit asks how many channels there are.

        The controller knows how many there are at all front doors.
        """
        if self._session.is_hidden:
            return False
        return self._services.config.channel_max_per_node > 0 or login.has_channel_limit(
            self._services.catalog, self._session.user
        )

    async def admit(self, channel: Channel) -> Reply:
        """Return the answer to channel.open where there is a limit: the controller knows."""
        session = self._session
        ask = ChannelOpen(session.vhost, session.user, len(self.by_number))
        answer = await self._services.catalog_link.ask(ask, session.owner, session.user)
        if answer.code:
            raise ConnectionException(answer.code, answer.text, *login.CHANNEL_OPEN)
        return OPEN_OK if channel.is_open else None

    def limits_changed(self, client: Receiver) -> None:
        """Count from now on, or count no more, and tell the controller how many there are."""
        if self._session.is_open:
            self.begin(client)
            self.tell_count()

    def tell_count(self) -> None:
        """Tell the controller how many there are: a limit is new, or there is a channel less."""
        if self._session.is_open and self.are_counted:
            count, session = len(self.by_number), self._session
            self._services.catalog_link.connection_up(session.owner, partial(session.info, count))

    def close(self, channel: Channel) -> Outcome:
        """Close a channel for channel.close, and return the answer.

        Unacknowledged messages are requeued first, so that the client finds the messages with what
        it asks next.
        """
        released = self.end(channel)
        if released or self.are_counted:
            return self._close_behind(channel, released)
        self._forget(channel)
        return CLOSE_OK

    async def _close_behind(self, channel: Channel, released: Releases) -> Reply:
        session = self._session
        await self._services.catalog_link.removed(await closed_by(released))
        if self.are_counted:
            ask = ChannelClose(session.vhost, len(self.by_number) - 1)
            await self._services.catalog_link.ask(ask, session.owner, session.user)
        self.drop(channel)
        return CLOSE_OK

    def drop(self, channel: Channel) -> None:
        """Forget a channel that both sides have closed."""
        if self._forget(channel):
            self.tell_count()

    def _forget(self, channel: Channel) -> bool:
        channel.is_open = False
        self._work.forget(channel)
        is_known = self.by_number.get(channel.number) is channel
        if is_known:
            del self.by_number[channel.number]
            self._add_counted(channel)
        return is_known

    def _add_counted(self, channel: Channel) -> None:
        """Add what a channel that has ended did to the counters of its vhost."""
        if channel.published or channel.has_consumed:
            self._services.vhost_counts.add_channel(self._session.vhost, channel.counted())

    def end(self, channel: Channel) -> Releases:
        """End what a channel does; the futures end when the shards have requeued its messages."""
        channel.is_open = False
        if channel.pipeline is not None:
            channel.pipeline.close()
        if channel.confirms is not None:
            channel.confirms.closed = True
        if not channel.has_consumed:
            return []
        return self._services.consuming.release(channel.consuming)

    def end_all(self) -> Releases:
        return [future for channel in self.by_number.values() for future in self.end(channel)]

    def clear(self) -> None:
        """End and forget all channels of a connection that has ended."""
        for channel in list(self.by_number.values()):
            self.end(channel)
            self._work.forget(channel)
            self._add_counted(channel)
        self.by_number.clear()


async def closed_by(released: Releases) -> list[int]:
    """Return the ids of the queues that are deleted with what is released, when it has been."""
    answers = [await future for future in released]
    return [queue for answer in answers if isinstance(answer, wire.Done) for queue in answer.closed]
