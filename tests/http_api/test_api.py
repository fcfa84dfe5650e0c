"""Each route when it works, is refused, is absent, and gets bad input."""

from __future__ import annotations

import json
import logging
import os
import socket
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urljoin

import aiohttp
import msgspec
import pytest

from shardmq.broker.controller.groups.groups import GroupConsumer, VirtualQueueName
from shardmq.broker.controller.management import app
from shardmq.broker.controller.management.app import RESOURCES
from shardmq.broker.controller.management.metrics import stats_collector
from shardmq.broker.model import passwords
from shardmq.broker.shared.control import ConsumeTerms, QueueDeclare
from shardmq.shardd.wire import messages as wire
from tests.http_api.conftest import CONNECTION, OWNER, Api

QUICK_HASH = {"hashing_algorithm": "rabbit_password_hashing_sha256"}
NAME = quote(CONNECTION, safe="")


async def make(api: Api) -> None:
    """Make one or two objects of each kind.

    The queues are q and r/s; q is bound to the exchange e twice. The user nobody has no tag, the
    user manager may manage.
    """
    for path, body in (
        ("/api/exchanges/%2F/e", {"type": "topic"}),
        ("/api/queues/%2F/q", {}),
        ("/api/queues/%2F/r%2Fs", {"durable": True}),
        ("/api/users/nobody", {"password": "x", "tags": "", **QUICK_HASH}),
        ("/api/users/manager", {"password": "x", "tags": "management", **QUICK_HASH}),
        ("/api/policies/%2F/p", {"pattern": "^zz", "definition": {"max-length": 3}, "priority": 1}),
        ("/api/operator-policies/%2F/o", {"pattern": "^zz", "definition": {"max-length": 2}}),
        ("/api/parameters/stream/%2F/s", {"value": "text"}),
        ("/api/global-parameters/g", {"value": 1}),
        ("/api/topic-permissions/%2F/nobody", {"exchange": "e", "write": "w", "read": "r"}),
    ):
        status, found = await api.call("PUT", path, body)
        assert status == 201, (path, found)
    for path in ("/api/vhost-limits/%2F/max-connections", "/api/user-limits/nobody/max-channels"):
        assert (await api.call("PUT", path, {"value": 9}))[0] == 204
    for body in ({"routing_key": "a.#"}, {"routing_key": "a.#", "arguments": {"n": 1}}):
        assert (await api.call("POST", "/api/bindings/%2F/e/e/q/q", body))[0] == 201


