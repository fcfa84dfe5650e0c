"""The command `shardctl perf`: put a load on a running broker and measure rates and latencies.

One process plays all publishers and consumers, so the figure measures this program as much as the
broker. `--churn` opens and closes things instead (churn.py). `--scenarios` runs the scenarios of
bench/ (scenarios.py). Their generator is written in C, and they are the ones to compare brokers
with.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import typer

from shardmq.supervisor import amqp_client
from shardmq.supervisor.amqp_client import Received
from shardmq.supervisor.cli import scenarios as played
from shardmq.supervisor.cli.amqp import READ_BYTES, Connection, Counts, Lost
from shardmq.supervisor.cli.api import FAILED, UNREACHABLE, USAGE, Api, Rows, fail
from shardmq.supervisor.cli.channel import tcp_server_of
from shardmq.supervisor.cli.churn import Churned, churn_rows, churn_run
from shardmq.supervisor.cli.command import Quiet
from shardmq.supervisor.cli.latency import PERCENTILES

T = TypeVar("T")

BURST_BYTES = 64 << 10  # The size of the publishes in one write.
# Publishers wait at this number of messages that are not consumed yet, so that the rate is that of
# the whole way through the broker.
BACKLOG_MESSAGES_MAX = 50_000
HANDSHAKE_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 10.0  # The time for the last messages to arrive.
# A broker that blocks publishers does not read what they have written last.
BLOCKED_DRAIN_TIMEOUT_S = 1.0
TRANSIENT, PERSISTENT = b"\x10\x00\x01", b"\x10\x00\x02"  # The property delivery_mode alone.


@dataclass(frozen=True)
class Load:
    """The load: what the publishers and consumers do, as the options of the command say."""

    producers: int
    consumers: int
    size: int
    queues: list[str]
    persistent: bool
    confirm: int
    rate: int
    auto_ack: bool
    prefetch: int
    seconds: float


def perf(
    api: Api,
    uri: str = typer.Option("", help="amqp://user:password@host:port/vhost. Default: this host."),
    producers: int = typer.Option(1, "--producers", "-x", min=0, help="Connections that publish."),
    consumers: int = typer.Option(1, "--consumers", "-y", min=0, help="Connections that consume."),
    size: int = typer.Option(16, "--size", min=0, max=1 << 20, help="Bytes of a body."),
    queue: str = typer.Option(
        "shardctl-perf", "--queue", help="Name of the queue. Several get a number."
    ),
    queues: int = typer.Option(1, min=1, max=1000, help="Number of queues."),
    persistent: bool = typer.Option(False, help="Durable queues, persistent messages."),
    confirm: int = typer.Option(
        0, "--confirm", "-c", min=0, help="Unconfirmed messages at most. 0: no confirms."
    ),
    rate: int = typer.Option(
        0, "--rate", "-r", min=0, help="Messages per second of each producer. 0: no limit."
    ),
    auto_ack: bool = typer.Option(False, help="Consumers do not acknowledge."),
    prefetch: int = typer.Option(1000, "--prefetch", min=0, max=65535, help="0: no limit."),
    seconds: float = typer.Option(10.0, "--time", "-z", min=0.1, help="Seconds to publish."),
    keep: bool = typer.Option(False, help="Leave the queues, and what is in them."),
    churn: Churned | None = typer.Option(
        None, help="Open and close these instead, by --producers, at --rate each."
    ),
    quiet: Quiet = False,
    scenarios: str = typer.Option("", help="Run scenarios of bench/ instead: all, small, rpc ..."),
    peer: list[str] | None = typer.Option(
        None, help="NAME=URL: another broker to measure by turns (scenarios)."
    ),
    runs: int = typer.Option(3, min=1, help="Runs of each scenario. The medians are shown."),
    quick: bool = typer.Option(False, help="Run each scenario once, for a second."),
    output: str = typer.Option(
        "", help="JSON file of the scenarios, with table and charts beside it. Default: no file."
    ),
) -> Rows:
    """Publish and consume as fast as one process can, and print rates and latencies.

    Each second gets a line on standard error, unless --quiet. Another line says so if an alarm
    blocked publishers. Latencies are in milliseconds: of a message, from the publisher's write to
    the consumer's read, and of its confirm.
    """
    names = [queue] if queues == 1 else [f"{queue}-{at}" for at in range(queues)]
    load = Load(
        producers, consumers, size, names, persistent, confirm, rate, auto_ack, prefetch, seconds
    )
    target = _target(uri, api)
    if scenarios:
        played.run(target.uri, scenarios, peer or [], runs, seconds, quick, output)
    said = None if quiet else partial(print, file=sys.stderr, flush=True)
    if churn is not None:
        work = churn_run(churn, partial(_connected, target), max(1, producers), rate, seconds, said)
        return churn_rows(_ended(work), churn)
    counts, took = _ended(_run(target, load, keep, said))
    if counts.blocked:
        print(f"publishers were blocked: {counts.blocked}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {
        f"{name}/s": round(getattr(counts, name) / took)
        for name in ("published", "confirmed", "consumed")
    } | {"refused": counts.refused, "seconds": took}
    columns = [*row, *PERCENTILES]
    latency = counts.latency if counts.latency.count else counts.confirm_latency
    row |= latency.row()
    document = row | {f"latency_{name}_ms": row[name] for name in PERCENTILES}
    document |= {
        f"confirm_{name}_ms": value for name, value in counts.confirm_latency.row().items()
    }
    return Rows([row], columns, [{k: v for k, v in document.items() if k not in PERCENTILES}])


def _ended(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a load. A load that cannot go on ends the command."""
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None
    except Lost as lost:
        fail(f"the broker ends the connection: {lost}", FAILED)
    except OSError as error:
        fail(f"no broker reachable by AMQP: {error}", UNREACHABLE)


