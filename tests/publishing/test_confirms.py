"""Every publish of a confirm channel is answered once, and never before it is stored."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.front_door.publish.confirms import Confirms, Waiting


class Client:
    """Collects answers as the publisher counts them."""

    def __init__(self) -> None:
        self.acked: list[int] = []
        self.nacked: list[int] = []
        self._answered = 0

    def write(self, data: bytes) -> None:
        for at in range(0, len(data), 21):
            kind, channel, size, cls, method, tag, multiple, end = struct.unpack_from(
                ">BHIHHQBB", data, at
            )
            assert (kind, channel, size, cls, end) == (1, 3, 13, 60, 0xCE)
            numbers = range(self._answered + 1, tag + 1) if multiple else [tag]
            (self.acked if method == 80 else self.nacked).extend(numbers)
            self._answered = tag


counts = st.integers(1, 5)
steps = st.lists(
    st.tuples(st.sampled_from(["publish", "confirm", "lose", "refuse"]), counts, st.integers(0, 2))
)


@given(steps)
def test_each_publish_is_answered_once_in_order_and_truly(
    history: list[tuple[str, int, int]],
) -> None:
    client, dirty = Client(), []
    confirms = Confirms(client, 3, dirty)
    open_ones: list[tuple[Waiting, int]] = []
    stored: set[int] = set()
    refused: set[int] = set()
    published = 0
    for what, count, number in history:
        if what == "publish":
            waiting = confirms.wait(count, number)
            numbers = range(published + 1, published + count + 1)
            published += count
            if number == 0:
                stored.update(numbers)
            open_ones += [(waiting, shard) for shard in range(number)]
        elif open_ones:
            waiting, _ = open_ones.pop(number % len(open_ones))
            numbers = range(waiting.first, waiting.last + 1)
            if what == "lose":
                waiting.lost()
                refused.update(numbers)
            else:
                if what == "refuse":
                    confirms.refused.add(waiting.first)
                    refused.add(waiting.first)
                waiting.confirmed()
            if not any(other is waiting for other, _ in open_ones):
                stored.update(numbers)
        for each in dirty:
            client.write(each.answers())
        dirty.clear()
        assert client.acked == sorted(set(client.acked))
        assert set(client.acked) <= stored - refused
        assert set(client.nacked) <= refused
    for waiting, _ in open_ones:
        waiting.confirmed()
    for each in dirty:
        client.write(each.answers())
    assert sorted(client.acked + client.nacked) == list(range(1, published + 1))
    assert set(client.nacked) == refused