READS = [
    "overview", "whoami", "nodes", "nodes/shardmq@localhost", "vhosts", "vhosts/%2F",
    "vhosts/%2F/permissions", "vhosts/%2F/connections", "vhosts/%2F/channels", "users",
    "users/guest", "users/guest/permissions", "permissions", "permissions/%2F/guest", "queues",
    "queues/%2F", "queues/%2F/q", "queues/%2F/r%2Fs", "queues/%2F/q/bindings", "exchanges",
    "exchanges/%2F", "exchanges/%2F/e", "exchanges/%2F/amq.default",
    "exchanges/%2F/e/bindings/source", "exchanges/%2F/e/bindings/destination", "bindings",
    "bindings/%2F", "bindings/%2F/e/e/q/q", "bindings/%2F/e/e/q/q/a.%23",
    "bindings/%2F/e/e/q/q/a.%2523", "connections", f"connections/{NAME}",
    f"connections/{NAME}/channels", "channels", f"channels/{quote(CONNECTION + ' (1)', safe='')}",
    "consumers", "consumers/%2F", "health/checks/alarms", "health/checks/local-alarms",
    "health/checks/virtual-hosts", "health/checks/port-listener/5672",
    "health/checks/protocol-listener/amqp091", "health/checks/is-in-service",
    "health/checks/ready-to-serve-clients", "health/checks/node-is-quorum-critical",
    "health/checks/node-is-mirror-sync-critical", "queues/", "queues/%2F/", "queues/%2F/q/",
    "overview/",
    "message-sizes",
    "healthchecks/node", "healthchecks/node/shardmq@localhost", "definitions", "definitions/%2F",
    "processes", "shards", "users/without-permissions", "users/guest/topic-permissions",
    "vhosts/%2F/topic-permissions", "topic-permissions", "topic-permissions/%2F/nobody", "policies",
    "policies/%2F", "policies/%2F/p", "operator-policies", "operator-policies/%2F",
    "operator-policies/%2F/o", "parameters", "parameters/stream", "parameters/stream/%2F",
    "parameters/stream/%2F/s", "global-parameters", "global-parameters/g", "vhost-limits",
    "vhost-limits/%2F", "user-limits", "user-limits/nobody", "cluster-name", "version",
    "extensions", "feature-flags", "deprecated-features", "auth", "auth/hash_password/x",
    "auth/attempts/shardmq@localhost", "auth/attempts/shardmq@localhost/source",
    "connections/username/guest", "queues/detailed", "all-configuration",
    "nodes/shardmq@localhost/memory", "health/checks/metadata-store/initialized",
    "health/checks/reached-target-cluster-size", "health/checks/below-node-connection-limit",
    "queues/%2F/q/unacked", "queues/%2F/q/unacked/consumers", "queues/quorum/%2F/q/status",
    "config/effective",
    "health/checks/certificate-expiration/3/weeks",
    "shards/load", "shards/0/queues", "logs", "settings", "settings/sources",
    "health/checks/metadata-store/initialized/with-data", "nodes/shardmq@localhost/memory/relative",
    *(f"health/checks/quorum-queues-without-elected-leaders/{where}" for where in (
        "all-vhosts", "all-vhosts/", "vhost/%2F", "vhost/%2F/pattern/a.*", "all-vhosts/pattern/b",
    )),
    "health/checks/protocol-listener/amqp,http",
    "health/checks/certificate-expiration/3/Weeks",
    "stream/connections", "stream/connections/%2F", "stream/consumers", "stream/consumers/%2F",
    "stream/publishers", "stream/publishers/%2F", "stream/publishers/%2F/q",
]  # fmt: skip
EMPTY = {
    "exchanges/%2F/e/bindings/destination", "users/guest/topic-permissions", "extensions",
    "feature-flags", "deprecated-features", "config/effective", "logs", "settings",
    "settings/sources",
    "auth/attempts/shardmq@localhost/source", "stream/connections", "stream/connections/%2F",
    "stream/consumers", "stream/consumers/%2F", "stream/publishers", "stream/publishers/%2F",
    "stream/publishers/%2F/q",
}  # fmt: skip
ABSENT = [
    "nothing", "nodes/x", "vhosts/x", "vhosts/x/permissions", "users/x", "users/x/permissions",
    "permissions/%2F/x", "queues/x", "queues/%2F/x", "queues/x/q", "queues/%2F/x/bindings",
    "queues/quorum/%2F/x/status", "queues/quorum/x/q/status",
    "exchanges/x", "exchanges/%2F/x", "exchanges/%2F/x/bindings/source", "bindings/x",
    "bindings/%2F/e/x/q/q", "bindings/%2F/e/e/q/x", "bindings/%2F/e/e/q/q/x", "connections/x",
    "connections/x/channels", "channels/x", "consumers/x", "aliveness-test/x",
    "healthchecks/node/x", "definitions/x", "users/x/topic-permissions",
    "vhosts/x/topic-permissions", "topic-permissions/%2F/x", "policies/x", "policies/%2F/x",
    "operator-policies/x", "operator-policies/%2F/x", "parameters/stream/x",
    "parameters/stream/%2F/x", "parameters/x/%2F/s", "global-parameters/x", "vhost-limits/x",
    "user-limits/x", "virtual-queues/x", "virtual-queues/%2F/e", "virtual-queues/%2F/x",
    "auth/attempts/x", "auth/attempts/x/source", "nodes/x/memory/relative",
    "connections/x/sessions",
    "health/checks/quorum-queues-without-elected-leaders/vhost/x", "stream/connections/x",
    "stream/connections/%2F/x", "stream/%2F/x/tracking", "stream/publishers/%2F/x",
]  # fmt: skip
ABSENT_DELETES = [
    "vhosts/x", "users/x", "permissions/%2F/x", "queues/%2F/x", "queues/%2F/x/contents",
    "exchanges/%2F/x", "bindings/%2F/e/e/q/q/x", "connections/x", "policies/%2F/x",
    "operator-policies/%2F/x", "topic-permissions/%2F/x", "topic-permissions/%2F/nobody?exchange=x",
    "parameters/stream/%2F/x", "global-parameters/x", "vhost-limits/x/max-queues",
    "user-limits/x/max-channels", "virtual-queues/%2F/e", "virtual-queues/%2F/e/contents",
]  # fmt: skip
CHANGES = [
    ("PUT", "vhosts/v", {}), ("DELETE", "vhosts/%2F", None),
    ("PUT", "users/u", {"tags": "", "password": "x"}), ("DELETE", "users/nobody", None),
    ("PUT", "permissions/%2F/nobody", {"configure": "", "write": "", "read": ""}),
    ("DELETE", "permissions/%2F/guest", None), ("PUT", "queues/%2F/new", {}),
    ("DELETE", "queues/%2F/q", None), ("DELETE", "queues/%2F/q/contents", None),
    ("PUT", "exchanges/%2F/new", {"type": "direct"}), ("DELETE", "exchanges/%2F/e", None),
    ("POST", "bindings/%2F/e/e/q/q", {}), ("DELETE", "bindings/%2F/e/e/q/q/a.%23", None),
    ("PUT", "policies/%2F/p", {}), ("DELETE", "policies/%2F/p", None),
    ("PUT", "operator-policies/%2F/p", {}), ("PUT", "topic-permissions/%2F/nobody", {}),
    ("PUT", "parameters/stream/%2F/s", {}), ("PUT", "global-parameters/g", {}),
    ("DELETE", "global-parameters/g", None), ("PUT", "vhost-limits/%2F/max-queues", {}),
    ("PUT", "user-limits/nobody/max-channels", {}), ("POST", "definitions", {}),
    ("POST", "definitions/%2F", {}), ("PUT", "cluster-name", {}),
    ("POST", "exchanges/%2F/e/publish", {}), ("POST", "queues/%2F/q/get", {}),
]  # fmt: skip
BAD = [
    ("PUT", "users/u", {}), ("PUT", "users/u", {"tags": 3}), ("PUT", "users/u", b"{"),
    ("PUT", "users/%00none", {"tags": "", "password": "x"}),
    ("PUT", "vhosts/v", b"[]"),
    ("PUT", "users/u", {"tags": "", "password": "x", "hashing_algorithm": "none"}),
    ("PUT", "permissions/%2F/nobody", {"configure": "("}),
    ("PUT", "permissions/x/nobody", {"configure": "", "write": "", "read": ""}),
    ("PUT", "permissions/%2F/nobody", {"configure": "(", "write": "", "read": ""}),
    ("PUT", "queues/%2F/new", {"durable": "perhaps"}), ("PUT", "queues/%2F/q", {"durable": False}),
    ("PUT", "queues/%2F/new", {"arguments": {"x-message-ttl": -1}}),
    ("PUT", "queues/%2F/new", {"arguments": [1]}),
    ("PUT", "exchanges/%2F/new", {"type": "strange"}),
    ("PUT", "exchanges/%2F/e", {"type": "direct"}),
    ("POST", "bindings/%2F/e/e/q/q", {"routing_key": 3}), ("PUT", "feature-flags/x/enable", {}),
    ("POST", "queues/%2F/q/actions", {"action": "x"}), ("POST", "queues/%2F/q/actions", {}),
    ("DELETE", "queues/%2F/q?if-empty=true", None),
    ("DELETE", "exchanges/%2F/e?if-unused=true", None), ("GET", "queues?page=x", None),
    ("GET", "queues?page=99", None), ("GET", "queues?page=1&page_size=501", None),
    ("GET", "queues?use_regex=true&name=(", None), ("GET", "health/checks/port-listener/x", None),
    ("PUT", "policies/%2F/p", {}),
    ("PUT", "policies/%2F/p", {"pattern": "", "definition": {"x": 1}}),
    ("PUT", "parameters/policy/%2F/p", {"value": {}}), ("DELETE", "parameters/policy/%2F/p", None),
    ("PUT", "parameters/nosuch/%2F/p", {"value": {}}), ("PUT", "parameters/stream/%2F/p", {}),
    ("PUT", "global-parameters/g", {}), ("PUT", "vhost-limits/%2F/zz", {"value": 1}),
    ("PUT", "vhost-limits/%2F/max-queues", {"value": "a"}),
    ("PUT", "user-limits/x/max-channels", {"value": 1}),
    ("PUT", "topic-permissions/%2F/nobody", {"exchange": "e", "write": "(", "read": ""}),
    ("PUT", "topic-permissions/%2F/x", {"exchange": "e", "write": "", "read": ""}),
    ("PUT", "cluster-name", {}),
    ("PUT", "users/u", {"tags": "", "password": "a", "password_hash": "b"}),
    ("POST", "definitions", b"{"), ("PUT", "users/u", {"tags": "", "password_hash": "!"}),
    ("POST", "definitions", {"queues": [{"name": "q"}]}), ("GET", "stream/%2F/q/tracking", None),
    ("GET", f"connections/{NAME}/sessions", None),
    ("GET", "health/checks/quorum-queues-without-elected-leaders/all-vhosts/pattern/(", None),
    ("PUT", "stream/super-streams/%2F/s", {}),
]  # fmt: skip


@pytest.fixture
async def made(api: Api) -> Api:
    await make(api)
    return api


@pytest.mark.row("G1.8", "G1.10", "G1.15", "G1.16", "G1.20", "G3.5", "G3.6", "G3.7", "G3.8")
async def test_every_read_answers(made: Api) -> None:
    for path in READS:
        status, found = await made.call("GET", f"/api/{path}")
        assert status == 200, (path, found)
        assert found or path in EMPTY, path


