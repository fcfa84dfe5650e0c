"""Clients at all nodes of a cluster: four publishers, eight consumers, and who changes definitions.

    publisher        goes to                                        consumers
    p-fanout         a fanout of one queue on each shard,           one for each of them
                     and of a queue with two consumers              two
    p-spread         a stream exchange, a key for each connection   one of the virtual queue
    p-stream         a stream                                       one, which goes on where it was
    p-dying          a queue whose messages are all rejected        one of the dead letters

Each is a thread that comes back at another node when it is lost. What they are told goes into one
ledger. Two more at each node change definitions, each of which asks another node at once.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from pamqp import commands, frame

from shardmq.broker.routing.placement import place
from tests.support.kill_load import (
    Consumer,
    ConsumerClient,
    LoadClient,
    Lost,
    Publisher,
    Worker,
    publishing,
)
from tests.support.ledger import Ledger
from tests.support.raw_client import method, raw_frame
from tests.support.real_broker import Address, RealBroker
from tests.support.real_cluster import login

FANOUT: Final = "rounds"
SHARED: Final = "shared"
SPREAD: Final = "spread"
STREAM: Final = "stream"
DYING: Final = "dying"
DEAD: Final = "dead"
CONSUMERS: Final = 8
HTTP_S_MAX: Final = 60.0
CHANGE_PAUSE_S: Final = 0.3


def queue_names(shards: int) -> tuple[str, ...]:
    """Return the name of one queue for each shard, which is placed there."""
    found: dict[int, str] = {}
    number = 0
    while len(found) < shards:
        name = f"q{number}"
        found.setdefault(place("/", name, shards), name)
        number += 1
    return tuple(found[shard] for shard in range(shards))


class SpreadPublisher(Publisher):
    """A publisher with another routing key, thus perhaps another shard, for each connection."""

    def session(self) -> None:
        self._frames = publishing(SPREAD, f"{self.name}.{self.sessions}")
        super().session()


class SpreadConsumer(Consumer):
    """A consumer of a virtual queue, of whose shards no single one answers for all acks."""

    def _settle(self, client: ConsumerClient) -> None:
        tag = 0
        while client.deliveries:
            tag, redelivered, body, since = client.deliveries.popleft()
            self.ledger.was_delivered(self.queue, body, redelivered, time.monotonic(), since)
        if tag:
            client.send(method(1, commands.Basic.Ack(tag, True)))


class Rejecter(Consumer):
    """A consumer that lets all messages die; what it sees is nobody's business."""

    def _settle(self, client: ConsumerClient) -> None:
        tags = []
        while client.deliveries:
            tags.append(client.deliveries.popleft()[0])
        client.send(b"".join(method(1, commands.Basic.Reject(tag, False)) for tag in tags))


class OffsetClient(ConsumerClient):
    """A client whose deliveries come from a stream: `offsets` are those of the deliveries."""

    def __init__(self, at: Address) -> None:
        self.offsets: list[int] = []
        super().__init__(at)

    def pending(self, found: tuple[int, bytes]) -> None:
        if found[0] == 2:
            head = frame.unmarshal(raw_frame(2, 1, found[1]))[2]
            self.offsets.append(int(head.properties.headers["x-stream-offset"]))
        super().pending(found)


