"""An operator reads messages of a stream by HTTP."""

from __future__ import annotations

import urllib.error
from typing import Any

import pytest
from pamqp.commands import Basic, Confirm, Queue

from tests.support.brokers import Api
from tests.support.raw_client import RawClient, publish
from tests.support.real_broker import wait_until


def confirmed(client: RawClient, name: str, bodies: list[bytes]) -> None:
    client.ask(1, Confirm.Select(), Confirm.SelectOk)
    for number, body in enumerate(bodies, 1):
        client.send(publish(1, "", name, body))
        assert client.expect(Basic.Ack).delivery_tag == number


def read(api: Api, name: str, **wanted: Any) -> Any:
    return api(f"/api/queues/%2F/{name}/stream", method="POST", body=wanted)


@pytest.mark.row("G2.3", "D9", "L9")
def test_messages_of_a_stream_are_read_by_http_from_any_offset_and_stay(
    client: RawClient, api: Api, name: str
) -> None:
    client.ask(
        1,
        Queue.Declare(queue=name, durable=True, arguments={"x-queue-type": "stream"}),
        Queue.DeclareOk,
    )
    assert read(api, name, count=10) == []
    bodies = [b"a", b"\xff\xfe", b"c" * 500_000, b"d", b""]
    confirmed(client, name, bodies)
    found = read(api, name, count=100)
    assert [row["properties"]["headers"]["x-stream-offset"] for row in found] == list(range(5))
    assert [row["payload_bytes"] for row in found] == [len(body) for body in bodies]
    assert [row["payload_encoding"] for row in found] == [
        "string",
        "base64",
        "string",
        "string",
        "string",
    ]
    assert found[0]["routing_key"] == name and found[2]["payload"] == "c" * 500_000
    assert [row["payload"] for row in read(api, name, offset=3, count=5)] == ["d", ""]
    assert [row["payload"] for row in read(api, name, offset="3")] == ["d"]
    assert [
        row["payload"] for row in read(api, name, offset="2", truncate=3, encoding="base64")
    ] == ["Y2Nj"]
    assert read(api, name, offset="next", count=2) == [] == read(api, name, offset=5)
    assert len(read(api, name, offset="1h", count=9)) == 5
    # A message that just came may not be counted in yet.
    wait_until(
        lambda: [row["message_count"] for row in read(api, name, count=3)] == [4, 3, 2],
        "how many are left",
    )


@pytest.mark.row("G2.3", "D9")
@pytest.mark.parametrize(
    "wanted",
    [
        {"offset": -1},
        {"offset": "yesterday"},
        {"offset": "9" * 30},
        {"offset": "9" * 5000},
        {"offset": {}},
        {"count": 0},
        {"count": "many"},
        {"encoding": "hex"},
        {"truncate": -1},
    ],
)
def test_what_cannot_be_read_of_a_stream_is_400(
    client: RawClient, api: Api, name: str, wanted: dict[str, Any]
) -> None:
    client.ask(
        1,
        Queue.Declare(queue=name, durable=True, arguments={"x-queue-type": "stream"}),
        Queue.DeclareOk,
    )
    with pytest.raises(urllib.error.HTTPError, match="400"):
        read(api, name, **wanted)


@pytest.mark.row("G2.3")
def test_only_streams_are_read_so(client: RawClient, api: Api, name: str) -> None:
    client.ask(1, Queue.Declare(queue=name), Queue.DeclareOk)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        read(api, name)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        read(api, f"{name}-none")
