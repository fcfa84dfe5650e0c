"""Measure this broker at scale: many stored messages, queues, bindings, delayed messages.

The figures are memory and time to start, the effect of a large removal and of the HTTP API on
publishing, and how soon many consumers have divided many shards.

    python bench/scale.py [messages] [queues] [bindings] [removals] [delayed] [consumers] [api]
        [scrape]

Without a name all parts run. Each part has a broker and a data directory of its own. Each figure is
printed on a line as soon as it is known. The exit status is 1 when something was lost. Whether a
figure is good is not decided here: the bars are in bench/COSTS.md.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import generator
import machine
from brokers import ROOT, address_of, end, ready_line

READ_BYTES = 1 << 20
SILENCE_S_MAX = 120.0  # the broker may be silent for this time during a request
SETTLE_S = 2.0  # time from the load to the reading of memory
KILLED_S_MAX = 30.0
PIPELINE = 1000  # unanswered requests at a time
PUBLISH_S_MAX = 600.0
BALANCED_S_MAX = 30.0
DELAY_SPREAD_MS = 1000  # delayed messages are due at random within this time
DELAYED_BODY_BYTES = 100
DELAYED_AT_ONCE = 10_000
COUNT_EACH_S = 0.05
# Seconds between two scrapes: as monitoring does, and at once after each answer.
SCRAPE_EACH_S: dict[str, float | None] = {"without": None, "each 5 s": 5.0, "in a loop": 0.0}
RATE_ROUNDS = 3
RATE_S = 4
PAGE = "/api/queues?page=1&page_size=100"
SCRAPED = ("/metrics", "/metrics/per-object", f"{PAGE}&sort=messages&sort_reverse=true")
PROBE_BEFORE_S = 1.5  # publishing goes on for this time before the act begins

ONE_MESSAGE = {
    "routing_key": "",
    "properties": {},
    "payload": "in each queue",
    "payload_encoding": "string",
}

PROBE_S = 4
PROBE = ["--rate", "1000", "--latency", "--batch", "1", "--body", "16", "--warmup", "0.5"]
RATES = {
    "20,000/s wanted": ["--rate", "20000", "--batch", "10", "--body", "100", "--warmup", "0.5"],
    "as fast as it goes": ["--body", "1024", "--warmup", "0.5"],
}

CLOSE = ((10, 50), (20, 40))


class Lost(Exception):
    """Something that was there before a stop is not there after it."""


def shortstr(text: str) -> bytes:
    return struct.pack(">B", len(text)) + text.encode()


class Client:
    """A small AMQP client that can ask for many things without waiting for each answer."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), SILENCE_S_MAX)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._got = b""
        self.published = 0
        self._socket.sendall(b"AMQP\0\0\x09\x01")
        self._next(1)
        plain = b"\0guest\0guest"
        start_ok = (
            struct.pack(">I", 0)
            + shortstr("PLAIN")
            + struct.pack(">I", len(plain))
            + plain
            + shortstr("en_US")
        )
        self._socket.sendall(self.method(10, 11, start_ok, channel=0))
        self._next(1)
        tune_ok = self.method(10, 31, struct.pack(">HIH", 1, 131072, 0), channel=0)
        self._socket.sendall(tune_ok + self.method(10, 40, shortstr("/") + b"\0\0", channel=0))
        self._next(1)
        self.ask([self.method(20, 10, b"\0")])

    @staticmethod
    def method(cls: int, number: int, arguments: bytes, channel: int = 1) -> bytes:
        return (
            struct.pack(">BHIHH", 1, channel, 4 + len(arguments), cls, number) + arguments + b"\xce"
        )

    def _next(self, count: int) -> list[bytes]:
        """Return the payloads of the next `count` methods; heartbeats are skipped."""
        found: list[bytes] = []
        at = 0
        while len(found) < count:
            while len(found) < count and len(self._got) - at >= 7:
                kind, _, size = struct.unpack_from(">BHI", self._got, at)
                if len(self._got) - at < size + 8:
                    break
                if kind == 1:
                    found.append(self._got[at + 7 : at + 7 + size])
                    if struct.unpack_from(">HH", found[-1]) in CLOSE:
                        text = found[-1][7:].split(bytes(1))[0].decode(errors="replace")
                        raise Lost(f"the broker refused: {text}")
                at += size + 8
            self._got, at = self._got[at:], 0
            if len(found) < count:
                piece = self._socket.recv(READ_BYTES)
                if not piece:
                    raise Lost("the broker hung up")
                self._got += piece
        return found

    def ask(self, requests: Iterable[bytes], pipeline: int = PIPELINE) -> list[bytes]:
        """Return the answers in order; `pipeline` requests are sent before answers are read."""
        answers: list[bytes] = []
        batch: list[bytes] = []
        for request in requests:
            batch.append(request)
            if len(batch) == pipeline:
                self._socket.sendall(b"".join(batch))
                answers += self._next(len(batch))
                batch = []
        self._socket.sendall(b"".join(batch))
        return answers + self._next(len(batch))

    def declare(self, names: Iterable[str], passive: bool = False) -> int:
        """Declare durable queues and return the number of messages that they hold."""
        flags = 1 if passive else 2
        frames = (
            self.method(50, 10, b"\0\0" + shortstr(name) + struct.pack(">BI", flags, 0))
            for name in names
        )
        return sum(
            struct.unpack_from(">I", answer, 5 + answer[4])[0] for answer in self.ask(frames)
        )

    def bind(self, queue: str, exchange: str, keys: Iterable[str], pipeline: int) -> None:
        start = b"\0\0" + shortstr(queue) + shortstr(exchange)
        frames = (
            self.method(50, 20, start + shortstr(key) + struct.pack(">BI", 0, 0)) for key in keys
        )
        self.ask(frames, pipeline)

    def unbind(self, queue: str, exchange: str, keys: Iterable[str]) -> None:
        start = b"\0\0" + shortstr(queue) + shortstr(exchange)
        self.ask(self.method(50, 50, start + shortstr(key) + struct.pack(">I", 0)) for key in keys)

    def declare_exchange(self, name: str, kind: str, arguments: bytes = b"") -> None:
        """Declare an exchange; `arguments` is the inside of an AMQP table."""
        start = b"\0\0" + shortstr(name) + shortstr(kind) + struct.pack(">BI", 2, len(arguments))
        self.ask([self.method(40, 10, start + arguments)])

    def consume(self, queue: str) -> None:
        self.ask(
            [self.method(60, 20, b"\0\0" + shortstr(queue) + b"\0" + struct.pack(">BI", 0, 0))]
        )

    def publish_delayed(self, exchange: str, delays_ms: list[int]) -> None:
        """Publish a persistent message for each delay and wait until the last is confirmed."""
        line = self.method(60, 40, b"\0\0" + shortstr(exchange) + shortstr("key") + b"\0")
        body = struct.pack(">BHI", 3, 1, DELAYED_BODY_BYTES) + bytes(DELAYED_BODY_BYTES) + b"\xce"
        # The flags of headers and delivery mode, then a table with one long integer.
        start = (
            struct.pack(">BHIHHQHI", 2, 1, 36, 60, 0, DELAYED_BODY_BYTES, 0x3000, 17)
            + shortstr("x-delay")
            + b"l"
        )
        frames = [line + start + struct.pack(">qBB", delay, 2, 0xCE) + body for delay in delays_ms]
        self._socket.sendall(b"".join(frames))
        self.published += len(frames)
        while struct.unpack_from(">Q", self._next(1)[-1], 4)[0] < self.published:
            pass

    def delete_exchange(self, name: str) -> None:
        self.ask([self.method(40, 20, b"\0\0" + shortstr(name) + b"\0")])

    def delete_queue(self, name: str) -> None:
        self.ask([self.method(50, 40, b"\0\0" + shortstr(name) + b"\0")])

    def close(self) -> None:
        self._socket.close()