class LoadTarget(NamedTuple):
    """The broker that gets the load."""

    host: str
    port: int
    user: str
    password: str
    vhost: str

    @property
    def uri(self) -> str:
        """The broker as amqp://user:password@host:port/vhost."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user, password, vhost = (
            quote(text, safe="") for text in (self.user, self.password, self.vhost)
        )
        return f"amqp://{user}:{password}@{host}:{self.port}/{vhost}"


def _target(uri: str, api: Api) -> LoadTarget:
    if uri:
        parts = urlsplit(uri)
        if parts.scheme != "amqp" or not parts.hostname:
            fail(f"--uri: not amqp://...: {uri}", USAGE)
        vhost = unquote(parts.path[1:]) if len(parts.path) > 1 else "/"
        login = unquote(parts.username or "guest"), unquote(parts.password or "guest")
        return LoadTarget(parts.hostname, parts.port or 5672, *login, vhost)
    server = tcp_server_of(api)
    if server.is_secure:
        fail("perf speaks AMQP without TLS, and the broker listens for TLS only", USAGE)
    return LoadTarget(server.host, server.port, api.user, api.password, "/")


async def _connected(target: LoadTarget, counts: Counts) -> Connection:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=READ_BYTES)
    connection = Connection(reader, writer, counts)
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            await connection.open(target.user, target.password, target.vhost)
    except BaseException:
        writer.close()
        raise
    return connection


async def _run(
    target: LoadTarget, load: Load, keep: bool, said: Callable[[str], None] | None
) -> tuple[Counts, float]:
    counts = Counts()
    connections: list[Connection] = []
    if (task := asyncio.current_task()) is not None:
        # SIGTERM cancels this task, as asyncio does for Ctrl-C.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    async def connected() -> Connection:
        connections.append(await _connected(target, counts))
        return connections[-1]

    try:
        control = await connected()
        try:
            for name in load.queues:
                control.client.declare(name, load.persistent)
                await control.expect(Received(amqp_client.DECLARE_OK))
            consuming = [
                await _consumer(await connected(), at, load) for at in range(load.consumers)
            ]
            publishing = [await connected() for _ in range(load.producers)]
            showing = asyncio.create_task(_show_seconds(counts, said)) if said else None
            try:
                took = await _play(publishing, consuming, load, counts)
            finally:
                if showing is not None:
                    showing.cancel()
        except asyncio.CancelledError:
            # The interrupted connection may still wait for a response, so another one is opened.
            await _delete_queues(await connected(), load, keep)
            raise
        await _delete_queues(control, load, keep)
        return counts, took
    finally:
        for connection in connections:
            if connection.client.blocked:
                connection.writer.transport.abort()  # Drop what the broker has not taken yet.
            connection.writer.close()


async def _show_seconds(counts: Counts, said: Callable[[str], None]) -> None:
    """Write a line for each second with what has happened in it."""
    names = ("published", "confirmed", "consumed")
    began = at = time.monotonic()
    before = [0] * len(names)
    while True:
        await asyncio.sleep(at + 1.0 - time.monotonic())
        now = time.monotonic()
        total = [getattr(counts, name) for name in names]
        rates = ", ".join(
            f"{name} {(new - old) / (now - at):,.0f}/s"
            for name, new, old in zip(names, total, before, strict=True)
        )
        latency = counts.latency if counts.latency.count else counts.confirm_latency
        said(f"{now - began:5.1f} s: {rates}, ms {latency.text_since_last()}")
        at, before = now, total


async def _delete_queues(control: Connection, load: Load, keep: bool) -> None:
    for name in [] if keep else load.queues:
        control.client.delete(name)
        await control.expect(Received(amqp_client.DELETE_OK))


async def _play(
    publishing: list[Connection], consuming: list[Connection], load: Load, counts: Counts
) -> float:
    """Run the load and return the seconds until the last message has arrived."""
    began = time.monotonic()
    until = began + load.seconds  # also by the clock of the event loop
    readers = [
        asyncio.create_task(_consume(one, at, load, counts)) for at, one in enumerate(consuming)
    ]
    readers += [asyncio.create_task(_hear(one)) for one in publishing]
    try:
        publishers = [
            _publish_until(one, at, load, until, counts) for at, one in enumerate(publishing)
        ]
        await _run_beside(asyncio.gather(*publishers), readers)
        await _run_beside(_drained(counts, load, bool(consuming)), readers)
        return time.monotonic() - began
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _run_beside(work: Any, readers: list[asyncio.Task[None]]) -> None:
    """Wait for some work while readers run. A reader that fails ends the work with its error."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task, *readers], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    for one in done:
        if one is not task:
            task.cancel()
        one.result()


