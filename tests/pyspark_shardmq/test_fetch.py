"""Rows on their way from the broker into Arrow, without a JVM."""

from __future__ import annotations

import random
import socket
from typing import Any

import pytest

from pyspark_shardmq import fetch
from pyspark_shardmq.fetch import Broker
from pyspark_shardmq.offsets import Range
from pyspark_shardmq.options import read_options
from tests.support.fake_streams import FakeStreams

ROWS = 2500
ROW_BYTES = 300  # a batch is many times what one call may take in


def scanned(url: str, one: Range) -> list[bytes]:
    broker = Broker(read_options({"shardmq.url": url, "subscribe": one.queue}).connection)
    try:
        return [value for batch in broker.scan(one, ["value"]) for value in batch["value"].to_pylist()]
    finally:
        broker.close()


@pytest.mark.parametrize("cut_off", [0, 2])
def test_no_call_of_the_kernel_takes_in_a_whole_batch(
    streams: FakeStreams, url: str, cut_off: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others on the host wait that long; and nothing is lost between the pieces, also where an answer is cut off."""
    (shard,) = streams.declare("orders")
    streams.append("orders", ROWS)
    chosen = random.Random(cut_off)
    for row in shard.rows:
        row["value"] = chosen.randbytes(chosen.randrange(2 * ROW_BYTES))
    streams.faults["arrow"] = cut_off
    asked: list[int] = []
    receive = socket.SocketIO.readinto

    def receiving(self: socket.SocketIO, buffer: Any) -> int | None:
        asked.append(memoryview(buffer).nbytes)
        return receive(self, buffer)

    monkeypatch.setattr(socket.SocketIO, "readinto", receiving)
    found = scanned(url, Range("orders", 0, shard.id, 0, ROWS))
    assert found == [row["value"] for row in shard.rows]
    assert max(asked) <= fetch.RECEIVE_BYTES_MAX < sum(map(len, found)) / 4
