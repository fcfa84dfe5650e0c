"""RabbitMQ's definitions come into a whole broker and go out again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support import vhosts
from tests.support.real_broker import RealBroker
from tests.support.vhosts import Api, connect, publish, waiting

api, vhost = vhosts.api, vhosts.vhost

EXPORT = Path(__file__).with_name("rabbitmq_definitions.json")


@pytest.mark.broker
@pytest.mark.row("G1.28", "J14")
def test_rabbitmqs_definitions_at_start_and_by_http(tmp_path: Path) -> None:
    broker = RealBroker(tmp_path / "data", more=("--load-definitions", str(EXPORT)))
    try:
        api = Api(broker)
        first = api("GET", "definitions")
        assert {queue["name"] for queue in first["queues"]} >= {
            "orders.new",
            "orders.dead",
            "quorum",
        }
        with connect(broker, "orders", "olga", "olga secret") as connection:
            channel = connection.channel()
            publish(channel, "olga.1", 1, "events")
            assert waiting(channel, "orders/slash ü") == 1, "by the policy's alternate exchange"
        api("DELETE", "vhosts/orders")
        api("POST", "definitions", json.loads(EXPORT.read_bytes()))
        again = api("GET", "definitions")
        for kind in (
            "queues",
            "exchanges",
            "bindings",
            "policies",
            "parameters",
            "permissions",
            "topic_permissions",
        ):
            assert sorted(map(_key, again[kind])) == sorted(map(_key, first[kind])), kind
        api("PUT", "vhosts/copy", {})
        api("POST", "definitions/copy", api("GET", "definitions/orders"))
        assert len(api("GET", "queues/copy")) == len(api("GET", "queues/orders"))
        assert api("GET", f"queues/copy/{quote('orders.new')}")["policy"] == "short"
        broker.stop()
    finally:
        broker.clean_up()


def _key(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True)


def test_definitions_with_many_queues_come_in_within_seconds(api: Api, vhost: str) -> None:
    queues = [{"name": f"q{n}", "vhost": vhost, "durable": False} for n in range(3000)]
    began = time.monotonic()
    api("POST", "definitions", {"queues": queues})
    assert time.monotonic() - began < 60
    assert len(api("GET", f"queues/{vhost}?columns=name")) == 3000


@pytest.mark.row("G1.28")
def test_who_imports_a_new_vhost_may_use_it_unless_the_document_says_otherwise(api: Api) -> None:
    names = ["imported-open", "imported-closed", "imported-before"]
    api("PUT", f"vhosts/{names[2]}", {})
    api("DELETE", f"permissions/{names[2]}/guest")
    closed = {"user": "guest", "vhost": names[1], "configure": "", "write": "", "read": "^x"}
    document = {"vhosts": [{"name": name} for name in names], "permissions": [closed]}
    try:
        api("POST", "definitions", document)
        found = {
            row["vhost"]: row["read"] for row in api("GET", "permissions") if row["vhost"] in names
        }
        assert found == {names[0]: ".*", names[1]: "^x"}
    finally:
        for name in names:
            api("DELETE", f"vhosts/{name}")
