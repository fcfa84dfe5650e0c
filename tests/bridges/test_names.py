"""Bridges take queues, exchanges and vhosts of any name, also those that pamqp refuses."""

from __future__ import annotations

import ast
from pathlib import Path
from urllib.parse import quote

import pytest
from pamqp import commands

import shardmq.bridges
from shardmq.broker.amqp.methods import decode_method, encode_method, encode_table, unchecked
from tests.bridges.moving import call, federate, fill, set_shovel, taken, uri
from tests.support.real_broker import RealBroker

NAME = "größe: a -> b"
NAMED = {"queue", "exchange", "source", "destination", "virtual_host", "routing_key"}


def test_a_method_has_any_name_and_a_table_may_be_given_as_bytes() -> None:
    with pytest.raises(ValueError, match="Invalid value"):
        commands.Queue.Declare(queue=NAME)
    arguments = encode_table({"a": 1})
    made = unchecked(commands.Queue.Declare, queue=NAME, durable=True, arguments=arguments)
    read = decode_method(encode_method(made))
    assert isinstance(read, commands.Queue.Declare)
    assert (read.queue, read.durable, read.passive, read.arguments) == (NAME, True, False, {"a": 1})
    with pytest.raises(AttributeError):
        unchecked(commands.Queue.Declare, misspelt=True)


def test_no_bridge_lets_pamqp_check_names() -> None:
    [folder] = shardmq.bridges.__path__
    files = sorted(Path(folder).glob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("commands."):
                assert not NAMED & {each.arg for each in node.keywords}, (file.name, node.lineno)


@pytest.mark.broker
@pytest.mark.row("J5", "J11")
def test_shovels_and_links_take_queues_of_any_name(broker: RealBroker, name: str) -> None:
    vhost = f"{NAME} {name}"
    place = quote(vhost, safe="")
    here, there = f"{NAME} {name}", f"{NAME} {name} there"
    assert call(broker, "PUT", f"vhosts/{place}", {})[0] == 201
    try:
        assert call(broker, "PUT", f"queues/{place}/{quote(here)}", {"durable": True})[0] == 201
        federate(broker, here, uri=f"amqp:///{place}")
        set_shovel(
            broker, name, src_queue=there, dest_uri=f"{uri(broker)}/{place}", dest_queue=here
        )
        fill(broker, there, [b"a", b"b"])
        assert [body for _, body in taken(broker, here, 2)] == [b"a", b"b"]
    finally:
        for path in (f"policies/%2F/{quote(here)}", f"shovels/vhost/%2F/{quote(name)}"):
            call(broker, "DELETE", path)
        call(broker, "DELETE", f"parameters/federation-upstream/%2F/{quote(here)}")
        call(broker, "DELETE", f"vhosts/{place}")
        for queue in (here, there):
            call(broker, "DELETE", f"queues/%2F/{quote(queue)}")