async def test_the_root_of_the_port_says_where_to_go_on_without_a_login(api: Api) -> None:
    api.login = None
    said = await api.get("/")
    assert all(word in said for word in ("/api/overview", "/metrics", "shardctl"))
    assert api.headers["Content-Type"].startswith("text/plain")


async def test_the_supervisor_is_first_among_the_processes(api: Api) -> None:
    first, *others = await api.get("/api/processes")
    assert (first["name"], first["kind"], first["pid"]) == ("supervisor", "supervisor", os.getpid())
    assert others and all(row["kind"] != "supervisor" for row in others)


async def test_every_read_but_open_ones_wants_a_login(made: Api) -> None:
    # many wrong ones are refused unseen
    for login in (None, ("nobody", "x"), ("guest", "wrong"), ("absent", "guest")):
        made.login = login
        for path in READS:
            status, found = await made.call("GET", f"/api/{path}")
            known = login == ("nobody", "x")  # who may see nothing
            assert (status, found["error"]) == (
                401,
                "not_authorised" if known else "not_authorized",
            ), path
            assert made.headers["WWW-Authenticate"].startswith("Basic")


async def test_what_is_absent_is_404(made: Api) -> None:
    for path in ABSENT:
        assert (await made.call("GET", f"/api/{path}"))[0] == 404, path
    for path in ABSENT_DELETES:
        assert (await made.call("DELETE", f"/api/{path}"))[0] == 404, path


async def test_a_manager_without_permissions_changes_and_sees_nothing(made: Api) -> None:
    made.login = ("manager", "x")
    for method, path, body in CHANGES:
        status, found = await made.call(method, f"/api/{path}", body)
        assert status == 401, (method, path, found)
    for path in (
        "queues",
        "exchanges",
        "bindings",
        "vhosts",
        "connections",
        "channels",
        "consumers",
    ):
        assert await made.get(f"/api/{path}") == []
    for path in ("queues/%2F", "users", "definitions", "processes", "nodes"):
        assert (await made.call("GET", f"/api/{path}"))[0] == 401, path
    assert (await made.call("DELETE", f"/api/connections/{NAME}"))[0] == 404


async def test_permissions_limit_what_a_manager_changes(made: Api) -> None:
    grant = {"configure": "^mine", "write": "^mine", "read": ".*"}
    assert (await made.call("PUT", "/api/permissions/%2F/manager", grant))[0] == 201
    made.login = ("manager", "x")
    assert (await made.call("PUT", "/api/queues/%2F/mine", {}))[0] == 201
    assert (await made.call("PUT", "/api/queues/%2F/other", {}))[0] == 401
    assert (await made.call("POST", "/api/bindings/%2F/e/e/q/mine", {}))[0] == 201
    assert (await made.call("POST", "/api/bindings/%2F/e/e/q/q", {}))[0] == 401
    assert {row["name"] for row in await made.get("/api/queues")} == {"mine", "q", "r/s"}


async def test_bad_input_is_400_with_a_reason(made: Api) -> None:
    for method, path, body in BAD:
        status, found = await made.call(method, f"/api/{path}", body)
        assert status == 400, (method, path, found)
        assert found["error"] and found["reason"], path


async def test_a_wrong_method_is_405(made: Api) -> None:
    assert (await made.call("POST", "/api/overview"))[0] == 405


@pytest.mark.row("G1.12", "G1.19", "G1.26")
async def test_put_says_whether_it_made_something_and_delete_takes_it_away(made: Api) -> None:
    for path, body in (
        ("vhosts/v", {"description": "d", "tags": "a,b"}),
        ("users/u", {"password": "p", "tags": ["monitoring"]}),
        ("permissions/%2F/nobody", {"configure": "", "write": "", "read": ".*"}),
        ("queues/%2F/new", {"auto_delete": "true", "arguments": {"x-max-length": 5}}),
        ("exchanges/%2F/new", {"type": "headers", "internal": True}),
        (
            "policies/%2F/new",
            {"pattern": "^zz", "definition": {"max-length": 3}, "apply-to": "queues"},
        ),
        ("operator-policies/%2F/new", {"pattern": "^zz", "definition": {"max-length": 3}}),
        ("parameters/stream/%2F/new", {"value": [1]}),
        ("global-parameters/new", {"value": None}),
        ("topic-permissions/%2F/manager", {"exchange": "e", "write": "w", "read": "r"}),
    ):
        assert (await made.call("PUT", f"/api/{path}", body))[0] == 201, path
        assert (await made.call("PUT", f"/api/{path}", body))[0] == 204, path
        assert await made.get(f"/api/{path}")
        assert (await made.call("DELETE", f"/api/{path}"))[0] == 204, path
        assert (await made.call("GET", f"/api/{path}"))[0] == 404, path


async def test_a_password_set_here_opens_and_an_empty_one_does_not(made: Api) -> None:
    for body, status in (
        ({"password": "p", "tags": "monitoring"}, 200),
        ({"password": "", "tags": "monitoring"}, 401),
        ({"tags": "monitoring"}, 401),
    ):
        made.login = ("guest", "guest")
        await made.call("PUT", "/api/users/u", body)
        made.login = ("u", body.get("password", ""))
        assert (await made.call("GET", "/api/whoami"))[0] == status


@pytest.mark.row("G1.17", "G1.18")
async def test_bindings_are_named_by_key_and_arguments(made: Api) -> None:
    rows = await made.get("/api/bindings/%2F/e/e/q/q")
    keys = sorted(row["properties_key"] for row in rows)
    assert keys[0] == "a.%23"
    assert keys[1].startswith("a.%23~")
    assert (await made.call("DELETE", f"/api/bindings/%2F/e/e/q/q/{quote(keys[1])}"))[0] == 204
    assert [row["arguments"] for row in await made.get("/api/bindings/%2F/e/e/q/q")] == [{}]
    await made.call("POST", "/api/bindings/%2F/e/e/e/amq.fanout", {})
    assert made.headers["Location"] == "amq.fanout/~", (
        "relative to what was called, as from RabbitMQ"
    )
    location = urljoin("/api/bindings/%2F/e/e/e/amq.fanout", made.headers["Location"])
    assert (await made.get(location))["destination_type"] == "exchange"
    await made.call("POST", "/api/bindings/%2F/e/e/e/amq.fanout/", {"routing_key": "a b"})
    assert made.headers["Location"] == "a%2Bb"


