"""Measure a shovel that moves the messages of a durable queue into another one.

Messages wait in the source before the shovel is made. The time begins when the destination was
empty for the last time, and ends when it has all messages: it is asked for its length. The CPU of
all processes counts: those of this broker, with its process of bridges, and of the other one if
messages move there.
"""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import machine
import scale
from brokers import own_broker, port_of
from generator import Figures, RunFailed, Target, measure
from load.scenarios import Shovel

SOURCE, DESTINATION = "shovelled-0", "shovelled-1"
SHOVEL = "/api/parameters/shovel/%2F/bench"
FILL_S_MAX = 300.0
MOVE_S_MAX = 300.0
END_S_MAX = 30.0  # after the last message: until the shovel has ended
ASK_EACH_S, ASK_EACH_S_MAX = 0.01, 0.5
CONFIRMS = "20000"


@contextmanager
def both_ends(data_parent: Path | None, shovel: Shovel) -> Iterator[tuple[Target, Target]]:
    """Run this broker, and another one if messages move elsewhere; yield source and destination."""
    with own_broker(data_parent) as source:
        if shovel.to == "here":
            yield source, source
            return
        with own_broker(data_parent) as destination:
            yield source, destination


def moved(
    source: Target, destination: Target, options: list[str], shovel: Shovel, count: int
) -> Figures:
    """Fill a queue, move its messages, and return the figures. Raises RunFailed.

    Args:
        source: The broker of the shovel.
        destination: The same broker, or another one.
        options: What the generator is told of the messages.
        shovel: Where to and how they move.
        count: The number of messages.
    """
    here, there = scale.Client(_address(source)), scale.Client(_address(destination))
    try:
        here.declare([SOURCE])
        there.declare([DESTINATION])
        filling = [*options, "--messages", str(count), "--confirms", CONFIRMS, "--no-consume"]
        prefix = SOURCE.removesuffix("-0")
        measure(source, [*filling, "--keep", "--prefix", prefix], FILL_S_MAX)
        is_here = source == destination
        uri = "amqp://" if is_here else destination.url
        _ask(source, "PUT", {"value": _parameter(uri, shovel)})
        found = _followed([source] if is_here else [source, destination], there, count)
        _wait_for_end(source)
        if left := here.declare([SOURCE], passive=True):
            raise RunFailed(f"{left:,} messages are left in the source")
        return found
    finally:
        here.delete_queue(SOURCE)
        there.delete_queue(DESTINATION)
        here.close()
        there.close()


def _parameter(uri: str, shovel: Shovel) -> dict[str, Any]:
    return {
        "src-uri": "amqp://",
        "src-queue": SOURCE,
        "src-prefetch-count": shovel.prefetch,
        "src-delete-after": "queue-length",
        "dest-uri": uri,
        "dest-queue": DESTINATION,
        "ack-mode": "on-confirm",
    }


def _followed(brokers: list[Target], there: scale.Client, count: int) -> Figures:
    """Return the figures from the first to the last message. Raises RunFailed.

    To ask costs the broker work. So it is asked often only at the beginning and near the end.
    """
    give_up = time.monotonic() + MOVE_S_MAX
    processes: list[int] = []
    begun = cpu = 0.0
    while True:
        now = time.monotonic()
        arrived = there.declare([DESTINATION], passive=True)
        wait_s = ASK_EACH_S
        if not arrived:
            # The process of bridges starts now, with the first shovel.
            processes = [pid for broker in brokers for pid in broker.processes()]
            begun, cpu = time.monotonic(), machine.cpu_seconds(processes)
        elif arrived >= count:
            break
        else:
            left_s = (now - begun) / arrived * (count - arrived)
            wait_s = max(ASK_EACH_S, min(left_s / 2, ASK_EACH_S_MAX))
        if now > give_up:
            raise RunFailed(f"{arrived:,} of {count:,} messages after {MOVE_S_MAX:.0f} s")
        time.sleep(wait_s)
    seconds, spent = time.monotonic() - begun, machine.cpu_seconds(processes) - cpu
    if arrived > count:
        raise RunFailed(f"{arrived:,} messages came of {count:,}")
    found = {"rate": count / seconds, "consumed_per_s": count / seconds}
    if spent:
        found |= {"cores": spent / seconds, "per_cpu_s": count / spent}
    return found


def _wait_for_end(source: Target) -> None:
    """Wait until the shovel has ended and deleted itself. Raises RunFailed."""
    give_up = time.monotonic() + END_S_MAX
    while _ask(source, "GET") != 404:
        if time.monotonic() > give_up:
            _ask(source, "DELETE")
            raise RunFailed(f"the shovel has not ended after {END_S_MAX:.0f} s")
        time.sleep(ASK_EACH_S)


def _ask(broker: Target, method: str, body: Any = None) -> int:
    """Send a request for the shovel to the HTTP API and return the status. Raises RunFailed."""
    where = urlsplit(broker.url)
    login = base64.b64encode(f"{where.username}:{where.password}".encode()).decode()
    connection = http.client.HTTPConnection(broker.http, timeout=scale.SILENCE_S_MAX)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, SHOVEL, text, {"Authorization": f"Basic {login}"})
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace")
    finally:
        connection.close()
    if answer.status >= 300 and answer.status != 404:
        raise RunFailed(f"{method} {SHOVEL}: {answer.status} {said[:200]}")
    return answer.status


def _address(target: Target) -> str:
    return f"{urlsplit(target.url).hostname}:{port_of(target.url)}"
