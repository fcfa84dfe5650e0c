"""Moves messages from a source to a destination, while both connections last.

```
   source:  deliveries -> Relay -> publishes      :destination
            ack for many <- Settled <- confirms
            one nack for each message that the destination refuses (basic.nack)
```

A link of exchanges drops messages that have come too far: they are acknowledged without a publish.

A refused message goes back into the source's queue at once, as in RabbitMQ, and the others go on.
The source is not read while the destination takes no more bytes, and for a while after it has
refused something.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from pamqp import base, commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.destinations import Destination
from shardmq.bridges.errors import ChannelClosed, LinkFailed
from shardmq.bridges.relay import Relay
from shardmq.broker.shared.bridging import BridgeState

# The destination confirms nothing for so long, although messages wait for confirms.
CONFIRM_S_MAX: Final = 60.0
CHECK_S: Final = 1.0
# After the destination has refused something the source is not read for so long, at least and at
# most: what is refused comes again at once.
REFUSED_S, REFUSED_S_MAX = 0.05, 1.0
# What left the source before the destination had it is waited for at the end: so long, and at a
# stop, for which the process has `process.STOP_S_MAX`.
FLUSH_S_MAX: Final = 10.0
FLUSH_S_AT_STOP: Final = 2.0
PRECONDITION_FAILED: Final = 406
# How brokers tell the size of a message that is too large.
MESSAGE_SIZE: Final = re.compile(r"message size (\d{1,18})\b")


class Mode(NamedTuple):
    """Says when messages leave the source.

    confirms: when the destination has confirmed them; otherwise when they are written to it.
    acks: the source waits for acks; otherwise messages leave it when it sends them.
    is_http: the destination answers each message.
    """

    confirms: bool
    acks: bool
    is_http: bool = False


class Pump:
    """One pair of connections, while messages move from one to the other.

    Args:
        source: Where a consumer is started after `start`.
        destination: What takes the messages.
        state: What is told of the bridge; `count` brings it up to date.
        settled: Called with the number of messages that are settled without those that were
            dropped, and how many of them were refused. Returns whether these were the last that
            are to move.
        confirm_s_max: The seconds for which the destination may confirm nothing.
    """

    def __init__(
        self,
        source: Connection,
        destination: Destination,
        state: BridgeState,
        settled: Callable[[int, int], bool],
        confirm_s_max: float = CONFIRM_S_MAX,
    ) -> None:
        self._source, self._destination = source, destination
        self._state, self._bytes_before = state, state.moved_bytes
        self._dropped_before, self._dropped = state.dropped, 0
        self._told_settled = settled
        self._confirm_s_max = confirm_s_max
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._relay: Relay | None = None
        self._mode = Mode(confirms=True, acks=True)
        self._limit = -1
        self._settled = self._skipped = 0  # messages; those of them that were dropped
        self._refused: set[int] = set()  # of the numbers above `_settled`
        # Why the source is not read: all that is to be moved has been taken, the destination takes
        # no more bytes, or it has refused what it got.
        self._is_stopped = self._is_full = False
        self._resting: asyncio.TimerHandle | None = None
        self._rest_s = 0.0
        self._confirmed_since = self._refused_since = 0  # messages, since the last rest began
        self._is_paused = False

    def watch_ends(self) -> None:
        """End when a connection fails. Raises LinkFailed if the destination has failed before."""
        source, destination = self._source, self._destination
        source.on_failed = lambda error: self.end(LinkFailed(f"source: {error}"))
        destination.on_failed = lambda error: self.end(
            LinkFailed(f"destination: {error}{self._meant(error)}")
        )
        source.on_method = self._heard
        if (failure := destination.failure) is not None:
            raise LinkFailed(f"destination: {failure}")

    def start(self, relay: Relay, mode: Mode, limit: int = -1) -> None:
        """Take deliveries from now on, `limit` of them; -1 for no limit."""
        self._relay, self._mode, self._limit = relay, mode, limit
        self._destination.on_settled = self._settle
        self._destination.on_room = self._set_full
        self._source.keeps_deliveries = True
        self._source.batches = self._take

    async def run(self) -> None:
        """Wait for the end, and see to it that confirms come. Raises LinkFailed."""
        settled, since = 0, time.monotonic()
        relay = self._relay
        assert relay is not None
        while not self._ended.done():
            await asyncio.wait([self._ended], timeout=CHECK_S)
            now = time.monotonic()
            relay.forget_edited()
            waits = relay.passed > self._settled and not self._destination.blocked
            if self._settled != settled or not waits:
                settled, since = self._settled, now
            elif now - since > self._confirm_s_max:
                raise LinkFailed(f"the destination confirms nothing for {self._confirm_s_max:g} s")
        self._ended.result()

    def stop(self) -> None:
        """Read the source no further."""
        self._is_stopped = True
        self._pause()
        if self._resting is not None:
            self._resting.cancel()

    async def flush(self, within_s: float) -> str:
        """Wait until the destination has what left the source before; return why it has not."""
        relay, mode, destination = self._relay, self._mode, self._destination
        if mode.confirms or relay is None or not relay.published:
            return ""
        if mode.is_http and mode.acks:
            return ""  # what the server has not answered is not acknowledged
        if await destination.finish(within_s):
            return ""
        unread = relay.passed - destination.settled  # 0 if the destination confirms nothing
        lost = f", up to {unread} messages are lost" if unread else ""
        why = destination.failure or f"it had {within_s:g} s"
        return f"the destination has not read all{lost}: {why}"

    def count(self) -> None:
        """Bring the numbers of the state up to date."""
        relay, state = self._relay, self._state
        if relay is not None:
            state.pending = max(0, relay.passed - self._settled)
            state.dropped = self._dropped_before + relay.dropped
            state.moved_bytes = self._bytes_before + relay.body_bytes
            state.blocked = self._destination.blocked

    @property
    def settled(self) -> int:
        """The number of messages up to which all are settled."""
        return self._settled

    def end(self, error: LinkFailed | None) -> None:
        """End `run`, with an error if there is one."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()  # it may be that nobody waits any more

    # -- what comes --------------------------------------------------------------------------------

    def _take(self, data: bytes | memoryview, at: int) -> int:
        relay = self._relay
        assert relay is not None
        at, frames = relay.feed(data, at)
        if frames:
            self._destination.write(frames, relay.published)
        if relay.dropped != self._dropped:
            self._dropped = relay.dropped
            self._destination.skip(relay.take_dropped())
            self._settle()
        elif frames and not self._mode.confirms and not self._mode.is_http:
            self._settle()
        if (0 <= self._limit <= relay.published or relay.unfit) and not self._is_stopped:
            self._is_stopped = True
            self._pause()
        self._end_if_unfit()
        return at

    def _end_if_unfit(self) -> None:
        """End at a message that cannot be moved, when all before it are settled.

        It is the first one of the next try then, and those before it come once.
        """
        relay = self._relay
        if relay is not None and relay.unfit and relay.passed <= self._settled:
            self.end(LinkFailed(relay.unfit))

    def _meant(self, error: LinkFailed) -> str:
        """Return which message the destination has found too large, in brackets; '' if none.

        Brokers tell its size: the first message of that size is larger than all that they took.
        """
        if not isinstance(error, ChannelClosed) or error.code != PRECONDITION_FAILED:
            return ""
        size = MESSAGE_SIZE.search(str(error))
        named = self._relay.first_of(int(size[1])) if size and self._relay is not None else ""
        return f" ({named})" if named else ""

    def _settle(self) -> None:
        """Acknowledge what the destination has, and give back what it has refused."""
        settled, refused = self._destination.settled, self._destination.take_refused()
        before, self._settled = self._settled, settled
        dropped, self._skipped = (
            self._destination.skipped - self._skipped,
            self._destination.skipped,
        )
        if settled == before and not refused:
            return
        for number in refused:
            self._source.send(commands.Basic.Nack(number, multiple=False, requeue=True))
        self._refused.update(refused)
        # The source does not know a refused message any more, and an ack must name one it knows.
        last = settled
        while last in self._refused:
            last -= 1
        if self._mode.acks and last > before:
            self._source.ack_up_to(last)
        given_back = {number for number in self._refused if number <= settled}
        self._refused -= given_back
        self._confirmed_since += settled - before - len(given_back)
        self._refused_since += len(refused)
        if self._told_settled(settled - before - dropped, len(given_back)):
            self.end(None)
        elif refused and self._resting is None:
            self._rest()
        self._end_if_unfit()

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