class Broker:
    """A broker on one data directory, started and ended several times."""

    def __init__(self, directory: Path, shards: int) -> None:
        self._directory = directory
        self._shards = shards
        self.address = ""

    def start(self) -> float:
        """Start the broker and return the seconds until it was ready."""
        command = [
            sys.executable,
            "-m",
            "shardmq.supervisor.cli",
            "start",
            "--data-dir",
            str(self._directory / "data"),
        ]
        self._http_port = _free_port()
        ports = ["--amqp-port", "0", "--http-port", str(self._http_port), "--metrics-port", "0"]
        command += [*ports, "--shards", str(self._shards)]
        log = self._directory / "log"
        begun = time.monotonic()
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        self.address = address_of(ready_line(self.process, log), "amqp")
        return time.monotonic() - begun

    def stop(self) -> float:
        begun = time.monotonic()
        end(self.process)
        return time.monotonic() - begun

    def kill(self) -> None:
        """Kill every process of the broker at once."""
        pids = machine.tree(self.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        give_up = time.monotonic() + KILLED_S_MAX
        while (
            any(machine.stat_fields(pid)[:1] not in ([], ["Z"]) for pid in pids)
            and time.monotonic() < give_up
        ):
            time.sleep(0.01)

    def memory(self) -> machine.Memory:
        time.sleep(SETTLE_S)
        return machine.memory(machine.tree(self.process.pid))

    def virtual_queue(self, name: str) -> dict[str, Any]:
        """Return the description of a virtual queue from the HTTP API."""
        http = json.loads((self._directory / "data" / "broker.json").read_text())["http"]
        url = f"http://127.0.0.1:{http.rpartition(':')[2]}/api/virtual-queues/%2F/{name}"
        request = urllib.request.Request(url)
        request.add_header("Authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
        with urllib.request.urlopen(request, timeout=SILENCE_S_MAX) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def client(self) -> Client:
        return Client(self.address)

    def http(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self._request(path, body), timeout=SILENCE_S_MAX) as answer:
            return bytes(answer.read())

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._http_port}{path}"

    def _request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        login = base64.b64encode(b"guest:guest").decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        return urllib.request.Request(self.url(path), body, headers)

    def controller(self) -> int:
        """Return the pid of the controller."""
        found = json.loads(self.http("/api/processes"))
        return next(int(row["pid"]) for row in found if row["name"] == "controller")

    def target(self) -> generator.Target:
        return generator.Target("shardmq", f"amqp://guest:guest@{self.address}/", self.process.pid)


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def say(what: str, value: float, unit: str) -> None:
    print(f"{what:<44} {value:>14,.2f} {unit}   (load {machine.load_average():.1f})", flush=True)


def told_all(what: str, values: list[float], unit: str) -> None:
    """Print the median of the values and the values."""
    say(
        what,
        statistics.median(values),
        f"{unit} of {', '.join(f'{value:,.2f}' for value in values)}",
    )


def added(what: str, before: machine.Memory, after: machine.Memory) -> None:
    say(f"{what}: RSS added", after.rss_mb - before.rss_mb, "MB")
    if before.pss_mb is not None and after.pss_mb is not None:
        say(f"{what}: PSS added", after.pss_mb - before.pss_mb, "MB")


@contextmanager
def broker(options: argparse.Namespace) -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="scale-", dir=options.data_parent) as directory:
        own = Broker(Path(directory), options.shards)
        say("empty: start", own.start(), "s")
        try:
            yield own
        finally:
            own.stop()


