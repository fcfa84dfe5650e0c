"""Small reads that come fast share passes; a rare message is awaited awake, for a bounded time, if that helps."""

from __future__ import annotations

from broker.pace import RARE_TICKS, VAIN_EACH, VAIN_MAX, Pace

TICK, AWAKE = 0.001, 0.002


def test_a_client_that_sends_rarely_never_waits() -> None:
    pace = Pace(TICK, AWAKE)
    assert all(pace.distance(now) <= 0 for now in (1.0, 1.0 + 2 * TICK, 5.0))


def test_small_passes_keep_a_tick_between_them() -> None:
    pace = Pace(TICK, AWAKE)
    assert pace.distance(1.0) <= 0
    first = pace.distance(1.0 + TICK / 4)
    assert abs(first - TICK * 3 / 4) < 1e-9
    second = pace.distance(1.0 + TICK + TICK / 4)  # the first one ended at 1 + TICK
    assert abs(second - TICK * 3 / 4) < 1e-9


def test_a_large_read_is_not_held_up() -> None:
    pace = Pace(TICK, AWAKE)
    pace.distance(1.0)
    pace.was_large()
    assert pace.distance(1.0 + TICK / 4) <= 0


def test_a_rare_message_is_awaited_until_its_answer_or_the_limit() -> None:
    pace = Pace(TICK, AWAKE)
    pace.distance(1.0)
    assert pace.handed_over(1.0)
    assert pace.still_awake(1.0 + AWAKE / 2)
    pace.answered()
    assert not pace.still_awake(1.0 + AWAKE / 2)
    pace.distance(2.0)
    assert pace.handed_over(2.0)
    assert not pace.still_awake(2.0 + AWAKE)


def test_messages_that_come_fast_are_not_awaited() -> None:
    pace = Pace(TICK, AWAKE)
    pace.distance(1.0)
    assert pace.handed_over(1.0)
    pace.answered()
    pace.distance(1.0 + RARE_TICKS * TICK / 2)
    assert not pace.handed_over(1.0 + RARE_TICKS * TICK / 2)


def test_one_pass_is_awaited_once() -> None:
    pace = Pace(TICK, AWAKE)
    pace.distance(1.0)
    assert pace.handed_over(1.0)
    assert not pace.handed_over(1.0)


def test_waiting_for_answers_that_never_come_is_given_up_but_tried_again() -> None:
    pace = Pace(TICK, AWAKE)
    awake = 0
    for now in range(1, 1001):
        pace.distance(now)
        if pace.handed_over(now):
            awake += 1
            assert not pace.still_awake(now + AWAKE)
    assert VAIN_MAX < awake <= VAIN_MAX + 2 + 1000 // VAIN_EACH
    now = 2000.0
    while not pace.handed_over(now):
        now += 1
        pace.distance(now)
    pace.answered()
    for later in (now + 1, now + 2):
        pace.distance(later)
        assert pace.handed_over(later)
        pace.answered()


def test_no_time_to_stay_awake_means_never() -> None:
    pace = Pace(TICK, 0.0)
    pace.distance(1.0)
    assert not pace.handed_over(1.0)