@pytest.mark.row("G1.18", "G4.6")
@pytest.mark.parametrize("arguments", [{}, {"n": 1}], ids=["plain", "with-arguments"])
async def test_keys_of_bindings_are_quoted_as_rabbitmq_quotes_them(
    made: Api, arguments: dict[str, Any]
) -> None:
    place, odd = "/api/bindings/%2F/e/e/q/q", "a/b c~%+é"
    as_rabbitmq = "a%2Fb+c%7E%25%2B%C3%A9"
    body = {"routing_key": odd, "arguments": arguments}
    assert (await made.call("POST", place, body))[0] == 201
    location = urljoin(place, made.headers["Location"])
    (row,) = [row for row in await made.get(place) if row["routing_key"] == odd]
    key = row["properties_key"]
    assert key == as_rabbitmq or (arguments and key.startswith(f"{as_rabbitmq}~"))
    tail = key[len(as_rabbitmq) :]
    # As the list has it; with the space as %20; the routing key itself, quoted once and twice.
    once = quote(odd, safe="").replace("~", "%7E")
    names = [quote(key, safe="~"), f"a%252Fb%2520c%257E%2525%252B%25C3%25A9{tail}", f"{once}{tail}"]
    for name in [*names, location.removeprefix(f"{place}/"), f"{quote(once, safe='')}{tail}"]:
        assert await made.get(f"{place}/{name}") == row, name
    assert (await made.call("DELETE", f"{place}/{names[0]}"))[0] == 204
    assert (await made.call("GET", f"{place}/{names[0]}"))[0] == 404


@pytest.mark.row("G1.17")
@pytest.mark.parametrize(
    ("ends", "missing"),
    [
        ("e/q/none", "queue 'none'"),
        ("none/q/q", "exchange 'none'"),
        ("e/e/none", "exchange 'none'"),
    ],
    ids=["queue", "source", "destination"],
)
async def test_a_binding_without_an_end_is_refused_with_its_name(
    made: Api, ends: str, missing: str
) -> None:
    status, found = await made.call("POST", f"/api/bindings/%2F/e/{ends}", {"routing_key": "k"})
    assert (status, found) == (
        404,
        {"error": "not_found", "reason": f"no {missing} in vhost '/'"},
    )


@pytest.mark.row("G1.13")
async def test_purge_asks_the_shard_and_a_close_carries_its_reason(made: Api) -> None:
    assert (await made.call("DELETE", "/api/queues/%2F/q/contents"))[0] == 204
    assert type(made.shards.sent[-1]).__name__ == "Purge"
    assert (await made.call("DELETE", f"/api/connections/{NAME}", headers={"X-Reason": "enough"}))[
        0
    ] == 204
    assert made.doors.closed == [(OWNER, 320, "enough")]


@pytest.mark.parametrize("path", ["queues/%2F/new", "exchanges/%2F/new"])
async def test_an_array_without_values_is_a_table_without_values(made: Api, path: str) -> None:
    """Some languages write one for the other. An exchange of no type is direct."""
    assert (await made.call("PUT", f"/api/{path}", {"arguments": []}))[0] == 201
    found = await made.get(f"/api/{path}")
    assert (found["arguments"], found.get("type") in ("classic", "direct")) == ({}, True)


async def test_a_queue_shows_its_numbers(made: Api) -> None:
    row = await made.get("/api/queues/%2F/q")
    assert (row["messages"], row["messages_ready"], row["messages_unacknowledged"]) == (4, 3, 1)
    assert row["consumer_details"][0]["channel_details"]["connection_name"] == CONNECTION
    assert (row["shard"] in (0, 1), row["type"], row["message_stats"]["publish"]) == (
        True,
        "classic",
        5,
    )


async def test_a_virtual_queue_shows_who_owns_which_shard(made: Api) -> None:
    body = {"type": "x-modulus-hash", "arguments": {"x-shards": 3}}
    assert (await made.call("PUT", "/api/exchanges/%2F/sharded", body))[0] == 201
    vhost = made.authority.catalog.vhosts["/"]
    queues = vhost.shard_queues("sharded")
    groups, shards = made.context.groups, [vhost.queues[queue].id for queue in queues]
    groups.begin()
    one, two = GroupConsumer(0, 7, 1), GroupConsumer(0, 7, 2)
    groups.join(
        one,
        VirtualQueueName("/", "sharded"),
        ConsumeTerms(owner=OWNER, channel=4, tag="one"),
        shards,
    )
    groups.join(two, VirtualQueueName("/", "sharded"), ConsumeTerms(tag="two"), shards)
    (row,) = await made.get("/api/virtual-queues")
    assert row == {
        "name": "sharded",
        "vhost": "/",
        "shards": 3,
        "consumers": 2,
        "groups": [""],
        "moving": 1,
    }
    found = await made.get("/api/virtual-queues/%2F/sharded")
    assert [shard["queue"] for shard in found["shards"]] == list(queues)
    assert [shard["owner"] for shard in found["shards"]] == ["one", "one", "one"]
    assert sorted(owner["moving"] for shard in found["shards"] for owner in shard["owners"]) == [
        False,
        False,
        True,
    ]
    assert found["consumers"][0]["channel_details"]["name"] == f"{CONNECTION} (4)"
    assert [len(each["shards"]) for each in found["consumers"]] == [2, 0]
    assert (await made.call("DELETE", "/api/virtual-queues/%2F/sharded/contents"))[0] == 204
    assert sum(isinstance(sent, wire.Purge) for sent in made.shards.sent) == 3
    assert (await made.call("DELETE", "/api/virtual-queues/%2F/sharded"))[0] == 204
    assert vhost.shard_queues("sharded") == queues
    assert not {vhost.queues[queue].id for queue in queues} & set(shards)  # new, empty ones
    made.login = ("manager", "x")
    for path in ("sharded", "sharded/contents"):
        assert (await made.call("DELETE", f"/api/virtual-queues/%2F/{path}"))[0] == 401


async def test_lists_are_cut_sorted_filtered_and_paged(made: Api) -> None:
    assert await made.get(
        "/api/queues?columns=name,message_stats.ack&sort=name&sort_reverse=true"
    ) == [
        {"name": "r/s", "message_stats": {"ack": 1}},
        {"name": "q", "message_stats": {"ack": 1}},
    ]
    page = await made.get("/api/queues?page=2&page_size=1&columns=name&sort=name")
    assert page == {
        "filtered_count": 2, "item_count": 1, "items": [{"name": "r/s"}], "page": 2,
        "page_count": 2, "page_size": 1,
        "total_count": 2,
    }  # fmt: skip
    assert [row["name"] for row in await made.get("/api/queues?name=%5Er&use_regex=true")] == [
        "r/s"
    ]
    assert [row["name"] for row in await made.get("/api/queues?name=Q")] == ["q"]


async def test_numbers_are_asked_once_for_many_listings(made: Api) -> None:
    for _ in range(5):
        await made.get("/api/queues")
    assert [asked.passed for asked in made.shards.asked] == [0, 0]


async def test_a_silent_shard_is_left_out_and_not_waited_for(
    made: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_collector, "STATS_S_MAX", 0.01)
    made.shards.silent = True
    rows = await made.get("/api/queues")
    assert [row["state"] for row in rows] == ["down", "down"]
    assert "messages" not in rows[0]


@pytest.mark.row("G3.1")
async def test_checks_fail_with_503_and_a_reason(made: Api) -> None:
    made.shards.shards[0].alarm = "low on disk"
    made.shards.shards[1].ready = False
    for path in (
        "alarms",
        "is-in-service",
        "ready-to-serve-clients",
        "port-listener/1",
        "protocol-listener/mqtt",
    ):
        status, found = await made.call("GET", f"/api/health/checks/{path}")
        assert (status, found["status"]) == (503, "failed"), path
        assert found["reason"]


