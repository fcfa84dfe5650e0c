"""A shovel: one try after another to move messages from a source to a destination.

```
             +------------------------ wait: the delay grows with each failure ------------+
             v                                                                             |
   starting: connect to the destination, then to the source; declare; consume              |
             |                                                                             |
             v                                                                             |
   running:  deliveries -> Relay -> publishes; confirms -> Settled -> one ack for many  ---+
             |
             v
   terminated: all that `src-delete-after` asks for has moved, or no further try makes sense
```

A message leaves the source when the destination has confirmed it (`on-confirm`). One that the
destination refuses (basic.nack) goes back into the source's queue at once, as in RabbitMQ, and the
others go on. If anything ends a try, the connections end, and the source requeues what it has no
ack for. So a message may be moved twice, but none is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from pamqp import base, commands

from shardmq.bridges.connection import FRAME_BYTES_MAX, Connection, connect
from shardmq.bridges.destinations import (
    AmqpDestination,
    Destination,
    HttpDestination,
    ensure_queue,
)
from shardmq.bridges.editing import editor
from shardmq.bridges.errors import LinkFailed, PeerSilent, Unread
from shardmq.bridges.relay import Relay
from shardmq.broker.amqp.errors import AmqpException
from shardmq.broker.model import amqp_uri
from shardmq.broker.model.shovels import WHOLE_QUEUE, Shovel
from shardmq.broker.shared.bridging import RUNNING, STARTING, TERMINATED, Order, ShovelState

DELAY_S_MIN: Final = 0.1  # before the next try, if there is one
DELAY_S_MAX: Final = 60.0  # between two tries, if the shovel's own delay is not longer
# The destination confirms nothing for so long, although messages wait for confirms.
CONFIRM_S_MAX: Final = 60.0
# A shovel that ran for so long has not failed at once: the delay begins anew.
STEADY_S: Final = 60.0
CHECK_S: Final = 1.0
# After the destination has refused something the source is not read for so long, at least and at
# most: what is refused comes again at once.
REFUSED_S, REFUSED_S_MAX = 0.05, 1.0
REFUSED: Final = "the destination refuses messages (basic.nack)"
# What left the source before the destination had it is waited for at the end: so long, and at a
# stop, for which the process has `process.STOP_S_MAX`.
FLUSH_S_MAX: Final = 10.0
FLUSH_S_AT_STOP: Final = 2.0
CONSUMER_TAG: Final = "shovel"

log = logging.getLogger("bridges")


class ShovelRunner:
    """Runs one shovel until it is cancelled or done.

    Args:
        order: What is to run.
        cluster: The name of this broker.
        doors: Returns the sockets of the front doors of this host, the one to use first.
        tell: Called after each change of `state.state`.
    """

    def __init__(
        self,
        order: Order,
        cluster: str,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        confirm_s_max: float = CONFIRM_S_MAX,
    ) -> None:
        self.order = order
        shovel = order.shovel
        self.state = ShovelState(vhost=shovel.vhost, name=shovel.name, life=order.life)
        self._shovel = shovel
        self._cluster = cluster
        self._doors = doors
        self._tell = tell
        self._confirm_s_max = confirm_s_max
        self._left: int | None = None  # messages until the end; None: not known, or no end
        self._held = 0  # messages that a silent source may hold for an old connection
        self._at = {"src": 0, "dest": 0}  # the URI that was used last
        self._name = f"Shovel {shovel.name}"
        self._try: _Try | None = None
        self._change(STARTING)

    async def run(self) -> None:
        """Move messages until there is no more to do."""
        while True:
            began, moved, is_over = time.monotonic(), self.state.moved, False
            try:
                await self._run_once()
                self.state.is_done = True
                self._change(TERMINATED)
                return
            except LinkFailed as failed:
                error, is_over = str(failed), isinstance(failed, Unread)
            except AmqpException as failed:
                error = failed.reply_text
            except Exception as failed:
                log.exception("%s in vhost '%s'", self._name, self._shovel.vhost)
                error = f"internal error: {type(failed).__name__}"
            if self.state.moved > moved or time.monotonic() - began > STEADY_S:
                self.state.failures = 0
            if self.state.moved == moved:
                self._at["src"] += 1  # these URIs were of no use: others come first
                self._at["dest"] += not self._shovel.is_http  # which has gone on already
            self.state.failures += 1
            delay = 0.0 if is_over else self._delay_s()
            log.warning(
                "%s in vhost '%s' failed: %s; %s",
                self._name,
                self._shovel.vhost,
                error,
                f"next try in {delay:g} s" if delay else "it is not tried again",
            )
            self.state.error, self.state.pending, self.state.retry_in_s = error, 0, delay
            self._change(STARTING if delay else TERMINATED)
            if not delay:
                return
            await asyncio.sleep(delay)
            self.state.retry_in_s = 0.0

    def update(self) -> None:
        """Bring the numbers of the state up to date."""
        if self._try is not None:
            self._try.count()

    def _delay_s(self) -> float:
        first = self._shovel.reconnect_delay_s
        first = first and max(first, DELAY_S_MIN)
        if self._is_own_loop():
            return 0.0
        return min(first * 2.0 ** min(self.state.failures - 1, 20), max(first, DELAY_S_MAX))

    def _is_own_loop(self) -> bool:
        """Return whether the destination is the very queue that is the source."""
        shovel = self._shovel
        if shovel.is_http or not shovel.src_queue or shovel.src_queue != shovel.dest_queue:
            return False

        def places(uris: list[str]) -> set[tuple[str, int, str]]:
            parsed = map(amqp_uri.parse, uris)
            return {(uri.host, uri.port if uri.host else 0, uri.vhost) for uri in parsed}

        return bool(places(shovel.src_uris) & places(shovel.dest_uris))

    def _change(self, state: str) -> None:
        self.state.state, self.state.since = state, time.time()
        self._tell()

    # -- one try -----------------------------------------------------------------------------------

    async def _run_once(self) -> None:
        """Connect and move messages. Returns when all is moved, raises LinkFailed otherwise."""
        if self._is_own_loop():
            raise LinkFailed("the destination is the queue that is the source")
        opened: list[Connection | Destination] = []
        try:
            destination, frame_bytes_max = await self._open_destination(opened)
            source = await self._open_any("src", self._shovel.src_uris, frame_bytes_max)
            opened.append(source)
            self._try = _Try(self, self._shovel, source, destination, self._confirm_s_max)
            try:
                await self._try.run()
            except Exception:
                if self._shovel.delete_after == WHOLE_QUEUE:
                    # The next try counts what is in the queue: all must be back there before.
                    await source.finish(FLUSH_S_AT_STOP)
                    if self.state.state == RUNNING and isinstance(source.failure, PeerSilent):
                        self._held = self._left or 0
                raise
        finally:
            self._try = None
            for each in reversed(opened):
                each.close()

    async def _open_destination(
        self, opened: list[Connection | Destination]
    ) -> tuple[Destination, int]:
        shovel = self._shovel
        if shovel.is_http:
            at = self._at["dest"] % len(shovel.dest_uris)
            self._at["dest"] = at + 1
            url = shovel.dest_uris[at]
            self.state.dest_uri = amqp_uri.without_credentials(url)
            address = shovel.dest_address
            url = f"{url.rstrip('/')}/{address.lstrip('/')}" if address else url
            http = HttpDestination(url, shovel)
            opened.append(http)
            return http, FRAME_BYTES_MAX
        connection = await self._open_any("dest", shovel.dest_uris, FRAME_BYTES_MAX)
        opened.append(connection)
        amqp = AmqpDestination(connection)
        await amqp.prepare(shovel)
        return amqp, connection.frame_bytes_max

    async def _open_any(self, end: str, uris: list[str], frame_bytes_max: int) -> Connection:
        """Connect to one of the URIs. They are tried in turn, the one that was used last first."""
        errors = []
        for step in range(len(uris)):
            at = (self._at[end] + step) % len(uris)
            shown = amqp_uri.without_credentials(uris[at])
            try:
                connection = await self._open(uris[at], frame_bytes_max)
            except LinkFailed as failed:
                errors.append(f"{shown}: {failed}")
                continue
            self._at[end] = at
            setattr(self.state, f"{end}_uri", shown)
            return connection
        what = "source" if end == "src" else "destination"
        raise LinkFailed(f"{what} {'; '.join(errors)}"[:1000])

    async def _open(self, text: str, frame_bytes_max: int) -> Connection:
        uri = amqp_uri.parse(text)
        doors = self._doors() if uri.is_here else [""]
        if not doors:
            raise LinkFailed("no front door is there")
        error = LinkFailed("no front door is there")
        for door in doors:
            try:
                return await connect(uri, self._name, path=door, frame_bytes_max=frame_bytes_max)
            except LinkFailed as failed:
                error = failed
        raise error

    # -- what a try tells --------------------------------------------------------------------------

    def editing(self, source: Connection, destination: Destination) -> Any:
        own = isinstance(destination, AmqpDestination) and destination.connection.is_own
        return editor(
            self._shovel, self.state.src_uri, self.state.dest_uri, self._cluster, time.time, own
        )

    @property
    def left(self) -> int | None:
        return self._left

    def begin(self, messages: int, queue: str) -> None:
        """Note that the shovel runs, from a queue of that length.

        A whole queue is counted anew in each try, as in RabbitMQ: others may have taken messages
        away. But a source that fell silent may still hold messages for the old connection, and they
        are not in the count, so what was left counts after that. A given number of messages is one
        number for all tries.
        """
        after = self._shovel.delete_after
        if after == WHOLE_QUEUE:
            self._left, self._held = max(messages, self._held), 0
        elif self._left is None and after != -1:
            self._left = after
        self.state.src_queue, self.state.error = queue, ""
        self._change(RUNNING)

    def settled(self, messages: int, refused: int) -> None:
        """Count messages that are settled, of which so many were refused.

        Refused ones count for `src-delete-after` too, as in RabbitMQ.
        """
        state = self.state
        state.moved += messages - refused
        state.refused += refused
        if refused:
            state.error = REFUSED
        elif messages and state.error == REFUSED:
            state.error = ""
        if self._left is not None:
            self._left -= messages


class _Try:
    """One pair of connections, while messages move from one to the other."""

    def __init__(
        self,
        runner: ShovelRunner,
        shovel: Shovel,
        source: Connection,
        destination: Destination,
        confirm_s_max: float,
    ) -> None:
        self._runner, self._shovel = runner, shovel
        self._source, self._destination = source, destination
        self._confirm_s_max = confirm_s_max
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._relay: Relay | None = None
        self._limit = -1
        self._settled = 0
        self._refused: set[int] = set()  # of the numbers above `_settled`
        self._acks = True
        # Why the source is not read: all that is to be moved has been taken, the destination takes
        # no more bytes, or it has refused what it got.
        self._is_stopped = self._is_full = False
        self._resting: asyncio.TimerHandle | None = None
        self._rest_s = 0.0
        self._confirmed_since = self._refused_since = 0  # messages, since the last rest began
        self._is_paused = False
        self._bytes_before = runner.state.moved_bytes

    async def run(self) -> None:
        source, destination, shovel = self._source, self._destination, self._shovel
        source.on_failed = lambda error: self._end(LinkFailed(f"source: {error}"))
        destination.on_failed = lambda error: self._end(LinkFailed(f"destination: {error}"))
        source.on_method = self._heard
        if (failure := destination.failure) is not None:
            raise LinkFailed(f"destination: {failure}")
        queue, messages = await self._declare()
        self._runner.begin(messages, queue)
        left = self._runner.left
        if left is not None and left <= 0:
            return
        self._limit = -1 if left is None else left
        self._acks = shovel.ack_mode != "no-ack" or left is not None
        if isinstance(destination, HttpDestination):
            exchange = key = None
        else:
            exchange = None if shovel.dest_exchange is None else shovel.dest_exchange.encode()
            key = None if shovel.dest_key is None else shovel.dest_key.encode()
        mandatory = bool(shovel.dest_queue) and shovel.ack_mode == "on-confirm"
        edit = self._runner.editing(source, destination)
        relay = Relay(exchange, key, mandatory, edit, source.frame_bytes_max, self._limit)
        self._relay = relay
        destination.on_settled = self._settle
        destination.on_room = self._set_full
        source.keeps_deliveries = True
        source.batches = self._take
        if self._acks and shovel.prefetch:
            prefetch = shovel.prefetch if left is None else min(shovel.prefetch, left)
            qos = commands.Basic.Qos(prefetch_count=prefetch)
            await source.call(qos, commands.Basic.QosOk)
        await source.call(
            commands.Basic.Consume(
                queue=queue,
                consumer_tag=CONSUMER_TAG,
                no_ack=not self._acks,
                arguments=shovel.src_consumer_args,
            ),
            commands.Basic.ConsumeOk,
        )
        flush_s = FLUSH_S_MAX
        try:
            await self._watch(relay)
        except asyncio.CancelledError:
            flush_s = FLUSH_S_AT_STOP
            raise
        finally:
            self._is_stopped = True
            self._pause()
            if self._resting is not None:
                self._resting.cancel()
            unread = await self._flush(flush_s)
            if unread:
                log.warning("Shovel %s in vhost '%s' ends: %s", shovel.name, shovel.vhost, unread)
        if unread:
            raise Unread(unread)

    async def _flush(self, within_s: float) -> str:
        """Wait until the destination has what left the source before; return why it has not."""
        relay, shovel, destination = self._relay, self._shovel, self._destination
        if shovel.ack_mode == "on-confirm" or relay is None or not relay.published:
            return ""
        if shovel.is_http and self._acks:
            return ""  # what the server has not answered is not acknowledged
        if await destination.finish(within_s):
            return ""
        unread = relay.published - destination.settled  # 0 if the destination confirms nothing
        lost = f", up to {unread} messages are lost" if unread else ""
        why = destination.failure or f"it had {within_s:g} s"
        return f"the destination has not read all{lost}: {why}"

    async def _declare(self) -> tuple[str, int]:
        """Return the source's queue and the number of its messages."""
        source, shovel = self._source, self._shovel
        if not shovel.src_exchange:
            queue = shovel.src_queue
            arguments, predeclared = shovel.src_queue_args, shovel.src_predeclared
            return queue, await ensure_queue(source, queue, arguments, predeclared)
        declare = commands.Queue.Declare(exclusive=True, arguments=shovel.src_queue_args)
        made = await source.call(declare, commands.Queue.DeclareOk)
        queue = str(made.queue)
        bind = commands.Queue.Bind(
            queue=queue, exchange=shovel.src_exchange, routing_key=shovel.src_exchange_key
        )
        await source.call(bind, commands.Queue.BindOk)
        return queue, 0

    async def _watch(self, relay: Relay) -> None:
        """Wait for the end, and see to it that confirms come."""
        settled, since = 0, time.monotonic()
        while not self._ended.done():
            await asyncio.wait([self._ended], timeout=CHECK_S)
            now = time.monotonic()
            relay.forget_edited()
            waits = relay.published > self._settled and not self._destination.blocked
            if self._settled != settled or not waits:
                settled, since = self._settled, now
            elif now - since > self._confirm_s_max:
                raise LinkFailed(f"the destination confirms nothing for {self._confirm_s_max:g} s")
        self._ended.result()

    def count(self) -> None:
        relay, state = self._relay, self._runner.state
        if relay is not None:
            state.pending = max(0, relay.published - self._settled)
            state.moved_bytes = self._bytes_before + relay.body_bytes
            state.blocked = self._destination.blocked

    def _take(self, data: bytes, at: int) -> int:
        relay = self._relay
        assert relay is not None
        at, frames = relay.feed(data, at)
        if frames:
            self._destination.write(frames, relay.published)
            if self._shovel.ack_mode != "on-confirm" and not self._shovel.is_http:
                self._settle()
        if 0 <= self._limit <= relay.published and not self._is_stopped:
            self._is_stopped = True
            self._pause()
        return at

    def _settle(self) -> None:
        """Acknowledge what the destination has, and give back what it has refused."""
        settled, refused = self._destination.settled, self._destination.take_refused()
        before, self._settled = self._settled, settled
        if settled == before and not refused:
            return
        for number in refused:
            self._source.send(commands.Basic.Nack(number, multiple=False, requeue=True))
        self._refused.update(refused)
        # The source does not know a refused message any more, and an ack must name one it knows.
        last = settled
        while last in self._refused:
            last -= 1
        if self._acks and last > before:
            self._source.send(commands.Basic.Ack(last, multiple=True))
        given_back = {number for number in self._refused if number <= settled}
        self._refused -= given_back
        self._confirmed_since += settled - before - len(given_back)
        self._refused_since += len(refused)
        self._runner.settled(settled - before, len(given_back))
        left = self._runner.left
        if left is not None and left <= 0:
            self._end(None)
        elif refused and self._resting is None:
            self._rest()

    def _rest(self) -> None:
        """Stop reading the source for a while, because the destination has refused something.

        The while is doubled if most messages since the last one were refused, and halved if not. A
        full destination with a slow consumer confirms a message now and then. To go on at once
        after each confirm would offer all the others again without a pause.
        """
        if self._refused_since > self._confirmed_since:
            self._rest_s = min(2 * self._rest_s or REFUSED_S, REFUSED_S_MAX)
        else:
            self._rest_s = max(self._rest_s / 2, REFUSED_S)
        self._confirmed_since = self._refused_since = 0
        self._resting = asyncio.get_running_loop().call_later(self._rest_s, self._rested)
        self._pause()

    def _rested(self) -> None:
        self._resting = None
        self._pause()

    def _set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        self._pause()

    def _pause(self) -> None:
        """Stop reading the source while there is a reason, and go on when there is none."""
        is_paused = self._is_stopped or self._is_full or self._resting is not None
        if is_paused != self._is_paused:
            self._is_paused = is_paused
            self._source.pause(is_paused)

    def _heard(self, method: base.Frame) -> None:
        if isinstance(method, commands.Basic.Cancel):
            raise LinkFailed("the consumer was cancelled: the source's queue is gone")

    def _end(self, error: LinkFailed | None) -> None:
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()  # it may be that nobody waits any more
