"""The controller lets others go first."""

from __future__ import annotations

import os
import threading

from shardmq.shardd.wire.precedence import messages_first


def test_a_thread_that_lets_messages_go_first_takes_a_processor_from_nobody() -> None:
    found: list[tuple[int, int]] = []

    def ask() -> None:  # in a thread of its own: there is no way back without a right
        before = os.sched_getscheduler(0)
        messages_first()
        found.append((before, os.sched_getscheduler(0)))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [(os.SCHED_OTHER, os.SCHED_BATCH)]