async def test_quorum_queues_have_no_leader_while_their_shard_does_not_serve(made: Api) -> None:
    path = "/api/health/checks/quorum-queues-without-elected-leaders"
    names = [f"{kind}-{number}" for kind in ("odd", "even") for number in range(4)]
    for name in names:
        body = {"durable": True, "arguments": QUORUM}
        assert (await made.call("PUT", f"/api/queues/%2F/{name}", body))[0] == 201
    assert await made.get(f"{path}/all-vhosts") == {"status": "ok"}
    made.shards.shards[1].ready = False
    queues = made.context.catalog.vhosts["/"].queues
    away = {name for name in names if queues[name].shard == 1}
    assert away and away != set(names)
    for where in ("all-vhosts", "vhost/%2F"):
        for pattern, wanted in (("", away), ("/pattern/^odd", {n for n in away if "odd" in n})):
            status, said = await made.call("GET", f"{path}/{where}{pattern}")
            assert (status, said["reason"]) == (
                503,
                "Detected quorum queues without an elected leader",
            )
            assert {row["name"] for row in said["queues"]} == wanted
    assert await made.get(f"{path}/all-vhosts/pattern/none") == {"status": "ok"}


async def test_consumers_are_served_during_an_alarm_that_only_blocks_publishers(made: Api) -> None:
    made.shards.shards[0].alarm = "low on disk"
    for path in ("is-in-service", "ready-to-serve-clients"):
        assert await made.get(f"/api/health/checks/{path}") == {"status": "ok"}
    assert (await made.call("GET", "/api/health/checks/alarms"))[0] == 503


async def test_a_stalled_disk_is_no_service_and_no_disk_that_is_full(made: Api) -> None:
    made.shards.shards[0].alarm = "disk does not answer"
    for path in ("alarms", "is-in-service", "ready-to-serve-clients"):
        status, found = await made.call("GET", f"/api/health/checks/{path}")
        assert (status, found["status"]) == (503, "failed"), path
    assert (await made.get("/api/nodes"))[0]["disk_free_alarm"] is False


async def test_what_an_operator_should_look_at_is_told_while_all_is_served(made: Api) -> None:
    made.shards.process[0] = {
        "disk_free_bytes": 9e6,
        "disk_free_warn_bytes": 10e6,
        "disk_free_min_bytes": 5e6,
        "damaged": 2,
    }
    status, found = await made.call("GET", "/api/health/checks/alarms")
    texts = [
        "low on disk soon: 9 MB free",
        "2 damaged places found in message files, see the log",
    ]
    assert (status, found["status"]) == (200, "ok")
    assert found["warnings"] == [{"shard": 0, "warning": text} for text in texts]
    assert [row["warnings"] for row in await made.get("/api/shards")] == [texts, []]
    node = (await made.get("/api/nodes"))[0]
    assert (node["disk_free"], node["disk_free_limit"], node["disk_free_alarm"]) == (
        9_000_000,
        5_000_000,
        False,
    )
    made.shards.shards[0].alarm = "low on disk"
    metrics = (await (await made.client.get("/metrics")).read()).decode()
    for line in (
        "rabbitmq_alarms_free_disk_space_watermark 1.0",
        "rabbitmq_disk_space_available_limit_bytes 5e+06",
        'shardmq_shard_alarm{alarm="low on disk",process="shard-0",shard="0"} 1.0',
        'shardmq_shard_warnings{process="shard-0",shard="0"} 2.0',
    ):
        assert line in metrics, line


async def test_users_go_many_at_once(made: Api) -> None:
    status, _ = await made.call(
        "POST", "/api/users/bulk-delete", {"users": ["nobody", "not there", "manager"]}
    )
    assert status == 204
    assert {user["name"] for user in await made.get("/api/users")} == {"guest"}


async def test_definitions_hold_what_is_nobodys_own(made: Api) -> None:
    await made.context.authority.ask(QueueDeclare("/", "own", True, False, True, {}), OWNER)
    found = await made.get("/api/definitions")
    assert {queue["name"] for queue in found["queues"]} == {"q", "r/s"}
    assert [exchange["name"] for exchange in found["exchanges"]] == ["e"]
    assert len(found["bindings"]) == 2
    assert {user["name"] for user in found["users"]} == {"guest", "nobody", "manager"}


async def test_inherited_sockets_are_served_and_let_go(made: Api) -> None:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [one.getsockname()[1] for one in sockets]
    fds = [one.detach() for one in sockets]
    config = msgspec.structs.replace(made.context.config, http_fds=fds[:1], metrics_fds=fds[1:])
    servers = await app.start(replace(made.context, config_now=lambda: config))
    statuses = []
    async with aiohttp.ClientSession() as client:
        for port, path in (
            (ports[0], "/metrics"),
            (ports[0], "/api/whoami"),
            (ports[1], "/metrics"),
            (ports[1], "/api"),
        ):
            async with client.get(f"http://127.0.0.1:{port}{path}") as answer:
                statuses.append(answer.status)
    await servers.cleanup()
    assert statuses == [200, 401, 200, 404]


def test_no_route_is_given_twice() -> None:
    routes = [(route.method, route.path) for resource in RESOURCES for route in resource.ROUTES]
    assert len(routes) == len(set(routes))


@pytest.mark.row("G1.23", "G1.24", "J1", "J2")
async def test_a_policy_is_shown_as_it_was_set_and_where_it_applies(made: Api) -> None:
    body = {
        "pattern": "^q$",
        "definition": {"max-length": 5, "message-ttl": 9},
        "priority": 7,
        "name": "other",
    }
    await made.call("PUT", "/api/policies/%2F/new", body)
    shown = await made.get("/api/policies/%2F/new")
    assert shown == {
        "vhost": "/", "name": "new", "pattern": "^q$", "apply-to": "all",
        "definition": {"max-length": 5, "message-ttl": 9}, "priority": 7,
    }  # fmt: skip
    await made.call(
        "PUT", "/api/operator-policies/%2F/top", {"pattern": "q", "definition": {"max-length": 2}}
    )
    row = await made.get(
        "/api/queues/%2F/q?columns=policy,operator_policy,effective_policy_definition"
    )
    merged = {"max-length": 2, "message-ttl": 9}
    assert row == {"policy": "new", "operator_policy": "top", "effective_policy_definition": merged}
    assert (await made.get("/api/exchanges/%2F/e"))["policy"] is None


@pytest.mark.row("G1.25", "J3")
async def test_parameters_show_operator_policies_and_limits_but_policies_only_by_name(
    made: Api,
) -> None:
    listed = {(row["component"], row["name"]) for row in await made.get("/api/parameters")}
    assert listed == {("operator_policy", "o"), ("stream", "s"), ("vhost-limits", "limits")}
    assert [row["name"] for row in await made.get("/api/parameters/policy")] == ["p"]
    assert (await made.get("/api/parameters/stream/%2F/s"))["value"] == "text"


