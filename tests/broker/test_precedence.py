"""The controller lets others go first, and long answers leave the processor alone for most of the time."""

from __future__ import annotations

import os
import threading
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from broker.controller.management.turns import REST_SHARE, RESTS_S_MAX, Turns
from shardd.wire.precedence import messages_first


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


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_long_answer_rests_as_its_share_wants_and_not_longer_than_its_reader_waits(worked: list[float]) -> None:
    clock = iter([0.0, *accumulate(worked)])
    turns = Turns(lambda: next(clock))
    rests = [turns.rest_s() for _ in worked]
    assert all(rest >= 0 for rest in rests)
    assert abs(sum(rests) - min(REST_SHARE * sum(worked), RESTS_S_MAX)) < 1e-6
