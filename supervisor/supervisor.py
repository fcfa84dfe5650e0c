"""Start the processes in order, keep them running, drain them in reverse. No message passes through here.

The controller comes first. Front doors are started when the first shard has recovered: its queues are served while the
others still recover. The broker is ready when all are. On the way down front doors go first, then shards, which put all
they hold on disk, then the controller. `run` gives the exit status: 0 drained, 1 given up, 2 a child refused its
settings.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import logging
import os
import signal
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shardmq.supervisor import systemd
from shardmq.supervisor.child import EXITED, READY, STARTING, Child, describe_exit
from shardmq.supervisor.config import ConfigError, Settings, Supervision
from shardmq.supervisor.directories import (
    READER_NAME,
    DataDirectory,
    RuntimeDirectory,
    replace_file,
)
from shardmq.supervisor.logs import keep, keep_no_more, set_level
from shardmq.supervisor.plan import STAGES, ChildPlan, Listening, children
from shardmq.supervisor.reload import SECRET, SETTABLE, flat, reloaded
from shardmq.supervisor.restart import Restarts
from shardmq.supervisor.sockets import Sockets, address, listen, listen_unix

LOOK_INTERVAL_S = 0.25  # how late a silent child or a systemd watchdog may be noticed
# A look that is later than this was kept from the processor, and so were the others: a machine that was paused.
LOOK_LATE_S = 2.0
KILL_WAIT_S = 5.0  # for the kernel to take a killed process away
EXTEND_EACH_S = 1.0  # how often systemd hears that recovery goes on, and how far it is
EXTEND_BY_S = 20.0
DRAINED, GAVE_UP, REFUSED = 0, 1, 2
# States of a child that is not there: between two lives, or nobody has called it.
WAITING, UNCALLED = "waiting", "uncalled"

log = logging.getLogger("supervisor")

Planner = Callable[[Settings, int, str, str, Listening], list[ChildPlan]]
# The settings as they are written now, with these laid over them. Raises ConfigError.
Reread = Callable[[dict[str, Any]], Settings]


class Slot:
    """The place of one child through all its lives."""

    def __init__(self, plan: ChildPlan, policy: Supervision) -> None:
        self.plan = plan
        self.child: Child | None = None
        self.deaths = 0
        self.started_at = 0.0
        self.announced = False  # that its present life is ready
        self.last_end = ""  # how its life before this one ended
        self.restarts = Restarts(policy.deaths_max, policy.deaths_within_s)
        self.ready = asyncio.Event()
        self.state_without_child = WAITING if plan.called_at < 0 else UNCALLED
        self.keeper: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        child = self.child
        return {
            "name": self.plan.name,
            "kind": self.plan.kind,
            "index": self.plan.index,
            "pid": child.pid if child else 0,
            "state": child.state if child else self.state_without_child,
            "status": child.status if child else "",
            "restarts": self.deaths,
            "started_at": self.started_at,
            "last_end": self.last_end,
            **({"info": child.info} if child and child.info else {}),
        }


class Supervisor:
    """`open` takes the lock, the ports and the directories, or raises ConfigError having touched nothing."""

    def __init__(
        self,
        settings: Settings,
        cores: int,
        planner: Planner = children,
        reread: Reread | None = None,
    ) -> None:
        data_dir = str(Path(settings.data_dir).absolute())
        self._data_dir = data_dir
        self.settings = msgspec.structs.replace(settings, data_dir=data_dir)
        self.boot = os.urandom(8).hex()
        self.slots: list[Slot] = []
        self._reread = reread
        self._set: dict[str, Any] = {}  # settings that are others until the next start
        self._cores = cores
        self._planner = planner
        self._data = DataDirectory(Path(data_dir))
        self._lifeline: tuple[int, int] = (-1, -1)
        self._calls: socket.socket | None = None
        self._ending = asyncio.Event()
        self._exit_status = DRAINED
        self._stopping = False
        self._is_ready = False
        self._started_at = round(time.time(), 3)
        self._dirty = asyncio.Event()
        self._writing = threading.Lock()
        self._closed = False
        self._background: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._data.open(wait_s=self.settings.supervision.drain_timeout_s)
        try:
            self._cores = max(self._cores, self._shards_held())
            self.sockets: Sockets = listen(self.settings, systemd.sockets())
        except Exception:
            self._data.undo()
            raise
        self.runtime = RuntimeDirectory(self.settings.runtime_dir, self._data.path)
        try:
            self.runtime.open(wait_s=self.settings.supervision.drain_timeout_s)
        except Exception:
            self.sockets.close()
            self._data.undo()
            raise
        self._calls = self._calls_of_reader()
        self._kept = keep(str(self.runtime.path), "supervisor")
        self._lifeline = os.pipe()
        self.slots = [Slot(plan, self.settings.supervision) for plan in self._plans()]
        where = {"runtime_dir": str(self.runtime.path), "http": address(self.sockets.http[0])}
        self._write(self.runtime.path / "status.json", self.describe())
        self._write(self._data.path / "broker.json", this_process() | where)
        self._data.write_version()
        self._warn_of_readers()

    def _plans(self) -> list[ChildPlan]:
        reader_fd = self._calls.fileno() if self._calls is not None else -1
        listening = replace(self.sockets.listening(), reader_fd=reader_fd)
        return self._planner(
            self.settings, self._cores, str(self.runtime.path), self.boot, listening
        )

    def _calls_of_reader(self) -> socket.socket | None:
        """Where it will be called: open for as long as the broker runs, so that a call waits while it starts."""
        enabled = self.settings.reader.enabled
        if enabled is False or (enabled == "auto" and importlib.util.find_spec("pyarrow") is None):
            return None
        return listen_unix(self.runtime.path / READER_NAME)

    def _warn_of_readers(self) -> None:
        try:
            mode = self._data.path.stat().st_mode
        except OSError:
            return  # whoever needs the directory says what is wrong with it
        if mode & 0o007:
            log.warning(
                "%s can be entered by every user of this host (mode %o)",
                self._data.path,
                mode & 0o777,
            )

    def _shards_held(self) -> int:
        """How many shards the data directory has files of: with fewer, their queues would be out of reach."""
        held, count = self._data.shards_held(), self.settings.shards.count
        if count != "auto" and count < held:
            raise ConfigError(
                f"shards.count: {count}, but {self._data.path} holds the queues of {held} shards"
            )
        return held

    async def run(self, announce: Callable[[str], None] = print) -> int:
        """Until `stop` is called or a child cannot be kept alive."""
        self._background = [
            asyncio.create_task(work) for work in (self._look(), self._write_status())
        ]
        try:
            if await self._start_stages():
                await asyncio.to_thread(
                    self._data.write_version
                )  # shards have made their directories
                _announce(announce, self.ready_line())
                self._is_ready = True
                systemd.tell("READY=1", f"STATUS={self.ready_line()}")
                await self._ending.wait()
            await self._drain()
        finally:
            self._close()
        return self._exit_status

    def stop(self) -> None:
        """Drain and end. Asked again, nothing changes: a drain is bounded, and cutting it short would lose work."""
        if not self._ending.is_set():
            log.info("stopping: front doors drain first, then shards, then the controller")
            self._ending.set()

    def reload(self) -> None:
        """The settings file, certificates and given definitions are read anew; what cannot be used is said."""
        log.info("settings, certificates and given definitions are to be read anew")
        if self._stopping or self._ending.is_set():
            return
        if self._is_ready:
            systemd.reloading()
        try:
            if self._reread is not None:
                self._take(self._reread(self._set))
        except ConfigError as error:
            log.error("the settings stay as they were: %s", error)
        for slot in self.slots:
            if slot.child is not None and slot.child.state == READY:
                slot.child.plan = slot.plan
                slot.child.reload()
        self._dirty.set()
        if self._is_ready:
            systemd.tell("READY=1", f"STATUS={self.ready_line()}")

    def set(self, key: str, value: str) -> None:
        """One setting is another until the next start: somebody asked the controller."""
        try:
            if key not in SETTABLE:
                raise ConfigError(f"{key}: cannot be set while the broker runs")
            before, self._set = (
                self._set,
                self._set | {key: tomllib.loads(f"value = {value}")["value"]},
            )
        except (ConfigError, tomllib.TOMLDecodeError) as error:
            log.error("not set: %s", error)
            return
        try:
            if self._reread is not None:
                self._reread(self._set)
        except ConfigError as error:
            log.error("not set: %s", error)
            self._set = before
            return
        self.reload()

    def _take(self, read: Settings) -> None:
        self.settings, changed, later = reloaded(
            self.settings, msgspec.structs.replace(read, data_dir=self._data_dir)
        )
        for key in changed:
            log.info("%s has changed", key)
        for key in later:
            log.warning("%s: another value holds from the next start on", key)
        set_level(self.settings.log_level)
        for slot, plan in zip(self.slots, self._plans(), strict=True):
            slot.plan = plan

    def ready_line(self) -> str:
        return "ready: " + " ".join(
            f"{name}={where}" for name, where in self.sockets.addresses().items()
        )

    def describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "started_at": self._started_at,
            **self.sockets.addresses(),
            "listeners": self.sockets.listeners(),
            "log_level": self.settings.log_level,
            "settings": {
                key: value for key, value in flat(self.settings).items() if key not in SECRET
            },
            "boot": self.boot,
            "children": [slot.describe() for slot in self.slots],
        }

    # -- up ------------------------------------------------------------------------------------------------

    async def _start_stages(self) -> bool:
        """False when the broker is to end before all are ready."""
        for kind in STAGES:
            stage = [slot for slot in self.slots if slot.plan.kind == kind]
            for slot in stage:
                slot.keeper = asyncio.create_task(self._keep(slot))
            needed = [slot for slot in stage if slot.plan.needed]
            if not await self._ready(needed, 1 if kind == "shard" else len(needed)):
                return False
        needed = [slot for slot in self.slots if slot.plan.needed]
        return await self._ready(needed, len(needed))

    async def _ready(self, slots: Sequence[Slot], enough: int) -> bool:
        waiters = [
            asyncio.create_task(self._ending.wait()),
            asyncio.create_task(_ready(slots, enough)),
        ]
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()
        return not self._ending.is_set()

    async def _keep(self, slot: Slot) -> None:
        """One life after another, until the broker stops or the child dies too often."""
        clock = asyncio.get_running_loop().time
        while not self._stopping:
            await self._called(slot)
            status = await self._live(slot)
            if self._stopping:
                return
            slot.deaths += 1
            if status == REFUSED and not slot.ready.is_set() and slot.plan.needed:
                return self._give_up(f"{slot.plan.name} refused its settings", REFUSED)
            wait_s = slot.restarts.wait_after_death(clock())
            if wait_s is None and not slot.plan.needed:
                wait_s = self.settings.supervision.deaths_within_s
                log.error(
                    "%s died too often: the broker goes on without it, next try in %g s",
                    slot.plan.name,
                    wait_s,
                )
            if wait_s is None:
                why = f"{slot.plan.name} died too often, at last with {slot.last_end}: giving up, the broker stops"
                return self._give_up(why, GAVE_UP)
            slot.state_without_child = WAITING
            slot.child = None
            self._dirty.set()
            await asyncio.sleep(wait_s)

    async def _called(self, slot: Slot) -> None:
        """At once, but for a child that only lives when somebody wants something of it."""
        if slot.plan.called_at < 0:
            return
        slot.state_without_child = UNCALLED
        self._dirty.set()
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(slot.plan.called_at, called.set)
        try:
            await called.wait()
        finally:
            loop.remove_reader(slot.plan.called_at)

    async def _live(self, slot: Slot) -> int:
        """The exit status of one life."""
        child = Child(slot.plan, lambda: self._changed(slot), self.set)
        slot.child, slot.started_at, slot.announced = child, round(time.time(), 3), False
        try:
            await child.spawn(self._lifeline[0], (self._data.lock_fd, self.runtime.lock_fd))
        except OSError as error:
            slot.child = None
            log.error("%s cannot be started: %s", slot.plan.name, error)
            return -1
        log.info("%s started, pid %d", slot.plan.name, child.pid)
        self._dirty.set()
        if self._stopping:  # decided while the process was being made
            child.signal(signal.SIGTERM)
        status = await child.wait()
        meant = self._stopping and status in (
            0,
            -signal.SIGTERM,
        )  # the latter: before it could listen to signals
        level = logging.INFO if meant else logging.ERROR
        why = f": {child.info['failure']}" if "failure" in child.info else ""
        slot.last_end = f"{describe_exit(status)}{why}"
        log.log(level, "%s (pid %d) ended: %s", slot.plan.name, child.pid, slot.last_end)
        return status

    def _changed(self, slot: Slot) -> None:
        child = slot.child
        if child is not None and child.state == READY and not slot.announced:
            slot.announced = True
            slot.restarts.became_ready()
            slot.ready.set()
            log.info("%s ready, pid %d", slot.plan.name, child.pid)
            if child.plan != slot.plan:  # there was a reload while it started
                child.plan = slot.plan
                child.reload()
        self._dirty.set()

    def _give_up(self, why: str, status: int) -> None:
        log.critical("%s", why)
        self._exit_status = status
        self._ending.set()

    # -- meanwhile -----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Kills the silent; keeps systemd's watchdog and its start timeout quiet."""
        clock = asyncio.get_running_loop().time
        watchdog_s = systemd.watchdog_interval_s()
        next_watchdog, next_extend = clock(), clock()
        looked_at = clock()
        while True:
            now = clock()
            self._excuse(now - looked_at, now)
            looked_at = now
            for slot in self.slots:
                self._kill_if_silent(slot, now)
            if watchdog_s is not None and now >= next_watchdog:
                systemd.tell("WATCHDOG=1")
                next_watchdog = now + watchdog_s
            starting = not all(slot.ready.is_set() for slot in self.slots if slot.plan.needed)
            if (starting or self._stopping) and now >= next_extend:
                systemd.tell(
                    f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * 1_000_000)}",
                    f"STATUS={self._awaited()}",
                )
                next_extend = now + EXTEND_EACH_S
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _awaited(self) -> str:
        """What a start or a stop waits for, for `systemctl status`."""
        if self._stopping:
            return "stopping"
        waits = (slot for slot in self.slots if slot.child and not slot.ready.is_set())
        return "; ".join(
            f"{slot.plan.name}: {slot.child.status or slot.child.state}"
            for slot in waits
            if slot.child
        )

    def _excuse(self, seconds: float, now: float) -> None:
        """So long after the look before. What children said in a pause, and what they could not, is not known yet."""
        if seconds < LOOK_LATE_S:
            return
        log.warning("nothing ran here for %.1f s: the machine was paused, or is very busy", seconds)
        for slot in self.slots:
            if slot.child is not None:
                slot.child.unheard(seconds, now)

    def _kill_if_silent(self, slot: Slot, now: float) -> None:
        child = slot.child
        if child is None or child.pid == 0:
            return
        if child.state == READY and child.watched:
            allowed_s = self.settings.supervision.watchdog_s
        elif child.state == STARTING:
            allowed_s = self.settings.supervision.start_timeout_s
        else:
            return
        if child.silent_for(now) > allowed_s and not child.killed:
            status = f"; it last said: {child.status}" if child.status else ""
            why = f"silent for {allowed_s:g} s while {child.state}{status}"
            log.error("%s (pid %d) %s: killed", slot.plan.name, child.pid, why)
            # Shown until the kernel lets it go, which it may not do before the disk answers.
            child.info["failure"] = child.status = f"killed: {why}"
            child.signal(signal.SIGKILL)
            self._dirty.set()

    async def _write_status(self) -> None:
        """In a thread: both directories may lie on a disk that hangs, and whoever watches the others must not."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            await asyncio.to_thread(self._write, self.runtime.path / "status.json", self.describe())

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        with self._writing:
            if self._closed:
                return
            try:
                replace_file(path, content)
            except OSError as error:  # a full disk must not end what keeps the processes running
                log.error("%s cannot be written: %s", path.name, error)

    # -- down ----------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        self._stopping = True
        systemd.tell("STOPPING=1")
        for kind in reversed(STAGES):
            await self._drain_stage([slot for slot in self.slots if slot.plan.kind == kind])

    async def _drain_stage(self, stage: Sequence[Slot]) -> None:
        keepers = [slot.keeper for slot in stage if slot.keeper is not None]
        for slot in stage:
            if slot.child is not None and slot.child.state != EXITED:
                slot.child.signal(signal.SIGTERM)
            elif slot.keeper is not None:
                slot.keeper.cancel()  # asleep between two lives
        if not keepers:
            return
        timeout_s = self.settings.supervision.drain_timeout_s
        _, late = await asyncio.wait(keepers, timeout=timeout_s)
        if late:
            for slot in stage:
                if slot.keeper in late and slot.child is not None:
                    log.error(
                        "%s (pid %d) not drained after %g s: killed",
                        slot.plan.name,
                        slot.child.pid,
                        timeout_s,
                    )
                    slot.child.signal(signal.SIGKILL)
            await asyncio.wait(late, timeout=KILL_WAIT_S)

    def _close(self) -> None:
        for task in self._background:
            task.cancel()
        with self._writing:  # a thread may be at it
            self._closed = True
        self.sockets.close()
        if self._calls is not None:
            self._calls.close()
        keep_no_more(self._kept)
        self.runtime.remove()
        try:
            (self._data.path / "broker.json").unlink(missing_ok=True)
        except OSError as error:  # a dead disk: the pointer names a process that is gone, which shardctl finds out
            log.error("%s stays in %s: %s", "broker.json", self._data.path, error.strerror)
        for fd in self._lifeline:
            os.close(fd)
        self._data.close()
        log.info("stopped")


def _announce(announce: Callable[[str], None], line: str) -> None:
    try:
        announce(line)
    except OSError as error:  # nobody reads standard output any more, or its disk is dead
        log.error("the ready line cannot be written: %s", error)


async def _ready(slots: Sequence[Slot], enough: int) -> None:
    """When `enough` of them have been ready once."""
    waits = [asyncio.create_task(slot.ready.wait()) for slot in slots]
    try:
        for ready in itertools.islice(asyncio.as_completed(waits), enough):
            await ready
    finally:
        for wait in waits:
            wait.cancel()


def this_process() -> dict[str, Any]:
    """A pid alone may be another's one day; this one began so many ticks after the machine (proc(5): starttime)."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return {"pid": os.getpid(), "pid_started": int(started)}
