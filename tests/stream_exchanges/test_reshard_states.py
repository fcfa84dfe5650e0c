"""The tables of reshard states are as drawn, and every walk over them comes to an end."""

from __future__ import annotations

import re
from itertools import product

import pytest

from shardmq.broker.controller.resharding import states
from shardmq.broker.controller.resharding.reshard_progress import ReshardProgress, step_of
from shardmq.broker.controller.resharding.states import HOLD_NAMES, HOLDS, STEPS, Event, Step
from shardmq.broker.model.changes import CLOSING, OPEN, SETTLING, QueuePut, ShardOf

LINES = (states.__doc__ or "").splitlines()
NUMBERS = {name: number for number, name in HOLD_NAMES.items()}


def queue(held: int, index: int = 0) -> QueuePut:
    return QueuePut("/", f"q{index}", index + 1, 0, part=ShardOf("e", index, held=held))


def test_the_drawing_of_the_states_of_a_queue_is_the_table() -> None:
    head = next(number for number, line in enumerate(LINES) if line.split()[:2] == ["hold", "back"])
    events = [Event(name) for name in re.split(r"\s{2,}", LINES[head].strip())]
    assert events == list(Event)
    drawn = {}
    for line in LINES[head + 1 : head + 1 + len(NUMBERS)]:
        state, *cells = line.split()
        drawn |= {
            (NUMBERS[state], event): NUMBERS[cell]
            for event, cell in zip(events, cells, strict=True)
            if cell != "."
        }
    assert drawn == HOLDS


def test_the_drawing_of_the_steps_is_the_table() -> None:
    found = [re.fullmatch(r"    (\w+) {2,}\S.*? {2,}(\w+)", line) for line in LINES]
    rows = [
        match.groups()
        for match in found
        if match and match[1] in set(Step) and match[2] in set(Step)
    ]
    drawn: dict[Step, set[Step]] = {}
    for step, following in rows:
        drawn.setdefault(Step(step), set()).add(Step(following))
    assert drawn == STEPS


@pytest.mark.parametrize(("held", "event"), [*product(HOLD_NAMES, Event)])
def test_an_event_that_comes_twice_changes_nothing_more(held: int, event: Event) -> None:
    once = states.after(queue(held), event)
    assert states.after(once, event) == once
    assert states.changed_by(event, [queue(held)]) == ([once] if once != queue(held) else [])


def test_a_queue_is_open_again_after_all_events_or_when_it_is_called_off_early() -> None:
    held = OPEN
    for event in (Event.HOLD_BACK, Event.SHARD_HOLDS_BACK, Event.REBIND, Event.SETTLED):
        called_off = HOLDS.get((held, Event.CALL_OFF), held)
        assert called_off == (SETTLING if held == SETTLING else OPEN)
        held = HOLDS[held, event]
    assert held == OPEN


def test_the_step_follows_from_the_queues_and_from_what_is_known() -> None:
    loses, gains = queue(OPEN), queue(SETTLING, 1)
    progress = ReshardProgress(0.0)
    assert step_of([loses], None) is Step.NONE
    assert step_of([loses, queue(CLOSING, 1)], None) is Step.CLOSING
    assert step_of([loses, gains], None) is step_of([loses, gains], progress) is Step.PASSING
    progress.passed = True
    assert step_of([loses, gains], progress) is Step.SETTLING
    assert step_of([gains], progress) is Step.SETTLED
    progress.gone(loses)
    assert step_of([loses, gains], progress) is Step.SETTLED
    late = ReshardProgress(0.0)
    late.is_given_up = True
    assert step_of([loses, gains], late) is Step.SETTLED