@pytest.mark.row("G1.27", "G3.3", "I8", "I9")
async def test_limits_are_set_and_forgotten_one_by_one(made: Api) -> None:
    for path, names in (("vhost-limits/%2F", ("max-connections", "max-queues")),
                        ("user-limits/nobody", ("max-channels", "max-connections"))):  # fmt: skip
        await made.call("PUT", f"/api/{path}/{names[1]}", {"value": 4})
        assert (await made.get(f"/api/{path}"))[0]["value"] == {names[0]: 9, names[1]: 4}
        assert (await made.call("DELETE", f"/api/{path}/{names[0]}"))[0] == 204
        assert (await made.call("DELETE", f"/api/{path}/{names[0]}"))[0] == 204, (
            "gone already: no error"
        )
        assert (await made.get(f"/api/{path}"))[0]["value"] == {names[1]: 4}
        assert (await made.call("DELETE", f"/api/{path}/{names[1]}"))[0] == 204
        assert await made.get(f"/api/{path}") == []


@pytest.mark.row("G1.21", "I9")
async def test_a_users_limits_go_with_the_user(made: Api) -> None:
    assert (await made.get("/api/users/nobody"))["limits"] == {"max-channels": 9}
    await made.call("DELETE", "/api/users/nobody")
    await made.call("PUT", "/api/users/nobody", {"password": "x", "tags": ""})
    assert (await made.get("/api/users/nobody"))["limits"] == {}
    assert await made.get("/api/topic-permissions") == []


@pytest.mark.row("G1.2")
async def test_aliveness_fails_when_no_front_door_answers(made: Api) -> None:
    status, found = await made.call("GET", "/api/aliveness-test/%2F")
    assert (status, found["status"]) == (503, "failed")
    wanted = {"count": 1, "ackmode": "ack_requeue_true", "encoding": "auto"}
    status, found = await made.call("POST", "/api/queues/%2F/q/get", wanted)
    assert (status, found["error"]) == (503, "unavailable")


@pytest.mark.row("G3.4")
async def test_the_cluster_has_a_name(made: Api) -> None:
    assert (await made.call("PUT", "/api/cluster-name", {"name": "orders"}))[0] == 204
    assert await made.get("/api/cluster-name") == {"name": "orders"}
    assert (await made.get("/api/overview"))["cluster_name"] == "orders"
    assert (await made.get("/api/global-parameters/cluster_name"))["value"] == "orders"


@pytest.mark.row("G1.4")
async def test_all_connections_of_a_user_are_closed_together(made: Api) -> None:
    assert [row["name"] for row in await made.get("/api/connections/username/guest")] == [
        CONNECTION
    ]
    assert await made.get("/api/connections/username/nobody") == []
    assert (
        await made.call("DELETE", "/api/connections/username/guest", headers={"X-Reason": "enough"})
    )[0] == 204
    assert made.doors.closed == [(OWNER, 320, "enough")]


@pytest.mark.parametrize(("tags", "status"), [("monitoring", 200), ("policymaker", 401)])
async def test_who_monitors_sees_the_states_of_shovels(made: Api, tags: str, status: int) -> None:
    await made.call("PUT", "/api/users/m", {"password": "m", "tags": tags, **QUICK_HASH})
    none = {"configure": "", "write": "", "read": ""}
    await made.call("PUT", "/api/permissions/%2F/m", none)
    made.login = ("m", "m")
    assert (await made.call("GET", "/api/shovels"))[0] == status
    assert (await made.call("GET", "/api/shovels/%2F"))[0] == status


async def test_a_cleared_shovel_takes_along_that_it_was_paused(made: Api) -> None:
    value = {"src-uri": "amqp://", "src-queue": "q", "dest-uri": "amqp://", "dest-queue": "r"}
    for name in ("s", "other"):
        for component, set_to in (("shovel", value), ("shovel-paused", True)):
            path = f"/api/parameters/{component}/%2F/{name}"
            assert (await made.call("PUT", path, {"value": set_to}))[0] == 201
    assert (await made.call("DELETE", "/api/parameters/shovel/%2F/s"))[0] == 204
    left = await made.get("/api/parameters/shovel-paused")
    assert [row["name"] for row in left] == ["other"]


@pytest.mark.row("G2.10", "H1")
@pytest.mark.parametrize("by_body", [False, True])
async def test_a_hash_made_here_is_one_users_can_have(made: Api, by_body: bool) -> None:
    if by_body:
        status, found = await made.call("PUT", "/api/auth/hash_password", {"password": "s ecret"})
        assert status == 200
        password_hash = found["password_hash"]
        for wrong in ({}, {"password": 1}, {"password": None}):
            assert (await made.call("PUT", "/api/auth/hash_password", wrong))[0] == 400
    else:
        password_hash = (await made.get("/api/auth/hash_password/s%20ecret"))["ok"]
    body = {
        "password_hash": password_hash,
        "hashing_algorithm": passwords.DEFAULT_ALGORITHM,
        "tags": "management",
    }
    await made.call("PUT", "/api/users/hashed", body)
    made.login = ("hashed", "s ecret")
    assert (await made.get("/api/whoami"))["name"] == "hashed"


@pytest.mark.row("G2.1")
async def test_no_queue_is_closed_and_has_to_be_restarted(made: Api) -> None:
    assert (await made.call("PUT", "/api/queues/%2F/q/restart"))[0] == 400
    assert (await made.call("PUT", "/api/queues/%2F/none/restart"))[0] == 404
    made.login = ("manager", "x")
    assert (await made.call("PUT", "/api/queues/%2F/q/restart"))[0] == 401


@pytest.mark.row("G2.8")
async def test_garbage_is_collected_when_an_administrator_asks(made: Api) -> None:
    async def collections() -> int:
        return int((await made.get("/api/nodes/gc_stats"))["generations"][2]["collections"])

    before = await collections()
    for path in ("/api/nodes/gc_collect", "/api/nodes/shardmq@localhost/gc_collect"):
        assert (await made.call("POST", path))[0] == 204
    assert await collections() >= before + 2
    assert (await made.call("POST", "/api/nodes/other/gc_collect"))[0] == 404
    made.login = ("nobody", "x")
    assert (await made.call("POST", "/api/nodes/gc_collect"))[0] == 401
    assert (await made.call("GET", "/api/nodes/gc_stats"))[0] == 401