def restarts(
    own: Broker, what: str, names: list[str], messages: int, empty: machine.Memory
) -> None:
    """Measure three starts: after a kill with everything fresh, after a stop, after another kill.

    Each time the seconds until ready are printed, and everything must be there.
    """
    for how, stop in (("killed fresh", own.kill), ("clean", own.stop), ("killed", own.kill)):
        took = stop()
        if took is not None:
            say(f"{what}: drained", took, "s")
        say(f"{what}: start after {how}", own.start(), "s")
        begun = time.monotonic()
        client = own.client()
        found = client.declare(names, passive=True)
        say(f"{what}: counted after {how}", time.monotonic() - begun, "s")
        client.close()
        added(f"{what}, after {how}", empty, own.memory())
        if found != messages:
            raise Lost(f"{found:,} of {messages:,} messages after {how}")


def measure_messages(options: argparse.Namespace) -> None:
    with broker(options) as own:
        names = [f"scale-{i}" for i in range(options.message_queues)]
        client = own.client()
        client.declare(names)
        before = own.memory()
        count = str(options.messages)
        load = [
            "--body",
            "100",
            "--persistent",
            "--durable",
            "--no-consume",
            "--keep",
            "--prefix",
            "scale",
        ]
        load += ["--messages", count]
        load += [
            "--queues",
            str(len(names)),
            "--keys",
            str(len(names)),
            "--confirms",
            "20000",
            "--producers",
            "2",
        ]
        figures = generator.measure(own.target(), load, PUBLISH_S_MAX)
        say("messages: published", figures["published_per_s"], "/s")
        added("messages", before, own.memory())
        stored = client.declare(names, passive=True)
        client.close()
        if stored != options.messages:
            raise Lost(f"{stored:,} of {options.messages:,} messages before any stop")
        restarts(own, "messages", names, options.messages, before)