async def _drained(counts: Counts, load: Load, consumed: bool) -> None:
    """Wait until all messages are confirmed and consumed, or until nothing more arrives."""
    seen, at = -1, time.monotonic()
    while time.monotonic() - at < (BLOCKED_DRAIN_TIMEOUT_S if counts.blocked else DRAIN_TIMEOUT_S):
        settled = counts.confirmed + counts.refused
        if (not consumed or counts.consumed >= counts.published) and (
            not load.confirm or settled >= counts.published
        ):
            return
        if counts.consumed + settled != seen:
            seen, at = counts.consumed + settled, time.monotonic()
        await asyncio.sleep(0.005)


async def _consumer(connection: Connection, at: int, load: Load) -> Connection:
    if load.prefetch and not load.auto_ack:
        connection.client.qos(load.prefetch)
        await connection.expect(Received(amqp_client.QOS_OK))
    connection.client.consume(load.queues[at % len(load.queues)], "", load.auto_ack)
    await connection.expect(Received(amqp_client.CONSUME_OK))
    return connection


async def _consume(connection: Connection, at: int, load: Load, counts: Counts) -> None:
    sent = counts.sent[load.queues[at % len(load.queues)]]
    while True:
        came = await connection.take()
        if came:
            sent.arrived(came, time.monotonic(), counts.latency)
        if came and not load.auto_ack:
            connection.client.ack(connection.last_delivery, multiple=True)
            connection.flush()


async def _hear(connection: Connection) -> None:
    while True:
        await connection.take()


async def _publish_until(
    connection: Connection, at: int, load: Load, until: float, counts: Counts
) -> None:
    """Publish until the time of the event loop, also if the broker reads or confirms nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(until):
            await _publish(connection, at, load, until, counts)


async def _publish(
    connection: Connection, at: int, load: Load, until: float, counts: Counts
) -> None:
    if load.confirm:
        connection.client.select()  # The response is read with the confirms and not counted.
        connection.flush()
    properties = PERSISTENT if load.persistent else TRANSIENT
    queue, body = load.queues[at % len(load.queues)], b"x" * load.size
    connection.client.publish("", queue, properties, body, False)
    one = connection.client.data_to_send()
    most = max(1, BURST_BYTES // len(one))
    burst = min(most, load.confirm or most, max(1, load.rate // 100) if load.rate else most)
    data, published, began = one * burst, 0, time.monotonic()
    sent = counts.sent[queue]
    while (now := time.monotonic()) < until:
        if load.rate and (ahead_s := published / load.rate - (now - began)) > 0:
            await asyncio.sleep(ahead_s)
        if load.confirm and published + burst - connection.confirmed > load.confirm:
            await counts.moved.wait()
            continue
        if load.consumers and counts.published - counts.consumed > BACKLOG_MESSAGES_MAX:
            await counts.moved.wait()
            continue
        now = time.monotonic()  # The time before has passed in waiting.
        sent.left(burst, now)
        if load.confirm:
            connection.unconfirmed.left(burst, now)
        connection.writer.write(data)
        published += burst
        counts.published += burst
        await connection.writer.drain()
        await asyncio.sleep(0)  # Let the consumers run.