class StreamReader(Consumer):
    """A reader of a stream that goes on behind the last message that it has seen.

    An offset never means two messages, and none is left out.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._bodies: list[bytes] = []  # by offset

    def session(self) -> None:
        client = self.connect(OffsetClient)
        try:
            client.ask(1, commands.Basic.Qos(0, 100, False), commands.Basic.QosOk)
            self.ledger.consumer_came(self.queue)
            wanted = {"x-stream-offset": len(self._bodies)}
            client.ask(
                1,
                commands.Basic.Consume(queue=self.queue, arguments=wanted),
                commands.Basic.ConsumeOk,
            )
            while self.going:
                client.wait(0.05)
                self._take_in(client)
        finally:
            client.close()

    def _take_in(self, client: OffsetClient) -> None:
        tag = 0
        while client.deliveries:
            tag, redelivered, body, since = client.deliveries.popleft()
            offset = client.offsets.pop(0)
            if offset == len(self._bodies):
                self._bodies.append(body)
                self.ledger.was_delivered(self.queue, body, redelivered, time.monotonic(), since)
            elif offset > len(self._bodies):
                self.ledger.complain(
                    f"{self.queue}: offset {offset} came behind {len(self._bodies) - 1}"
                )
            elif self._bodies[offset] != body:
                self.ledger.complain(
                    f"{self.queue}: offset {offset} was {self._bodies[offset][:60]!r}, "
                    f"and is {body[:60]!r}"
                )
        if tag:
            client.send(method(1, commands.Basic.Ack(tag, True)))


class Definer(Worker):
    """A client that changes definitions at one node, and asks another node at once.

    A change that was answered is true at all nodes: `there` and `gone` are the names of exchanges
    and queues of which that is known.
    """

    def __init__(self, name: str, ats: Sequence[Address], ledger: Ledger, seed: str) -> None:
        super().__init__(name, ats[0], ledger, seed)
        self._ats = ats
        self.there: dict[str, str] = {}  # kind by name
        self.gone: dict[str, str] = {}
        self.changes = 0

    def session(self) -> None:
        first, second = self.random.sample(list(self._ats), 2)
        one = LoadClient(first)
        try:
            other = LoadClient(second)
            try:
                for _ in range(self.random.randint(1, 4)):
                    if self.paused:
                        self.idle.set()
                        self._may_work.wait(0.2)
                    elif self.going:
                        self._declare(one, other)
                        if self.there and self.random.random() < 0.6:
                            self._delete(one)
                        time.sleep(self.random.uniform(0, CHANGE_PAUSE_S))
            finally:
                other.close()
        finally:
            one.close()

    def _declare(self, one: LoadClient, other: LoadClient) -> None:
        self.changes += 1
        name = f"{self.name}-{self.changes}"
        if self.random.random() < 0.5:
            declare = commands.Exchange.Declare(exchange=name, durable=True)
            passive = commands.Exchange.Declare(exchange=name, passive=True)
            kind, answer = "exchange", commands.Exchange.DeclareOk
        else:
            declare = commands.Queue.Declare(queue=name, durable=True)
            passive = commands.Queue.Declare(queue=name, passive=True)
            kind, answer = "queue", commands.Queue.DeclareOk
        one.ask(1, declare, answer)
        self.there[name] = kind
        # A node that does not know the name closes the channel, which `ask` complains of.
        other.ask(1, passive, answer)

    def _delete(self, one: LoadClient) -> None:
        name = self.random.choice(sorted(self.there))
        kind = self.there.pop(name)  # before it is known: the answer may be lost
        self.changes += 1
        if kind == "exchange":
            one.ask(1, commands.Exchange.Delete(exchange=name), commands.Exchange.DeleteOk)
        else:
            one.ask(1, commands.Queue.Delete(queue=name), commands.Queue.DeleteOk)
        self.gone[name] = kind
        self._check_gone(name, kind)

    def _check_gone(self, name: str, kind: str) -> None:
        """Ask another node for what is gone, with a connection that may be closed by the answer."""
        client = LoadClient(self.random.choice(list(self._ats)))
        try:
            passive = (
                commands.Exchange.Declare(exchange=name, passive=True)
                if kind == "exchange"
                else commands.Queue.Declare(queue=name, passive=True)
            )
            answer = client.ask(1, passive, object)
            if not (isinstance(answer, commands.Channel.Close) and answer.reply_code == 404):
                self.ledger.complain(f"{kind} {name} was deleted, and is there: {answer!r}")
        finally:
            client.close()


class Tuner(Worker):
    """A client that sets a parameter by HTTP at one node after the other.

    A GET asks nobody whether the node still leads, so the value is checked when all is still.
    """

    def __init__(self, name: str, nodes: Sequence[RealBroker], ledger: Ledger, seed: str) -> None:
        super().__init__(name, nodes[0].at, ledger, seed)
        self._nodes = nodes
        self.value = 0
        self._answered = 0  # the last value that was; those behind it are set or not
        self._told: deque[str] = deque(maxlen=8)  # what became of the last ones

    def session(self) -> None:
        if self.paused:
            self.idle.set()
            self._may_work.wait(0.2)
            return
        self.value += 1
        path = f"global-parameters/{self.name}"
        body = json.dumps({"name": self.name, "value": self.value}).encode()
        node = self.random.choice(list(self._nodes))
        asked = f"{time.strftime('%H:%M:%S')} {self.value} at {node.data_dir.name}"
        try:
            ask(node, path, body)
        except Lost as lost:
            self._told.append(f"{asked}: {lost}")
            raise
        self._told.append(f"{asked}: answered {time.strftime('%H:%M:%S')}")
        self._answered = self.value
        time.sleep(self.random.uniform(0, CHANGE_PAUSE_S))

    def check(self, node: RealBroker) -> None:
        """Check the value at a node when all is still."""
        if self._answered == 0:
            return
        found = ask(node, f"global-parameters/{self.name}")["value"]
        told = "\n".join(self._told)
        who = f"{self.name} at {node.data_dir.name}"
        assert self._answered <= found <= self.value, f"{who}: {found}\n{told}"


def ask(node: RealBroker, path: str, body: bytes | None = None) -> Any:
    """GET a path of the API of a node, or PUT a body there. Raises Lost if there is no answer."""
    request = urllib.request.Request(
        f"http://{node.http}/api/{path}", body, method="GET" if body is None else "PUT"
    )
    request.add_header("Authorization", f"Basic {login(node)}")
    try:
        with urllib.request.urlopen(request, timeout=HTTP_S_MAX) as answer:
            said = answer.read()
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        raise Lost(f"{path}: {error}") from None
    except OSError as error:
        raise Lost(f"{path}: {error}") from None
    return json.loads(said) if said else None


def declare_all(node: RealBroker, queues: Sequence[str]) -> None:
    client = LoadClient(node.at)
    exchange = commands.Exchange.Declare
    queue = commands.Queue.Declare
    client.ask(
        1,
        exchange(exchange=FANOUT, exchange_type="fanout", durable=True),
        commands.Exchange.DeclareOk,
    )
    for name in (*queues, SHARED):
        client.ask(1, queue(queue=name, durable=True), commands.Queue.DeclareOk)
        client.ask(1, commands.Queue.Bind(queue=name, exchange=FANOUT), commands.Queue.BindOk)
    spread = {"x-shards": len(queues)}
    client.ask(
        1,
        exchange(
            exchange=SPREAD, exchange_type="x-consistent-hash", durable=True, arguments=spread
        ),
        commands.Exchange.DeclareOk,
    )
    dying = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}
    for name, arguments in ((STREAM, {"x-queue-type": "stream"}), (DYING, dying), (DEAD, {})):
        client.ask(
            1, queue(queue=name, durable=True, arguments=arguments), commands.Queue.DeclareOk
        )
    client.close()
