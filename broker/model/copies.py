"""Say how many copies a queue asks for, and check what a policy says of copies. Pure.

`shardmq.cluster.replicas` says what becomes of it: a queue is placed on a shard that has about as
many copies. Who asks, the first that says something:

1. the queue's argument `x-quorum-initial-group-size`, or `x-initial-cluster-size`;
2. of a shard queue, and of the queues in which an exchange keeps messages, the policy of the
   exchange: `replicas`, or `initial-cluster-size`;
3. the queue's policy, by the same keys;
4. its vhost: `replicas`;
5. its type, if it is quorum: 3, as in RabbitMQ, or more if the broker has more;
6. the broker: `cluster.replicas`.

How many of them must be in sync is said by `min-in-sync` of such a policy, else by the vhost, else
by the broker where the number of copies is the broker's, else it is half of the copies, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from shardmq.broker.model.arguments import MIN_IN_SYNC, QUORUM, REPLICAS
from shardmq.broker.model.catalog import Vhost
from shardmq.broker.model.changes import QueuePut
from shardmq.broker.model.policies import EXCHANGE, Policies, queue_kind
from shardmq.cluster.replicas import REPLICAS_MAX, Replicas

SIZES: Final = ("x-quorum-initial-group-size", "x-initial-cluster-size")
KEYS: Final = (REPLICAS, "initial-cluster-size")
QUORUM_REPLICAS: Final = 3


def asked(
    vhost: Vhost,
    name: str,
    arguments: Mapping[str, Any],
    others: Replicas,
    exchange: str = "",
    policies: Policies | None = None,
) -> Replicas:
    """Return the copies that a queue asks for.

    others: those of the broker, for shards that are in no set.
    exchange: the name of the exchange that the queue is a part of; "" if it is of none.
    policies: those that will be in force; None: those of the vhost.
    """
    kind, policies = queue_kind(arguments), vhost.policies if policies is None else policies
    definitions = [policies.of(EXCHANGE, exchange).definition] if exchange else []
    definitions.append(policies.of(kind, name).definition)
    count = _first(arguments, SIZES)
    for definition in definitions:
        count = count or _first(definition, KEYS)
    count = count or vhost.put.replicas
    if not count and kind == QUORUM:
        count = max(QUORUM_REPLICAS, others.count)
    count = min(count, REPLICAS_MAX) or others.count
    least = 0
    for definition in definitions:
        least = least or _first(definition, (MIN_IN_SYNC,))
    least = least or vhost.put.min_in_sync
    if not least and count == others.count:
        least = others.min_in_sync
    return Replicas(count, min(least, count))


def asked_by(queue: QueuePut, vhost: Vhost | None, others: Replicas) -> Replicas:
    """Return the copies that a queue of a vhost asks for; an exclusive queue asks for none more."""
    if vhost is None or queue.owner:
        return others
    exchange = queue.part.exchange if queue.part is not None else ""
    return asked(vhost, queue.name, queue.arguments, others, exchange)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of these numbers that is there; 0 without one.

    What is no number is passed over: somebody may have edited the file of the policies.
    """
    found = (values.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def policy_faults(definition: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the copies that a policy asks for, whose numbers are checked."""
    if (least := _first(definition, (MIN_IN_SYNC,))) > (count := _first(definition, KEYS)) > 0:
        yield f"{MIN_IN_SYNC} is {least}, more than {count} replicas"
