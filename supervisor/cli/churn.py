"""The load `shardctl perf --churn`: open and close connections, channels or queues."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Received
from shardmq.supervisor.cli.amqp import Connection, Counts
from shardmq.supervisor.cli.api import Rows
from shardmq.supervisor.cli.latency import PERCENTILES, Histogram

Connect = Callable[[Counts], Awaitable[Connection]]


class Churned(StrEnum):
    """The things that are opened and closed."""

    CONNECTIONS = "connections"
    CHANNELS = "channels"
    QUEUES = "queues"


@dataclass(frozen=True)
class ChurnResult:
    """The number of things that were opened and closed, and how long each took."""

    count: int
    seconds: float
    latency: Histogram


async def churn_run(
    kind: Churned,
    connect: Connect,
    workers: int,
    rate: int,
    seconds: float,
    said: Callable[[str], None] | None,
) -> ChurnResult:
    """Open and close things for some seconds.

    Args:
        kind: The things.
        connect: Opens a connection with one channel.
        workers: The number of tasks that work side by side, each with a connection of its own.
        rate: The things a second of each worker, or 0 for as many as it can.
        seconds: The length of the load.
        said: Gets a line each second, or None.
    """
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    histogram, began = Histogram(), time.monotonic()
    until = began + seconds

    async def work(number: int) -> None:
        done, connection, name = 0, None, f"shardctl-perf-{os.getpid()}-{number}"
        if kind is not Churned.CONNECTIONS:
            connection = await connect(Counts())
        try:
            while (now := time.monotonic()) < until:
                if rate and (ahead_s := done / rate - (now - began)) > 0:
                    await asyncio.sleep(min(ahead_s, until - now))
                    continue
                if connection is None:
                    (await connect(Counts())).writer.close()
                elif kind is Churned.CHANNELS:
                    connection.client.close()
                    await connection.expect(Received(amqp_client.CHANNEL_CLOSE_OK))
                    connection.client.reopen()
                    await connection.expect(amqp_client.Opened())
                else:
                    connection.client.declare(name, False)
                    await connection.expect(Received(amqp_client.DECLARE_OK))
                    connection.client.delete(name)
                    await connection.expect(Received(amqp_client.DELETE_OK))
                histogram.add(time.monotonic() - now)
                done += 1
        finally:
            if connection is not None:
                if kind is Churned.QUEUES:  # An interruption may come before the delete.
                    connection.client.delete(name)
                    connection.flush()
                connection.writer.close()

    async def show() -> None:
        before, at = 0, began
        while said is not None:
            await asyncio.sleep(at + 1.0 - time.monotonic())
            now, count = time.monotonic(), histogram.count
            rate_now = (count - before) / (now - at)
            said(
                f"{now - began:5.1f} s: {kind} {rate_now:,.0f}/s, ms {histogram.text_since_last()}"
            )
            before, at = count, now

    showing = asyncio.create_task(show())
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(workers):
                group.create_task(work(number))
    except* Exception as errors:
        raise errors.exceptions[0] from None
    finally:
        showing.cancel()
    return ChurnResult(histogram.count, time.monotonic() - began, histogram)


def churn_rows(result: ChurnResult, kind: Churned) -> Rows:
    """Return the row to show: how many a second, and the milliseconds that each took."""
    row = {f"{kind}/s": round(result.count / result.seconds), "seconds": result.seconds}
    shown = row | result.latency.row()
    document = row | {f"latency_{name}_ms": value for name, value in result.latency.row().items()}
    return Rows([shown], [*row, *PERCENTILES], [document])
