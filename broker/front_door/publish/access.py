"""May this user publish this message? A refusal is the error that ends the channel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardmq.broker.amqp import ChannelException, ConnectionException
from shardmq.broker.front_door.publish.message import PUBLISH
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog, Vhost
from shardmq.broker.shared import rights


def vhost_of(catalog: Catalog, name: str) -> Vhost:
    """Return the vhost of a connection; raise ConnectionException when it is deleted."""
    vhost = catalog.vhost(name)
    if vhost is None:
        raise ConnectionException(320, f"vhost '{name}' is deleted", *PUBLISH)
    return vhost


def check_exchange(
    catalog: Catalog, user: str, vhost: str, exchange: str, keys: Iterable[str]
) -> None:
    """Raise ChannelException when the user may not publish there with one of these keys."""
    exchanges = vhost_of(catalog, vhost).exchanges
    try:
        rights.check_publish(catalog, user, vhost, exchange)
    except checks.Refusal as refusal:
        raise _channel_error(refusal) from None
    found = exchanges.get(exchange)
    if found is None:
        raise ChannelException(404, f"no exchange '{exchange}' in vhost '{vhost}'", *PUBLISH)
    if found.internal:
        text = f"cannot publish to internal exchange '{exchange}' in vhost '{vhost}'"
        raise ChannelException(403, text, *PUBLISH)
    check_keys(catalog, user, vhost, exchange, keys)


def check_keys(catalog: Catalog, user: str, vhost: str, exchange: str, keys: Iterable[str]) -> None:
    """Raise ChannelException when a topic exchange does not take a key from this user."""
    try:
        rights.check_keys(catalog, user, vhost, exchange, keys)
    except checks.Refusal as refusal:
        raise _channel_error(refusal) from None


def check_dead_letter(
    catalog: Catalog, user: str, vhost: str, headers: dict[str, Any], keys: Iterable[str]
) -> None:
    """Raise ChannelException when the user may not publish to the dead-letter exchange it names."""
    try:
        rights.check_dead_letter(catalog, user, vhost, headers, keys)
    except checks.Refusal as refusal:
        raise _channel_error(refusal) from None


def _channel_error(refusal: checks.Refusal) -> ChannelException:
    return ChannelException(refusal.code, refusal.text, *PUBLISH)
