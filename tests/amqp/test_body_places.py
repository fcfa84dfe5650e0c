"""Bodies that a socket writes to their place give the same events as bytes that are handed in."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shardmq.broker.amqp import Connection, Event
from shardmq.broker.amqp.events import Nothing
from shardmq.broker.amqp.unfinished import BodyPart
from tests.amqp.bytes_of import facts, publish, received, shake_hands

SEEDS = range(150)
SIZES = (0, 1, 5000, 20_000, 60_000, 70_000, 140_000, 300_000, 1_000_000)
PARTS = (4000, 8192, 10_000, 16_384, 131_064)
BEHIND_BYTES = 4096


def connection() -> Connection:
    made = Connection(server_properties={})
    shake_hands(made, 3)
    made.data_to_send()
    return made


def said(at: random.Random) -> bytes:
    """Return publishes of one channel or of two by turns, some of them broken."""
    frames: list[bytes] = []
    for _ in range(at.randint(1, 4)):
        content = at.randbytes(at.choice(SIZES))
        own = publish(1, "e", "k", content, at.choice(PARTS))
        if at.random() < 0.2:
            own = [*own[:2], *publish(1, content=content, part=at.choice(PARTS))[2:]]
        if at.random() < 0.2:
            other = publish(2, "e", "k", at.randbytes(at.choice(SIZES)), at.choice(PARTS))
            own = [each for pair in zip(own, other, strict=False) for each in pair]
        frames += own
    data = bytearray(b"".join(frames))
    if at.random() < 0.4:
        data[at.randrange(len(data))] ^= at.choice((1, 0xFF))
    return bytes(data)


def heard(made: Connection, data: bytes, at: random.Random) -> tuple[list[Event], int]:
    """Return the events of bytes that come in pieces, and how many were written to their place."""
    events: list[Event] = []
    placed = start = 0
    while start < len(data):
        part = made.part
        places = part.places(at.choice((1, 5000, 1 << 20))) if part is not None else None
        if part is None or places is None:
            stop = min(len(data), start + at.choice((1, 7, 100, 5000, 65_536)))
            events += received(made, data[start:stop])
            start = stop
            continue
        places.append(memoryview(bytearray(BEHIND_BYTES)))
        room = min(sum(map(len, places)), len(data) - start)
        count = at.choice((room, room, at.randint(1, room), min(room, len(places[0]) + 3)))
        left, here = count, start
        for place in places:
            size = min(left, len(place))
            place[:size] = data[here : here + size]
            here += size
            left -= size
        start += count
        placed += count
        events += received(made, bytes(made.unfinished.body_came(part, places, count)))
    return events, placed


def said_by(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, Nothing)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_events_are_those_of_the_same_bytes_in_one_piece(seed: int) -> None:
    at = random.Random(seed)
    data = said(at)
    events, _ = heard(connection(), data, at)
    assert facts(said_by(events)) == facts(said_by(received(connection(), data)))


def test_most_of_a_large_body_is_written_to_its_place() -> None:
    data = b"".join(publish(1, "e", "k", bytes(1_000_000), 131_064))
    _, placed = heard(connection(), data, random.Random(3))
    assert placed > 900_000


def test_a_place_that_is_wrong_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    places: Callable[[BodyPart, int], list[memoryview] | None] = BodyPart.places

    def early(part: BodyPart, expected: int) -> list[memoryview] | None:
        found = places(part, expected)
        if found is not None and part.content.whole_place is not None:
            at = part.content.used - 1
            found[0] = part.content.whole_place[at : at + len(found[0])]
        return found

    monkeypatch.setattr(BodyPart, "places", early)
    with pytest.raises(AssertionError):
        for seed in SEEDS:
            test_the_events_are_those_of_the_same_bytes_in_one_piece(seed)
