"""One try after another of a bridge: the states, the delay that grows, and the URIs in turn.

```
             +------------- wait: the delay grows with each failure ------------+
             v                                                                  |
   starting: connect, declare, consume  ---->  running: messages move  ---------+
                                                       |
                                                       v
                                   terminated: all has moved, or no try makes sense
```
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final
from weakref import WeakValueDictionary

from shardmq.bridges.connection import FRAME_BYTES_MAX, Connection, connect
from shardmq.bridges.errors import LinkFailed, Unread
from shardmq.broker.amqp.errors import AmqpException
from shardmq.broker.model import amqp_uri
from shardmq.broker.shared.bridging import RUNNING, STARTING, TERMINATED, BridgeState

DELAY_S_MIN: Final = 0.1  # before the next try, if there is one
DELAY_S_MAX: Final = 60.0  # between two tries, if the bridge's own delay is not longer
# A bridge that ran for so long has not failed at once: the delay begins anew.
STEADY_S: Final = 60.0
# A delay that is spread is so much longer or shorter, so that many bridges do not try at once.
SPREAD: Final = 0.2
# So many connections to one address are opened at once. Those that wait keep the entry alive.
OPENING_MAX: Final = 50
_opening: Final[WeakValueDictionary[tuple[str, int], asyncio.Semaphore]] = WeakValueDictionary()
REASONS_MAX: Final = 10  # that are known to be in the log
REFUSED: Final = "the destination refuses messages (basic.nack)"

log = logging.getLogger("bridges")


class Tries:
    """The tries of one bridge.

    Args:
        state: What is told of the bridge; kept up to date here.
        name: The name of its connections.
        vhost: The vhost of the bridge, for the log.
        first_delay_s: The delay after the first failure; 0 for no other try.
        is_spread: Whether delays are longer or shorter by chance, by up to `SPREAD`.
        doors: Returns the sockets of the front doors of this host, the one to use first.
        tell: Called after each change of `state.state`.
    """

    def __init__(
        self,
        state: BridgeState,
        name: str,
        vhost: str,
        first_delay_s: float,
        doors: Callable[[], list[str]],
        tell: Callable[[], None],
        is_spread: bool = False,
    ) -> None:
        self.state = state
        self.is_hopeless = False  # no other try after a failure
        self.at = {"src": 0, "dest": 0}  # the URI that was used last
        self._name, self._vhost = name, vhost
        self._first_delay_s, self._is_spread = first_delay_s, is_spread
        self._said: set[str] = set()  # of a few texts
        self._logged: set[str] = set()  # why it has failed since it last ran well
        self._doors, self.tell = doors, tell
        self.change(STARTING)

    async def run(self, once: Callable[[], Awaitable[None]], useless: Callable[[], None]) -> None:
        """Call `once` until it returns, because all has moved, or no other try makes sense.

        `useless` is called after a try that has moved nothing.
        """
        state = self.state
        while True:
            began, moved, is_over = time.monotonic(), state.moved, False
            try:
                await once()
                state.is_done = True
                self.change(TERMINATED)
                return
            except LinkFailed as failed:
                error, is_over = str(failed), isinstance(failed, Unread)
            except AmqpException as failed:
                error = failed.reply_text
            except Exception as failed:
                log.exception("%s in vhost '%s'", self._name, self._vhost)
                error = f"internal error: {type(failed).__name__}"
            if state.moved > moved or time.monotonic() - began > STEADY_S:
                state.failures = 0
                self._logged.clear()
            if state.moved == moved:
                useless()
            state.failures += 1
            delay = 0.0 if is_over or self.is_hopeless else self._delay_s()
            if error not in self._logged or not delay:
                if len(self._logged) >= REASONS_MAX:
                    self._logged.clear()
                self._logged.add(error)
                log.warning(
                    "%s in vhost '%s' failed: %s; %s",
                    self._name,
                    self._vhost,
                    error,
                    f"next try in {delay:.3g} s" if delay else "it is not tried again",
                )
            state.error, state.pending, state.retry_in_s = error, 0, delay
            self.change(STARTING if delay else TERMINATED)
            if not delay:
                return
            await asyncio.sleep(delay)
            state.retry_in_s = 0.0

    def running(self) -> None:
        """Note that messages move now."""
        self.state.error = ""
        self.change(RUNNING)

    def say_once(self, text: str) -> None:
        """Log one of a few texts, the first time that it is said of the bridge."""
        if text not in self._said:
            self._said.add(text)
            self.warn(text)

    def warn(self, text: str) -> None:
        log.warning("%s in vhost '%s': %s", self._name, self._vhost, text)

    def change(self, state: str) -> None:
        self.state.state, self.state.since = state, time.time()
        self.tell()

    def settled(self, messages: int, refused: int) -> None:
        """Count messages that are settled, of which so many were refused."""
        state = self.state
        state.moved += messages - refused
        state.refused += refused
        if refused:
            state.error = REFUSED
        elif messages and state.error == REFUSED:
            state.error = ""

    def _delay_s(self) -> float:
        first = self._first_delay_s and max(self._first_delay_s, DELAY_S_MIN)
        delay = min(first * 2.0 ** min(self.state.failures - 1, 20), max(first, DELAY_S_MAX))
        return delay * random.uniform(1 - SPREAD, 1 + SPREAD) if self._is_spread else delay

    # -- connections -------------------------------------------------------------------------------

    async def open_any(
        self, end: str, uris: list[str], frame_bytes_max: int = FRAME_BYTES_MAX, vhost: str = "/"
    ) -> Connection:
        """Connect to one of the URIs. They are tried in turn, the one that was used last first.

        `end` is src or dest. `vhost` is that of a URI that names none.
        """
        errors = []
        for step in range(len(uris)):
            at = (self.at[end] + step) % len(uris)
            shown = amqp_uri.without_credentials(uris[at])
            try:
                connection = await self.open(amqp_uri.parse(uris[at], vhost), frame_bytes_max)
            except LinkFailed as failed:
                errors.append(f"{shown}: {failed}")
                continue
            self.at[end] = at
            setattr(self.state, f"{end}_uri", shown)
            return connection
        what = "source" if end == "src" else "destination"
        raise LinkFailed(f"{what} {'; '.join(errors)}"[:1000])

    async def open(
        self, uri: amqp_uri.AmqpUri, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> Connection:
        """Connect to one broker. Raises LinkFailed."""
        doors = self._doors() if uri.is_here else [""]
        error = LinkFailed("no front door is there")
        opening = _opening.setdefault((uri.host, uri.port), asyncio.Semaphore(OPENING_MAX))
        for door in doors:
            try:
                async with opening:
                    return await connect(
                        uri, self._name, path=door, frame_bytes_max=frame_bytes_max
                    )
            except LinkFailed as failed:
                error = failed
        raise error
