"""The names of the keys of a cluster, and the records at them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from shardmq.cluster.records import (
    BadRecord,
    Copies,
    KeyNames,
    Node,
    decoded,
    encoded,
    number_in,
)

NODE = Node(3, "shardmq@host", "10.0.0.3", {"amqp": 5672, "cluster": 25672}, "0.1.0", 8, 17)
COPIES = Copies(term=4, leader=1, in_sync=[1, 2], members=[1, 2, 5])


def test_the_keys_are_those_of_the_design() -> None:
    names = KeyNames("prod-1.eu_west")
    assert names.all == "/shardmq/prod-1.eu_west/"
    assert names.node(3) == names.nodes + "3" == "/shardmq/prod-1.eu_west/nodes/3"
    assert names.shard(0) == names.shards + "0" == "/shardmq/prod-1.eu_west/shards/0"
    assert names.controller == "/shardmq/prod-1.eu_west/controller"
    assert number_in(names.node(254)) == 254


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", "a\n", "a" * 65])
def test_a_name_of_a_cluster_has_letters_digits_and_three_signs(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a cluster"):
        KeyNames(name)


@pytest.mark.parametrize("record", [NODE, COPIES], ids=lambda one: type(one).__name__)
def test_a_record_is_json_and_comes_back(record: Any) -> None:
    value = encoded(record)
    assert isinstance(msgspec.json.decode(value), dict)
    assert decoded("/k", value, type(record)) == record
    newer = {**msgspec.json.decode(value), "added_later": [1]}
    assert decoded("/k", msgspec.json.encode(newer), type(record)) == record


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (b"", Node, "no node: "),
        (b"[]", Copies, "no copies: "),
        (b'{"number": 255}', Node, "<= 254.*number"),
        (encoded(COPIES).replace(b'"leader":1', b'"leader":5'), Copies, "leader is not in in_sync"),
        (encoded(COPIES).replace(b"[1,2,5]", b"[1,5]"), Copies, "not among the members"),
        (encoded(COPIES).replace(b'"term":4', b'"term":-4'), Copies, "term"),
        (encoded(NODE).replace(b"17", b'"x"'), Node, "incarnation"),
        (encoded(NODE).replace(b"@host", b"@caf\xe9"), Node, "utf-8"),
        (b'{"x":' + b"[" * 100_000, Node, "recursion"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(value: bytes, kind: Any, says: str) -> None:
    with pytest.raises(BadRecord, match=f"^/shardmq/a/k: .*{says}"):
        decoded("/shardmq/a/k", value, kind)


def test_a_key_without_a_number_is_named() -> None:
    for last in ("", "x", "²", "1" * 5000):
        key = f"/shardmq/a/nodes/{last}"
        with pytest.raises(BadRecord, match=key):
            number_in(key)


def test_the_lease_and_the_records_are_imported_without_the_client() -> None:
    code = (
        "import sys, shardmq.cluster.lease, shardmq.cluster.records\n"
        "assert not {'aiohttp', 'shardmq.cluster.etcd'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
