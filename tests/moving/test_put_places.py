"""The new place of a stream answers when what it was told lasts, and syncs nothing before that."""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.shardd.wire import messages as m
from tests.support.faulty_files import FaultyFiles
from tests.support.stream_moving_world import StreamWorld

NEW = m.QueueSpec(77, "/", "q", True, arguments=dict(StreamWorld.arguments), arriving=True)


class Place:
    """The shard that a stream comes to."""

    def __init__(self) -> None:
        self.shard = StreamWorld(1, faults=0.0, kills=0.0).shards[1]
        self.shard.tell(m.CreateQueues(0, [NEW]), m.CONTROLLER)
        self.shard.sync()

    def put(self, request: int) -> None:
        put = m.PutPlaces(request, NEW.id, {b"name": 3})
        self.shard.tell(put, m.CONTROLLER)
        self.shard.turn()

    def answer(self, request: int) -> Any:
        return self.shard.replies.pop(request, None)


def test_positions_are_answered_for_after_a_sync_that_the_shard_does_not_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place()

    def no_sync(*_: Any) -> None:
        pytest.fail("the thread of the shard syncs")

    with monkeypatch.context() as patched:
        patched.setattr(FaultyFiles, "sync", no_sync)
        patched.setattr(FaultyFiles, "sync_directory", no_sync)
        place.put(900)
        sync = place.shard.shard.syncs.begin()
    assert sync is not None and place.answer(900) is None
    sync.run()
    place.shard.shard.syncs.end()
    place.shard.turn()
    assert place.answer(900) == m.Done(900)
    files = place.shard.files.restarted(power_cut=True)
    log = place.shard.world.home(files).open_stream("/", NEW.id, 0).stream
    assert log.positions.get(b"name") == 3


def test_positions_without_room_are_refused_after_the_sync() -> None:
    place = Place()
    place.shard.files.fill()
    place.put(900)
    place.shard.sync()
    refused = place.answer(900)
    assert isinstance(refused, m.Refused) and refused.code == m.NO_ROOM
    place.shard.files.free()
    place.put(901)
    place.shard.sync()
    assert place.answer(901) == m.Done(901)


def test_a_place_that_lacks_messages_does_not_say_that_it_has_all() -> None:
    place = Place()
    for request, behind in ((900, 5), (901, 0)):
        put = m.PutChunks(request, NEW.id, behind, behind, b"", 0, 0)
        place.shard.tell(put, m.CONTROLLER)
        place.shard.sync()
    refused = place.answer(900)
    assert isinstance(refused, m.Refused) and refused.code == m.ELSEWHERE
    assert place.answer(901) == m.Done(901)
