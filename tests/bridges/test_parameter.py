"""The parameter `shovel` is checked with RabbitMQ's words, and read with its defaults."""

from __future__ import annotations

from typing import Any

import pytest

from shardmq.broker.model import amqp_uri, shovels
from shardmq.broker.model.amqp_uri import AmqpUri, BadUri

GOOD = {"src-uri": "amqp://", "src-queue": "a", "dest-uri": "amqp://h", "dest-queue": "b"}
WITHOUT = {key: value for key, value in GOOD.items() if not key.startswith("src-q")}


@pytest.mark.row("J5", "J6", "J7", "J8")
@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (3, "s should be a table, actually was 3"),
        ({}, "Must specify 'src-exchange' or 'src-queue'"),
        (GOOD | {"src-exchange": "e"}, "Cannot specify 'src-exchange' and 'src-queue'"),
        (GOOD | {"dest-exchange": "e"}, "Cannot specify 'dest-exchange' and 'dest-queue'"),
        (WITHOUT | {"src-exchange": "e"}, ""),
        (GOOD | {"ack-mode": "no-ack", "src-delete-after": 3},
         "Cannot specify 'no-ack' and numerical 'delete-after'"),
        ({"src-queue": "a", "dest-uri": "amqp://"}, 'Key "src-uri" not found in s'),
        ({"src-queue": "a", "src-uri": "amqp://"}, 'Key "dest-uri" not found in s'),
        (GOOD | {"more": 1}, 'Unrecognised terms [{<<"more">>,1}] in s'),
        (GOOD | {"ack-mode": "x"},
         "ack-mode should be one of [no-ack,on-publish,on-confirm], actually was x"),
        (GOOD | {"src-prefetch-count": "1"},
         'src-prefetch-count should be a number, actually was <<"1">>'),
        (GOOD | {"src-prefetch-count": True},
         "src-prefetch-count should be a number, actually was true"),
        (GOOD | {"prefetch-count": 70_000}, "prefetch-count should be from 0 to 65535"),
        (GOOD | {"reconnect-delay": "1"}, "reconnect-delay should be a number"),
        (GOOD | {"src-delete-after": "soon"},
         'src-delete-after should be number, "never" or "queue-length", actually was <<"soon">>'),
        (GOOD | {"src-delete-after": 1.5}, "src-delete-after should be number"),
        (GOOD | {"src-predeclared": 1}, "src-predeclared should be boolean, actually was 1"),
        (GOOD | {"src-queue": 5}, "src-queue should be binary, actually was 5"),
        (GOOD | {"src-queue": "q" * 256}, "src-queue has at most 255 bytes"),
        (GOOD | {"src-uri": "http://h"}, '"http://h" not a valid URI: unexpected scheme'),
        (GOOD | {"src-uri": []}, "src-uri should have 1 to 64 URIs"),
        (GOOD | {"src-uri": [["amqp://"]]}, "src-uri should be binary"),
        (GOOD | {"dest-uri": ["amqp://", "amqp://u:secret@h:x"]}, '"amqp://h:x" not a valid URI'),
        (GOOD | {"dest-uri": ["amqp://", "http://h"]}, "all of HTTP or all of AMQP"),
        (GOOD | {"dest-uri": "https://u:secret@:80/"}, '"https://:80/" not a valid URI'),
        (GOOD | {"dest-publish-properties": {"x": 1}}, "unrecognised property x"),
        (GOOD | {"dest-publish-properties": {"priority": 256}}, "priority in dest-publish"),
        (GOOD | {"dest-publish-properties": {"app_id": 1}}, "app_id in dest-publish-properties"),
        (GOOD | {"src-protocol": "amqp10", "src-address": "x"}, ""),
        (GOOD | {"src-protocol": "mqtt"}, "src-protocol should be one of"),
    ],
)  # fmt: skip
def test_faults_have_rabbitmqs_words(value: Any, fault: str) -> None:
    found = list(shovels.faults("s", value))
    assert (not found) if not fault else any(fault in each for each in found), found
    assert "secret" not in str(found)


