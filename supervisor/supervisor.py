"""The supervisor: start the processes in order, keep them running, drain them in reverse.

The controller comes first. Front doors are started when the first shard has recovered: its queues
are served while the other shards still recover. The broker is ready when all children are. At the
end front doors drain first, then the shards, which write all they hold to the disk, then the
controller. No message passes through this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shardmq.supervisor import systemd
from shardmq.supervisor.child import EXITED, READY, STARTING, Child, describe_exit
from shardmq.supervisor.config import ConfigError, Supervision, kinds
from shardmq.supervisor.directories import (
    BRIDGES_NAME,
    READER_NAME,
    DataDirectory,
    RuntimeDirectory,
    replace_file,
)
from shardmq.supervisor.logs import keep, keep_no_more, set_level
from shardmq.supervisor.member import Member
from shardmq.supervisor.notify import DEPOSED
from shardmq.supervisor.plan import (
    STAGES,
    ChildPlan,
    ClusterPlan,
    children,
    copies_refused,
    replicas_wanted,
    shard_count,
)
from shardmq.supervisor.reload import SETTABLE, flat, reloaded
from shardmq.supervisor.restart import FIRST_WAIT_S, Restarts
from shardmq.supervisor.sockets import Sockets, address, listen, listen_unix
from shardmq.supervisor.sources import Effective
from shardmq.supervisor.tasks import DRAINED, GAVE_UP, REFUSED, Tasks

# What is shown in place of a secret that is set.
HIDDEN = "(hidden)"
# The interval between two checks for silent children and for the watchdog of systemd.
POLL_INTERVAL_S = 0.25
# If a check is late by this time, the whole machine was paused and the children with it.
POLL_LATE_S = 2.0
KILL_WAIT_S = 5.0  # The time that the kernel gets to remove a killed process.
# At this interval systemd hears that recovery goes on, and extends its timeout by EXTEND_BY_S.
EXTEND_EACH_S = 1.0
EXTEND_BY_S = 20.0
# States of a slot without a process: between two lives, or started on demand and not called yet.
WAITING, UNCALLED = "waiting", "uncalled"

log = logging.getLogger("supervisor")

# Its arguments are those of `plan.children`.
Planner = Callable[..., list[ChildPlan]]
# Reads the settings again and lays the given ones over them. Raises ConfigError.
Reread = Callable[[dict[str, Any]], Effective]


class Slot:
    """The state of one child through all its lives."""

    def __init__(self, plan: ChildPlan, policy: Supervision) -> None:
        self.plan = plan
        self.child: Child | None = None
        self.deaths = 0
        self.started_at = 0.0
        self.announced = False  # The log has said that the present life is ready.
        self.last_end = ""  # How the life before the present one has ended.
        self.restarts = Restarts(policy.deaths_max, policy.deaths_within_s)
        self.ready = asyncio.Event()
        self.state_without_child = WAITING if plan.called_at < 0 else UNCALLED
        self.keeper: asyncio.Task[None] | None = None

    def describe(self) -> dict[str, Any]:
        """Return the state of the child as status.json shows it."""
        child = self.child
        return {
            "name": self.plan.name,
            "kind": self.plan.kind,
            "index": self.plan.index,
            "front_door": self.plan.front_door,
            "pid": child.pid if child else 0,
            "state": child.state if child else self.state_without_child,
            "status": child.status if child else "",
            "restarts": self.deaths,
            "started_at": self.started_at,
            "last_end": self.last_end,
            **({"info": child.info} if child and child.info else {}),
        }


class Supervisor:
    """Starts the children, keeps them running and drains them.

    Args:
        effective: The settings of the broker and the source of each.
        cores: The number of cores that the broker may use.
        planner: Makes the plans of the children; tests give another one.
        reread: Reads the settings again at a reload. None means that they stay as they are.
    """

    def __init__(
        self,
        effective: Effective,
        cores: int,
        planner: Planner = children,
        reread: Reread | None = None,
    ) -> None:
        data_dir = str(Path(effective.settings.data_dir).absolute())
        self._data_dir = data_dir
        self.settings = msgspec.structs.replace(effective.settings, data_dir=data_dir)
        self.sources = effective.sources  # The source of each setting that holds now.
        self.boot = os.urandom(8).hex()
        self.slots: list[Slot] = []
        self._reread = reread
        self._overrides: dict[str, Any] = {}  # Settings that `set` has changed, by path.
        self._cores = cores
        self._planner = planner
        self._data = DataDirectory(Path(data_dir))
        self._lifeline: tuple[int, int] = (-1, -1)
        self._member: Member | None = None  # of a cluster
        self._node: ClusterPlan | None = None  # known when the cluster has a place for it
        self._reader_socket: socket.socket | None = None
        self._bridges_socket: socket.socket | None = None
        self._ending = asyncio.Event()
        self._exit_status = DRAINED
        self._stopping = False
        self._is_ready = False
        self._started_at = round(time.time(), 3)
        self._dirty = asyncio.Event()  # status.json is to be written.
        self._writing = threading.Lock()
        self._closed = False
        self._tasks = Tasks(self._give_up)
        self.shards = 0  # of this host, without copies of others; known when the ports are open

    def open(self) -> None:
        """Lock the directories, bind the ports and write the first status.json.

        Raises:
            ConfigError: A setting, a port or a directory cannot be used. Nothing has been changed.
            OSError: The disk refuses a directory.
        """
        self._data.open(wait_s=self.settings.supervision.drain_timeout_s)
        try:
            self.sockets = self._listen()
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
        enabled = self.settings.reader.enabled
        if enabled is True or (enabled == "auto" and importlib.util.find_spec("pyarrow")):
            # The socket stays open as long as the broker runs, so that a call waits while the
            # reader starts.
            self._reader_socket = listen_unix(self.runtime.path / READER_NAME)
        self._bridges_socket = listen_unix(self.runtime.path / BRIDGES_NAME)
        self._kept = keep(str(self.runtime.path), "supervisor")
        self._lifeline = os.pipe()
        if self._member is None:
            self.slots = self._make_slots()
        endpoint = {"runtime_dir": str(self.runtime.path), "http": address(self.sockets.http[0])}
        self._write(self.runtime.path / "status.json", self.describe())
        self._write(self._data.path / "broker.json", this_process() | endpoint)
        self._data.write_version()
        with contextlib.suppress(OSError):  # The code that uses the directory reports the error.
            mode = self._data.path.stat().st_mode
            if mode & 0o007:
                log.warning(
                    "%s can be entered by every user of this host (mode %o)",
                    self._data.path,
                    mode & 0o777,
                )

    def _listen(self) -> Sockets:
        """Bind the ports, and check that the shards in the data directory can be served."""
        held = self._data.shards()
        if self.settings.cluster.name:
            count = max(shard_count(self.settings, self._cores), len(held))
            replicas = replicas_wanted(self.settings)
            self._member = Member(self.settings.cluster, self._data.path, count, held, replicas)
            self._member.failed = self._tasks.ended
            host, self.shards = self._member.address, self._member.shards
            return listen(self.settings, systemd.sockets(), self._cores, host, count)
        # With fewer shards than the directory holds, some queues would be out of reach.
        count, wanted = max(held, default=-1) + 1, self.settings.shards.count
        if wanted != "auto" and wanted < count:
            raise ConfigError(
                f"shards.count: {wanted}, but {self._data.path} holds the queues of {count} shards"
            )
        self._cores = max(self._cores, count)
        self.shards = shard_count(self.settings, self._cores)
        return listen(self.settings, systemd.sockets(), self._cores)

    async def _join_cluster(self, member: Member) -> bool:
        """Wait until this node has its place in the cluster, and make the slots of the children.

        Returns:
            False if the broker ends before that.
        """
        joining = asyncio.create_task(self._take_place(member))
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({joining, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not joining.done():
            joining.cancel()
            return False
        try:
            joining.result()
        except ConfigError as error:
            self._give_up(str(error), REFUSED)
            return False
        self.slots = self._make_slots()
        self._dirty.set()
        return True

    async def _take_place(self, member: Member) -> None:
        """Claim the place of this node and say that it lives. Raises ConfigError."""
        seats = await member.join(lambda text: systemd.tell(f"STATUS={text}"))
        if seats and (why := copies_refused(self.settings)):
            raise ConfigError(why)
        for shard in seats:
            member.open_seat(shard, self.sockets)
        self._node = member.node(self.sockets)
        member.announce(self.sockets)
        await member.check_versions()

    def _take_seat(self, member: Member, shard: int) -> None:
        """Start a process that has a copy of a shard of another node."""
        if self._stopping:
            return
        try:
            member.open_seat(shard, self.sockets)
        except ConfigError as error:
            log.error("no copy of shard %d: %s", shard, error)
            return
        self._node = member.node(self.sockets)
        known = {slot.plan.name for slot in self.slots}
        for plan in self._plans():
            if plan.name not in known:
                slot = Slot(plan, self.settings.supervision)
                self.slots.append(slot)
                slot.keeper = asyncio.create_task(self._keep(slot))
        member.announce(self.sockets)

    def _make_slots(self) -> list[Slot]:
        return [Slot(plan, self.settings.supervision) for plan in self._plans()]

    def _plans(self) -> list[ChildPlan]:
        reader_fd = self._reader_socket.fileno() if self._reader_socket is not None else -1
        bridges_fd = self._bridges_socket.fileno() if self._bridges_socket is not None else -1
        listening = replace(self.sockets.listening(), reader_fd=reader_fd, bridges_fd=bridges_fd)
        of_cluster = () if self._node is None else (self._node,)
        return self._planner(
            self.settings, self._cores, str(self.runtime.path), self.boot, listening, *of_cluster
        )

    async def run(self, announce: Callable[[str], None] = print) -> int:
        """Run the broker until `stop` is called or a child cannot be kept alive.

        Args:
            announce: Called with the line `ready: ...` when all children are ready.

        Returns:
            The exit status of the process: DRAINED, GAVE_UP or REFUSED.
        """
        for work in (self._watch(), self._write_status()):
            self._tasks.start(work)
        try:
            is_member = self._member is None or await self._join_cluster(self._member)
            if is_member and await self._start_stages():
                # The shards have made their directories by now.
                await asyncio.to_thread(self._data.write_version)
                try:
                    announce(self.ready_line())
                except OSError as error:  # Standard output is closed, or its disk is dead.
                    log.error("the ready line cannot be written: %s", error)
                self._is_ready = True
                systemd.tell("READY=1", f"STATUS={self.ready_line()}")
                if self._member is not None and self._member.takes_copies:
                    taking = self._member.take_seats(partial(self._take_seat, self._member))
                    self._tasks.start(taking)
                await self._ending.wait()
            await self._drain()
            if self._member is not None:
                await self._member.leave()
        finally:
            self._close()
        return self._exit_status

    def stop(self) -> None:
        """Drain the children and end. A second call changes nothing.

        A drain has a bound of its own, and cutting it short would lose work.
        """
        if not self._ending.is_set():
            log.info("stopping: front doors drain first, then shards, then the controller")
            self._ending.set()

    def reload(self) -> None:
        """Read the settings again and have the children read their files again.

        The files of the children are certificates and the definitions to load. An error in the
        settings is logged and nothing changes: no child reads a file.
        """
        log.info("settings, certificates and given definitions are to be read anew")
        if self._stopping or self._ending.is_set():
            return
        if self._is_ready:
            systemd.reloading()
        try:
            if self._reread is not None:
                self._apply(self._reread(self._overrides))
        except ConfigError as error:
            log.error("the settings stay as they were: %s", error)
        else:
            for slot in self.slots:
                if slot.child is not None and slot.child.state == READY:
                    slot.child.plan = slot.plan
                    slot.child.reload()
        self._dirty.set()
        if self._is_ready:
            systemd.tell("READY=1", f"STATUS={self.ready_line()}")

    def set(self, key: str, value: str) -> None:
        """Change a setting until the next start, as the controller asks on behalf of a user.

        A key or value that cannot be set is logged and has no effect.

        Args:
            key: The path of the key, one of SETTABLE.
            value: The value as TOML.
        """
        before = self._overrides
        try:
            if key not in SETTABLE:
                raise ConfigError(f"{key}: cannot be set while the broker runs")
            self._overrides = before | {key: tomllib.loads(f"value = {value}")["value"]}
            if self._reread is not None:
                self._reread(self._overrides)
        except (ConfigError, tomllib.TOMLDecodeError) as error:
            log.error("not set: %s", error)
            self._overrides = before
            return
        self.reload()

    def _apply(self, read: Effective) -> None:
        self.settings, changed, later = reloaded(
            self.settings, msgspec.structs.replace(read.settings, data_dir=self._data_dir)
        )
        self.sources = read.sources | {key: self.sources[key] for key in later}
        for key in changed:
            log.info("%s has changed", key)
        for key in later:
            log.warning("%s: another value holds from the next start on", key)
        set_level(self.settings.log_level)
        plans = {plan.name: plan for plan in self._plans()}
        for slot in self.slots:
            slot.plan = plans[slot.plan.name]

    def ready_line(self) -> str:
        """Return the line that says that the broker is ready, with one address of each protocol."""
        addresses = self.sockets.addresses().items()
        return "ready: " + " ".join(f"{name}={where}" for name, where in addresses)

    def describe(self) -> dict[str, Any]:
        """Return the state of the broker and its children, the content of status.json."""
        settings = {
            key: HIDDEN if value and kinds()[key].secret else value
            for key, value in flat(self.settings).items()
        }
        return {
            "pid": os.getpid(),
            "started_at": self._started_at,
            **self.sockets.addresses(),
            "listeners": self.sockets.listeners(),
            "log_level": self.settings.log_level,
            "settings": settings,
            "sources": {key: self.sources[key] for key in settings},
            "boot": self.boot,
            "children": [slot.describe() for slot in self.slots],
        }

    # -- start and restart ---------------------------------------------------------------------

    async def _start_stages(self) -> bool:
        """Start the stages in their order. False means that the broker ends before it is ready."""
        for kind in STAGES:
            stage = [slot for slot in self.slots if slot.plan.kind == kind]
            for slot in stage:
                slot.keeper = asyncio.create_task(self._keep(slot))
            needed = [slot for slot in stage if slot.plan.needed]
            if not await self._wait_until_ready(needed, 1 if kind == "shard" else len(needed)):
                return False
        needed = [slot for slot in self.slots if slot.plan.needed]
        return await self._wait_until_ready(needed, len(needed))

    async def _wait_until_ready(self, slots: Sequence[Slot], enough: int) -> bool:
        """Wait until `enough` of the slots have been ready once.

        Returns:
            False if the broker ends before that.
        """
        ending = asyncio.create_task(self._ending.wait())
        pending = {asyncio.create_task(slot.ready.wait()) for slot in slots}
        missing = len(pending) - enough
        try:
            while len(pending) > missing and not self._ending.is_set():
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait({ending, *pending}, return_when=first)
                pending -= done
        finally:
            for task in (ending, *pending):
                task.cancel()
        return not self._ending.is_set()

    async def _keep(self, slot: Slot) -> None:
        """Live one life after another, until the broker stops or the child dies too often."""
        clock = asyncio.get_running_loop().time
        while not self._stopping:
            if slot.plan.called_at >= 0:
                await self._wait_for_call(slot)
            status = await self._live(slot)
            if self._stopping:
                return
            if self._node is not None and status == DEPOSED:
                await asyncio.sleep(FIRST_WAIT_S)
                continue
            if slot.plan.called_at >= 0 and status == 0:
                slot.child = None  # It had nothing to do any more, and waits for the next call.
                continue
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
                why = f"{slot.plan.name} died too often, at last with {slot.last_end}"
                return self._give_up(f"{why}: giving up, the broker stops", GAVE_UP)
            slot.state_without_child = WAITING
            slot.child = None
            self._dirty.set()
            await asyncio.sleep(wait_s)

    async def _wait_for_call(self, slot: Slot) -> None:
        """Wait until a process connects to the socket of a child that is started on demand."""
        slot.state_without_child = UNCALLED
        self._dirty.set()
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(slot.plan.called_at, called.set)
        try:
            await called.wait()
        finally:
            loop.remove_reader(slot.plan.called_at)

    async def _live(self, slot: Slot) -> int:
        """Start a child, wait for its end and return its exit status; -1 if it did not start."""
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
        if self._stopping:  # The stop came while the process was being made.
            child.signal(signal.SIGTERM)
        status = await child.wait()
        # SIGTERM ends a child that has not begun to handle signals.
        intended = self._stopping and status in (0, -signal.SIGTERM)
        intended = intended or (self._node is not None and status == DEPOSED)
        intended = intended or (slot.plan.called_at >= 0 and status == 0)
        level = logging.INFO if intended else logging.ERROR
        why = f": {child.info['failure']}" if "failure" in child.info else ""
        slot.last_end = f"{describe_exit(status)}{why}"
        log.log(level, "%s (pid %d) ended: %s", slot.plan.name, child.pid, slot.last_end)
        self._send_clients_elsewhere(slot)
        return status

    def _send_clients_elsewhere(self, dead: Slot) -> None:
        """Stop listening for a shard that has ended and was a front door, if another one is ready.

        The next process of the shard listens when it has recovered. A front door alone is back
        before that, so its connections wait.
        """
        door = dead.plan.front_door
        if door is None or dead.plan.kind != "shard" or self._stopping:
            return
        for slot in self.slots:
            if slot.plan.front_door is not None and slot.child and slot.child.state == READY:
                return self.sockets.stop_listening(door)

    def _changed(self, slot: Slot) -> None:
        child = slot.child
        if child is not None and child.state == READY and not slot.announced:
            slot.announced = True
            slot.restarts.became_ready()
            slot.ready.set()
            log.info("%s ready, pid %d", slot.plan.name, child.pid)
            if child.plan != slot.plan:  # A reload came while the child was starting.
                child.plan = slot.plan
                child.reload()
        self._dirty.set()

    def _give_up(self, why: str, status: int) -> None:
        log.critical("%s", why)
        self._exit_status = status
        self._ending.set()

    # -- watch -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Kill silent children, and keep the watchdog and the start timeout of systemd quiet."""
        clock = asyncio.get_running_loop().time
        watchdog_s = systemd.watchdog_interval_s()
        next_watchdog, next_extend = clock(), clock()
        polled_at = clock()
        while True:
            now = clock()
            pause_s, polled_at = now - polled_at, now
            if pause_s >= POLL_LATE_S:
                # Nobody knows yet what the children have sent in the pause, or could not send.
                log.warning(
                    "nothing ran here for %.1f s: the machine was paused, or is very busy", pause_s
                )
                for slot in self.slots:
                    if slot.child is not None:
                        slot.child.unheard(pause_s, now)
            for slot in self.slots:
                self._kill_if_silent(slot, now)
            if watchdog_s is not None and now >= next_watchdog:
                systemd.tell("WATCHDOG=1")
                next_watchdog = now + watchdog_s
            starting = not all(slot.ready.is_set() for slot in self.slots if slot.plan.needed)
            if (starting or self._stopping) and now >= next_extend:
                systemd.tell(
                    f"EXTEND_TIMEOUT_USEC={int(EXTEND_BY_S * 1_000_000)}",
                    f"STATUS={self._progress()}",
                )
                next_extend = now + EXTEND_EACH_S
            await asyncio.sleep(POLL_INTERVAL_S)

    def _progress(self) -> str:
        """Return what a start or a stop waits for, as `systemctl status` shows it."""
        if self._stopping:
            return "stopping"
        waiting = (slot for slot in self.slots if slot.child and not slot.ready.is_set())
        return "; ".join(
            f"{slot.plan.name}: {slot.child.status or slot.child.state}"
            for slot in waiting
            if slot.child
        )

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
        if now - child.heard_at > allowed_s and not child.killed:
            status = f"; it last said: {child.status}" if child.status else ""
            why = f"silent for {allowed_s:g} s while {child.state}{status}"
            log.error("%s (pid %d) %s: killed", slot.plan.name, child.pid, why)
            # The status is shown until the kernel has ended the process, which may take until the
            # disk answers.
            child.info["failure"] = child.status = f"killed: {why}"
            child.signal(signal.SIGKILL)
            self._dirty.set()

    async def _write_status(self) -> None:
        """Write status.json after each change.

        A thread writes the file: the directory may lie on a disk that hangs, and the watch of the
        children must go on.
        """
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
            except OSError as error:  # A full disk must not end the process that keeps the others.
                log.error("%s cannot be written: %s", path.name, error)

    # -- drain -----------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Drain the stages in the reverse order. A child that does not end in time is killed."""
        self._stopping = True
        systemd.tell("STOPPING=1")
        timeout_s = self.settings.supervision.drain_timeout_s
        for kind in reversed(STAGES):
            stage = [slot for slot in self.slots if slot.plan.kind == kind]
            keepers = [slot.keeper for slot in stage if slot.keeper is not None]
            for slot in stage:
                if slot.child is not None and slot.child.state != EXITED:
                    slot.child.signal(signal.SIGTERM)
                elif slot.keeper is not None:
                    slot.keeper.cancel()  # The keeper sleeps between two lives.
            if not keepers:
                continue
            _, late = await asyncio.wait(keepers, timeout=timeout_s)
            for slot in stage:
                if slot.keeper in late and slot.child is not None:
                    log.error(
                        "%s (pid %d) not drained after %g s: killed",
                        slot.plan.name,
                        slot.child.pid,
                        timeout_s,
                    )
                    slot.child.signal(signal.SIGKILL)
            if late:
                await asyncio.wait(late, timeout=KILL_WAIT_S)

    def _close(self) -> None:
        self._tasks.cancel()
        with self._writing:  # A thread may still write status.json.
            self._closed = True
        self.sockets.close()
        if self._reader_socket is not None:
            self._reader_socket.close()
        if self._bridges_socket is not None:
            self._bridges_socket.close()
        keep_no_more(self._kept)
        self.runtime.remove()
        try:
            (self._data.path / "broker.json").unlink(missing_ok=True)
        except OSError as error:
            # The pointer on a dead disk names a process that is gone. shardctl checks that.
            log.error("%s stays in %s: %s", "broker.json", self._data.path, error.strerror)
        for fd in self._lifeline:
            os.close(fd)
        self._data.close()
        log.info("stopped")


def this_process() -> dict[str, Any]:
    """Return the process id of this process and the time of its start.

    Another process may get the same id later. The time of the start, in ticks since the start of
    the machine (proc(5): starttime), tells the two apart.
    """
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return {"pid": os.getpid(), "pid_started": int(started)}
