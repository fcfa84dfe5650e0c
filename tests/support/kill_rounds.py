"""Rounds of kills over one broker under one load, with one ledger over all of them.

What is killed and when comes from the seed; what the processes were doing at that moment does not.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from pamqp import commands

from tests.support.kill_load import (
    Consumer,
    ConsumerClient,
    Declarer,
    Getter,
    LoadClient,
    Lost,
    Publisher,
    Transactor,
    Worker,
)  # fmt: skip
from tests.support.ledger import Ledger
from tests.support.real_broker import Address, RealBroker, is_running, wait_until

# Tests kill one kind more often than a broker that is well ever sees.
SETTINGS = """
[supervision]
deaths_max = 100
deaths_within_s = 3
"""

BACK_S = 120.0
QUIET_S = 60.0  # without a delivery: nothing comes any more
# All is still, everything is checked, then it goes on: after so many rounds.
REST_EACH = 10
QUEUES = tuple(f"q{number}" for number in range(4))
FANOUT = ("fanout-0", "fanout-1", "fanout-2")
LATE = ("late-0", "late-1")
SHARED = "shared"
BIG = "big"
POLLED = "polled"
ALL_QUEUES = (*QUEUES, *FANOUT, *LATE, SHARED, BIG, POLLED)
EXCHANGE = "kill-rounds"

# How often, of a hundred.
KINDS = {
    "shard": 26, "shard again": 10, "front-door": 16, "controller": 12, "both shards": 8,
    "shard and front-door": 8, "controller and shard": 6, "everything": 8, "supervisor": 3,
    "stop": 3,
}  # fmt: skip


class Load:
    """All clients, and the queues they use."""

    def __init__(self, broker: RealBroker, ledger: Ledger, seed: str, quiet_s: float) -> None:
        self.broker, self.ledger, self.quiet_s = broker, ledger, quiet_s
        _declare_all(broker.at)
        given = (broker.at, ledger, seed)
        self.publishers: list[Worker] = [
            *(Publisher(f"p-{queue}", *given, "", queue, (queue,)) for queue in (*QUEUES, *LATE)),
            Publisher("one-at-a-time", *given, "", QUEUES[0], (QUEUES[0],), window_max=1),
            Publisher("p-shared", *given, "", SHARED, (SHARED,)),
            Publisher("p-fanout", *given, EXCHANGE, "", FANOUT, window_max=300),
            Publisher(
                "p-big", *given, "", BIG, (BIG,), window_max=3, padding_max=400_000, rest_s=0.3
            ),
            Publisher("p-polled", *given, "", POLLED, (POLLED,), window_max=10),
            Transactor("tx", *given, (QUEUES[0], QUEUES[1], FANOUT[0])),
        ]
        self.declarer = Declarer("churn", *given)
        self.consumers = [
            *(Consumer(f"c-{queue}", *given, queue) for queue in (*QUEUES, *FANOUT, BIG)),
            *(Consumer(f"c-{queue}", *given, queue, away_s=6.0) for queue in LATE),
            Getter("g-polled", *given, POLLED),
            Consumer("c-shared-0", *given, SHARED, gives_back=0.1),
            Consumer("c-shared-1", *given, SHARED, away_s=2.0),
        ]
        ledger.may_fall(SHARED)
        self.workers: list[Worker] = [*self.consumers, *self.publishers, self.declarer]
        for worker in self.workers:
            worker.start()

    def rest(self) -> None:
        """Stop publishing, wait until all messages are acknowledged, and check the result."""
        pausing = [*self.publishers, self.declarer]
        for worker in pausing:
            worker.pause()
        for consumer in self.consumers:
            consumer.hurry = True
        self._until(
            lambda: all(worker.idle.is_set() for worker in pausing),
            "publishers to have their answers",
        )
        with contextlib.suppress(AssertionError):  # the check says what is missing
            self._until(lambda: not self.ledger.missing(), "all confirmed messages")
        self.ledger.check_all()
        # Asked of the shards, so that what was acknowledged and what was given back is all settled
        # there.
        self._until(lambda: _depths(self.broker.at) == dict.fromkeys(ALL_QUEUES, 0), "empty queues")
        _check_topology(self.broker, self.declarer)
        for consumer in self.consumers:
            consumer.hurry = False
        for worker in pausing:
            worker.resume()

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        arrived, since = 0, time.monotonic()
        while not happened():
            self.ledger.check()
            now = time.monotonic()
            if (arrived_now := self.ledger.deliveries) != arrived:
                arrived, since = arrived_now, now
            if now - since > self.quiet_s:
                raise AssertionError(f"waited {self.quiet_s:g} s for {what}: {self.state()}")
            time.sleep(0.05)

    def state(self) -> str:
        busy = [
            worker.name for worker in (*self.publishers, self.declarer) if not worker.idle.is_set()
        ]
        with contextlib.suppress(Lost, OSError):
            depths = {queue: depth for queue, depth in _depths(self.broker.at).items() if depth}
            return f"not idle {busy}, not empty {depths}"
        return f"not idle {busy}"

    def stop(self) -> None:
        for worker in self.workers:
            worker.going = False
        for worker in self.workers:
            worker.stop()


def _declare_all(at: Address) -> None:
    client = LoadClient(at)
    exchange = commands.Exchange.Declare(exchange=EXCHANGE, exchange_type="fanout", durable=True)
    client.ask(1, exchange, commands.Exchange.DeclareOk)
    for queue in ALL_QUEUES:
        client.ask(1, commands.Queue.Declare(queue=queue, durable=True), commands.Queue.DeclareOk)
    for queue in FANOUT:
        client.ask(1, commands.Queue.Bind(queue=queue, exchange=EXCHANGE), commands.Queue.BindOk)
    client.close()


def _depths(at: Address) -> dict[str, int]:
    """Ready messages of each queue."""
    client = ConsumerClient(at)
    try:
        return {queue: client.look(queue) for queue in ALL_QUEUES}
    finally:
        client.close()


def _queue_names(broker: RealBroker) -> set[str]:
    login = base64.b64encode(b"guest:guest").decode()
    request = urllib.request.Request(
        f"http://{broker.http}/api/queues", headers={"Authorization": f"Basic {login}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return {queue["name"] for queue in json.load(answer)}


def _check_topology(broker: RealBroker, declarer: Declarer) -> None:
    """Check that declared queues exist, and deleted and exclusive ones do not."""
    names: set[str] = set()

    def settled() -> bool:
        names.clear()
        names.update(_queue_names(broker))
        return not names & declarer.passing

    with contextlib.suppress(AssertionError):
        wait_until(settled, "exclusive and auto-delete queues to go")
    lost, risen, left = declarer.there - names, declarer.gone & names, declarer.passing & names
    assert not lost, f"queues that were declared are not there: {sorted(lost)[:5]}"
    assert not risen, f"queues that were deleted are there: {sorted(risen)[:5]}"
    assert not left, f"{len(left)} queues should have gone with their client: {sorted(left)[:5]}"
    missing = set(ALL_QUEUES) - names
    assert not missing, f"queues are gone: {missing}"


@contextlib.contextmanager
def started(
    directory: Path, command: tuple[str, ...] | None = None, front_doors: int = 2
) -> Iterator[RealBroker]:
    """Start two shards and two front doors; with 0 the shards are front doors.

    They end cleanly, or at once after a failure. Then their files are checked.
    """
    settings = directory / "broker.toml"
    settings.write_text(SETTINGS)
    more = {} if command is None else {"command": command}
    config = ("--config", str(settings))
    broker = RealBroker(directory / "data", front_doors=front_doors, more=config, **more)
    try:
        yield broker
        broker.stop()
    finally:
        broker.clean_up()


class Rounds:
    """`kinds`: names of KINDS, with weights."""

    def __init__(
        self,
        broker: RealBroker,
        seed: int,
        kinds: dict[str, int] | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.broker, self.seed = broker, seed
        self.random = random.Random(seed)
        self.kinds = KINDS if kinds is None else kinds
        self.ledger = Ledger()
        self.done: list[str] = []
        self.load = Load(broker, self.ledger, str(seed), quiet_s)

    def run(self, rounds: int, rest_each: int = REST_EACH) -> dict[str, int]:
        """Run the rounds; return the counts of the ledger.

        An AssertionError has all that explains it.
        """
        try:
            for number in range(1, rounds + 1):
                self._wait(self.random.choice([0.1, 0.3, 0.3, 0.6, 0.6, 1.0, 1.5, 4.5]))
                self._kill()
                self.ledger.check()
                if number % rest_each == 0 or number == rounds:
                    self._wait(0.5)
                    self.load.rest()
            return self.ledger.counts()
        except AssertionError as error:
            done = "\n".join(self.done[-12:])
            told = (
                f"seed {self.seed}, round "
                f"{len(self.done)}\n{error}\n\n{self.ledger.counts()}\n{done}"
            )
            raise AssertionError(f"{told}\n\n{self.broker.log_tail()}") from error
        finally:
            self.load.stop()

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds * self.random.uniform(0.5, 1.0))

    def _kill(self) -> None:
        (kind,) = self.random.choices(list(self.kinds), self.kinds.values())
        shard, door = self.random.randrange(2), self.random.randrange(2)
        self.done.append(f"{time.strftime('%H:%M:%S')} {kind} (shard {shard}, door {door})")
        match kind:
            case "shard":
                self._kill_some([("shard", shard)])
            case "front-door":
                self._kill_some([("front-door", door)])
            case "controller":
                self._kill_some([("controller", 0)])
            case "both shards":
                self._kill_some([("shard", 0), ("shard", 1)])
            case "shard and front-door":
                self._kill_some([("shard", shard), ("front-door", door)])
            case "controller and shard":
                self._kill_some([("controller", 0), ("shard", shard)])
                self.load.declarer.forget_auto_delete()
            case "shard again":
                self._kill_again(shard)
            case _:
                self._end(kind)
                self.broker.restart()

    def _end(self, kind: str) -> None:
        """Of the whole broker; its processes end at some time in between."""
        self.ledger.was_killed(time.monotonic(), shards=True)
        match kind:
            case "everything":
                self.broker.kill_all()
            case "supervisor":
                pids = [int(child["pid"]) for child in self.broker.status()["children"]]
                self.broker.process.kill()
                self.broker.process.wait()
                wait_until(
                    lambda: not any(map(is_running, pids)), "its processes to notice", BACK_S
                )
            case "stop":
                self.broker.stop()
        self.ledger.was_killed(time.monotonic(), shards=True)

    def _kill_some(self, which: list[tuple[str, int]]) -> None:
        old = {}
        for kind, index in which:
            old[kind, index] = self._kill_one(kind, index)
            if self.random.random() < 0.5:
                time.sleep(self.random.uniform(0, 0.1))
        for (kind, index), pid in old.items():
            wait_until(
                lambda kind=kind, index=index, pid=pid: self.broker.is_replaced(kind, index, pid),  # type: ignore[misc]
                f"{kind} {index} to come back",
                BACK_S,
            )

    def _kill_one(self, kind: str, index: int) -> int:
        pid = self.broker.pid(kind, index)
        with_shard = kind == "shard" or (kind == "front-door" and self.broker.combined)
        self.ledger.was_killed(time.monotonic(), shards=with_shard)
        if pid:  # 0: it has been killed as something else, and is not back
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid

    def _kill_again(self, shard: int) -> None:
        """While it starts, recovers, or has just begun to work."""
        old = self._kill_one("shard", shard)
        wait_until(lambda: self.broker.pid("shard", shard) not in (0, old), "the next life", BACK_S)
        time.sleep(self.random.uniform(0, 0.6))
        with contextlib.suppress(ProcessLookupError):
            old = self._kill_one("shard", shard)
        wait_until(
            lambda: self.broker.is_replaced("shard", shard, old),
            f"shard {shard} to come back",
            BACK_S,
        )