@pytest.mark.row("G3.9")
async def test_logins_are_counted_by_protocol_until_they_are_forgotten(made: Api) -> None:
    path = "/api/auth/attempts/shardmq@localhost"

    async def attempts() -> dict[str, tuple[int, ...]]:
        kinds = ("auth_attempts", "auth_attempts_succeeded", "auth_attempts_failed")
        return {row["protocol"]: tuple(row[kind] for kind in kinds) for row in await made.get(path)}

    before = await attempts()
    assert before["amqp091"] == (6, 4, 2)
    made.login = ("guest", "wrong")
    assert (await made.call("GET", "/api/whoami"))[0] == 401
    made.login = ("guest", "guest")
    total, succeeded, failed = before["http"]
    assert (await attempts())["http"] == (total + 2, succeeded + 1, failed + 1)
    made.login = None
    told = set((await made.get("/metrics")).splitlines())
    assert {f'rabbitmq_auth_attempts_failed_total{{protocol="http"}} {failed + 1}.0'} <= told
    assert {'rabbitmq_auth_attempts_total{protocol="amqp091"} 6.0'} <= told
    made.login = ("guest", "guest")
    assert (await made.call("DELETE", path))[0] == 204
    assert await attempts() == {"amqp091": (0, 0, 0), "http": (1, 1, 0)}


@pytest.mark.row("G3.9")
async def test_rates_begin_anew_when_an_administrator_asks_and_counts_stay(made: Api) -> None:
    before = (await made.get("/api/queues/%2F/q"))["message_stats"]
    for path in ("/api/reset", "/api/reset/shardmq@localhost"):
        assert (await made.call("DELETE", path))[0] == 204
        assert made.context.stats._last.at == 0
        after = (await made.get("/api/queues/%2F/q"))["message_stats"]
        assert after["publish"] == before["publish"]
        assert "publish_details" not in after, "it is not known any more"
    assert (await made.call("DELETE", "/api/reset/other"))[0] == 404
    made.login = ("nobody", "x")
    assert (await made.call("DELETE", "/api/reset"))[0] == 401


@pytest.mark.row("G3.11")
async def test_permissions_by_topic_are_found_from_both_ends(made: Api) -> None:
    one = {"user": "nobody", "vhost": "/", "exchange": "e", "write": "w", "read": "r"}
    assert await made.get("/api/users/nobody/topic-permissions") == [one]
    assert one in await made.get("/api/vhosts/%2F/topic-permissions")
    assert await made.get("/api/users/guest/topic-permissions") == []


@pytest.mark.row("G1.28", "G2.9")
async def test_definitions_come_in_as_a_form_and_go_out_as_a_file(made: Api) -> None:
    login = {"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="}  # guest:guest
    for path in ("/api/definitions", "/api/definitions/upload"):
        form = aiohttp.FormData()
        form.add_field("redirect", "#/overview")
        form.add_field("file", b'{"queues": [{"name": "up", "vhost": "/"}]}', filename="d.json")
        async with made.client.post(path, data=form, headers=login) as answer:
            assert answer.status == 204
    assert (await made.get("/api/queues/%2F/up"))["name"] == "up"
    await made.get('/api/definitions?download=my%20"file".json')
    assert made.headers["Content-Disposition"] == 'attachment; filename="my__file_.json"'


@pytest.mark.row("I4", "G1.28")
async def test_an_import_stops_at_what_is_refused_and_names_it(made: Api) -> None:
    policy = {"vhost": "/", "name": "ip", "pattern": "a", "definition": {"zz": 1}}
    status, found = await made.call("POST", "/api/definitions", {"policies": [policy]})
    assert status == 400
    assert (
        found["reason"]
        == 'Validation failed\n\n[{<<"zz">>,1}] are not recognised policy settings\n (//ip)'
    )


@pytest.mark.row("I4", "G1.28")
async def test_an_import_says_what_it_keeps_without_effect(
    made: Api, caplog: pytest.LogCaptureFixture
) -> None:
    mirrored = {"vhost": "/", "name": "ha", "pattern": "^none$", "definition": {"ha-mode": "all"}}
    shovel = {"vhost": "/", "component": "federation", "name": "move", "value": {}}
    with caplog.at_level(logging.WARNING):
        status, found = await made.call(
            "POST", "/api/definitions", {"policies": [mirrored], "parameters": [shovel]}
        )
    assert status == 200 and [
        text.partition(" is kept without effect: ")[0] for text in found["warnings"]
    ] == [
        "parameter federation of 'move' in vhost '/'",
        "policy key ha-mode of policy 'ha' in vhost '/'",
    ]
    assert all(
        any(text in record.getMessage() for record in caplog.records) for text in found["warnings"]
    )
    assert (await made.get("/api/imports"))[0]["warnings"] == found["warnings"]
    assert (await made.call("POST", "/api/definitions", {"vhosts": [{"name": "/"}]}))[0] == 204


