"""Give each published message to the shards that hold its queues, and tell the publisher what became of it.

Publish path, 2 of 5. Before: broker/front_door/connection/connection.py. After: shardd/shard.py.

A read's publishes are packed by compiled code as long as their routes are known (`Routes`, one per vhost and user,
emptied by every change of the catalog). It stops at a message that needs a decision; that one is decided here and
packing goes on behind it. Who waits for the confirm is in confirms.py.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

from shardmq.broker.amqp import (
    ChannelException,
    ConnectionException,
    Publishes,
    copies_by_channel,
    frames,
)
from shardmq.broker.front_door.counts import Counts
from shardmq.broker.front_door.links.shard_links import ShardLinks
from shardmq.broker.front_door.publish.committing import Commit, Copies
from shardmq.broker.front_door.publish.confirms import Confirms
from shardmq.broker.front_door.publish.exchange_counts import ExchangeCounts
from shardmq.broker.front_door.publish.message import (
    FACTS,
    MANDATORY,
    PUBLISH,
    ROW,
    Message,
    exchange_and_key,
    line_of,
)
from shardmq.broker.front_door.publish.once import Asked, Once, Wanted
from shardmq.broker.front_door.publish.publisher import Held, Publisher, PublishingChannel, Targets
from shardmq.broker.front_door.publish.replies import Replies
from shardmq.broker.front_door.publish.reserving import Reservation, Reserving, wanted
from shardmq.broker.front_door.publish.scope import PLACES_MAX, Alone, Places, Scope
from shardmq.broker.model import checks, own_letters
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.model.changes import ExchangePut, QueuePut
from shardmq.broker.routing import (
    delaying,
    goes_always_alike,
    goes_by_key,
    keeping,
    route,
    route_message,
    spread_of,
)
from shardmq.broker.shared import rights
from shardmq.broker.shared.deduplication import Copy, Rule, Seen
from shardmq.broker.shared.reading import is_stream
from shardmq.shardd.wire import packer, routes

if TYPE_CHECKING:
    from shardmq.broker.front_door.publish.tracing import Tracing

# Queue ids in one record: their count is a u16.
QUEUES_MAX = 65535
EXCHANGE, QUEUE = "exchange", "queue"
# What a message held by a transaction takes beside its bytes.
HELD_MESSAGE_BYTES = 1024

SPREAD = {
    "rendezvous": routes.RENDEZVOUS,
    "jump": routes.JUMP,
    "modulus": routes.MODULUS,
    "chance": routes.CHANCE,
}

_CHANNEL_OF = struct.Struct("<6xH")


NO_COPIES = Copies([], [])  # never changed


def _never() -> bool:
    return False


class _AskFirst(Exception):
    """This message of an event has an id that some shard has to be asked about."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class CatalogSource(Protocol):
    """Holds the copy of the catalog that is in force; another object after a snapshot."""

    catalog: Catalog


