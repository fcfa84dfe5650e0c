"""What links of exchanges declare and bind at their upstreams, and which messages they drop."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pamqp import base, commands

from shardmq.bridges.connection import Connection
from shardmq.bridges.editing import DROPPED, forwarded_by
from shardmq.bridges.errors import ChannelClosed, ConnectionClosed, LinkFailed
from shardmq.bridges.exchange_link import TOO_MANY, ExchangeLinkRunner
from shardmq.bridges.process import Bridges
from shardmq.bridges.upstream import Upstream
from shardmq.broker.amqp.methods import Long, decode_table, encode_table
from shardmq.broker.amqp.properties import encode_properties, read
from shardmq.broker.model.encrypted import ENCRYPTED
from shardmq.broker.model.federation import ExchangeLink, Source
from shardmq.broker.model.upstream_bindings import Binding, Place, at_upstream
from shardmq.broker.shared.bridging import Bindings, Order, Run, line
from tests.bridges.test_queue_link import ODD, array, headed

HISTORIES = 150
QUEUE = "federation: there -> here:x"
KEYS = ("a", "b", "c.*")


def link(**more: Any) -> ExchangeLink:
    given = {"upstream": "u", "policy": "p", "consumer_tag": "t", "uris": ["amqp://h"]} | more
    of_source = {name: given.pop(name) for name in Source.__struct_fields__ if name in given}
    given = {"upstream_exchange": "there", "exchange_type": "topic"} | given
    return ExchangeLink(vhost="/", exchange="x", source=Source(**of_source), **given)


# -- headers ---------------------------------------------------------------------------------------


def edited(props: dict[str, Any], redelivered: bool = False, **more: Any) -> Any:
    """Return the properties that the link publishes; None if it drops the message."""
    upstream = more.pop("upstream", ("up", "v"))
    edit = forwarded_by(link(**more), "amqp://u:secret@h?x=1", "here", upstream, 4096, print)
    found = edit(encode_properties(props), bytes([redelivered]))
    return None if found is None else read(found)


@pytest.mark.row("J12")
def test_the_upstream_is_noted_in_front_of_those_before() -> None:
    entry = {"uri": "amqp://h", "exchange": "x", "redelivered": True, "cluster-name": "up",
             "vhost": "v"}  # fmt: skip
    given = {"content_type": "a/b", "user_id": "me", "headers": {"x-sequence": 1, "CC": ["k"]}}
    found = edited(given, redelivered=True)
    assert found.headers == {"x-received-from": [entry], "CC": ["k"]}
    assert (found.content_type, found.user_id) == ("a/b", None)
    assert edited(given, trust_user_id=True).user_id == "me"
    before = [{"cluster-name": "c", "vhost": "/"}, "no table"]
    found = edited({"headers": {"x-received-from": before}}, max_hops=3, upstream=(None, "v"))
    first, *others = found.headers["x-received-from"]
    assert others == before and "cluster-name" not in first and first["redelivered"] is False


@pytest.mark.row("J12")
def test_any_message_that_came_too_far_or_through_here_is_dropped(
    pytestconfig: pytest.Config,
) -> None:
    chance = random.Random(pytestconfig.option.seed)
    for _ in range(HISTORIES):
        hops = chance.randrange(4)
        been = [(chance.choice(["here", "c", "d"]), chance.choice("/v")) for _ in range(3)]
        been = been[: chance.randrange(4)]
        entries = [{"cluster-name": name, "vhost": vhost} for name, vhost in been]
        found = edited({"headers": {"x-received-from": entries}}, max_hops=hops)
        passes = len(been) < hops and ("here", "/") not in been
        assert (found is not None) == passes, (been, hops)


@pytest.mark.row("J12")
@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
def test_odd_entries_stay_byte_for_byte_and_count_as_hops(odd: bytes) -> None:
    props = headed(b"x-received-from", array(odd))
    for hops in (1, 2):
        edit = forwarded_by(
            link(max_hops=hops), "amqp://h", "here", ("up", "/"), 4096, cast(Any, pytest.fail)
        )
        found = edit(props, b"\0")
        assert (found is not None and found.endswith(odd)) == (hops == 2)
        assert edit(headed(b"h", odd), b"\0") is not None


@pytest.mark.row("J12")
def test_a_message_whose_header_cannot_be_written_is_dropped_and_named() -> None:
    said: list[str] = []
    edit = forwarded_by(link(), "amqp://h", "here", ("up", "/"), 4096, said.append)
    assert edit(headed(b"h", b"?"), b"\0") is None
    assert edit(headed(b"h", b"x\0\0\x0f\xa0" + bytes(4000)), b"\0") is None
    assert said == [DROPPED] * 2


# -- what is at the upstream -----------------------------------------------------------------------


class Broker:
    """The queues, exchanges and bindings of an upstream, where a method may fail."""

    def __init__(self, knows_type: bool = True) -> None:
        self.knows_type = knows_type
        self.exchanges: dict[str, tuple[str, Any]] = {}
        self.queues: dict[str, Any] = {}
        self.to_queue: set[str] = set()  # exchanges that are bound to the queue
        self.bindings: set[tuple[str, str, bytes]] = set()  # destination, key and arguments
        self.failing_at = -1  # so many methods later the connection is lost
        self.kept: set[str] = set()  # keys that must lead to the queue all the time

    def keys(self) -> set[str]:
        """Return the keys of messages that come to the queue."""
        return {key for to, key, _ in self.bindings if to in self.to_queue}

    def do(self, method: base.Frame) -> base.Frame:
        self.failing_at -= 1
        if self.failing_at == -1:
            raise LinkFailed("lost")
        match method:
            case commands.Exchange.Declare() if method.passive:
                if method.exchange not in self.exchanges:
                    raise ChannelClosed(404, "404 NOT_FOUND")
            case commands.Exchange.Declare():
                if method.exchange_type == "x-federation-upstream" and not self.knows_type:
                    raise ConnectionClosed(503, "503 COMMAND_INVALID")
                given = method.exchange_type, method.arguments
                assert self.exchanges.setdefault(method.exchange, given) == given
            case commands.Exchange.Delete():
                self.exchanges.pop(method.exchange, None)
                self.to_queue.discard(method.exchange)
                self.bindings = {each for each in self.bindings if each[0] != method.exchange}
            case commands.Exchange.Bind() | commands.Exchange.Unbind():
                assert method.source == "there" and method.destination in self.exchanges
                binding = method.destination, method.routing_key, bytes(method.arguments)
                if isinstance(method, commands.Exchange.Bind):
                    self.bindings.add(binding)
                else:
                    self.bindings.remove(binding)
            case commands.Queue.Declare() if method.passive:
                if method.queue not in self.queues:
                    raise ChannelClosed(404, "404 NOT_FOUND")
            case commands.Queue.Declare():
                assert method.durable and not method.auto_delete
                if self.queues.setdefault(method.queue, method.arguments) != method.arguments:
                    raise ChannelClosed(406, "406 PRECONDITION_FAILED")
            case commands.Queue.Bind():
                assert method.queue in self.queues and method.exchange in self.exchanges
                self.to_queue.add(method.exchange)
            case commands.Queue.Delete():
                self.queues.pop(method.queue, None)
                self.to_queue.clear()
        assert self.kept <= self.keys()
        return SimpleNamespace(message_count=0)  # type: ignore[return-value]


class Wire:
    """A connection to such a broker."""

    frame_bytes_max = 4096
    cluster_name = "up"
    uri = SimpleNamespace(vhost="/")

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.unanswered = 0

    def send(self, method: base.Frame) -> None:
        assert method.nowait  # type: ignore[attr-defined]
        self.unanswered += 1
        assert self.unanswered < 100
        self.broker.do(method)

    async def call(self, method: base.Frame, answer: type[base.Frame]) -> base.Frame:
        assert not getattr(method, "nowait", False)
        self.unanswered = 0
        return self.broker.do(method)

    async def call_or_reopen(self, method: base.Frame, answer: type[base.Frame]) -> Any:
        try:
            return await self.call(method, answer)
        except ChannelClosed as closed:
            assert closed.code == 404
            return None


def upstream_of(broker: Broker, of: ExchangeLink | None = None) -> Upstream:
    async def again() -> Connection:
        return cast(Connection, Wire(broker))

    return Upstream(of or link(), "here", cast(Connection, Wire(broker)), again)


def bindings_of(keys: set[str]) -> list[Binding]:
    return [Binding(key, encode_table({})) for key in sorted(keys)]


def bound(broker: Broker, suffix: str, keys: set[str]) -> bool:
    """Return whether exactly these keys lead to the queue, by the internal exchange alone."""
    here = Place("here", "/", "x", suffix)
    made = at_upstream(bindings_of(keys), here, ("up", "/"), 1)
    name = f"{QUEUE} {suffix}"
    expected = {(name, each.key, each.arguments) for each in made}
    return (broker.bindings, broker.to_queue, set(broker.exchanges)) == (
        expected, {name}, {name, "there"},
    )  # fmt: skip


@pytest.mark.row("J12")
async def test_the_queue_and_the_internal_exchange_are_declared_as_rabbitmq_does() -> None:
    broker = Broker()
    await upstream_of(broker, link(expires=5, message_ttl=0, max_hops=2)).prepare([])
    assert broker.queues == {
        QUEUE: {"x-expires": 5, "x-message-ttl": 0, "x-queue-type": "classic",
                "x-internal-purpose": "federation"}
    }  # fmt: skip
    arguments = {"x-max-hops": 2, "x-downstream-name": "here", "x-downstream-vhost": "/"}
    assert broker.exchanges == {
        "there": ("topic", {}), f"{QUEUE} A": ("x-federation-upstream", arguments),
    }  # fmt: skip
    hops = broker.exchanges[f"{QUEUE} A"][1]["x-max-hops"]
    assert encode_table({"n": hops})[6:7] == b"l", "RabbitMQ asks for a long"
    assert decode_table(encode_table({"n": Long(-2)})) == {"n": -2}


@pytest.mark.row("J12")
@pytest.mark.parametrize("more", [{"expires": 6}, {"message_ttl": 1}, {"queue_type": "quorum"}])
async def test_a_queue_with_other_arguments_is_the_reason_of_a_failure(
    more: dict[str, Any],
) -> None:
    broker = Broker()
    await upstream_of(broker, link(expires=5)).prepare([])
    with pytest.raises(LinkFailed, match="PRECONDITION_FAILED"):
        await upstream_of(broker, link(**{"expires": 5} | more)).prepare([])
    await upstream_of(broker, link(expires=5)).prepare([])


@pytest.mark.row("J12")
async def test_an_upstream_without_the_exchange_type_gets_a_fanout_exchange() -> None:
    broker = Broker(knows_type=False)
    upstream = upstream_of(broker)
    first = upstream.connection
    await upstream.prepare(bindings_of({"k"}))
    assert broker.exchanges[f"{QUEUE} A"] == ("fanout", {})
    assert upstream.connection is not first and bound(broker, "A", {"k"})


@pytest.mark.row("J12")
async def test_any_history_of_failures_and_bindings_never_lacks_a_binding(
    pytestconfig: pytest.Config,
) -> None:
    for history in range(HISTORIES):
        chance = random.Random(pytestconfig.option.seed + history)
        broker, keys = Broker(chance.random() < 0.5), set(KEYS[:2])
        for step in range(chance.randrange(1, 8)):
            upstream = upstream_of(broker)
            broker.failing_at = chance.choice([-1, chance.randrange(1, 25)])
            try:
                await upstream.prepare(bindings_of(keys))
                broker.kept = keys
                for _ in range(chance.randrange(4)):
                    keys = {key for key in KEYS if chance.random() < 0.6}
                    broker.kept = broker.kept & keys
                    await upstream.follow(bindings_of(keys))
                    broker.kept = keys
                    assert bound(broker, upstream._suffix, keys), (history, step)
            except LinkFailed:
                pass
        broker.failing_at = -1
        last = upstream_of(broker)
        await last.prepare(bindings_of(keys))
        assert bound(broker, last._suffix, keys), history
        await last.check()
        broker.kept = set()
        await last.clean_up()
        assert (broker.queues, set(broker.exchanges)) == ({}, {"there"})
        with pytest.raises(LinkFailed, match="is gone"):
            await last.check()


@pytest.mark.row("J12")
async def test_many_bindings_are_sent_by_the_hundred_and_too_large_ones_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = Broker()
    upstream = upstream_of(broker)
    keys = {f"k{number}" for number in range(250)}
    large = [Binding(f"large{n}", encode_table({"a": "x" * 5000})) for n in range(3)]
    await upstream.prepare([*bindings_of(keys), *large])
    assert bound(broker, "A", keys)
    said = [each.getMessage() for each in caplog.records if "no frame" in each.getMessage()]
    assert len(said) == 1 and "3 bindings" in said[0]
    await upstream.follow(large)
    assert bound(broker, "A", set())


@pytest.mark.row("J12")
async def test_names_that_are_too_long_together_are_the_reason_of_a_failure() -> None:
    long = link(uris=["amqp://h"])
    upstream = Upstream(long, "c" * 240, cast(Connection, Wire(Broker())), cast(Any, None))
    with pytest.raises(LinkFailed, match="too long together"):
        await upstream.prepare([])


# -- the process -----------------------------------------------------------------------------------


@pytest.mark.row("J12")
async def test_a_link_leaves_its_upstream_only_for_good_and_knows_its_bindings(
    tmp_path: Path,
) -> None:
    config = SimpleNamespace(runtime_dir=str(tmp_path), first_door=0, doors=1)
    bridges = Bridges(cast(Any, config))
    bridges._bind(Bindings("/", "x", bindings_of({"k"})))
    await bridges._run([Order(link(), 1)], "here")
    [first] = bridges._runners.values()
    assert isinstance(first, ExchangeLinkRunner) and first._wanted() == bindings_of({"k"})
    bridges._bind(Bindings("/", "x", None))
    with pytest.raises(LinkFailed, match=TOO_MANY):
        first._wanted()
    for order, cluster, leaves in (
        (Order(link(), 2), "here", False),  # a restart
        (Order(link(prefetch=1), 3), "here", False),
        (Order(link(uris=["amqp://u:secret@h"]), 4), "here", False),
        (Order(link(uris=["amqp://j", "amqp://h"]), 5), "here", False),
        (Order(link(upstream="renamed"), 6), "here", False),
        (Order(link(uris=["amqp://i"]), 7), "here", True),
        (Order(link(uris=["amqp://i"]), 7), "there", True),
    ):
        [before] = bridges._runners.values()
        await bridges._run([order], cluster)
        [after] = bridges._runners.values()
        assert after is not before
        assert isinstance(before, ExchangeLinkRunner) and before.leaves == leaves, order
    await bridges._stop_all()
    assert isinstance(after, ExchangeLinkRunner) and not after.leaves and not bridges._runners
    await bridges._run([order], "there")
    [unread] = bridges._runners.values()
    await bridges._run([Order(link(uris=[f"{ENCRYPTED}x"]), 8)], "there")
    assert isinstance(unread, ExchangeLinkRunner) and not unread.leaves and not bridges._runners
    await bridges._run([order], "there")
    [last] = bridges._runners.values()
    await bridges._run([], "there")
    assert isinstance(last, ExchangeLinkRunner) and last.leaves
    assert bridges._bindings == {}


async def test_what_an_older_call_says_is_not_run_behind_what_a_newer_one_says(
    tmp_path: Path,
) -> None:
    config = SimpleNamespace(runtime_dir=str(tmp_path), first_door=0, doors=1)
    bridges = Bridges(cast(Any, config))
    has_stopped = asyncio.Event()
    stop = bridges._stop_runners

    async def stop_slowly(keys: Any) -> None:
        await stop(keys)
        if keys:
            await has_stopped.wait()

    bridges._stop_runners = stop_slowly  # type: ignore[method-assign]
    calls = []
    for orders in ([Order(link(), 1)], [Order(link(), 2)], [Order(link(), 3)], []):
        reader = asyncio.StreamReader()
        reader.feed_data(line(Run(orders, "here")))
        writer = SimpleNamespace(transport=SimpleNamespace(abort=reader.feed_eof))
        calls.append(asyncio.create_task(bridges._controller_calls(reader, cast(Any, writer))))
        for _ in range(10):
            await asyncio.sleep(0)
    has_stopped.set()
    reader.feed_eof()
    await asyncio.wait(calls)
    assert bridges._runners == {}


@pytest.mark.row("J12")
async def test_an_exchange_is_not_federated_from_itself() -> None:
    own = link(upstream_exchange="x", uris=["amqp://"])
    runner = ExchangeLinkRunner(Order(own, 1), "here", list, lambda: None)
    await runner.run()
    assert runner.state.error == "the upstream exchange is the federated exchange itself"


@pytest.mark.row("J12")
async def test_a_link_with_a_twin_does_not_run_and_says_why() -> None:
    runner = ExchangeLinkRunner(Order(link(twin="v"), 1), "here", list, lambda: None)
    assert runner._common.tries.is_hopeless
    with pytest.raises(LinkFailed, match="'v' leads to the same exchange of the same broker"):
        await runner._run_once()
