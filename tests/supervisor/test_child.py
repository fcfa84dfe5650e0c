"""One life of one child: heard, signalled, its end told."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shardmq.supervisor.child import EXITED, READY, STARTING, STOPPING, Child, describe_exit
from shardmq.supervisor.plan import ChildPlan

FAKE = "tests.supervisor.fake_child"


class Watched:
    """A child and the list of states it went through."""

    def __init__(self, tmp_path: Path, does: str) -> None:
        section = {"name": "fake", "journal": str(tmp_path / "journal"), "does": does}
        self.states: list[str] = []
        self.changed = asyncio.Event()
        self.child = Child(ChildPlan("fake", 0, FAKE, section), self._note)

    def _note(self) -> None:
        if not self.states or self.states[-1] != self.child.state:
            self.states.append(self.child.state)
        self.changed.set()

    async def until(self, state: str) -> None:
        while self.child.state != state:
            self.changed.clear()
            await self.changed.wait()


@pytest.fixture
async def lifeline() -> AsyncIterator[int]:
    read, write = os.pipe()
    yield read
    os.close(write)
    os.close(read)


async def test_a_child_is_heard_to_be_ready_with_what_it_says(
    tmp_path: Path, lifeline: int
) -> None:
    watched = Watched(tmp_path, "well")
    await watched.child.spawn(lifeline)
    await watched.until(READY)
    assert watched.child.info == {"says": "fake"}
    watched.child.signal(signal.SIGTERM)
    assert await watched.child.wait() == 0
    assert watched.states == [READY, STOPPING, EXITED]


async def test_the_exit_status_of_one_that_dies_at_once_is_told(
    tmp_path: Path, lifeline: int
) -> None:
    watched = Watched(tmp_path, "exits 7")
    assert watched.child.state == STARTING
    await watched.child.spawn(lifeline)
    assert await watched.child.wait() == 7


async def test_a_killed_child_is_told_by_its_signal(tmp_path: Path, lifeline: int) -> None:
    watched = Watched(tmp_path, "well")
    await watched.child.spawn(lifeline)
    await watched.until(READY)
    os.kill(watched.child.pid, signal.SIGKILL)
    assert describe_exit(await watched.child.wait()) == "signal SIGKILL"


async def test_children_drain_when_the_lifeline_ends(tmp_path: Path) -> None:
    read, write = os.pipe()
    watched = Watched(tmp_path, "well")
    await watched.child.spawn(read)
    await watched.until(READY)
    os.close(write)
    assert await watched.child.wait() == 0
    assert "fake orphaned" in (tmp_path / "journal").read_text()
    os.close(read)


async def test_the_settings_of_a_child_are_not_on_its_command_line(
    tmp_path: Path, lifeline: int
) -> None:
    watched = Watched(tmp_path, "well")
    await watched.child.spawn(lifeline)
    await watched.until(READY)
    shown = Path(f"/proc/{watched.child.pid}/cmdline").read_bytes()
    assert b"journal" not in shown and FAKE.encode() in shown
    watched.child.signal(signal.SIGKILL)
    await watched.child.wait()


async def test_what_a_child_writes_is_not_for_all_users(tmp_path: Path, lifeline: int) -> None:
    watched = Watched(tmp_path, "exits 0")
    await watched.child.spawn(lifeline)
    await watched.child.wait()
    assert (tmp_path / "journal").stat().st_mode & 0o007 == 0


async def test_a_child_has_a_session_of_its_own(tmp_path: Path, lifeline: int) -> None:
    watched = Watched(tmp_path, "well")
    await watched.child.spawn(lifeline)
    assert os.getsid(watched.child.pid) == watched.child.pid
    watched.child.signal(signal.SIGKILL)
    await watched.child.wait()