def test_defaults_and_older_names() -> None:
    read = shovels.read("/", "s", GOOD)
    assert (read.prefetch, read.ack_mode, read.delete_after) == (1000, "on-confirm", -1)
    assert (read.dest_exchange, read.dest_key, read.reconnect_delay_s) == ("", "b", 5.0)
    older = GOOD | {
        "prefetch-count": 7,
        "delete-after": "queue-length",
        "add-forward-headers": True,
    }
    read = shovels.read("/", "s", older)
    assert (read.prefetch, read.delete_after, read.forward_headers) == (7, -2, True)
    newer = shovels.read("/", "s", older | {"src-prefetch-count": 8})
    assert newer.prefetch == 8
    unnamed = {key: value for key, value in GOOD.items() if key != "dest-queue"}
    read = shovels.read("/", "s", unnamed)
    assert (read.dest_exchange, read.dest_key) == (None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("amqp://", AmqpUri()),
        ("amqp:///v", AmqpUri(vhost="v")),
        ("amqp:///%2F", AmqpUri()),
        ("amqp://h", AmqpUri(host="h", user="guest", password="guest")),
        ("amqp://h/", AmqpUri(host="h", user="guest", password="guest")),
        ("amqp://u%40:p%2F@h:1/a%2Fb?heartbeat=0&connection_timeout=9&channel_max=3",
         AmqpUri(host="h", port=1, user="u@", password="p/", vhost="a/b", heartbeat_s=0,
                 timeout_ms=9, channel_max=3)),
        ("amqps://u@[::1]?verify=verify_peer&cacertfile=/c&server_name_indication=n",
         AmqpUri(host="::1", port=5671, tls=True, user="u", verify=True, cacertfile="/c",
                 server_name="n")),
        ("amqps://u:p@h?server_name_indication=disable&auth_mechanism=external&certfile=/a",
         AmqpUri(host="h", port=5671, tls=True, user="u", password="p", server_name=None,
                 mechanism="external", certfile="/a")),
    ],
)  # fmt: skip
def test_uris_are_read(text: str, expected: AmqpUri) -> None:
    assert amqp_uri.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "h", "amqp", "http://h", "amqp://h:x", "amqp://h:70000", "amqp://[h", "amqps://",
        "amqp://h/a/b", "amqp://h?heartbeat=x", "amqp://h?heartbeat=70000", "amqp://h?verify=x",
        "amqp://h?auth_mechanism=x", "amqp://h?keyfile=/k", "amqp://a b", "amqp://h/%ff",
        "amqp://:1", "amqp://" + "h" * 5000, "amqp://h?heartbeat=99999999999",
    ],
)  # fmt: skip
def test_what_is_no_uri_of_a_broker_is_refused(text: str) -> None:
    with pytest.raises(BadUri):
        amqp_uri.parse(text)


def test_credentials_are_not_shown() -> None:
    shown = amqp_uri.without_credentials("amqps://u:p@h:1/v?keyfile=/k")
    assert shown == "amqps://h:1/v"


@pytest.mark.parametrize("text", ["amqp://u:p@ss@h", "amqp://u:pa?ss@h", "amqp://u:pa#ss@h"])
def test_signs_of_a_uri_in_a_password_do_not_show_a_part_of_it(text: str) -> None:
    assert amqp_uri.without_credentials(text) == "amqp://h"


@pytest.mark.parametrize("key", ["src-queue", "src-exchange", "dest-queue"])
def test_an_empty_name_is_refused(key: str) -> None:
    """The default exchange would lose messages for a queue without a name, and confirm them."""
    value = {"src-uri": "amqp://", "src-queue": "a", "dest-uri": "amqp://", "dest-queue": "b"}
    if key == "src-exchange":
        del value["src-queue"]
    value[key] = ""
    assert any(f"{key} should not be empty" in fault for fault in shovels.faults("s", value))
