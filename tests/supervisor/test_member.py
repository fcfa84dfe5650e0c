"""Test the sign of life of a node, with sockets and an etcd that nobody uses."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shardmq.broker.controller.config import Cluster as ClusterOfController
from shardmq.cluster.lease import ENDED, LAPSED, Barred
from shardmq.cluster.membership import Origin, Part, Place, Refused, write_place
from shardmq.cluster.pairs import EtcdAway
from shardmq.cluster.secret import keys_of
from shardmq.shardd.config import CopiesConfig
from shardmq.supervisor import member as members
from shardmq.supervisor.config import Cluster, ConfigError
from shardmq.supervisor.member import Member, own_address


@contextmanager
def announced(tmp_path: Path, holds: Any) -> Iterator[list[asyncio.Task[None]]]:
    """Announce a node whose lease `holds`; yield the tasks of leases that have ended."""
    ended: list[asyncio.Task[None]] = []
    settings = Cluster(name="tea", secret="a secret of the tests", address="127.0.0.1", node="a")
    member = Member(settings, tmp_path, 0, (), 1)
    member.place = msgspec.structs.replace(member.place, number=0)
    member.failed = ended.append
    member._lease.hold = holds  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sockets: Any = SimpleNamespace(cluster=[listening], amqp=(), addresses=dict)
        member.announce(sockets)
        yield ended
        assert member._holding is not None
        member._holding.cancel()


@pytest.mark.parametrize(
    ("lost", "level"),
    [(ENDED, logging.INFO), (LAPSED, logging.ERROR)],
    ids=["in order", "by a silent etcd"],
)
def test_the_end_of_a_lease_is_an_error_unless_the_node_stops(
    caplog: pytest.LogCaptureFixture, lost: str, level: int
) -> None:
    lease: Any = SimpleNamespace(lost=lost, trouble="")
    with caplog.at_level(logging.INFO):
        members._lease_changed(lease)
    assert [record.levelno for record in caplog.records] == [level]


class Probe(socket.socket):
    """A socket by which this host reaches h2 and h3 from 192.0.2.1, and knows no h9."""

    def connect(self, address: Any) -> None:
        if address[0] == "h9":
            raise socket.gaierror("who is h9?")
        self.from_address = "127.0.0.1" if address[0] == "h1" else "192.0.2.1"

    def getsockname(self) -> Any:
        return (self.from_address, 0)


@pytest.mark.parametrize(
    ("etcd", "address"),
    [
        (["http://h2:2379"], "192.0.2.1"),
        (["http://h1:2379", "http://h2:2379"], "192.0.2.1"),
        (["http://h9:2379", "http://h3:2379"], "192.0.2.1"),
        (["http://h1:2379", "http://h9:2379"], "127.0.0.1"),
    ],
)
def test_a_node_has_the_address_by_which_other_hosts_reach_it(
    monkeypatch: pytest.MonkeyPatch, etcd: list[str], address: str
) -> None:
    monkeypatch.setattr(members.socket, "socket", Probe)
    assert own_address(Cluster(name="tea", secret="a", etcd=etcd)) == address


def test_a_node_that_no_endpoint_tells_its_address_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members.socket, "socket", Probe)
    with pytest.raises(ConfigError, match="h9:1: .*who is h9"):
        own_address(Cluster(name="tea", secret="a", etcd="http://h9:1"))


@pytest.mark.parametrize(
    ("origin", "founds"),
    [
        (None, True),
        (Origin("monday", "", {"shardmq@a": Part(0, {0: 1})}), True),
        (Origin("monday", "", {"shardmq@b": Part(1, {0: 1})}), False),
    ],
)
def test_children_hear_after_how_long_other_nodes_take_over_and_whether_this_one_founds(
    tmp_path: Path, origin: Origin | None, founds: bool
) -> None:
    settings = Cluster(name="tea", secret="a", address="127.0.0.1", node="a", node_timeout_s=9)
    settings = msgspec.structs.replace(settings, replica_lag_s=3)
    member = Member(settings, tmp_path, 0, (), 1)
    member.place = msgspec.structs.replace(member.place, number=0, origin=origin)
    member._keys = keys_of("a", "tea")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sockets: Any = SimpleNamespace(cluster=[listening])
        plan = member.node(sockets)
    assert plan.controller is not None
    told = msgspec.convert({**plan.controller, "release": "1"}, ClusterOfController)
    assert (plan.node_timeout_s, told.node_timeout_s, told.replica_lag_s) == (9, 9, 3)
    assert told.founds == founds
    assert plan.copies is not None
    seat = {**plan.copies, "fd": 0, "founds": founds}
    assert msgspec.convert(seat, CopiesConfig).replica_lag_s == 3


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_node_of_another_cluster_is_refused_and_the_others_are_told(
    tmp_path: Path, is_away: bool
) -> None:
    write_place(tmp_path, Place("coffee", "shardmq@b", "identity", 0))
    settings = Cluster(name="tea", secret="a secret of the tests", address="127.0.0.1", node="a")
    member, told = Member(settings, tmp_path, 0, (), 1), list[Refused]()

    async def tell(refused: Refused) -> None:
        if is_away:
            raise EtcdAway("etcd is away")
        told.append(refused)

    member._claims.tell_refused = tell  # type: ignore[method-assign]
    why = "belongs to the node 'shardmq@b' of the cluster 'coffee', not to 'shardmq@a' of 'tea'"
    with pytest.raises(ConfigError, match=f"^cluster: .* {why}$"):
        await member.join(lambda text: None)
    assert [str(each) for each in told] == (
        [] if is_away else [f"shardmq@a at 127.0.0.1: {tmp_path} {why}"]
    )


async def test_the_end_of_the_lease_is_told(tmp_path: Path) -> None:
    async def fails() -> None:
        raise RuntimeError("a fault of ours")

    with announced(tmp_path, fails) as ended:
        for _ in range(5):  # passes of the loop
            await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        ended[0].result()


async def test_who_leaves_takes_no_copies_any_more_before_the_connections_end(
    tmp_path: Path,
) -> None:
    """A watch that is cut off by this node itself would be taken for a fault of the supervisor."""
    settings = Cluster(name="tea", secret="a secret of the tests", address="127.0.0.1", node="a")
    member, steps = Member(settings, tmp_path, 0, (), 3), list[str]()

    async def watch(prefix: str) -> AsyncIterator[Any]:
        steps.append("watches")
        try:
            yield await asyncio.Event().wait()
        finally:
            steps.append("watches no more")

    async def close() -> None:
        steps.append("closed")

    member._etcd.watch = watch  # type: ignore[method-assign, assignment]
    member._etcd.close = close  # type: ignore[method-assign]
    taking = asyncio.create_task(member.take_seats(lambda shard: None))
    while not steps:
        await asyncio.sleep(0)
    await member.leave()
    assert steps == ["watches", "watches no more", "closed"]
    assert taking.cancelled()


async def test_a_node_that_was_forgotten_while_it_ran_is_told_why(tmp_path: Path) -> None:
    async def fails() -> None:
        raise Barred("/shardmq/tea/forgotten/0")

    with announced(tmp_path, fails) as ended:
        for _ in range(5):  # passes of the loop
            await asyncio.sleep(0)
    with pytest.raises(ConfigError, match="the node 'shardmq@a' was forgotten"):
        ended[0].result()
