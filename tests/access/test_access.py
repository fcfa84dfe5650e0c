"""Test which users may do what, and how that is kept."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import stat
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Channel, Connection

from tests.support.brokers import Api
from tests.support.raw_client import HEADER, RawClient, method, publish
from tests.support.real_broker import RealBroker

TRIES = 30  # of wrong passwords of one user from one address before they are refused unseen


def status(
    broker: RealBroker, path: str, user: str, password: str, how: str = "GET", body: Any = None
) -> int:
    """Of a call by another user than guest."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{broker.http}{path}", data, method=how)
    request.add_header(
        "Authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def login(port: int, user: str, password: str) -> bool:
    return logins(port, user, [password]) == [True]


def logins(port: int, user: str, passwords: Sequence[str]) -> list[bool]:
    """All at once."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(RawClient(port)) for _ in passwords]
        for client, password in zip(clients, passwords, strict=True):
            client.send(HEADER)
            client.expect(Connection.Start)
            capabilities = {"capabilities": {"authentication_failure_close": True}}
            client.send(
                method(
                    0, Connection.StartOk(capabilities, "PLAIN", f"\0{user}\0{password}", "en_US")
                )
            )
        said = [client.read() for client in clients]
    return [read is not None and isinstance(read[1], Connection.Tune) for read in said]


# What each tag opens, of: the own tags, all users, all connections, a policy.
TAGS = [
    ("", (401, 401, 401, 401)),
    ("management", (200, 401, 200, 401)),
    ("policymaker", (200, 401, 200, 201)),
    ("monitoring", (200, 401, 200, 401)),
    ("administrator", (200, 200, 200, 201)),
    ("mine", (401, 401, 401, 401)),
]


@pytest.mark.row("I4")
def test_who_may_not_publish_to_an_exchange_does_not_hear_whether_it_is_there(
    broker: RealBroker, api: Api, name: str
) -> None:
    api(f"/api/users/{name}", method="PUT", body={"tags": "", "password": "p"})
    api(
        f"/api/permissions/%2F/{name}",
        method="PUT",
        body={"configure": "", "write": "^mine$", "read": ""},
    )
    with RawClient(broker.port) as client:
        client.shake_hands(user=name, password="p", channels=2)
        client.send(publish(1, "theirs", "k", b"x") + publish(2, "mine", "k", b"x"))
        closed = {}
        for _ in range(2):
            channel, said = client.read() or (0, None)
            closed[channel] = said.reply_text if isinstance(said, Channel.Close) else said
    refused = (
        f"ACCESS_REFUSED - write access to exchange 'theirs' in vhost '/' refused for user '{name}'"
    )
    assert closed == {1: refused, 2: "NOT_FOUND - no exchange 'mine' in vhost '/'"}


@pytest.mark.row("I1")
@pytest.mark.parametrize(("tag", "opened"), TAGS, ids=[tag or "none" for tag, _ in TAGS])
def test_a_tag_opens_what_it_is_for(
    broker: RealBroker, api: Api, name: str, tag: str, opened: tuple[int, int, int, int]
) -> None:
    api(f"/api/users/{name}", method="PUT", body={"tags": tag, "password": "p"})
    api(
        f"/api/permissions/%2F/{name}",
        method="PUT",
        body={"configure": ".*", "write": ".*", "read": ".*"},
    )
    found = [
        status(broker, f"/api/{path}", name, "p") for path in ("whoami", "users", "connections")
    ]
    policy = {"pattern": "^nothing$", "definition": {"max-length": 1}}
    found.append(status(broker, f"/api/policies/%2F/{name}", name, "p", "PUT", policy))
    assert tuple(found) == opened
    if found[-1] == 201:
        api(f"/api/policies/%2F/{name}", method="DELETE")
    assert login(broker.port, name, "p")  # AMQP asks for no tag
    api(f"/api/users/{name}", method="DELETE")


@pytest.mark.row("I1")
@pytest.mark.parametrize("tags", ["a, management,b", ["a", "management", "b"]])
def test_tags_are_any_words_as_a_list_or_as_one_string(api: Api, name: str, tags: Any) -> None:
    api(f"/api/users/{name}", method="PUT", body={"tags": tags, "password": "p"})
    assert api(f"/api/users/{name}")["tags"] == ["a", "management", "b"]
    api(f"/api/users/{name}", method="DELETE")


@pytest.mark.row("I15")
def test_what_processes_say_to_each_other_is_nobody_elses(broker: RealBroker) -> None:
    runtime = Path(json.loads((broker.data_dir / "broker.json").read_text())["runtime_dir"])
    assert stat.S_IMODE(runtime.stat().st_mode) & 0o077 == 0
    sockets = [path for path in runtime.iterdir() if path.is_socket()]
    assert sockets
    assert stat.S_IMODE(broker.data_dir.stat().st_mode) & 0o007 == 0


@pytest.mark.broker
@pytest.mark.row("I17")
def test_many_wrong_passwords_of_a_user_are_refused_unseen_and_nobody_elses(tmp_path: Path) -> None:
    """Nor its own, when it was right lately. The log and the metrics say so."""
    (tmp_path / "broker.toml").write_text("[front_doors]\nhandshake_timeout_s = 60\n")
    broker = RealBroker(
        tmp_path / "data", shards=1, more=("--config", str(tmp_path / "broker.toml"))
    )
    try:
        for user in ("known", "new", "web", "other"):
            body = {"tags": "administrator", "password": "right"}
            # guesses one by one, so they must be judged faster than the budget fills again
            if user == "web":
                body["hashing_algorithm"] = "rabbit_password_hashing_sha256"
            assert status(broker, f"/api/users/{user}", "guest", "guest", "PUT", body) == 201
        assert login(broker.port, "known", "right")
        # What is too much is paid for in time: a minute, in which the rest of this is done.
        assert not any(
            logins(broker.port, "known", [f"wrong {number}" for number in range(TRIES * 3 // 2)])
        )
        assert login(broker.port, "known", "right")
        assert login(broker.port, "new", "right")
        for number in range(TRIES * 2):
            assert status(broker, "/api/whoami", "web", f"wrong {number}") == 401
        assert status(broker, "/api/whoami", "web", "right") == 401
        assert status(broker, "/api/whoami", "other", "right") == 200
        log = broker.log_path.read_text()
        for user in ("known", "web"):
            assert (
                log.count(
                    f"login of user '{user}' from 127.0.0.1 refused unseen: too many failed logins"
                )
                == 1
            )
        assert "right" not in log.replace("rights", "") and "wrong 3" not in log
        with urllib.request.urlopen(f"http://{broker.metrics}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        unseen = dict(
            re.findall(
                r'^shardmq_logins_refused_unseen_total\{protocol="(\w+)"\} (\S+)$', metrics, re.M
            )
        )
        assert float(unseen["amqp091"]) >= TRIES // 2 - 5 and float(unseen["http"]) >= 1
        broker.stop()
    finally:
        broker.clean_up()


# No colon, at which the name ends by HTTP.
FORGED = "nobody'\n2026-01-01 INFO controller, all is well\x1b[2J\r\x9b1m\u2028\u202e"
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [a-z]")


def test_who_cannot_log_in_cannot_write_a_line_of_the_log_either(
    broker: RealBroker, api: Api
) -> None:
    """By AMQP as user, vhost and connection name, by HTTP as user, path and reason."""
    assert not login(broker.port, FORGED, "p")
    assert status(broker, "/api/whoami", FORGED, "p") == 401
    quoted = urllib.parse.quote(FORGED, safe="")
    assert status(broker, f"/api/queues/{quoted}/{quoted}", FORGED, "p") == 401
    with RawClient(broker.port) as client:
        client.send(HEADER)
        client.expect(Connection.Start)
        client.send(
            method(
                0,
                Connection.StartOk({"connection_name": FORGED}, "PLAIN", "\0guest\0guest", "en_US"),
            )
        )
        offered = client.expect(Connection.Tune)
        client.send(method(0, Connection.TuneOk(offered.channel_max, offered.frame_max, 0)))
        client.send(method(0, Connection.Open(FORGED)))
        assert client.expect(Connection.Close).reply_code == 530
    log = broker.log_path.read_text()
    assert log.count("all is well") >= 4
    lines = log.split("\n")[:-1]
    assert [line for line in lines if not LOG_LINE.match(line)] == []
    assert [line for line in lines if not line.isprintable()] == []
    kept = [row["message"] for row in api("/api/logs")]
    assert sum("all is well" in message for message in kept) >= 4 and all(
        map(str.isprintable, kept)
    )
