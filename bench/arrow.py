"""Measure streams over HTTP as Arrow: read ranges of a stream, publish rows.

    python bench/arrow.py [--messages 2000000] [--body 100] [--runs 5] [--rows 200000] [--data DIR]

First one client reads the whole stream and throws the bytes away: with three columns (offset,
timestamp, value), with the seven default columns, and with headers and properties as well. Then two
processes read three columns at once through the connector, as tasks of Spark do, and write the rows
to a socket, so that they use the caches that the reader would have. Then the client publishes rows,
with confirms.

The figures are means of all runs: nanoseconds of CPU per row for each kind of process. A first
read, in which the reader imports pyarrow (0.1 s), is not counted. Publishing rows needs pyarrow
here, too.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import machine
from brokers import own_broker
from streams import WRITE_MESSAGES, StreamClient

BUFFER_BYTES = 1 << 20
TASKS = 2
PASSED_BYTES = 64 << 10
LOGIN = {"Authorization": "Basic " + base64.b64encode(b"guest:guest").decode()}
ROLES = {
    "reader": "shardmq.shardd.reader",
    "shard": "shardmq.shardd",
    "front door": "shardmq.broker.front_door",
    "controller": "shardmq.broker.controller",
}
COLUMNS = {
    "3 columns": "offset,timestamp,value",
    "7 columns": "",
    "all columns": "queue,shard,offset,timestamp,exchange,routing_key,value,headers,properties",
}


class Api:
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)

    def read(self, path: str) -> int:
        """Read an answer to its end and return the number of its bytes."""
        answer = self.call("GET", path)
        buffer, total = bytearray(BUFFER_BYTES), 0
        while got := answer.readinto(buffer):
            total += got
        return total

    def call(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        self._connection.request(method, path, body, LOGIN)
        answer = self._connection.getresponse()
        assert answer.status == 200, (answer.status, answer.read())
        return answer


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU seconds of processes from their clock ticks, which count ended threads too."""
    fields = [machine.stat_fields(pid) for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields if one) / machine.TICKS_PER_S


def measured(pid: int, act: Callable[[], Any]) -> dict[str, float]:
    """Return the CPU seconds of each role during `act`, and the time in seconds that `act` took."""
    who: dict[str, list[int]] = {role: [] for role in ROLES}
    for each in machine.tree(pid):
        words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
        for role, module in ROLES.items():
            if module.encode() in words:
                who[role].append(each)
    before = {role: cpu_seconds(pids) for role, pids in who.items()}
    begin = time.monotonic()
    act()
    took = time.monotonic() - begin
    return {role: cpu_seconds(pids) - before[role] for role, pids in who.items()} | {"time": took}


def show(what: str, rows: int, runs: list[dict[str, float]]) -> None:
    each = {
        role: statistics.mean(run[role] for run in runs) * 1e9 / rows for role in (*ROLES, "time")
    }
    cpu = ", ".join(f"{role} {each[role]:.0f}" for role in ROLES)
    print(f"{what}: {1e9 / each['time']:,.0f} rows/s; ns of CPU a row: {cpu}", flush=True)


def pass_on(address: str, rows: int) -> int:
    """Copy the stream to a socket that a thread empties. Return the number of rows."""
    import pyarrow as pa

    from pyspark_shardmq.fetch import Broker
    from pyspark_shardmq.offsets import Range
    from pyspark_shardmq.options import Connection

    broker = Broker(Connection((f"http://{address}",), "/", "guest", "guest", 3, 100, 60_000))
    (state,) = broker.inspect("stream").shards
    found = 0
    here, there = socket.socketpair()
    with here, there:
        emptying = threading.Thread(target=empty, args=(there,))
        emptying.start()
        with here.makefile("wb", PASSED_BYTES) as file:
            writer = None
            for batch in broker.scan(
                Range("stream", 0, state.id, 0, rows), COLUMNS["3 columns"].split(",")
            ):
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
                found += batch.num_rows
        here.shutdown(socket.SHUT_WR)
        emptying.join()
    broker.close()
    return found


def empty(there: socket.socket) -> None:
    buffer = bytearray(PASSED_BYTES)
    while there.recv_into(buffer):
        pass


def read_by_tasks(pid: int, address: str, rows: int, runs: int) -> None:
    with multiprocessing.get_context("spawn").Pool(TASKS) as pool:
        asked = [(address, rows)] * TASKS
        pool.starmap(pass_on, asked, 1)  # not measured: the processes import their modules
        found = [measured(pid, lambda: pool.starmap(pass_on, asked, 1)) for _ in range(runs)]
    show(f"read, 3 columns, {TASKS} tasks", rows * TASKS, found)


def rows_of(count: int, body_bytes: int) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    table = pa.table({"value": pa.array([bytes(body_bytes)] * count, pa.binary())})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--body", type=int, default=100)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200_000, help="published by one call")
    parser.add_argument("--data", type=Path, default=None, help="directory on the disk to measure")
    options = parser.parse_args()
    messages = options.messages // WRITE_MESSAGES * WRITE_MESSAGES
    with own_broker(options.data) as target:
        assert target.pid is not None
        pid = target.pid
        client = StreamClient(target.url.rpartition("@")[2].rstrip("/"))
        for name in ("stream", "copy"):
            client.declare_stream(name)
        client.publish("stream", options.body, messages)
        api = Api(target.http)
        for what, columns in COLUMNS.items():
            path = f"/api/streams/%2F/stream/0/arrow?columns={columns}"
            api.read(path)
            runs = [measured(pid, partial(api.read, path)) for _ in range(options.runs)]
            show(f"read, {what}", messages, runs)
        read_by_tasks(pid, target.http, messages, options.runs)
        body = rows_of(options.rows, options.body)
        path = "/api/exchanges/%2F/amq.default/arrow?routing_key=copy"
        calls = [
            measured(pid, lambda: api.call("POST", path, body).read()) for _ in range(options.runs)
        ]
        show("publish, with confirms", options.rows, calls)


if __name__ == "__main__":
    main()
