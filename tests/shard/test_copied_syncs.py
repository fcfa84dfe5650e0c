"""A sync that the loop runs confirms nothing before the nodes with copies have answered."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest

from shardmq.shardd.store.errors import StoreFailed
from shardmq.shardd.sync_threads import SyncThreads
from tests.support.readable import is_readable

PATIENCE_S = 60


class OwnSync:
    """The sync of the shard's own disk."""

    def __init__(self) -> None:
        self.runs = 0
        self.fails = False

    def run(self) -> None:
        self.runs += 1
        if self.fails:
            raise StoreFailed("on purpose")


class Syncs:
    """The part that the loop has of `shardd.syncs.Syncs`: `begin` and `end`."""

    def __init__(self) -> None:
        self.sync = OwnSync()
        self.ended = 0

    def begin(self) -> OwnSync:
        return self.sync

    def end(self) -> None:
        if self.sync.fails:
            raise StoreFailed("it did not succeed")
        self.ended += 1


class Copies:
    """Nodes that answer at once, or when they are told to."""

    def __init__(self) -> None:
        self.answer = threading.Event()
        self.error: BaseException | None = None
        self.waits: list[float] = []

    def sync_own(self, act: Callable[[], None]) -> int:
        act()
        return 7

    def is_confirmed(self, number: int, seconds: float = math.inf) -> bool:
        assert number == 7
        self.waits.append(seconds)
        if seconds < math.inf:
            return self.answer.is_set()
        assert self.answer.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return True


class Loop:
    def __init__(self) -> None:
        self.syncs, self.copies = Syncs(), Copies()
        # Begin and end.
        self.threads = SyncThreads(self.syncs, self.copies)  # type: ignore[arg-type]

    def hear(self) -> None:
        """Take in the end of the sync in its thread."""
        assert is_readable(self.threads.messages.fd, PATIENCE_S)
        self.threads.ended(self.threads.messages.fd, 0)


def test_answers_that_come_soon_are_waited_for_in_the_loop() -> None:
    loop = Loop()
    loop.copies.answer.set()
    loop.threads.sync_here()
    assert loop.syncs.ended == 1 and not is_readable(loop.threads.messages.fd, 0)
    assert len(loop.copies.waits) == 1 and loop.copies.waits[0] < 1


def test_a_thread_waits_for_answers_that_are_late_and_syncs_nothing_again() -> None:
    loop = Loop()
    loop.threads.sync_here()
    assert loop.syncs.ended == 0
    loop.copies.answer.set()
    loop.hear()
    assert loop.syncs.ended == 1 and loop.syncs.sync.runs == 1


def test_a_sync_is_counted_once_wherever_it_ends() -> None:
    loop = Loop()
    took_us = loop.threads.messages.took_us
    loop.threads.sync_here()
    assert not any(took_us.counts)
    loop.copies.answer.set()
    loop.hear()
    assert sum(took_us.counts) == 1
    loop.threads.sync_here()
    assert sum(took_us.counts) == 2


def test_a_sync_under_way_is_awaited_with_its_answers() -> None:
    loop = Loop()
    loop.threads.sync_here()
    threading.Timer(0.01, loop.copies.answer.set).start()
    loop.threads.await_sync()
    assert loop.syncs.ended == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [StoreFailed("deposed"), SystemExit()], ids=repr)
def test_a_wait_that_fails_confirms_nothing(error: BaseException) -> None:
    loop = Loop()
    loop.threads.sync_here()
    loop.copies.error = error
    loop.copies.answer.set()
    with pytest.raises(type(error)):
        loop.hear()
    assert loop.syncs.ended == 0


def test_the_failure_of_the_own_disk_is_that_of_the_sync() -> None:
    loop = Loop()
    loop.syncs.sync.fails = True
    with pytest.raises(StoreFailed, match="did not succeed"):
        loop.threads.sync_here()
    assert loop.copies.waits == []
