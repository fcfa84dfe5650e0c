"""The controller's side of bridges: it tells their process what to run, and keeps the states.

The process is called when the first parameter of a shovel is there, and told of nothing when the
last one is gone. `broker/shared/bridging.py` says how the two speak.

A shovel enters this broker at a URI without a host, as the user that the URI names, or without one
as `permissions.INTERNAL_USER`. The HTTP API sees to it that whoever sets the parameter may do that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from shardmq.broker.controller.authority import Authority
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    ParameterDelete,
    ParameterPut,
    VhostDelete,
)
from shardmq.broker.model.shovels import PAUSED, SHOVEL, obstacle, read
from shardmq.broker.shared import bridging
from shardmq.broker.shared.bridging import (
    LINE_BYTES_MAX,
    SOCKET_NAME,
    STARTING,
    TERMINATED,
    BridgeState,
    Key,
    Order,
    Run,
    Told,
)
from shardmq.broker.shared.cluster_name import cluster_name

# After a failure the process is called again so much later, at first and at most.
AGAIN_S, AGAIN_S_MAX = 0.25, 5.0
# Changes that may change what is to run.
_CHANGES: Final = frozenset((ParameterPut, ParameterDelete, VhostDelete))
GONE_KEPT_MAX: Final = 1000

Name = tuple[str, str]  # of a shovel: vhost and name

log = logging.getLogger(__name__)


class Bridges:
    """The shovels that the parameters ask for, and their states."""

    def __init__(self, authority: Authority, runtime_dir: Callable[[], str]) -> None:
        self._authority = authority
        self._catalog: Catalog = authority.catalog
        self._runtime_dir = runtime_dir
        self._states: dict[Key, BridgeState] = {}
        # By bridge: the number of its life, and the value that the life is of.
        self._lives: dict[Key, tuple[int, Any]] = {}
        self._gone: set[Key] = set()  # of `_lives`, those that nobody asks for any more
        self._wake = asyncio.Event()
        self._deleting: set[asyncio.Task[None]] = set()

    # -- what others ask -----------------------------------------------------------------------

    def changed(self, changes: list[AnyChange]) -> None:
        """Follow changes of the catalog."""
        if not self._wake.is_set() and not _CHANGES.isdisjoint(map(type, changes)):
            self._wake.set()

    def parameters(self) -> Iterator[ParameterPut]:
        """Yield the parameter of each shovel."""
        for put in self._catalog.parameters.values():
            if put.component == SHOVEL:
                yield put

    def is_paused(self, name: Name) -> bool:
        return (name[0], PAUSED, name[1]) in self._catalog.parameters

    def state(self, put: ParameterPut) -> BridgeState:
        """Return the state of a shovel."""
        key = SHOVEL, put.vhost, put.name
        if self.is_paused((put.vhost, put.name)):
            return BridgeState(key=key, life=0, state=bridging.PAUSED)
        if why := obstacle(put.name, put.value):
            return BridgeState(key=key, life=0, state=TERMINATED, error=why)
        known, life = self._states.get(key), self._lives.get(key)
        if known is None or life is None or known.life != life[0] or life[1] != put.value:
            return BridgeState(key=key, life=0, state=STARTING)
        return known

    def restart(self, key: Key) -> None:
        """Start a bridge anew."""
        if key in self._lives:
            life, value = self._lives[key]
            self._lives[key] = life + 1, value
            self._states.pop(key, None)
            self._wake.set()

    # -- the process ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Call the process while there is something to run, until cancelled."""
        wait_s = AGAIN_S
        self._wake.set()
        while True:
            await self._wake.wait()
            if not self._orders():
                self._wake.clear()
                continue
            try:
                reader, writer = await asyncio.open_unix_connection(
                    f"{self._runtime_dir()}/{SOCKET_NAME}", limit=LINE_BYTES_MAX
                )
            except OSError as error:
                log.warning("the process of bridges cannot be called: %s", error)
            else:
                listening = asyncio.create_task(self._listen(reader))
                try:
                    if await self._tell(writer, listening):
                        wait_s = AGAIN_S
                        continue
                except OSError as error:
                    log.warning("the process of bridges is gone: %s", error)
                finally:
                    listening.cancel()
                    writer.close()
                    self._states.clear()
            self._wake.set()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_S_MAX)

    async def _tell(self, writer: asyncio.StreamWriter, listening: asyncio.Task[None]) -> bool:
        """Tell the process each change, and return True when there is nothing to run any more.

        Returns False when the process is gone.
        """
        told: Run | None = None
        while not listening.done():
            self._wake.clear()
            run = Run(self._orders(), cluster_name(self._catalog))
            if run != told:
                told = run
                writer.write(bridging.line(run))
                await writer.drain()
            if not run.bridges:
                return True
            waking = asyncio.create_task(self._wake.wait())
            await asyncio.wait({waking, listening}, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
        return False

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take the states that the process tells."""
        try:
            while text := await reader.readline():
                for state in msgspec.json.decode(text, type=Told).states:
                    key = state.key
                    life = self._lives.get(key)
                    if life is None or life[0] != state.life:
                        continue
                    if state.is_done and key[0] == SHOVEL and not self._is_known_done(key):
                        deleting = asyncio.create_task(self._delete(key, state.life))
                        self._deleting.add(deleting)
                        deleting.add_done_callback(self._deleting.discard)
                    self._states[key] = state
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the process of bridges: %s", error)

    def _is_known_done(self, key: Key) -> bool:
        state = self._states.get(key)
        return state is not None and state.is_done

    async def _delete(self, key: Key, life: int) -> None:
        """Delete the parameter of a shovel that has moved all that it was to move."""
        _, vhost, name = key
        known, put = self._lives.get(key), self._catalog.parameters.get((vhost, SHOVEL, name))
        if known is None or known[0] != life or put is None or put.value != known[1]:
            return
        log.info("shovel '%s' in vhost '%s' has moved all it was to move", name, vhost)
        answer = await self._authority.ask(ParameterDelete(vhost, SHOVEL, name))
        if answer.code:
            log.error("shovel '%s' in vhost '%s' stays: %s", name, vhost, answer.text)

    def _orders(self) -> list[Order]:
        """Return what is to run."""
        orders = []
        asked: set[Key] = set()
        for put in self.parameters():
            key = SHOVEL, put.vhost, put.name
            asked.add(key)
            life = self._life(key, put.value)
            if obstacle(put.name, put.value) or self.is_paused((put.vhost, put.name)):
                self._states.pop(key, None)
                continue
            orders.append(Order(read(put.vhost, put.name, put.value), life))
        for gone in self._states.keys() - asked:
            del self._states[gone]
        # The process may still tell of one that is gone: the next of its name has another life.
        self._gone = {key for key in self._lives if key not in asked}
        for gone in [key for key in self._lives if key in self._gone][:-GONE_KEPT_MAX]:
            del self._lives[gone]
            self._gone.discard(gone)
        return orders

    def _life(self, key: Key, value: Any) -> int:
        """Return the number of the life of a bridge that is asked for with this value."""
        life, known = self._lives.get(key, (0, value))
        if known != value or key in self._gone:
            life += 1
            self._gone.discard(key)
        self._lives[key] = life, value
        return life