class Publishing:
    """All publishing of this front door."""

    def __init__(
        self,
        source: CatalogSource,
        links: ShardLinks,
        counts: Counts | None = None,
        *,
        set_timestamp: bool = False,
        once: Once | None = None,
        replies: Replies | None = None,
    ) -> None:
        self._source = source
        self._replies = replies or Replies(links, counts)
        self._is_full = (
            False  # the packer stopped, for what goes to many queues was enough for one slice
        )
        self._far_queue = 0  # of a consumer here, to which what comes next does not go straight
        self._counts = counts or Counts()
        self._set_timestamp = set_timestamp
        self.links = links
        self._reserving = Reserving(links)
        # As long as some client holds them.
        self._scopes: WeakValueDictionary[tuple[str, str], Scope] = WeakValueDictionary()
        self.exchange_counts = ExchangeCounts()
        self.answers_due: list[Confirms] = []  # whose acks and nacks
        self._dropped = 0  # here, beside those that the packer dropped
        self.tracing: Tracing | None = None  # nothing is traced
        self.duplicates = 0  # dropped at exchanges and queues that want each message once
        self._seen: dict[tuple[str, str, str], Seen] = {}  # by kind, vhost and name
        self.once = once  # asked instead, where there are several front doors
        self._asked: Asked | None = None  # its answers about what is just being sent
        self._committing: set[asyncio.Task[asyncio.Future[bool]]] = set()  # transactions

    @property
    def catalog(self) -> Catalog:
        return self._source.catalog

    @property
    def unroutable_dropped(self) -> int:
        """Messages that had no queue to go to and were not mandatory."""
        return self._dropped + self.links.packer.unroutable

    def scope(self, vhost: str, user: str) -> Scope:
        scope = self._scopes.get((vhost, user))
        if scope is None:
            scope = self._scopes[vhost, user] = Scope(vhost, user, self.exchange_counts.of(vhost))
        return scope

    def catalog_changed(self, something_went: bool = True) -> None:
        """Every route is looked up anew. `something_went`: not only new things came."""
        for reference in self._scopes.valuerefs():
            if (scope := reference()) is not None:
                scope.forget()
        if self.once is not None:
            self.once.catalog_changed(self.catalog)
        if not something_went:
            return
        self.exchange_counts.forget(
            self.catalog, lambda vhost: any(of == vhost for of, _ in self._scopes)
        )
        for kind, vhost, name in list(self._seen):
            there = self.catalog.exchange if kind == EXCHANGE else self.catalog.queue
            if there(vhost, name) is None:
                del self._seen[kind, vhost, name]

    def confirms(self, client: Publisher, channel: int) -> Confirms:
        return Confirms(client, channel, self.answers_due, self._counts)

    def end_of_pass(self) -> None:
        """Write the acks and nacks that became due."""
        due = self.answers_due.copy()
        self.answers_due.clear()
        for confirms in due:
            confirms.client.write(confirms.answers())

    # -- a read's publishes -----------------------------------------------------------------------

    def publishes(
        self, client: Publisher, event: Publishes, is_over: Callable[[], bool] = _never
    ) -> Collection[tuple[int, Publishes]]:
        """Route and pack the event's messages in order; errors end their channel and drop what it sent behind.

        Messages of the channels `event.without` are left out. Asks `is_over` behind each message that needed
        a decision; if so, or if what goes to many queues was enough for one time slice, `event.done` says
        how far it came, and the next call goes on there. Gives, by channel, what has to be given to
        publish_once(), before anything that the channel sends later.
        """
        to_ask: list[tuple[int, Publishes]] | None = None
        now_ms = time.time_ns() // 1_000_000
        at = event.done
        if not event.counted:
            self._take_in(event, now_ms)
        while at < event.count:
            self._is_full = False
            number = _CHANNEL_OF.unpack_from(event.table, at * ROW)[0]
            channel = client.publishing_channel(number)
            if channel is None or number in event.without:
                at += 1
                continue
            if channel.transaction is not None:
                self._decide(client, channel, event, at, now_ms)
                at += 1
            else:
                try:
                    at = self._pack(client, channel, event, at, now_ms)
                except _AskFirst as ask:
                    to_ask = [*(to_ask or ()), *copies_by_channel(event, {number}, ask.at).items()]
                    event.without = {*event.without, number}
                    at = ask.at + 1
            # What the packer is told to pass by holds for the very next message.
            may_stop = event.done < at < event.count and not self._far_queue
            if may_stop and (self._is_full or is_over()):
                break
        event.done = at
        return to_ask or ()

    def _take_in(self, event: Publishes, now_ms: int) -> None:
        """Count an event that comes for the first time, and stamp its messages if that is asked for."""
        event.counted = True
        self._counts.received += event.count
        self._counts.sizes.add(event.table)
        if (
            self._set_timestamp
            and (stamped := frames.stamped(event.buffer, event.table, now_ms // 1000)) is not None
        ):
            event.buffer, event.table = stamped

    def _pack(
        self, client: Publisher, channel: PublishingChannel, event: Publishes, at: int, now_ms: int
    ) -> int:
        """As many of the channel's messages as go without a decision, and the one that needs it."""
        confirms, scope, links = channel.confirms, client.scope, self.links
        assert scope is not None
        if scope.vhost != links.vhost:
            links.use_vhost(scope.vhost)
        far_queue, self._far_queue = self._far_queue, 0
        packed, why = links.packer.pack(
            scope.routes,
            event.buffer,
            event.table,
            at,
            client.id,
            confirms.next_seq if confirms else 0,
            now_ms,
            event.lasting,
            far_queue,
        )
        if packed > at:
            if confirms and links.packer.in_sequence:
                confirms.in_sequence = True
            self._account(client, channel, packed - at)
        if why == packer.DONE:
            return packed
        self._is_full = why == packer.FULL
        if why == packer.UNKNOWN:
            try:
                self._learn(scope, line_of(event, packed))
            except (ChannelException, ConnectionException) as error:
                client.fail(error, channel.number)
                return packed + 1
        elif why == packer.ASK and _asks_for_replies(event, packed) and channel.reply_to:
            _name_repliers(client, event)
        elif why in (packer.ASK, packer.UNROUTABLE):
            self._decide(client, channel, event, packed, now_ms)
            return packed + 1
        elif why == packer.NEAR:
            return packed + self._reply(client, channel, event, packed, now_ms)
        return packed

    def _reply(
        self, client: Publisher, channel: PublishingChannel, event: Publishes, at: int, now_ms: int
    ) -> int:
        """Messages for a direct reply-to consumer of this front door: how many of them are done with."""
        queue_id, count = self.links.packer.near_queue, self.links.packer.near_count
        requester = self._replies.here.get(queue_id)
        if requester is None:  # it left
            self._decide(client, channel, event, at, now_ms)
            return 1
        if not requester.takes(wanted=count > 0):
            self._far_queue = queue_id
            return 0
        self._replies.hand_over(requester, event, at, count)
        self.exchange_counts.of(self.links.vhost).add(b"", count, count)
        self._account(client, channel, count)
        return count

    def _account(
        self, client: Publisher, channel: PublishingChannel, count: int, copies: Copies = NO_COPIES
    ) -> None:
        """Remember who waits for the batches that were just added to."""
        touched = self.links.packer.take_touched()
        client.feeds(touched)
        channel.published += count
        for copy in copies.first:
            self.watch(copy, touched)
        if channel.confirms is None:
            return
        self._counts.received_confirm += count
        if not copies.again:
            self.links.wait_for(touched, channel.confirms.wait(count, touched.bit_count()))
            return
        waiting = channel.confirms.wait(count, touched.bit_count() + len(copies.again))
        self.links.wait_for(touched, waiting)
        for copy in copies.again:
            copy.follow(waiting)

    # -- routes ------------------------------------------------------------------------------------------

    def _learn(self, scope: Scope, line: bytes) -> None:
        """Look the line's exchange and key up, once per catalog version. Raises what the publisher did wrong."""
        known = scope.exchanges.get(line[1 : line[0] + 1])
        if known is not None:
            self._learn_key(scope, known, line)
            return
        exchange, key = exchange_and_key(line)
        self._check(scope, exchange, (key,))
        vhost = self._vhost(scope)
        if vhost.put.is_traced:
            scope.routes.learn(line, routes.CALLER, [], False)
            return
        once = _rule(vhost.exchanges[exchange]) is not None
        if not once and (
            self._learn_spread(scope, vhost, exchange) or self._learn_alike(scope, vhost, exchange)
        ):
            return
        if once or not goes_by_key(vhost.table, exchange):
            scope.routes.learn(line, routes.CALLER, [], False)
            return
        alone = Alone.of(vhost, exchange)
        if alone is not None:
            scope.exchanges[exchange.encode()] = alone
            self._learn_key(scope, alone, line)
            return
        routed = route(vhost.table, exchange, key, None)
        reach = len(routed.queues)
        is_returned = routed.kept and not reach and line[-1] & MANDATORY
        if is_returned or any(_rule(vhost.queues[name]) for name in routed.queues):
            scope.routes.learn(line, routes.CALLER, [], False)
            return
        targets, durable = self._targets(vhost, (*routed.queues, *routed.kept))
        scope.routes.learn(
            line, routes.TARGETS if targets else routes.NOWHERE, targets, durable, reach
        )

    def _learn_key(self, scope: Scope, exchange: Alone, line: bytes) -> None:
        """Of an exchange that is known already."""
        key = line[line[0] + 2 : -1].decode("utf-8", "replace")
        if exchange.is_topic and self.catalog.has_topic_permissions(scope.user, scope.vhost):
            self._check_topics(scope, exchange.name, (key,))
        names = exchange.queues(key)
        if (
            self._replies.here
            and names
            and checks.is_reply_queue(names[0])
            and self._learn_reply(scope, line, names)
        ):
            return
        try:
            places = scope.places[names]
        except KeyError:
            places = self._places(scope, names)
        if places is None:
            scope.routes.learn(line, routes.CALLER, [], False)
        else:
            scope.routes.learn(
                line, routes.TARGETS if names else routes.NOWHERE, *places, len(names)
            )

    def _learn_reply(self, scope: Scope, line: bytes, names: tuple[str, ...]) -> bool:
        """Of a queue for direct replies, if its consumer is here."""
        vhost = self._vhost(scope)
        if vhost.queues[names[0]].id not in self._replies.here:
            return False
        scope.routes.learn(line, routes.HERE, *self._targets(vhost, names), len(names))
        return True

    def _places(self, scope: Scope, names: tuple[str, ...]) -> tuple[Places, bool] | None:
        """Where these queues lie; None if one of them wants each message once."""
        vhost = self._vhost(scope)
        if len(scope.places) >= PLACES_MAX:
            scope.places.clear()
        wants_once = any(_rule(vhost.queues[name]) for name in names)
        places = scope.places[names] = None if wants_once else self._targets(vhost, names)
        return places

    @staticmethod
    def _learn_spread(scope: Scope, vhost: Vhost, exchange: str) -> bool:
        """Of an exchange that chooses one queue for each key: once for all keys."""
        spread = spread_of(vhost.table, exchange)
        if spread is None:
            return False
        members = []
        for target, weight, seed in spread.lots:
            queue = vhost.queues[target.name]
            if _rule(queue) is not None:
                return False
            members.append((weight, seed, queue.shard, queue.id, queue.durable))
        return scope.routes.learn_spread(exchange.encode(), SPREAD[spread.how], members)

    def _learn_alike(self, scope: Scope, vhost: Vhost, exchange: str) -> bool:
        """Of an exchange that sends all messages the same way: once for all keys."""
        if not goes_always_alike(vhost.table, exchange):
            return False
        routed = route(vhost.table, exchange, "", None)
        if (routed.kept and not routed.queues) or any(
            _rule(vhost.queues[name]) for name in routed.queues
        ):
            return False
        targets, durable = self._targets(vhost, (*routed.queues, *routed.kept))
        kind = routes.TARGETS if targets else routes.NOWHERE
        return scope.routes.learn_exchange(
            exchange.encode(), kind, targets, durable, len(routed.queues)
        )

    def _copy(
        self, thing: ExchangePut | QueuePut | None, message: Message, now_ms: int
    ) -> tuple[Copy | None, bool]:
        """The first copy of the message where that counts, and whether this is another one."""
        rule = _rule(thing)
        if thing is None or rule is None:
            return None, False
        if self.once is not None:
            id = rule.id_of(message.headers)
            copy, again = (
                self._asked.take(thing, id)
                if self._asked is not None and id is not None
                else (None, False)
            )
            self.duplicates += again
            return copy, again
        name = EXCHANGE if isinstance(thing, ExchangePut) else QUEUE, thing.vhost, thing.name
        seen = self._seen.get(name)
        if seen is None or seen.rule != rule:
            seen = self._seen[name] = Seen(rule)
        copy, again = seen.look(message.headers, now_ms)
        self.duplicates += again
        return copy, again

    def _check(self, scope: Scope, exchange: str, keys: Iterable[str]) -> None:
        """May this user publish to this exchange at all, and with these keys."""
        vhost = self._vhost(scope)
        try:
            rights.check_publish(self.catalog, scope.user, scope.vhost, exchange)
        except checks.Refusal as refusal:
            raise _refused(refusal) from None
        found = vhost.exchanges.get(exchange)
        if found is None:
            raise ChannelException(
                404, f"no exchange '{exchange}' in vhost '{scope.vhost}'", *PUBLISH
            )
        if found.internal:
            text = f"cannot publish to internal exchange '{exchange}' in vhost '{scope.vhost}'"
            raise ChannelException(403, text, *PUBLISH)
        self._check_topics(scope, exchange, keys)

    def _check_topics(self, scope: Scope, exchange: str, keys: Iterable[str]) -> None:
        try:
            rights.check_keys(self.catalog, scope.user, scope.vhost, exchange, keys)
        except checks.Refusal as refusal:
            raise _refused(refusal) from None

    def _vhost(self, scope: Scope) -> Vhost:
        vhost = self.catalog.vhost(scope.vhost)
        if vhost is None:
            raise ConnectionException(320, f"vhost '{scope.vhost}' is deleted", *PUBLISH)
        return vhost

    @staticmethod
    def _targets(vhost: Vhost, names: tuple[str, ...]) -> tuple[list[tuple[int, list[int]]], bool]:
        """Queues by shard, and whether one of them is durable."""
        by_shard: dict[int, list[int]] = {}
        durable = False
        for shard, queue in keeping.named(_there(vhost, names)):
            by_shard.setdefault(shard, []).append(queue.id)
            durable = durable or queue.durable
        return _cut(by_shard), durable

    # -- one message at a time --------------------------------------------------------------------------

    def _decide(
        self, client: Publisher, channel: PublishingChannel, event: Publishes, at: int, now_ms: int
    ) -> None:
        """A message that the packer does not decide about: checked, routed by its headers, returned or held by tx."""
        try:
            message, targets = self._decided(client, channel, event, at, now_ms)
            if channel.transaction is not None:
                channel.transaction.publish(
                    (message, targets), len(message.stored) + HELD_MESSAGE_BYTES
                )
                return
        except (ChannelException, ConnectionException) as error:
            client.fail(error, channel.number)
            return
        if self.once is not None and self._wanted(client, message, targets):
            raise _AskFirst(at)
        self.send_one(client, channel, message, targets, now_ms)

    def _decided(
        self, client: Publisher, channel: PublishingChannel, event: Publishes, at: int, now_ms: int
    ) -> Held:
        """Raises what the publisher did wrong."""
        assert client.scope is not None
        message = Message(event, at)
        self._check(client.scope, message.exchange, message.keys)
        message.check(client.user, self._may_impersonate(client.user))
        self._check_keys(client.scope, message)
        message.direct_replies_to(channel)
        return message, self._route_one(client.scope, message, now_ms)

    # -- each message once, over all front doors ----------------------------------------------------------

    def _wanted(self, client: Publisher, message: Message, targets: Targets) -> list[Wanted]:
        """What a shard has to be asked about it."""
        assert client.scope is not None
        vhost = self._vhost(client.scope)
        found = []
        for thing in (vhost.exchanges.get(message.exchange), *_there(vhost, targets)):
            rule = _rule(thing)
            id = rule.id_of(message.headers) if rule is not None else None
            if thing is not None and rule is not None and id is not None:
                found.append(Wanted.of(thing, rule, id, rule.ttl_of(message.headers)))
        return found

    async def ask_once(self, client: Publisher, held: Sequence[Held]) -> Asked | None:
        """Which of these are the first of their ids."""
        if self.once is None:
            return None
        wants: list[Wanted] = []
        client.begin_slice()
        for message, targets in held:
            wants += self._wanted(client, message, targets)
            if client.slice_is_over():
                await client.next_slice()
        return await self.once.ask(wants)

    async def publish_once(
        self, client: Publisher, channel: PublishingChannel, event: Publishes
    ) -> None:
        """Publish a channel's messages from one on that some shard has to be asked about, slice by slice.

        Nothing else of the channel may be done meanwhile. Raises what the publisher did wrong.
        """
        now_ms = time.time_ns() // 1_000_000
        held: list[Held] = []
        failed: ChannelException | ConnectionException | None = None
        try:
            client.begin_slice()
            for at in range(event.count):
                held.append(self._decided(client, channel, event, at, now_ms))
                if client.slice_is_over():
                    await client.next_slice()
        except (ChannelException, ConnectionException) as error:
            failed = error
        asked = await self.ask_once(client, held)
        try:
            client.begin_slice()
            for message, targets in held:
                if client.publishing_channel(channel.number) is not channel:
                    return
                self._asked = asked
                try:
                    self.send_one(client, channel, message, targets, now_ms)
                finally:
                    self._asked = None
                if client.slice_is_over():
                    await client.next_slice()
        finally:
            if asked is not None:
                asked.release()
        if failed is not None:
            raise failed

    def _check_keys(self, scope: Scope, message: Message) -> None:
        """Of what its headers say: the keys of CC and BCC, and where its dead letter goes."""
        try:
            rights.check_keys(self.catalog, scope.user, scope.vhost, message.exchange, message.keys)
            rights.check_dead_letter(
                self.catalog, scope.user, scope.vhost, message.headers, message.keys
            )
        except checks.Refusal as refusal:
            raise _refused(refusal) from None

    def _may_impersonate(self, user: str) -> bool:
        known = self.catalog.users.get(user)
        return known is not None and "impersonator" in known.tags

    def _route_one(self, scope: Scope, message: Message, now_ms: int) -> Targets:
        routed = route_message(self._vhost(scope).table, message.exchange, message.routable())
        if message.delay_ms and any(map(delaying.is_delay_queue, routed.queues)):
            message.check_delay(now_ms)
        return (*routed.queues, *routed.kept) if routed.kept else routed.queues

    def send_one(
        self,
        client: Publisher,
        channel: PublishingChannel,
        message: Message,
        targets: Targets,
        now_ms: int,
    ) -> None:
        """Hand one decided message to its shards, or back to its publisher."""
        copies = self._put(client, channel, message, targets, now_ms)
        if channel.confirms and message.in_sequence:
            channel.confirms.in_sequence = True
        self._account(client, channel, 1, copies)
        if self.tracing is not None:
            self.tracing.published(
                client, channel.number, message.without_bcc(), message.keys, targets
            )

    async def reserve(self, client: Publisher, held: Sequence[Held]) -> Reservation | None:
        """Set room aside for a transaction, None if no queue may refuse it; raises when one does."""
        assert client.scope is not None
        needs = wanted(self._vhost(client.scope), held)
        return await self._reserving.reserve(needs) if needs else None

    async def commit(
        self,
        client: Publisher,
        channel: PublishingChannel,
        held: Sequence[Held],
        asked: Asked | None = None,
        reservation: Reservation | None = None,
    ) -> asyncio.Future[bool]:
        """Publish all of a transaction; the future tells whether all shards have all of it.

        `asked`: by ask_once(); `reservation`: by reserve(), which this ends. Once begun the commit goes on
        to its end, also when whoever waits for it is cancelled: the client of half a transaction that
        has left would never send the other half.
        """
        commit = Commit(self, client, channel, held, asked, reservation)
        committing = asyncio.get_running_loop().create_task(commit.run())
        self._committing.add(committing)
        committing.add_done_callback(self._committing.discard)
        return await asyncio.shield(committing)

    def put_asked(
        self,
        client: Publisher,
        channel: PublishingChannel,
        message: Message,
        targets: Targets,
        now_ms: int,
        asked: Asked | None,
    ) -> Copies:
        """Hand a message to its shards; the caller sees to who waits for them. `asked`: what they said of its ids."""
        self._asked = asked
        try:
            return self._put(client, channel, message, targets, now_ms)
        finally:
            self._asked = None

    def watch(self, copy: Copy, touched: int) -> None:
        """Tell a first copy when the batches being packed for these shards (bit mask) are stored."""
        copy.shards += touched.bit_count()
        self.links.wait_for(touched, copy)
        copy.confirmed()

    def _put(
        self,
        client: Publisher,
        channel: PublishingChannel,
        message: Message,
        targets: Targets,
        now_ms: int,
    ) -> Copies:
        assert client.scope is not None
        vhost = self._vhost(client.scope)
        by_shard: dict[int, tuple[list[int], bool]] = {}
        seq = channel.confirms.next_seq if channel.confirms else 0
        copies = Copies([], [])
        published, exchange = self.exchange_counts.of(vhost.name), message.exchange.encode()
        if self._is_again(
            client, channel, vhost.exchanges.get(message.exchange), message, now_ms, copies
        ):
            published.add(exchange, 1, 0)
            return copies
        waits = False
        handed_over = 0
        takers: list[QueuePut] = []
        for queue in _there(vhost, targets):  # some may be gone when they are committed
            if message.delay_ms and delaying.is_delay_queue(queue.name):
                self._put_off(client, channel, message, queue, seq, now_ms)
                waits = True
            elif queue.arguments and self._is_again(
                client, channel, queue, message, now_ms, copies
            ):
                waits = True
            elif (requester := self._replies.here.get(queue.id)) is not None and requester.takes(
                wanted=not message.in_sequence
            ):
                self._replies.hand_over_one(requester, message.without_bcc())
                waits = True
                handed_over += 1
            else:
                takers.append(queue)
        for shard, queue in keeping.named(takers):
            ids, durable = by_shard.get(shard, ([], False))
            by_shard[shard] = ([*ids, queue.id], durable or queue.durable)
        is_kept = bool(takers) and keeping.is_keeping_queue(takers[-1].name)
        kept = sum(keeping.is_keeping_queue(queue.name) for queue in takers) if is_kept else 0
        published.add(exchange, 1, len(takers) - kept + handed_over)
        reached = waits or (bool(takers) and not keeping.is_keeping_queue(takers[0].name))
        if not reached and message.mandatory:
            if (
                channel.confirms is not None
            ):  # what is due is not to come behind the return, merged with its ack
                client.write(channel.confirms.answers())
            client.write(message.returned(channel.number, client.frame_bytes_max))
            self._counts.returned += 1
        self.links.use_vhost(client.scope.vhost)
        if not reached and not message.mandatory:
            self._dropped += 1
        no_stream = not any(is_stream(queue.arguments) for queue in takers)
        stored = message.stored if no_stream else message.without_bcc()
        marks = own_letters.marks_of(message.headers, keeps_bcc=no_stream)
        for shard, (ids, durable) in by_shard.items():
            self.links.packer.add_stored(
                shard,
                ids,
                stored,
                client.id,
                channel.number,
                seq,
                now_ms + message.late_ms if no_stream else now_ms,  # streams find messages by it
                message.ttl_ms,
                message.priority,
                message.persistent,
                message.persistent and durable,
                in_sequence=message.in_sequence,
                marks=marks,
            )
        return copies

    def _is_again(
        self,
        client: Publisher,
        channel: PublishingChannel,
        thing: ExchangePut | QueuePut | None,
        message: Message,
        now_ms: int,
        copies: Copies,
    ) -> bool:
        """Whether it came to this exchange or queue before. Notes in `copies` what that depends on."""
        copy, again = self._copy(thing, message, now_ms)
        if copy is None:
            return False
        if again:
            copies.again.append(copy)
            return True
        copy.published(
            client.id, channel.number, channel.confirms.next_seq if channel.confirms else 0
        )
        copies.first.append(copy)
        return False

    def _put_off(
        self,
        client: Publisher,
        channel: PublishingChannel,
        message: Message,
        queue: QueuePut,
        seq: int,
        now_ms: int,
    ) -> None:
        """To where it waits. Its record has the time when it is due, and a ttl of 0; its own ttl begins then."""
        assert client.scope is not None
        self.links.use_vhost(client.scope.vhost)
        self.links.packer.add_stored(
            queue.shard,
            [queue.id],
            message.stored,
            client.id,
            channel.number,
            seq,
            min(now_ms + message.delay_ms, delaying.DUE_MAX),
            0,
            delaying.NO_PRIORITY,
            message.persistent,
            message.persistent and queue.durable,
        )


def _refused(refusal: checks.Refusal) -> ChannelException:
    """What is refused ends the channel of who published."""
    return ChannelException(refusal.code, refusal.text, *PUBLISH)


def _rule(thing: ExchangePut | QueuePut | None) -> Rule | None:
    """By which it tells a message that came before."""
    return Rule.of(thing.arguments) if thing is not None and thing.arguments else None


def _asks_for_replies(event: Publishes, at: int) -> bool:
    """And can be rewritten: with broken properties it is refused, one by one."""
    flags = FACTS.unpack_from(event.table, at * ROW)[3]
    return bool(flags & frames.DIRECT_REPLY_TO) and not flags & frames.BAD_PROPERTIES


def _name_repliers(client: Publisher, event: Publishes) -> None:
    """All of the read at once: who asks for direct replies gets its channel's name; where there is none it stays."""
    names = {}
    for number in frames.asking(event.table):
        channel = client.publishing_channel(number)
        if channel is not None and channel.reply_to:
            names[number] = channel.reply_to.encode()
    event.buffer, event.table = frames.with_replies(event.buffer, event.table, names)


def _there(vhost: Vhost, names: Iterable[str]) -> list[QueuePut]:
    """Those of the queues that there are."""
    return [queue for name in names if (queue := vhost.queues.get(name)) is not None]


def _cut(by_shard: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
    """A record names at most QUEUES_MAX queues: more are several records."""
    return [
        (shard, ids[at : at + QUEUES_MAX])
        for shard, ids in by_shard.items()
        for at in range(0, len(ids), QUEUES_MAX)
    ]
