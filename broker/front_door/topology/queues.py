"""Find the queue that a method names, and check that the connection may use the queue.

A name may be that of one queue or that of a stream exchange. The latter stands for all shard queues
of the exchange, together called its virtual queue.
"""

from __future__ import annotations

from shardmq.broker.front_door.session import Session
from shardmq.broker.model import checks
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.shared import rights

NOT_FOUND = 404


def named_queue(name: str, last_queue: str) -> str:
    """Return the name of the queue that a method names.

    An empty name means `last_queue`, the queue that the channel declared last. Raises Refusal when
    the name is empty and the channel has declared no queue.
    """
    name = checks.clean_name(name) or last_queue
    if not name:
        raise checks.Refusal(NOT_FOUND, "no previously declared queue")
    return name


def owned_queue(session: Session, catalog: Catalog, name: str) -> QueuePut:
    """Return the queue of this name.

    Raises Refusal when there is none that clients may name, or when the queue is exclusive to
    another connection.
    """
    queue = catalog.queue(session.vhost, name)
    if queue is None or checks.is_hidden_queue(name):
        raise checks.no_queue(session.vhost, name)
    checks.check_owner(queue, session.owner)
    return queue


def is_far(session: Session, catalog: Catalog, name: str) -> bool:
    """Return whether the queue of this name belongs to a connection of another front door.

    Then the end of the queue may be on its way: see `methods.catalog_in_step`.
    """
    queue = catalog.queue(session.vhost, name)
    return queue is not None and bool(queue.owner) and _door(queue.owner) != _door(session.owner)


def _door(owner: str) -> str:
    """Return the front door of a connection, and its incarnation."""
    return owner.rpartition(".")[0]


def readable_queue(session: Session, catalog: Catalog, name: str) -> QueuePut:
    """Return the queue that a consume or get names, if this connection may have its messages.

    Raises Refusal otherwise.
    """
    name = named_queue(name, "")
    rights.check(catalog, session.user, rights.Read(session.vhost, name))
    return owned_queue(session, catalog, name)


def shards_of(session: Session, catalog: Catalog, name: str) -> tuple[QueuePut, ...]:
    """Return the shard queues of a virtual queue; none if no stream exchange has the name.

    A queue with the name of a stream exchange cannot be reached.
    """
    vhost = catalog.vhost(session.vhost)
    return () if vhost is None else tuple(vhost.queues[queue] for queue in vhost.shard_queues(name))


def readable_shards(session: Session, catalog: Catalog, name: str) -> tuple[QueuePut, ...]:
    """Return the same as `shards_of`. Raises Refusal if this user may not read the queues."""
    shards = shards_of(session, catalog, name)
    if shards:
        rights.check(catalog, session.user, rights.Read(session.vhost, name))
    return shards
