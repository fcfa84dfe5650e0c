"""The record of copies at a key of etcd is changed by compare-and-swap only."""

from __future__ import annotations

import asyncio

import pytest

from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import EtcdAway, EtcdRefused, Outcome, Pair, Put
from shardmq.cluster.record_store import EtcdRecord, RecordAway, decoded
from shardmq.cluster.rules import Record, Swap


def record(term: int, leader: str = "a") -> Record:
    return Record(term, leader, 1, "s", {"a": "copy-a", "b": "copy-b"})


async def test_a_record_is_made_read_and_changed_by_its_revision(etcd: Etcd, prefix: str) -> None:
    store = EtcdRecord(etcd, f"{prefix}controller")
    found, before = await store.read()
    assert found is None and before > 0
    first = await store.swap(record(1), 0)
    assert isinstance(first, int) and first > before
    assert await store.read() == (record(1), first)
    assert await store.swap(record(2), 0) is Swap.REFUSED
    second = await store.swap(record(2), first)
    assert isinstance(second, int) and second > first
    assert await store.swap(record(3), first) is Swap.REFUSED
    assert await store.read() == (record(2), second)
    third = await store.swap(record(2), second)
    assert isinstance(third, int) and third > second, "the same record has a new revision"


async def test_of_many_who_propose_at_once_one_succeeds(etcd: Etcd, prefix: str) -> None:
    store = EtcdRecord(etcd, f"{prefix}controller")
    revision = await store.swap(record(1), 0)
    assert isinstance(revision, int)
    outcomes = await asyncio.gather(*(store.swap(record(2, each), revision) for each in "abab"))
    assert sorted(isinstance(outcome, int) for outcome in outcomes) == [False, False, False, True]


@pytest.mark.parametrize("value", [b"{", b"{}", b'{"term":1,"leader":"a","life":1,"store":"s",'
                                   b'"in_sync":{"b":"x"}}'])  # fmt: skip
async def test_a_record_that_is_none_is_not_taken_for_one(
    etcd: Etcd, prefix: str, value: bytes
) -> None:
    store = EtcdRecord(etcd, f"{prefix}controller")
    await etcd.transact((), [Put(store.key, value)])
    with pytest.raises(RecordAway, match="controller"):
        await store.read()


@pytest.mark.parametrize(
    "value",
    [b"", b'{"term":1,"leader":"caf\xe9"}', b'{"x":' + b"[" * 100_000],
    ids=["empty", "Latin-1", "deep"],
)
def test_no_value_is_more_than_no_record(value: bytes) -> None:
    with pytest.raises(RecordAway, match="controller"):
        decoded(Pair("controller", value, 1, 1))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EtcdAway("no answer", unknown=True), Swap.UNKNOWN),
        (EtcdAway("no connection"), Swap.REFUSED),
        (EtcdRefused("no permission"), Swap.REFUSED),
    ],
)
async def test_it_is_known_whether_a_proposal_can_still_take_effect(
    error: Exception, outcome: Swap
) -> None:
    class Failing:
        async def transact(self, compares: object, then: object) -> Outcome:
            raise error

    store = EtcdRecord(Failing(), "controller")
    assert await store.swap(record(1), 0) is outcome
    with pytest.raises(RecordAway):
        await store.read()