def measure_queues(options: argparse.Namespace) -> None:
    with broker(options) as own:
        before = own.memory()
        names = [f"scale-{i}" for i in range(options.queues)]
        client = own.client()
        begun = time.monotonic()
        client.declare(names)
        say("queues: declared", len(names) / (time.monotonic() - begun), "/s")
        client.close()
        added("queues", before, own.memory())
        restarts(own, "queues", names, 0, before)


def measure_bindings(options: argparse.Namespace) -> None:
    with broker(options) as own:
        client = own.client()
        client.declare(["scale"])
        for how, count, pipeline in (
            ("single", options.bindings // 20, 1),
            ("pipelined", options.bindings, PIPELINE),
        ):
            for exchange in ("amq.direct", "amq.topic"):
                begun = time.monotonic()
                client.bind("scale", exchange, (f"{how}.{i}" for i in range(count)), pipeline)
                say(f"bindings: {how}, {exchange}", count / (time.monotonic() - begun), "/s")
        client.close()


def measure_removals(options: argparse.Namespace) -> None:
    """Measure the slowest of 1,000 messages a second while 10,000 bindings are removed.

    The first line is without any removal.
    """
    keys = [f"key.{i}" for i in range(options.removals)]
    with broker(options) as own:
        client = own.client()

        def bound(kind: str) -> None:
            client.declare(["removal"])
            client.declare_exchange("removal", kind)
            client.bind("removal", "removal", keys, PIPELINE)

        acts = {
            "nothing": lambda: None,
            "bindings one by one": lambda: client.unbind("removal", "removal", keys),
            "their exchange": lambda: client.delete_exchange("removal"),
            "their queue": lambda: client.delete_queue("removal"),
        }
        for kind in ("direct", "topic"):
            for what, act in acts.items():
                bound(kind)
                figures, seconds = while_publishing(own, act)
                took = f", which took {seconds:.2f} s"
                say(
                    f"removals: {kind}, {what}: slowest message",
                    figures["latency_max_us"] / 1000,
                    f"ms{took}",
                )
                client.delete_exchange("removal")
        client.close()


def measure_api(options: argparse.Namespace) -> None:
    """Import 100,000 queues and bindings by HTTP, use each queue and list them.

    The latency of messages is measured meanwhile.
    """
    document = many_queues(options.queues)
    with broker(options) as own:
        acts: dict[str, Callable[[], object]] = {
            "nothing": lambda: None,
            "import": lambda: own.http("/api/definitions", document),
        }
        _felt(own, acts)
        own.http("/api/exchanges/%2F/amq.fanout/publish", json.dumps(ONE_MESSAGE).encode())
        time.sleep(SETTLE_S)
        _timed(own, "a page", PAGE)
        _timed(own, "a page by name", f"{PAGE}&sort=name&sort_reverse=true")
        _timed(own, "a page by messages", f"{PAGE}&sort=messages")
        acts = {
            "nothing, queues used": lambda: None,
            "20 pages": lambda: [own.http(PAGE) for _ in range(20)],
            "all queues": lambda: own.http("/api/queues"),
            "definitions": lambda: own.http("/api/definitions"),
            "metrics": lambda: own.http("/metrics"),
            "metrics of each queue": lambda: own.http("/metrics/per-object"),
        }
        _felt(own, acts)
        _rates(own, options.queues)


def measure_scrape(options: argparse.Namespace) -> None:
    """Measure 1,000 messages a second while monitoring asks for everything, and while it does not.

    Both take turns. Each of the queues has been used before.
    """
    with broker(options) as own:
        own.http("/api/definitions", many_queues(options.queues))
        own.http("/api/exchanges/%2F/amq.fanout/publish", json.dumps(ONE_MESSAGE).encode())
        time.sleep(SETTLE_S)
        found: dict[str, list[generator.Figures]] = {what: [] for what in SCRAPE_EACH_S}
        order = list(found)
        for _ in range(options.scrape_rounds):
            for what in order:
                found[what].append(_scraped(own, what, options.scrape_probe_s))
            # The order rotates, so that periodic work of the machine falls on each of them.
            order = [*order[1:], order[0]]
        alone = found["without"]
        for what, runs in found.items():
            for name in ("p50", "p99"):
                told_all(
                    f"scrape: {what}: latency {name}",
                    [run[f"latency_{name}_us"] / 1000 for run in runs],
                    "ms",
                )
            told_all(f"scrape: {what}: the broker's cores", [run["cores"] for run in runs], "cores")
            told_all(
                f"scrape: {what}: the controller's cores",
                [run["controller"] for run in runs],
                "cores",
            )
            beside = zip(runs, alone, strict=True)
            ratios = [run["latency_p99_us"] / other["latency_p99_us"] for run, other in beside]
            told_all(f"scrape: {what}: p99 beside that without", ratios, "times")


def _scraped(own: Broker, what: str, seconds: float) -> generator.Figures:
    """Measure the latency of messages and the cores that the controller takes."""
    each_s = SCRAPE_EACH_S[what]
    beside: AbstractContextManager[list[list[float]]] = nullcontext([])
    if each_s is not None:
        beside = repeating(own, SCRAPED, each_s)
    controller = own.controller()
    begun, used = time.monotonic(), machine.process_cpu_seconds(controller)
    with beside as times:
        figures = generator.measure(own.target(), probe(seconds), seconds)
        figures["controller"] = (machine.process_cpu_seconds(controller) - used) / (
            time.monotonic() - begun
        )
    for path, took in zip(SCRAPED, zip(*times, strict=True), strict=False):
        say(
            f"scrape: {what}: {path.partition('&')[0]}",
            statistics.median(took),
            f"s, {len(took)} times",
        )
    return figures


@contextmanager
def repeating(
    own: Broker, paths: Iterable[str], each_s: float = 0.0
) -> Iterator[list[list[float]]]:
    """Request all of `paths` again and again during the block.

    Yields a list that holds, after the block, the seconds of each request, round by round. In
    reality a monitoring system has its own computer; here it is a process that gets only the
    processor time that nobody else wants.
    """
    seconds: list[list[float]] = []
    command = [
        sys.executable,
        str(Path(__file__).with_name("asking.py")),
        str(each_s),
        *map(own.url, paths),
    ]
    asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert asking.stdin is not None and asking.stdout is not None
    with machine.last_in_line([asking.pid]):
        try:
            yield seconds
        finally:
            told, _ = asking.communicate()  # asking.py ends when its input ends
    seconds += map(json.loads, told.splitlines())


def probe(seconds: float) -> list[str]:
    return [*PROBE, "--seconds", str(seconds)]


def many_queues(count: int, prefix: str = "scale") -> bytes:
    """Return definitions with this many durable queues, each bound to amq.fanout."""
    names = [f"{prefix}-{i}" for i in range(count)]
    rows = [{"name": name, "vhost": "/", "durable": True} for name in names]
    ends = {"source": "amq.fanout", "vhost": "/", "destination_type": "queue"}
    bound = [{**ends, "destination": name, "routing_key": f"key.{name}"} for name in names]
    return json.dumps({"queues": rows, "bindings": bound}).encode()


def _felt(own: Broker, acts: dict[str, Callable[[], object]]) -> None:
    for what, act in acts.items():
        figures, seconds = while_publishing(own, act)
        say(f"api: {what}", seconds, "s")
        say(f"api: {what}: latency p50", figures["latency_p50_us"] / 1000, "ms")
        say(f"api: {what}: latency p99", figures["latency_p99_us"] / 1000, "ms")
        say(f"api: {what}: slowest message", figures["latency_max_us"] / 1000, "ms")


def _rates(own: Broker, queues: int) -> None:
    """Measure messages a second with and without work of the API, in turn, and that work's cores.

    On a machine without spare cores the messages may lack those cores.
    """
    parts = iter(
        [many_queues(queues // 4, f"rate-{number}") for number in range(RATE_ROUNDS * len(RATES))]
    )
    acts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "without": nullcontext,
        "importing": lambda: importing(own, next(parts)),
        "paging": lambda: repeating(own, [PAGE]),
        "scraping": lambda: repeating(own, ["/metrics/per-object"]),
    }
    for load, options in RATES.items():
        rates: dict[str, list[float]] = {what: [] for what in acts}
        cores: dict[str, list[float]] = {what: [] for what in acts}
        for _ in range(RATE_ROUNDS):
            for what, act in acts.items():
                begun, used = time.monotonic(), machine.process_cpu_seconds(own.controller())
                with act():
                    figures = generator.measure(
                        own.target(), [*options, "--seconds", str(RATE_S)], RATE_S
                    )
                    used = machine.process_cpu_seconds(own.controller()) - used
                    cores[what].append(used / (time.monotonic() - begun))
                rates[what].append(figures["consumed_per_s"])
        for what in acts:
            told_all(f"api: {load}: {what}", rates[what], "messages/s")
            told_all(f"api: {load}: {what}: the controller's cores", cores[what], "cores")


@contextmanager
def importing(own: Broker, document: bytes) -> Iterator[None]:
    thread = threading.Thread(target=own.http, args=("/api/definitions", document))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _timed(own: Broker, what: str, path: str) -> None:
    """Print the best time of five requests."""
    best = SILENCE_S_MAX
    for _ in range(5):
        begun = time.monotonic()
        own.http(path)
        best = min(best, time.monotonic() - begun)
    say(f"api: {what}", best * 1000, "ms")


def measure_delayed(options: argparse.Namespace) -> None:
    """Publish messages that are all due within one second, in random order, and wait for them.

    The broker is killed once before they are due.
    """
    with broker(options) as own:
        client = own.client()
        client.declare(["delayed"])
        inner = shortstr("x-delayed-type") + b"S" + struct.pack(">I", 6) + b"fanout"
        client.declare_exchange("delayed", "x-delayed-message", inner)
        client.bind("delayed", "delayed", [""], 1)
        client.ask([client.method(85, 10, b"\0")])
        before = own.memory()
        begun = time.time()
        due = begun + options.delay_s
        for start in range(0, options.delayed, DELAYED_AT_ONCE):
            left_ms = int((due - time.time()) * 1000)
            count = min(DELAYED_AT_ONCE, options.delayed - start)
            client.publish_delayed(
                "delayed", [left_ms + random.randrange(DELAY_SPREAD_MS) for _ in range(count)]
            )
        took = time.time() - begun
        say("delayed: published", options.delayed / took, "/s")
        added("delayed", before, own.memory())
        client.close()
        own.kill()
        say("delayed: start after killed", own.start(), "s")
        added("delayed, after killed", before, own.memory())
        client = own.client()
        if took > options.delay_s or client.declare(["delayed"], passive=True):
            raise Lost("some were due before all were published: give a longer --delay-s")
        time.sleep(max(0.0, due - time.time()))
        released, most_mb = 0, 0.0
        used = machine.cpu_seconds(machine.tree(own.process.pid))
        while released < options.delayed and time.time() < due + SILENCE_S_MAX:
            time.sleep(COUNT_EACH_S)
            released = client.declare(["delayed"], passive=True)
            most_mb = max(most_mb, machine.memory(machine.tree(own.process.pid)).rss_mb)
        say("delayed: released", released / (time.time() - due), "/s")
        used = machine.cpu_seconds(machine.tree(own.process.pid)) - used
        say("delayed: released per second of CPU, all processes'", released / used, "/s")
        say("delayed: most RSS added meanwhile", most_mb - before.rss_mb, "MB")
        client.close()
        if released != options.delayed:
            raise Lost(f"{released:,} of {options.delayed:,} delayed messages came")


def while_publishing(own: Broker, act: Callable[[], object]) -> tuple[generator.Figures, float]:
    """Return latencies of 1,000 messages a second, and the seconds that `act` took meanwhile."""
    took: list[float] = []

    def do() -> None:
        begun = time.monotonic()
        act()
        took.append(time.monotonic() - begun)

    timer = threading.Timer(PROBE_BEFORE_S, do)
    timer.start()
    figures = generator.measure(own.target(), probe(PROBE_S), PROBE_S)
    timer.join()
    return figures, took[0]


def measure_consumers(options: argparse.Namespace) -> None:
    """Measure how soon consumers of one virtual queue have divided its shards.

    The consumers join one by one, then half of them, chosen at random, hang up. The shards are
    divided when each has one owner and the loads differ by at most one.
    """
    with broker(options) as own:
        first = own.client()
        arguments = shortstr("x-shards") + b"I" + struct.pack(">I", options.consumer_shards)
        first.declare_exchange("scale", "x-modulus-hash", arguments)
        clients = [own.client() for _ in range(options.consumers)]
        random.Random(1).shuffle(clients)
        begun = time.monotonic()
        for client in clients:
            client.consume("scale")
        say(f"consumers: {len(clients)} joined", time.monotonic() - begun, "s")
        say("consumers: then balanced after", balanced(own, len(clients)), "s")
        half = len(clients) // 2
        for client in clients[:half]:
            client.close()
        say(f"consumers: {half} hung up, balanced after", balanced(own, len(clients) - half), "s")
        for client in [first, *clients[half:]]:
            client.close()


def balanced(own: Broker, consumers: int) -> float:
    """Return the seconds until the shards are divided evenly among the consumers."""
    begun = time.monotonic()
    while time.monotonic() - begun < BALANCED_S_MAX:
        found = own.virtual_queue("scale")
        loads = [len(each["shards"]) for each in found["consumers"]]
        owned = all(len(shard["owners"]) == 1 for shard in found["shards"])
        if (
            len(loads) == consumers
            and owned
            and not found["moving"]
            and max(loads) - min(loads) <= 1
        ):
            return time.monotonic() - begun
    raise Lost("shards without an owner, or unevenly owned")


PARTS = {
    "messages": measure_messages,
    "queues": measure_queues,
    "bindings": measure_bindings,
    "removals": measure_removals,
    "api": measure_api,
    "consumers": measure_consumers,
    "delayed": measure_delayed,
    "scrape": measure_scrape,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Messages, queues, bindings, consumers in large numbers: rates, memory, starts"
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--message-queues", type=int, default=100)
    parser.add_argument("--queues", type=int, default=100_000)
    parser.add_argument("--bindings", type=int, default=20_000)
    parser.add_argument("--removals", type=int, default=10_000, help="bindings that go at once")
    parser.add_argument("--consumers", type=int, default=200, help="of one virtual queue")
    parser.add_argument("--consumer-shards", type=int, default=64, help="that they divide")
    parser.add_argument(
        "--delayed", type=int, default=1_000_000, help="messages that wait at an exchange"
    )
    parser.add_argument("--delay-s", type=float, default=120, help="until they are due")
    parser.add_argument("--scrape-rounds", type=int, default=5)
    parser.add_argument(
        "--scrape-probe-s", type=float, default=10.0, help="of each way to ask, in each round"
    )
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--data-parent", type=Path, help="the disk that is measured")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    generator.build_generator()
    # So a time limit that ends this process ends the broker, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for part in options.parts or PARTS:
            PARTS[part](options)
    except (Lost, generator.RunFailed) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
