"""The controller's side of bridges: it tells their process what to run, and keeps the states.

The process is called when the first shovel or link of federation is asked for, and told of nothing
when the last one is gone. `broker/shared/bridging.py` says how the two speak.

A shovel enters this broker at a URI without a host, as the user that the URI names, or without one
as `permissions.INTERNAL_USER`. The HTTP API sees to it that whoever sets the parameter may do that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from shardmq.broker.controller.authority import Authority
from shardmq.broker.controller.demand import Demand, rest_s
from shardmq.broker.controller.federated_bindings import FederatedBindings
from shardmq.broker.controller.peers.shard_links import ShardLinks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    CLUSTER_NAME,
    GLOBAL,
    AnyChange,
    ExchangeDelete,
    ExchangePut,
    ParameterDelete,
    ParameterPut,
    QueueDelete,
    QueuePut,
    VhostDelete,
)
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.federation import (
    UPSTREAM,
    UPSTREAM_SET,
    Link,
    QueueLink,
    faults,
    federating_vhosts,
    is_federating,
    walk,
)
from shardmq.broker.model.policies import POLICY
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
    Pull,
    Run,
    Told,
    key_of,
)
from shardmq.broker.shared.cluster_name import cluster_name

# After a failure the process is called again so much later, at first and at most.
AGAIN_S, AGAIN_S_MAX = 0.25, 5.0
# The process has so long to stop all and to end the call, when nothing is to run any more.
GOODBYE_S_MAX: Final = 5.0
# Changes that may change what is to run, and those that may in vhosts with federated queues.
_CHANGES: Final = frozenset((ParameterPut, ParameterDelete, VhostDelete))
_THINGS: Final = frozenset((QueuePut, QueueDelete, ExchangePut, ExchangeDelete))
GONE_KEPT_MAX: Final = 1000
# To find the links takes at most one part in so many of a processor while queues come and go.
REST_SHARE: Final = 20
REST_S_MAX: Final = 10.0
LINKS_MAX: Final = 5000
FAULTS_LOGGED_MAX: Final = 100  # of upstreams, when the controller starts
FAULT_CHARS_MAX: Final = 500
TOO_MANY: Final = "there are more than {} links: this one and others behind it do not run"

Name = tuple[str, str]  # of a shovel: vhost and name

log = logging.getLogger(__name__)


class Bridges:
    """The bridges that parameters and policies ask for, and their states."""

    def __init__(
        self, authority: Authority, runtime_dir: Callable[[], str], shards: ShardLinks
    ) -> None:
        self._authority = authority
        self._catalog: Catalog = authority.catalog
        self._demand = Demand(authority.catalog, shards)
        self._links: dict[Key, Link] = {}  # that are asked for, LINKS_MAX at most
        self._beyond: Link | None = None  # the first link that is one too many
        self._queue_links: list[QueueLink] = []  # of `_links`
        self._has_queue_links = asyncio.Event()
        self._bindings = FederatedBindings(authority.catalog)
        self._vhosts: frozenset[str] = frozenset()  # whose policies federate
        self._is_stale = True  # the links are to be looked for
        self._rest_s = 0.0  # until the links are looked for because queues have changed
        self._later: asyncio.TimerHandle | None = None
        self._runtime_dir = runtime_dir
        self._states: dict[Key, BridgeState] = {}
        # By bridge: the number of its life, and the value that the life is of.
        self._lives: dict[Key, tuple[int, Any]] = {}
        self._gone: set[Key] = set()  # of `_lives`, those that nobody asks for any more
        self._told_pulling: list[Key] | None = None  # what the process knows; None: tell it
        self._wake = asyncio.Event()
        self._deleting: set[asyncio.Task[None]] = set()

    # -- what others ask -----------------------------------------------------------------------

    def changed(self, changes: list[AnyChange]) -> None:
        """Follow changes of the catalog."""
        kinds = set(map(type, changes))
        self._bindings.changed(changes, kinds)
        if not _CHANGES.isdisjoint(kinds):
            for change in changes:
                if self._changes_links(change):
                    self._is_stale = True
                    self._wake.set()
                elif _changes_orders(change):
                    self._wake.set()
        if not self._vhosts or self._later is not None or _THINGS.isdisjoint(kinds):
            return
        if any(
            isinstance(change, QueuePut | QueueDelete | ExchangePut | ExchangeDelete)
            and change.vhost in self._vhosts
            for change in changes
        ):
            self._later = asyncio.get_running_loop().call_later(self._rest_s, self._rested)

    def _changes_links(self, change: AnyChange) -> bool:
        """Return whether a change that is not of a queue may change which links there are."""
        match change:
            case VhostDelete():
                return change.name in self._vhosts
            case ParameterPut(component=component) | ParameterDelete(component=component):
                return component in (UPSTREAM, UPSTREAM_SET) or (
                    component == POLICY
                    and (
                        change.vhost in self._vhosts
                        or (isinstance(change, ParameterPut) and is_federating(change.value))
                    )
                )
        return False

    def _rested(self) -> None:
        self._later = None
        self._is_stale = True
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

    def links(self) -> list[tuple[Link, BridgeState]]:
        """Return the links of federation and their states.

        If there are too many, the first one that does not run stands for all that do not.
        """
        found = [(link, self._link_state(key, link)) for key, link in self._links.items()]
        if (link := self._beyond) is not None:
            error = TOO_MANY.format(LINKS_MAX)
            found.append(
                (link, BridgeState(key=key_of(link), life=0, state=TERMINATED, error=error))
            )
        return found

    def _link_state(self, key: Key, link: Link) -> BridgeState:
        if why := link.source.obstacle:
            return BridgeState(key=key, life=0, state=TERMINATED, error=why)
        known, life = self._states.get(key), self._lives.get(key)
        if known is not None and life is not None and (known.life, link) == life:
            return known
        return BridgeState(key=key, life=0, state=STARTING)

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
        self._log_faults()
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self._orders():
                continue
            try:
                reader, writer = await asyncio.open_unix_connection(
                    f"{self._runtime_dir()}/{SOCKET_NAME}", limit=LINE_BYTES_MAX
                )
            except OSError as error:
                log.warning("the process of bridges cannot be called: %s", error)
            else:
                listening = asyncio.create_task(self._listen(reader))
                parts = [
                    listening,
                    asyncio.create_task(self._tell_pulling(writer)),
                    asyncio.create_task(self._bindings.tell(writer)),
                ]
                try:
                    if await self._tell(writer, parts):
                        wait_s = AGAIN_S
                        for part in parts[1:]:
                            _end(part)
                        # A close with states unread would be a reset, and the process might not
                        # read what it was told last: that nothing is to run.
                        writer.write_eof()
                        await asyncio.wait([listening], timeout=GOODBYE_S_MAX)
                        continue
                except OSError as error:
                    log.warning("the process of bridges is gone: %s", error)
                finally:
                    for part in parts:
                        _end(part)
                    writer.close()
                    self._states.clear()
            self._wake.set()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, AGAIN_S_MAX)

    def _log_faults(self) -> None:
        """Log which upstreams make no links: an older release has kept them unchecked."""
        broken = (
            (put, fault)
            for put in self._catalog.parameters.values()
            if put.component in (UPSTREAM, UPSTREAM_SET)
            for fault in islice(faults(put.component, put.name, put.value), 1)
        )
        for put, fault in islice(broken, FAULTS_LOGGED_MAX):
            log.warning(
                "%s '%s' in vhost '%s' makes no links: %s",
                put.component,
                put.name,
                put.vhost,
                cut(fault, FAULT_CHARS_MAX),
            )

    async def _tell(self, writer: asyncio.StreamWriter, parts: list[asyncio.Task[None]]) -> bool:
        """Tell the process each change, and return True when there is nothing to run any more.

        Returns False when the process is gone, or when one of the parts of the call has ended.
        """
        told: Run | None = None
        while not any(part.done() for part in parts):
            self._wake.clear()
            run = Run(await self._orders(), cluster_name(self._catalog))
            if run != told:
                told = run
                self._told_pulling = None  # the process forgets what links did that were gone
                writer.write(bridging.line(run))
                await writer.drain()
            if not run.bridges:
                return True
            waking = asyncio.create_task(self._wake.wait())
            await asyncio.wait({waking, *parts}, return_when=asyncio.FIRST_COMPLETED)
            waking.cancel()
        return False

    async def _tell_pulling(self, writer: asyncio.StreamWriter) -> None:
        """Tell the process which links are to take messages."""
        self._told_pulling = None
        while not writer.is_closing():
            await self._has_queue_links.wait()
            began = time.monotonic()
            keys = await self._demand.pulling(self._queue_links)
            took_s = time.monotonic() - began
            if keys != self._told_pulling and not writer.transport.get_write_buffer_size():
                self._told_pulling = keys
                writer.write(bridging.line(Pull(keys)))
            await asyncio.sleep(rest_s(took_s))

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

    async def _orders(self) -> list[Order]:
        """Return what is to run."""
        await self._find_links()
        orders = []
        asked: set[Key] = set()
        for put in self.parameters():
            key: Key = (SHOVEL, put.vhost, put.name)
            asked.add(key)
            life = self._life(key, put.value)
            if obstacle(put.name, put.value) or self.is_paused((put.vhost, put.name)):
                self._states.pop(key, None)
                continue
            orders.append(Order(read(put.vhost, put.name, put.value), life))
        for key, link in self._links.items():
            asked.add(key)
            orders.append(Order(link, self._life(key, link)))
        for gone in self._states.keys() - asked:
            del self._states[gone]
        # The process may still tell of one that is gone: the next of its name has another life.
        self._gone = {key for key in self._lives if key not in asked}
        for gone in [key for key in self._lives if key in self._gone][:-GONE_KEPT_MAX]:
            del self._lives[gone]
            self._gone.discard(gone)
        return orders

    async def _find_links(self) -> None:
        """Find the links that are asked for, and let others have the processor meanwhile."""
        if not self._is_stale:
            return
        self._is_stale = False
        self._vhosts = frozenset(federating_vhosts(self._catalog))
        found: dict[Key, Link] = {}
        beyond = None
        took, began = 0.0, time.monotonic()
        for link in walk(self._catalog):
            if link is not None:
                if len(found) == LINKS_MAX:
                    beyond = link
                    break
                found[key_of(link)] = link
                continue
            took += time.monotonic() - began
            await asyncio.sleep(0)
            began = time.monotonic()
        took += time.monotonic() - began
        if beyond is not None and self._beyond is None:
            log.warning("there are more than %d links of federation: others do not run", LINKS_MAX)
        self._set_links(found, beyond)
        self._rest_s = min(REST_SHARE * took, REST_S_MAX)

    def _set_links(self, links: dict[Key, Link], beyond: Link | None) -> None:
        self._links, self._beyond = links, beyond
        self._queue_links = [
            link
            for link in links.values()
            if isinstance(link, QueueLink) and not link.source.obstacle
        ]
        if self._queue_links:
            self._has_queue_links.set()
        else:
            self._has_queue_links.clear()
        self._bindings.federate(links.values())

    def _life(self, key: Key, value: Any) -> int:
        """Return the number of the life of a bridge that is asked for with this value."""
        life, known = self._lives.get(key, (0, value))
        if known != value or key in self._gone:
            life += 1
            self._gone.discard(key)
        self._lives[key] = life, value
        return life


def _changes_orders(change: AnyChange) -> bool:
    """Return whether a change may change which shovels run, or what bridges are told besides."""
    match change:
        case VhostDelete():
            return True
        case ParameterPut() | ParameterDelete():
            return change.component in (SHOVEL, PAUSED) or (
                change.component == GLOBAL and change.name == CLUSTER_NAME
            )
    return False


def _end(part: asyncio.Task[None]) -> None:
    """End a part of a call of the process, and log why if it has failed."""
    if not part.done():
        part.cancel()
    elif not part.cancelled() and (error := part.exception()) is not None:
        log.error("the process of bridges is called again: internal error", exc_info=error)
