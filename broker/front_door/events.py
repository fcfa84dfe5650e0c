"""Handle the events that the shards and the controller send to a front door."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from typing import Any

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.alarms import WHOLE_BROKER
from shardmq.broker.front_door.connections import Connections
from shardmq.broker.front_door.consume.acks import holders, listed
from shardmq.broker.front_door.links.shard_links import HERE
from shardmq.broker.front_door.publish.confirms import known_frame
from shardmq.broker.front_door.publish.dead_letters import DeadLettering
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.tracing import Tracing
from shardmq.broker.front_door.services import Services
from shardmq.broker.model import checks
from shardmq.broker.model.changes import AnyChange, ParameterPut, QueuePut, is_only_more
from shardmq.broker.shared.control import AssignmentOrder, ConsumerHere, Fenced, ShardsElsewhere
from shardmq.shardd.wire import messages as wire

log = logging.getLogger("shardmq.broker.front_door.events")


class ShardEvents:
    """The handler of events from the shards (shard_link.Events)."""

    def attend(
        self, services: Services, connections: Connections, dead_lettering: DeadLettering
    ) -> None:
        """Say on what to act, before the links start.

        The links are built with this object, and the services are built with the links.
        """
        self._services = services
        self._connections = connections
        self._dead_lettering = dead_lettering
        self._dead_letters_scheduled = False
        loop = services.loop
        # Called for each message of a shard: without a call between.
        self.delivery = services.consuming.deliveries.deliver
        self.receiving, self.received = loop.receiving, loop.received
        self.write_borrowed, self.own_deliveries = loop.write_borrowed, loop.own_deliveries
        self.publish_room = loop.publish_room

    def away(self, shard: int) -> None:
        """Take note that the process of a shard is gone."""
        self._services.consuming.away(shard)
        self._services.shards.went_away(shard)

    def restarted(self, shard: int) -> None:
        """Take note of a new process of the shard, which knows nobody."""
        self._alarm(shard, "")
        self._services.consuming.restarted(shard, self._consumer_lost)
        self._services.publishing.dedup.restarted(shard)

    def known(self, connection: int, channel: int, first: int, last: int, altered: bool) -> None:
        """Tell the reader of streams that publishes repeat what a queue had before."""
        found = self._connections.by_number.get(connection)
        if found is not None and found.session.is_hidden:
            found.write(known_frame(channel, first, last, altered))

    def told(self, shard: int, what: wire.Control) -> None:
        """Do what a control message says."""
        consuming = self._services.consuming
        if isinstance(what, wire.Cancelled):
            self._consumer_lost(what.consumer)
        elif isinstance(what, wire.CreditReport):
            consuming.crediting.report(shard, what)
        elif isinstance(what, wire.MarkReached):
            consuming.groups.passed(what.consumer, what.offset)
        elif isinstance(what, wire.AckTimeout):
            self._close_overdue(what)
        elif isinstance(what, wire.DedupOutcome):
            self._services.publishing.dedup.told(shard, what)
        elif isinstance(what, wire.DeadLetters):
            self._dead_lettering.receive(shard, what)
            if not self._dead_letters_scheduled:
                self._dead_letters_scheduled = True
                self._services.loop.aio.call_soon(self._publish_dead_letters)
        elif isinstance(what, wire.Alarm):
            self._services.shards.set_stalled(shard, what.reason in wire.STALLED)
            self._alarm(shard, what.reason)

    def outlived(self) -> None:
        end_outlived()

    def _consumer_lost(self, number: int) -> None:
        end_consumer(self._services, number)

    def _close_overdue(self, what: wire.AckTimeout) -> None:
        """Close a channel that has not acknowledged for too long."""
        found = self._connections.by_number.get(what.connection)
        if found is not None:
            text = checks.overdue(what.channel, what.timeout_ms)
            found.fail(ChannelException(406, text, 0, 0), what.channel)

    def _publish_dead_letters(self) -> None:
        """Publish one batch; the next one follows in another turn of the loop."""
        loop = self._services.loop
        self._dead_letters_scheduled = self._dead_lettering.publish_next()
        if self._dead_letters_scheduled:
            loop.aio.call_soon(self._publish_dead_letters)
        loop.end_of_pass()

    def _alarm(self, shard: int, reason: str) -> None:
        if self._services.alarms.set(shard, reason):
            self._connections.alarm_changed()


def end_consumer(services: Services, number: int) -> None:
    """End a consumer whose queue is gone."""
    for ended in services.consuming.cancelled(number):
        ended.client.consumer_ended(ended)


def end_outlived() -> None:
    """End this process, which the others take for gone; its clients are told to come again."""
    log.error("this process was taken for gone, and what it held was given to others: it ends")
    signal.raise_signal(signal.SIGTERM)


class ControllerEvents:
    """The handler of events from the controller (catalog_link.Listener)."""

    def attend(
        self,
        services: Services,
        connections: Connections,
        dead_lettering: DeadLettering,
        replies: Replies,
        tracing: Tracing,
    ) -> None:
        """Say on what to act, before the link to the controller runs."""
        self._services = services
        self._connections = connections
        self._dead_lettering = dead_lettering
        self._replies = replies
        self._tracing = tracing
        self._fences: set[asyncio.Task[None]] = set()
        self.receiving, self.received = services.loop.receiving, services.loop.received

    def logins_change(self) -> None:
        """Meet newcomers by what they logged in by."""
        self._connections.renew()

    def catalog_changed(self, changes: list[AnyChange] | None) -> None:
        """Forget what was decided by the old catalog. None: a snapshot replaced everything."""
        services = self._services
        if changes is None or any(isinstance(c, QueuePut) and c.moving for c in changes):
            moving = services.catalog.index.moving()
            services.consuming.follow(moving, partial(end_consumer, services))
        only_more = is_only_more(changes)
        services.publishing.catalog_changed(something_went=not only_more)
        if only_more:
            return
        services.name_cluster()
        services.vhost_counts.forget_all_but(services.catalog.vhosts)
        tracing = self._tracing.catalog_changed()
        self._replies.tracing = tracing
        services.publishing.trace(tracing)
        services.consuming.trace(tracing)
        if changes is None:
            self.alarmed("")  # the controller says so again if there still is one
        if changes is None or any(
            isinstance(change, ParameterPut) and not change.vhost for change in changes
        ):
            self._connections.tell_channel_counts()

    def alarmed(self, reason: str) -> None:
        """Set or end the alarm of the whole broker."""
        if self._services.alarms.set(WHOLE_BROKER, reason):
            self._connections.alarm_changed()

    def close_connection(self, owner: str, code: int, text: str) -> None:
        for connection in self._connections.of_owner(owner):
            connection.close(ConnectionException(code, text, 0, 0))

    def cancel_consumer(self, owner: str, channel: int, tag: str) -> None:
        for connection in self._connections.of_owner(owner):
            connection.cancel_consumer(channel, tag)

    def consumers_here(self) -> list[ConsumerHere]:
        """Return all consumers of virtual queues that the controller has let in."""
        return self._services.consuming.groups.here()

    def assignment_orders(self, orders: list[AssignmentOrder]) -> None:
        """Begin and end assignments of consumers of virtual queues."""
        for ended in self._services.consuming.groups.obey(orders, self._services.catalog):
            ended.client.consumer_ended(ended)
        self._services.loop.schedule_end_of_pass()

    def fence(self, number: int) -> None:
        """Say Fenced when the shards have taken in all that was published before."""
        task = asyncio.create_task(self._answer_fence(number))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _answer_fence(self, number: int) -> None:
        await self._services.shards.fence()
        self._services.catalog_link.say(Fenced(number))

    def shards_elsewhere(self, message: ShardsElsewhere) -> None:
        """Connect to shards where they are led now: on other nodes, or here."""
        links = self._services.shards
        for shard in message.shards:
            links.learn(shard.number, shard.address, shard.node)
        for number in message.here:
            links.learn(number, HERE)
        if message.all is not None:
            links.of_cluster = message.all

    def outlived(self) -> None:
        end_outlived()

    # -- reports ---------------------------------------------------------------------------------

    def report(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]:
        """Return connections, channels and counters, as DoorReport wants them."""
        return *self._connections.report(), self.totals()

    def totals(self) -> dict[str, float]:
        """Return the counters since the start, and how many things there are now."""
        services, dead_lettering = self._services, self._dead_lettering
        dead_lettered = {
            f"dead_lettered_{reason}": float(count)
            for reason, count in dead_lettering.published.items()
        }
        unroutable = services.publishing.unroutable_dropped + dead_lettering.unroutable
        return {
            **services.counts.report(),
            "unroutable_dropped": float(unroutable),
            "logins_refused_unseen": float(services.logins.refused_unseen),
            "spans_dropped": float(services.spans.dropped if services.spans is not None else 0),
            "duplicates": float(services.publishing.dedup.duplicates),
            **self._connections.counters(),
            **dead_lettered,
            **services.loop.numbers(),
            **services.shards.numbers(),
        }

    def unacked(self, queue_id: int) -> list[dict[str, Any]]:
        """Return deliveries of a queue that wait for their ack, as DoorReport wants them."""
        now = self._services.loop.aio.time()
        return listed(self._services.consuming.consumers.values(), queue_id, now)

    def of_vhosts(self) -> dict[str, dict[str, int]]:
        return self._connections.of_vhosts()

    def holders(self, queue_id: int) -> list[dict[str, Any]]:
        """Return who holds deliveries of a queue without an ack, as DoorReport wants them."""
        now = self._services.loop.aio.time()
        return holders(self._services.consuming.consumers.values(), queue_id, now)

    def published(self) -> list[tuple[str, str, int, int]]:
        """Return what came to exchanges.

        Each row is: vhost, exchange, messages published to it, messages that went to queues.
        """
        return self._services.publishing.exchange_counts.report()
