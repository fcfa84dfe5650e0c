"""The client for etcd where etcd has users, or speaks TLS alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from shardmq.cluster.etcd import Etcd, Tls
from shardmq.cluster.pairs import Changes, EtcdAway, EtcdRefused, Listing, Put
from tests.support.certificates import Authority
from tests.support.etcd import RealEtcd
from tests.support.real_broker import wait_until

USER, PASSWORD, PREFIX = "shardmq", "pass word", "/shardmq/a/"


@pytest.fixture(scope="module")
def with_users(etcd_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    with RealEtcd(tmp_path_factory.mktemp("users")) as made:
        made.enable_users(USER, PASSWORD, PREFIX)
        yield made


async def test_a_user_does_what_its_permission_allows(with_users: RealEtcd) -> None:
    async with Etcd(with_users.endpoints, user=USER, password=PASSWORD) as etcd:
        outcome = await etcd.transact((), [Put(PREFIX + "a", b"1")])
        assert outcome.succeeded
        assert len((await etcd.range(PREFIX)).pairs) == 1
        grant = await etcd.grant(60)
        assert await etcd.keep_alive(grant.lease) == 60
        await etcd.revoke(grant.lease)
        async with aclosing(etcd.watch(PREFIX, outcome.revision)) as watch:
            assert isinstance(await anext(watch), Changes)
        denied = "etcd refused: permission denied"
        with pytest.raises(EtcdRefused, match=denied):
            await etcd.get("/shardmq/b/a")
        with pytest.raises(EtcdRefused, match=denied):
            await etcd.transact((), [Put("/shardmq/b/a", b"1")])
        for revision in (None, 1):
            with pytest.raises(EtcdRefused, match="permission denied"):
                async with aclosing(etcd.watch("/shardmq/b/", revision)) as watch:
                    await anext(watch)


@pytest.mark.parametrize(
    ("user", "password", "says"),
    [
        (USER, "wrong", r"invalid user ID or password \(user shardmq\)"),
        (USER, "", r"invalid user ID or password \(user shardmq\)"),
        ("nobody", PASSWORD, r"invalid user ID or password \(user nobody\)"),
        ("", "", "it wants a user and a password"),
    ],
)
async def test_a_wrong_password_is_refused_at_once(
    with_users: RealEtcd, user: str, password: str, says: str
) -> None:
    async with Etcd(with_users.endpoints, user=user, password=password) as etcd:
        with pytest.raises(EtcdRefused, match=says) as caught:
            await etcd.get(PREFIX)
        assert PASSWORD not in str(caught.value)
        with pytest.raises(EtcdRefused, match=says):
            await etcd.transact((), [Put(PREFIX, b"1")])
        for revision in (None, 1):
            with pytest.raises(EtcdRefused, match=says):
                async with aclosing(etcd.watch(PREFIX, revision)) as watch:
                    await anext(watch)


async def test_a_token_that_etcd_has_forgotten_is_fetched_anew(
    etcd_program: str, tmp_path: Path
) -> None:
    with RealEtcd(tmp_path) as real:
        async with Etcd(real.endpoints, user=USER, password=PASSWORD) as etcd:
            # A user that etcd does not ask for yet does no harm.
            await etcd.transact((), [Put(PREFIX + "a", b"0")])
            real.enable_users(USER, PASSWORD, PREFIX)
            calls = (
                lambda: etcd.get(PREFIX + "a"),
                lambda: etcd.transact((), [Put(PREFIX + "a", b"1")]),
                lambda: anext(etcd.watch(PREFIX, 1)),
            )
            for call in calls:
                real.only.kill()  # Tokens are in its memory alone.
                real.only.start()
                assert await call() is not None
            pair = await etcd.get(PREFIX + "a")
            assert pair is not None and pair.value == b"1"


async def test_a_watch_that_was_allowed_outlives_a_changed_password(
    etcd_program: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RealEtcd(tmp_path) as real:
        real.enable_users(USER, PASSWORD, PREFIX)
        async with (
            Etcd(real.endpoints, user=USER, password=PASSWORD) as etcd,
            aclosing(etcd.watch(PREFIX)) as watch,
        ):
            assert isinstance(await anext(watch), Listing)
            real.change_password(USER, PASSWORD, "another")
            real.only.kill()
            real.only.start()
            news = asyncio.ensure_future(anext(watch))
            await asyncio.to_thread(
                wait_until, lambda: "not watched for now" in caplog.text, "a refusal in the log"
            )
            assert not news.done()
            real.change_password(USER, PASSWORD, PASSWORD)
            async with Etcd(real.endpoints, user=USER, password=PASSWORD) as other:
                await other.transact((), [Put(PREFIX + "a", b"1")])
            async with asyncio.timeout(60):
                found = await news
            assert isinstance(found, Changes) and [each.key for each in found.changes] == [
                PREFIX + "a"
            ]
        assert caplog.text.count("not watched for now") == 1


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("certificates")
    authority = Authority(directory)
    strangers = Authority(directory, "strangers")
    server = authority.make("server.pem", "CN=etcd", hosts=("127.0.0.1",))
    return {
        "ca": authority.ca,
        "server": server,
        "elsewhere": authority.make("elsewhere.pem", "CN=etcd", hosts=("10.1.2.3",)),
        "client": authority.make("client.pem", "CN=node"),
        "strangers_ca": strangers.ca,
        "stranger": strangers.make("stranger.pem", "CN=node"),
    }


@pytest.fixture(scope="module")
def secure(
    etcd_program: str, tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]
) -> Iterator[RealEtcd]:
    server = {"ca": files["ca"], "cert": files["server"], "key": files["server"]}
    with RealEtcd(tmp_path_factory.mktemp("tls"), tls=server, client_certificates=True) as made:
        yield made


async def test_both_ends_show_a_certificate(secure: RealEtcd, files: dict[str, Path]) -> None:
    tls = Tls(str(files["ca"]), str(files["client"]))
    async with Etcd(secure.endpoints, tls=tls) as etcd, aclosing(etcd.watch("/")) as watch:
        assert isinstance(await anext(watch), Listing)
        assert (await etcd.transact((), [Put("/a", b"1")])).succeeded
        assert isinstance(await anext(watch), Changes)


@pytest.mark.parametrize(
    ("ca", "client", "says"),
    [
        ("strangers_ca", "client", "certificate verify failed"),
        ("", "client", "certificate verify failed"),
        ("ca", "", "certificate required|bad certificate|reset by peer"),
        ("ca", "stranger", "unknown ca|bad certificate|unknown certificate|reset by peer"),
    ],
)
async def test_strangers_are_not_spoken_to(
    secure: RealEtcd, files: dict[str, Path], ca: str, client: str, says: str
) -> None:
    tls = Tls(*(str(files[name]) if name else "" for name in (ca, client)))
    async with Etcd(secure.endpoints, tls=tls, call_s=0.3) as etcd:
        with pytest.raises(EtcdAway, match=f"(?i){says}"):
            await etcd.get("/a")


async def test_certificates_that_were_replaced_are_read_again(
    secure: RealEtcd, files: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes(files["stranger"].read_bytes())
    async with Etcd(secure.endpoints, tls=Tls(str(files["ca"]), str(own)), call_s=0.3) as etcd:
        with pytest.raises(EtcdAway):
            await etcd.get("/absent")
        own.write_bytes(files["client"].read_bytes())
        assert await etcd.get("/absent") is None
        own.unlink()
        for _ in range(2):
            assert await etcd.get("/absent") is None
        assert caplog.text.count(f"stay as they were: etcd's cert and key: {own}") == 1


async def test_a_certificate_for_another_host_is_not_believed(
    etcd_program: str, tmp_path: Path, files: dict[str, Path]
) -> None:
    elsewhere = {"ca": files["ca"], "cert": files["elsewhere"], "key": files["elsewhere"]}
    with RealEtcd(tmp_path, tls=elsewhere) as real:
        async with Etcd(real.endpoints, tls=Tls(str(files["ca"])), call_s=0.5) as etcd:
            with pytest.raises(EtcdAway, match="certificate is not valid for '127.0.0.1'"):
                await etcd.get("/a")


def test_files_that_cannot_be_used_are_named(files: dict[str, Path], tmp_path: Path) -> None:
    def refused(*named: Path | str) -> str:
        with pytest.raises(ValueError) as caught:
            Etcd(["https://127.0.0.1:1"], tls=Tls(*(str(name) for name in named)))
        return str(caught.value)

    missing, wrong = tmp_path / "missing.pem", tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    assert refused(missing) == f"etcd's ca: {missing}: No such file or directory"
    assert refused(wrong).startswith(f"etcd's ca: {wrong}: ")
    assert refused("", missing).startswith(f"etcd's cert and key: {missing}, {missing}: No such")
    assert refused("", wrong).startswith(f"etcd's cert and key: {wrong}, {wrong}: ")
    assert "key values mismatch" in refused("", files["client"], files["stranger"]).lower()
    assert refused("", "", files["client"]) == "etcd's key is of no use without a cert"
    with pytest.raises(
        ValueError, match="http://127.0.0.1:1: with TLS, an endpoint of etcd begins"
    ):
        Etcd(["http://127.0.0.1:1"], tls=Tls(str(files["ca"])))
