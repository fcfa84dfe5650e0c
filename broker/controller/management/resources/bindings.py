"""/api/bindings, and the bindings of one queue or exchange.

The `properties_key` of a binding is its name among the bindings of the same source and
destination: "~", the quoted routing key, or the quoted routing key, "~" and a hash of the
arguments. As in RabbitMQ a space is quoted as "+", and "~" as "%7E". The implied bindings of the
default exchange are shown, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, quote_plus, unquote

import msgspec
from aiohttp import web

from shardmq.broker.controller.management.api_error import not_found
from shardmq.broker.controller.management.call import Arguments, Call, Route, long_list, table_of
from shardmq.broker.controller.management.resources.exchanges import exchange_name
from shardmq.broker.controller.management.responses.listing import Listing
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import BindingPut
from shardmq.broker.model.checks import is_hidden_queue
from shardmq.broker.routing.hashing import hash64
from shardmq.broker.shared.control import Bind, Unbind

KINDS = {"q": "queue", "e": "exchange"}

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class BindingBody(msgspec.Struct):
    routing_key: str = ""
    arguments: Arguments = {}


def quoted(routing_key: str) -> str:
    return quote_plus(routing_key).replace("~", "%7E")


def properties_key(routing_key: str, arguments: dict[str, Any]) -> str:
    key = quoted(routing_key)
    if arguments:
        return f"{key}~{hash64(_encoder.encode(arguments)):016x}"
    return key or "~"


def row(binding: BindingPut) -> dict[str, Any]:
    return {
        "source": binding.source,
        "vhost": binding.vhost,
        "destination": binding.destination,
        "destination_type": binding.kind,
        "routing_key": binding.routing_key,
        "arguments": binding.arguments,
        "properties_key": properties_key(binding.routing_key, binding.arguments),
    }


def implied(vhost: Vhost, queues: Iterable[str]) -> Iterator[BindingPut]:
    """Return the bindings of the default exchange to those of these queues that are shown.

    `queues` is read at once.
    """
    names = list(queues)
    return (
        BindingPut(vhost.name, "", "queue", queue, queue)
        for queue in names
        if not is_hidden_queue(queue)
    )


def _listing(bindings: Iterable[BindingPut]) -> Listing:
    return Listing(row(binding) for binding in bindings)


async def get_all(call: Call) -> Listing:
    """List bindings, of all vhosts or of the one in the path."""
    found = [(implied(vhost, vhost.queues), list(vhost.bindings())) for vhost in call.vhosts()]
    return _listing(itertools.chain.from_iterable(itertools.chain(*both) for both in found))


async def of_queue(call: Call) -> Listing:
    """List the bindings to a queue."""
    vhost, name = call.vhost(), call.part("queue")
    if name not in vhost.queues or is_hidden_queue(name):
        raise not_found()
    return _listing([*implied(vhost, [name]), *vhost.bindings_to("queue", name)])


async def of_exchange(call: Call) -> Listing:
    """List the bindings from (`source`) or to (`destination`) an exchange."""
    vhost, name = call.vhost(), exchange_name(call.part("exchange"))
    if name not in vhost.exchanges:
        raise not_found()
    if call.part("end") == "destination":
        return _listing(list(vhost.bindings_to("exchange", name)))
    return _listing(implied(vhost, vhost.queues) if name == "" else list(vhost.bindings_from(name)))


def _named_ends(call: Call) -> tuple[str, str, str]:
    """Return source, kind and name of the destination from the path."""
    kind, destination = KINDS[call.part("kind")], call.part("destination")
    if kind == "exchange":
        destination = exchange_name(destination)
    return exchange_name(call.part("source")), kind, destination


def _ends(call: Call) -> tuple[Vhost, str, str, str]:
    """Return vhost, source, kind and name of the destination, if they all exist."""
    vhost, (source, kind, destination) = call.vhost(), _named_ends(call)
    if source not in vhost.exchanges or vhost.destination(kind, destination) is None:
        raise not_found()
    return vhost, source, kind, destination


def _between(call: Call) -> list[BindingPut]:
    vhost, source, kind, destination = _ends(call)
    if source == "":
        return list(implied(vhost, [destination] if kind == "queue" else []))
    return [b for b in vhost.bindings_to(kind, destination) if b.source == source]


def _binding(call: Call) -> BindingPut:
    given = call.part("properties")
    found = {properties_key(b.routing_key, b.arguments): b for b in _between(call)}
    # Some clients make the key of a routing key, and quote it once, or quote a space as "%20".
    routing_key, tilde, of_arguments = given.rpartition("~")
    for key in (given, quoted(unquote(given)), quoted(unquote(routing_key)) + tilde + of_arguments):
        if key in found:
            return found[key]
    raise not_found()


async def between(call: Call) -> Listing:
    """List the bindings from an exchange to a queue (`q`) or an exchange (`e`)."""
    return _listing(_between(call))


async def get(call: Call) -> dict[str, Any]:
    """Show a binding by its key of properties."""
    return row(_binding(call))


async def post(call: Call) -> web.Response:
    """Bind a queue (`q`) or an exchange (`e`) to an exchange."""
    vhost, (source, kind, destination) = call.vhost_to_change(), _named_ends(call)
    body = await call.body(BindingBody)
    arguments = table_of(body.arguments)
    bind = Bind(vhost.name, source, kind, destination, body.routing_key, arguments)
    # Without the right to bind one does not learn whether the ends exist.
    await call.ask(bind)
    key = properties_key(body.routing_key, arguments)
    # Relative to the path of the call, as in RabbitMQ, since a proxy may change that path.
    last = call.request.rel_url.raw_path.rpartition("/")[2]
    location = f"{last}/{quote(key, safe='~')}" if last else quote(key, safe="~")
    return web.Response(status=201, headers={"Location": location})


async def delete(call: Call) -> None:
    """Delete a binding by its key of properties."""
    vhost, b = call.vhost_to_change(), _binding(call)
    unbind = Unbind(vhost.name, b.source, b.kind, b.destination, b.routing_key, b.arguments)
    await call.ask(unbind)


ENDS = "/api/bindings/{vhost}/e/{source}/{kind:[qe]}/{destination}"

ROUTES = [
    long_list("/api/bindings", get_all, "Binding"),
    long_list("/api/bindings/{vhost}", get_all, "Binding"),
    long_list("/api/queues/{vhost}/{queue}/bindings", of_queue, "Binding"),
    long_list(
        "/api/exchanges/{vhost}/{exchange}/bindings/{end:source|destination}",
        of_exchange,
        "Binding",
    ),
    long_list(ENDS, between, "Binding"),
    Route("POST", ENDS, post, body=BindingBody),
    Route("GET", ENDS + "/{properties}", get, shows="Binding"),
    Route("DELETE", ENDS + "/{properties}", delete),
]
