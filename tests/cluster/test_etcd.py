"""The client for etcd, with a real etcd: keys, transactions, leases, watches."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from shardmq.cluster.etcd import Etcd
from shardmq.cluster.pairs import (
    Changes,
    Compare,
    Delete,
    Deleted,
    EtcdAway,
    EtcdRefused,
    Get,
    LeaseGone,
    Listing,
    Outcome,
    Pair,
    Put,
)
from tests.support.cut_proxy import CutProxy
from tests.support.etcd import RealEtcd

WAIT_S = 20.0  # on a busy machine
RACES = 200
# Bounds that let a test of failures end soon.
HASTY = {"attempt_s": 0.5, "call_s": 1.5, "silence_s": 0.5}


async def put(etcd: Etcd, key: str, value: bytes = b"", lease: int = 0) -> int:
    """Set a key and return the revision of the change."""
    return (await etcd.transact((), [Put(key, value, lease)])).revision


async def soon(waited_for: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await waited_for


# -- keys and transactions -------------------------------------------------------------------------


async def test_values_come_back_with_their_revisions(etcd: Etcd, prefix: str) -> None:
    key = prefix + "ключ 1"
    value = bytes(range(256))
    assert await etcd.get(key) is None
    first = await put(etcd, key, value)
    assert await etcd.get(key) == Pair(key, value, first, first)
    second = await put(etcd, key, b"")
    assert await etcd.get(key) == Pair(key, b"", second, first)


async def test_a_range_has_the_keys_below_the_prefix_and_no_others(etcd: Etcd, prefix: str) -> None:
    for key in ("a/2", "a/1", "a/", "a", "ab", "b"):
        await put(etcd, prefix + key)
    listing = await etcd.range(prefix + "a/")
    assert [pair.key for pair in listing.pairs] == [prefix + "a/", prefix + "a/1", prefix + "a/2"]
    assert listing.revision == await put(etcd, prefix + "b") - 1
    assert await etcd.range(prefix + "none/") == Listing((), listing.revision + 1)


async def test_a_transaction_does_what_its_compares_say(etcd: Etcd, prefix: str) -> None:
    a, b = prefix + "a", prefix + "b"
    made = await etcd.transact([Compare(a, create_revision=0)], [Put(a, b"1"), Get(a), Get(b)])
    assert made == Outcome(True, made.revision, (Pair(a, b"1", made.revision, made.revision), None))
    revision = made.revision
    true = [Compare(a, mod_revision=revision), Compare(a, create_revision=revision, value=b"1")]
    wrong = [
        Compare(a, mod_revision=revision + 1),
        Compare(a, create_revision=0),
        Compare(a, value=b"2"),
        Compare(a, mod_revision=revision, value=b"2"),
        Compare(b, mod_revision=revision),
    ]
    for compare in wrong:
        outcome = await etcd.transact([*true, compare], [Delete(a)], [Get(b), Get(a)])
        assert (outcome.succeeded, outcome.revision) == (False, revision)
        assert outcome.pairs == (None, made.pairs[0])
    assert (await etcd.transact(true, [Delete(a), Delete(b)])).succeeded
    assert await etcd.get(a) is None
    assert not (await etcd.transact([Compare(b, create_revision=1)], [])).succeeded


def test_a_compare_must_have_something_to_compare_with() -> None:
    with pytest.raises(ValueError, match="nothing to compare k with"):
        Compare("k")


async def test_of_two_clients_in_a_race_one_wins(real: RealEtcd, prefix: str) -> None:
    key = prefix + "leader"
    async with Etcd(real.endpoints) as one, Etcd(real.endpoints) as other:
        revision, winners = 0, []
        for _ in range(RACES):
            unchanged = [Compare(key, mod_revision=revision)]
            outcomes = await asyncio.gather(
                *(
                    client.transact(unchanged, [Put(key, name)], [Get(key)])
                    for client, name in ((one, b"one"), (other, b"other"))
                )
            )
            won = [outcome.succeeded for outcome in outcomes]
            assert sorted(won) == [False, True]
            # The loser has read what the winner wrote.
            (seen,) = outcomes[won.index(False)].pairs
            assert seen is not None and seen.value == (b"one", b"other")[won.index(True)]
            revision = outcomes[won.index(True)].revision
            assert seen.mod_revision == revision
            winners.append(seen.value)
    assert set(winners) == {b"one", b"other"}


# -- leases ----------------------------------------------------------------------------------------


async def test_a_lease_that_is_revoked_takes_its_keys_along(etcd: Etcd, prefix: str) -> None:
    grant = await etcd.grant(60)
    assert grant.ttl_s == 60
    await put(etcd, prefix + "a", b"", grant.lease)
    pair = await etcd.get(prefix + "a")
    assert pair is not None and pair.lease == grant.lease
    assert await etcd.keep_alive(grant.lease) == 60
    await etcd.revoke(grant.lease)
    assert await etcd.get(prefix + "a") is None
    await etcd.revoke(grant.lease)
    with pytest.raises(LeaseGone, match="has expired or was revoked"):
        await etcd.keep_alive(grant.lease)
    with pytest.raises(LeaseGone, match="requested lease not found"):
        await etcd.transact((), [Put(prefix + "b", b""), Put(prefix + "a", b"", grant.lease)])
    assert (await etcd.range(prefix)).pairs == ()


async def test_the_end_of_a_lease_is_seen_by_a_watch(etcd: Etcd, prefix: str) -> None:
    grant = await etcd.grant(1)
    revision = await put(etcd, prefix + "a", b"", grant.lease)
    async with aclosing(etcd.watch(prefix, revision + 1)) as watch:
        news = await soon(anext(watch))
    assert news == Changes((Deleted(prefix + "a", news.revision),), news.revision)


# -- watches ---------------------------------------------------------------------------------------


async def test_a_watch_begins_with_a_listing_and_goes_on_with_changes(
    etcd: Etcd, prefix: str
) -> None:
    first = await put(etcd, prefix + "a", b"1")
    async with aclosing(etcd.watch(prefix)) as watch:
        listing = Listing((Pair(prefix + "a", b"1", first, first),), first)
        assert await soon(anext(watch)) == listing
        await put(etcd, prefix[:-1] + "no/a")
        done = await etcd.transact((), [Put(prefix + "b", b"2"), Delete(prefix + "a")])
        at = done.revision
        both = (Pair(prefix + "b", b"2", at, at), Deleted(prefix + "a", at))
        assert await soon(anext(watch)) == Changes(both, at)


async def test_a_watch_from_a_revision_yields_what_has_happened_since(
    etcd: Etcd, prefix: str
) -> None:
    revisions = [await put(etcd, prefix + "a", b"%d" % number) for number in range(5)]
    seen: list[Pair | Deleted] = []
    async with aclosing(etcd.watch(prefix, revisions[2])) as watch:
        while len(seen) < 3:
            news = await soon(anext(watch))
            assert isinstance(news, Changes)
            seen += news.changes
    assert seen == [
        Pair(prefix + "a", b"%d" % number, revisions[number], revisions[0]) for number in (2, 3, 4)
    ]


async def test_changes_that_were_compacted_make_a_watch_list_anew(own: RealEtcd) -> None:
    async with CutProxy(own.only.port) as proxy, Etcd(own.endpoints) as direct:
        async with Etcd([proxy.endpoint], **HASTY) as etcd:
            async with aclosing(etcd.watch("/")) as watch:
                assert await soon(anext(watch)) == Listing((), 1)
                await put(direct, "/a", b"1")
                assert isinstance(await soon(anext(watch)), Changes)
                proxy.refuse = True
                await proxy.cut()
                await put(direct, "/a", b"2")
                at = await put(direct, "/b", b"3")
                own.compact(at)
                proxy.refuse = False
                news = await soon(anext(watch))
                assert isinstance(news, Listing) and news.revision == at
                assert [pair.value for pair in news.pairs] == [b"2", b"3"]
                await put(direct, "/c")
                news = await soon(anext(watch))
                assert isinstance(news, Changes) and news.revision == at + 1


async def test_a_watch_that_is_idle_asks_anew_and_misses_nothing(
    real: RealEtcd, prefix: str
) -> None:
    async with CutProxy(real.only.port) as proxy, Etcd(real.endpoints) as direct:
        async with Etcd([proxy.endpoint], attempt_s=5, silence_s=0.02) as etcd:
            async with aclosing(etcd.watch(prefix)) as watch:
                await soon(anext(watch))
                for number in range(10):
                    waiting = asyncio.create_task(anext(watch))
                    await soon(proxy.wait_for_connections(3))
                    at = await put(direct, prefix + "a", b"%d" % number)
                    news = await soon(waiting)
                    assert isinstance(news, Changes) and news.revision == at
                    assert len(news.changes) == 1


async def test_a_watch_that_is_cut_at_random_yields_each_change_once(
    real: RealEtcd, prefix: str, request: pytest.FixtureRequest
) -> None:
    random_ = random.Random(request.config.getoption("--seed"))
    count = 100
    async with CutProxy(real.only.port) as proxy, Etcd(real.endpoints) as direct:
        async with Etcd([proxy.endpoint], attempt_s=5) as etcd:

            async def write() -> None:
                for number in range(count):
                    await put(direct, prefix + "a", b"%d" % number)
                    if random_.random() < 0.2:
                        # The next connection is cut in a line, or between two.
                        proxy.answer_bytes_max = random_.choice([None, random_.randrange(2000)])
                        await proxy.cut()
                proxy.answer_bytes_max = None
                await proxy.cut()

            seen: list[bytes] = []
            revision = (await direct.range(prefix)).revision + 1
            async with aclosing(etcd.watch(prefix, revision)) as watch:
                writing = asyncio.create_task(write())
                while len(seen) < count:
                    news = await soon(anext(watch))
                    assert isinstance(news, Changes)
                    seen += [one.value for one in news.changes if isinstance(one, Pair)]
                await writing
    assert seen == [b"%d" % number for number in range(count)]


class TrustsRevisions(Etcd):
    """A client that is broken on purpose: it believes that the data of etcd never go back."""

    async def _is_older(self, *_: Any) -> bool:
        return False


@pytest.mark.parametrize("client", [Etcd, TrustsRevisions])
async def test_data_that_were_put_back_are_listed_anew(own: RealEtcd, client: type[Etcd]) -> None:
    async with client(own.endpoints, **HASTY) as etcd, aclosing(etcd.watch("/")) as watch:
        for number in range(3):
            await put(etcd, "/a", b"%d" % number)
        await soon(anext(watch))
        waiting = asyncio.create_task(anext(watch))
        own.only.kill()
        own.only.wipe()
        await asyncio.to_thread(own.only.start)
        if client is Etcd:
            assert await soon(waiting) == Listing((), 1)
            await put(etcd, "/b", b"new")
            assert isinstance(await soon(anext(watch)), Changes)
        else:
            done, _ = await asyncio.wait([waiting], timeout=1)
            assert not done
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


# -- dead, stopped and split members ---------------------------------------------------------------


async def test_etcd_that_is_not_there_is_away_within_the_time_of_a_call(own: RealEtcd) -> None:
    own.kill()
    async with Etcd(own.endpoints, call_s=0.3) as etcd:
        for call in (etcd.get("/a"), etcd.transact((), [Put("/a", b"")]), etcd.grant(1)):
            with pytest.raises(EtcdAway, match=r"127.0.0.1:\d+: connection refused") as caught:
                await soon(call)
            assert not caught.value.unknown


async def test_a_member_that_stands_still_is_passed_by(own: RealEtcd) -> None:
    async with Etcd(own.endpoints, attempt_s=0.2, call_s=0.5) as etcd:
        assert await etcd.get("/a") is None
        own.only.send(signal.SIGSTOP)
        with pytest.raises(EtcdAway, match="no answer in time") as caught:
            await etcd.get("/a")
        assert not caught.value.unknown
        with pytest.raises(EtcdAway, match="may have carried out the transaction") as caught:
            await etcd.transact((), [Put("/a", b"")])
        assert caught.value.unknown
        own.only.send(signal.SIGCONT)
        # The member finds the requests when it goes on: it carries the last one out, or not.
    async with Etcd(own.endpoints) as etcd:
        pair = await etcd.get("/a")
        assert pair is None or pair.mod_revision == pair.create_revision


async def put_at_last(etcd: Etcd, value: bytes) -> None:
    """Set /a, again and again where an election swallows the transaction."""
    while True:
        try:
            await put(etcd, "/a", value)
            return
        except EtcdAway:
            pass


async def values_until(watch: AsyncGenerator[Changes | Listing, None], value: bytes) -> set[bytes]:
    """Return the values that /a gets, until it gets the one that is waited for."""
    seen: set[bytes] = set()
    while value not in seen:
        news = await anext(watch)
        assert isinstance(news, Changes)
        seen |= {one.value for one in news.changes if isinstance(one, Pair)}
    return seen


async def test_a_member_that_dies_and_a_leader_that_is_lost(
    etcd_program: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with RealEtcd(tmp_path_factory.mktemp("etcd"), members=3) as real:
        first, second, third = real.members
        hasty = {"attempt_s": 0.5, "call_s": 1.0}
        async with (
            Etcd(real.endpoints, attempt_s=0.5) as etcd,
            Etcd(real.endpoints[1:], **hasty) as others,
            Etcd([third.endpoint], **hasty) as last,
        ):
            async with aclosing(etcd.watch("/")) as watch:
                assert isinstance(await soon(anext(watch)), Listing)
                await put_at_last(etcd, b"1")
                await soon(values_until(watch, b"1"))
                # The watch and the calls are at the first member.
                first.kill()
                await soon(put_at_last(others, b"2"))
                assert await soon(values_until(watch, b"2")) == {b"2"}
                pair = await etcd.get("/a")
                assert pair is not None and pair.value == b"2"

                # One member stands still, so that the last one loses its leader, or its followers.
                second.send(signal.SIGSTOP)
                reason = ""
                while "no leader" not in reason:
                    with pytest.raises(EtcdAway) as caught:
                        await last.transact((), [Put("/a", b"lost")])
                    reason = str(caught.value)
                assert not caught.value.unknown
                second.send(signal.SIGCONT)
                await soon(put_at_last(others, b"3"))
                assert await soon(values_until(watch, b"3")) <= {b"lost", b"3"}


# -- connections that are cut ----------------------------------------------------------------------


class SendsAgain(Etcd):
    """A client that is broken on purpose: it sends a transaction again when it is in doubt."""

    async def _call(self, *arguments: Any, once: bool = False, **named: Any) -> Any:
        return await super()._call(*arguments, **named)


@pytest.mark.parametrize("client", [Etcd, SendsAgain])
async def test_a_transaction_whose_answer_is_lost_is_sent_once_and_in_doubt(
    real: RealEtcd, etcd: Etcd, prefix: str, client: type[Etcd]
) -> None:
    twice = 0
    async with CutProxy(real.only.port) as proxy:
        for bytes_max in (0, 1, 20, 100, 300, 400)[: 2 if client is SendsAgain else None]:
            key = f"{prefix}{bytes_max}"
            proxy.answer_bytes_max = bytes_max
            async with client([proxy.endpoint, proxy.endpoint], call_s=0.5) as cut:
                with pytest.raises(EtcdAway) as caught:
                    await cut.transact((), [Put(key, b"1")])
                if client is Etcd:
                    assert caught.value.unknown
                    assert "etcd may have carried out the transaction, or not" in str(caught.value)
            pair = await etcd.get(key)
            assert pair is not None
            twice += pair.mod_revision > pair.create_revision
    assert (twice > 0) == (client is SendsAgain)


async def test_a_transaction_that_was_not_sent_goes_to_the_next_endpoint(
    real: RealEtcd, etcd: Etcd, prefix: str, own: RealEtcd
) -> None:
    own.kill()
    async with Etcd([*own.endpoints, *real.endpoints]) as both:
        assert (await both.transact((), [Put(prefix, b"")])).succeeded
    assert await etcd.get(prefix) is not None


async def test_reads_that_are_cut_are_asked_again_elsewhere(
    real: RealEtcd, etcd: Etcd, prefix: str
) -> None:
    await put(etcd, prefix, b"1")
    grant = await etcd.grant(60)
    async with CutProxy(real.only.port) as proxy:
        for bytes_max in (0, 1, 20, 100, 300, 400):
            proxy.answer_bytes_max = bytes_max
            async with Etcd([proxy.endpoint, *real.endpoints]) as cut:
                pair = await cut.get(prefix)
                assert pair is not None and pair.value == b"1"
            async with Etcd([proxy.endpoint, *real.endpoints]) as cut:
                assert await cut.keep_alive(grant.lease) == 60


async def test_renewals_share_a_connection_until_it_ends(real: RealEtcd, prefix: str) -> None:
    async with CutProxy(real.only.port) as proxy, Etcd([proxy.endpoint]) as etcd:
        grant = await etcd.grant(60)
        before = proxy.connections
        for cuts in range(3):
            for _ in range(3):
                assert await etcd.keep_alive(grant.lease) == 60
            assert proxy.connections == before + 1 + cuts
            await proxy.cut()
        before = proxy.connections
        for _ in range(2):
            await etcd.transact((), [Put(prefix, b"")])
        assert proxy.connections == before + 2, "a transaction has a connection of its own"


async def test_an_endpoint_of_another_etcd_is_not_believed(real: RealEtcd, own: RealEtcd) -> None:
    async with Etcd(real.endpoints) as other:
        await put(other, "/another", b"1")
    async with Etcd([*own.endpoints, *real.endpoints], call_s=0.3) as etcd:
        assert await etcd.get("/another") is None
        own.kill()
        with pytest.raises(EtcdAway, match="belongs to another etcd"):
            await etcd.get("/another")
        with pytest.raises(EtcdAway, match="belongs to another etcd"):
            await etcd.transact([], [Put("/another", b"2")])


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "named", "says"),
    [
        ([], {}, "etcd has no endpoint"),
        (["127.0.0.1:2379"], {}, "127.0.0.1:2379: an endpoint of etcd is like http://HOST:PORT"),
        (["http://a:1/v3"], {}, "is like"),
        (["http://u:p@a:1"], {}, "is like"),
        (["ftp://a:1"], {}, "is like"),
        (["http://a:1"], {"password": "p"}, "password is of no use without a user"),
    ],
)
def test_endpoints_that_cannot_be_used_are_named(
    endpoints: list[str], named: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Etcd(endpoints, **named)


def test_endpoints_may_be_names_and_addresses_of_any_kind() -> None:
    given = ["http://etcd-1.example.org:2379/", "https://[fe80::1]:2379", "http://10.0.0.1:1"]
    assert Etcd(given).endpoints == (given[0][:-1], given[1], given[2])


async def test_what_etcd_refuses_is_told_in_its_words(etcd: Etcd, prefix: str) -> None:
    with pytest.raises(EtcdRefused, match="etcd refused: duplicate key given in txn request"):
        await etcd.transact((), [Put(prefix, b"1"), Put(prefix, b"2")])
    with pytest.raises(EtcdRefused, match="etcd refused: key is not provided"):
        await etcd.transact((), [Put("", b"1")])
    with pytest.raises(EtcdRefused, match="etcd refused: request is too large"):
        await etcd.transact((), [Put(prefix, bytes(1600 << 10))])