@pytest.mark.row("J1", "J5")
async def test_what_is_set_and_has_no_effect_is_logged(
    made: Api, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (await made.call("PUT", "/api/parameters/federation/%2F/s", {"value": {}}))[0] == 201
    assert "parameter federation of 's' in vhost '/' is kept without effect: " in caplog.text


def plain(texts: list[str]) -> list[str]:
    return [text.partition(" is kept without effect: ")[0] for text in texts]


QUORUM = {"x-queue-type": "quorum"}
WITHOUT_EFFECT: list[tuple[str, str, Any, str]] = [
    ("PUT", "queues/%2F/w", {"durable": True, "arguments": QUORUM},
     "queue type quorum of queue 'w' in vhost '/'"),
    ("PUT", "queues/%2F/w", {"durable": True, "arguments": {"x-queue-mode": "lazy"}},
     "argument x-queue-mode of queue 'w' in vhost '/'"),
    ("PUT", "exchanges/%2F/w",
     {"type": "x-random", "arguments": {"x-shards": 1, "x-shard-arguments": QUORUM}},
     "queue type quorum of exchange 'w' in vhost '/'"),
    ("PUT", "policies/%2F/w", {"pattern": "^none$", "definition": {"ha-mode": "all"}},
     "policy key ha-mode of policy 'w' in vhost '/'"),
    ("PUT", "operator-policies/%2F/w",
     {"pattern": "^none$", "definition": {"max-in-memory-length": 5}, "apply-to": "queues",
      "priority": 0},
     "policy key max-in-memory-length of operator policy 'w' in vhost '/'"),
    ("PUT", "parameters/federation-upstream/%2F/w",
     {"value": {"uri": "amqp://", "bind-nowait": True}},
     "key bind-nowait of federation-upstream 'w' in vhost '/'"),
    ("PUT", "parameters/federation/%2F/w%C3%BC", {"value": {}},
     "parameter federation of 'w\u00fc' in vhost '/'"),
    ("PUT", "global-parameters/mqtt_default_vhosts", {"value": {}},
     "global parameter mqtt_default_vhosts of the broker"),
    ("PUT", "vhosts/w", {"default_queue_type": "quorum"}, "default queue type quorum of vhost 'w'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "said"), WITHOUT_EFFECT, ids=[row[3] for row in WITHOUT_EFFECT]
)
async def test_what_is_made_and_has_no_effect_is_answered_logged_and_listed(
    made: Api, caplog: pytest.LogCaptureFixture, method: str, path: str, body: Any, said: str
) -> None:
    before = (await made.get("/api/without-effect"))["warnings"]
    with caplog.at_level(logging.WARNING):
        status, found = await made.call(method, f"/api/{path}", body)
    assert status == 201, found
    values = made.headers.getall("Warning")
    assert plain([json.loads(value.removeprefix("299 shardmq ")) for value in values]) == [said]
    assert said in plain([record.getMessage() for record in caplog.records])
    listed = (await made.get("/api/without-effect"))["warnings"]
    assert [text for text in plain(listed) if text not in plain(before)] == [said]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert (await made.call(method, f"/api/{path}", body))[0] == 204
    assert "Warning" in made.headers
    if path.startswith(("queues", "exchanges")):
        assert caplog.records == [], "nothing was made"


async def test_what_acts_is_answered_without_a_warning(made: Api) -> None:
    assert (await made.call("PUT", "/api/queues/%2F/acts", {"arguments": {"x-max-length": 5}}))[
        0
    ] == 201
    assert "Warning" not in made.headers


async def test_a_misspelt_field_of_a_policy_is_warned_of(made: Api) -> None:
    body = {"pattern": "^x", "definition": {"max-length": 5}, "vhost": "/", "name": "p"}
    given = {**body, "prority": 7, "colour": "red"}
    assert (await made.call("PUT", "/api/policies/%2F/misspelt", given))[0] == 201
    assert [json.loads(value[12:]) for value in made.headers.getall("Warning")] == [
        "prority, colour are no fields of a policy and are ignored; did you mean priority?"
    ]
    assert (await made.get("/api/policies/%2F/misspelt"))["priority"] == 0
    assert (await made.call("PUT", "/api/policies/%2F/misspelt", {**body, "prority": 7}))[0] == 204
    assert json.loads(made.headers["Warning"][12:]) == (
        "prority is no field of a policy and is ignored; did you mean priority?"
    )
    assert (await made.call("PUT", "/api/policies/%2F/misspelt", body))[0] == 204
    assert "Warning" not in made.headers


async def test_the_warning_of_many_long_fields_of_a_policy_is_short(made: Api) -> None:
    body = {"pattern": "^x", "definition": {"max-length": 5}}
    many = {f"{number}{'x' * 9_000}": 1 for number in range(20_000, 20_200)}
    assert (await made.call("PUT", "/api/policies/%2F/many", {**body, **many}))[0] == 201
    (value,) = made.headers.getall("Warning")
    assert len(value) < 1_000 and " 195 more are no fields of a policy" in value


@pytest.mark.row("G3.10")
async def test_a_vhost_that_runs_is_started_and_one_that_is_not_there_is_not(made: Api) -> None:
    assert (await made.call("POST", "/api/vhosts/%2F/start/shardmq@localhost"))[0] == 204
    for absent in ("x/start/shardmq@localhost", "%2F/start/other"):
        assert (await made.call("POST", f"/api/vhosts/{absent}"))[0] == 404


@pytest.mark.row("G2.6")
async def test_a_consumer_is_cancelled_by_who_may_close_its_connection(made: Api) -> None:
    path = f"/api/consumers/%2F/{NAME}/1/tag"
    for other in (
        f"/api/consumers/%2F/{NAME}/2/tag",
        f"/api/consumers/%2F/{NAME}/1/other",
        "/api/consumers/%2F/x/1/tag",
    ):
        assert (await made.call("DELETE", other))[0] == 404
    assert (await made.call("DELETE", f"/api/consumers/%2F/{NAME}/one/tag"))[0] == 400
    made.login = ("manager", "x")
    assert (await made.call("DELETE", path))[0] in (401, 404)
    assert made.doors.closed == []
    made.login = ("guest", "guest")
    assert (await made.call("DELETE", path))[0] == 204
    assert made.doors.closed == [(OWNER, 1, "tag")]


async def test_a_plan_says_whether_keys_stay_in_order(api: Api) -> None:
    for name, type, kind, ordered in (
        ("classic", "x-consistent-hash", "classic", True),
        ("stream", "x-consistent-hash", "stream", True),
        ("random", "x-random", "stream", False),
    ):
        arguments = {"x-shards": 2, "x-shard-arguments": {"x-queue-type": kind}}
        assert (
            await api.call(
                "PUT", f"/api/exchanges/%2F/{name}", {"type": type, "arguments": arguments}
            )
        )[0] == 201
        _, plan = await api.call("POST", f"/api/exchanges/%2F/{name}/shards/plan", {"number": 3})
        assert (len(plan["coming"]), plan["going"], plan["keeps_order"]) == (1, [], ordered)
        _, status = await api.call("GET", f"/api/exchanges/%2F/{name}/shards")
        assert (status["keeps_order"], status["groups"]) == (ordered, [])


async def test_shards_are_planned_changed_and_shown(api: Api) -> None:
    declared = {
        "type": "x-modulus-hash",
        "arguments": {"x-shards": 2, "x-shards-change-deadline": 9},
    }
    assert (await api.call("PUT", "/api/exchanges/%2F/planned", declared))[0] == 201
    path = "/api/exchanges/%2F/planned/shards"
    status, plan = await api.call("POST", f"{path}/plan", {"number": 3})
    assert (status, plan["shards"], plan["new_shards"], plan["share_moving"]) == (200, 2, 3, 1.0)
    assert (len(plan["coming"]), len(plan["going"]), plan["keeps_order"]) == (3, 2, True)
    _, before = await api.call("GET", path)
    assert (before["step"], before["deadline_ms"], before["at_deadline"]) == ("none", 9, "wait")
    assert [queue["bound"] for queue in before["queues"]] == [True, True]  # a plan changes nothing
    assert (await api.call("PUT", path, {"number": 3}))[0] == 204
    _, after = await api.call("GET", path)
    assert after["step"] != "none"
    assert {queue["name"] for queue in after["queues"]} == {*plan["coming"], *plan["going"]}
    for bad in (0, -1, 1.5, "many", None, 10**6):
        assert (await api.call("PUT", path, {"number": bad}))[0] == 400
    assert (await api.call("GET", "/api/exchanges/%2F/amq.topic/shards"))[0] == 400
    assert (await api.call("GET", "/api/exchanges/%2F/nobody/shards"))[0] == 404


@pytest.mark.row("G1.21", "G1.22", "G3.2")
@pytest.mark.parametrize(
    ("method", "path", "body", "missing"),
    [
        ("PUT", "permissions/%2F/nobody", {"configure": "", "write": ""}, "{key_missing,read}"),
        (
            "PUT",
            "permissions/%2F/nobody",
            {},
            "{key_missing,configure},{key_missing,write},{key_missing,read}",
        ),
        (
            "PUT",
            "topic-permissions/%2F/nobody",
            {"write": "", "read": ""},
            "{key_missing,exchange}",
        ),
        ("POST", "users/bulk-delete", {}, "{key_missing,users}"),
    ],
    ids=["one-permission", "all-permissions", "topic-permission", "users"],
)
async def test_all_keys_that_a_body_lacks_are_named_in_rabbitmqs_words(
    made: Api, method: str, path: str, body: dict[str, Any], missing: str
) -> None:
    status, found = await made.call(method, f"/api/{path}", body)
    assert (status, found) == (400, {"error": "bad_request", "reason": f"[{missing}]"})
