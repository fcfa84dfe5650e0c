"""Decides what becomes of each request: it is refused, or these changes and orders carry it out.

Decisions look at the catalog, change nothing and wait for nothing. `authority.py` makes the changes
and does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final

from shardmq.broker.controller.decisions import (
    administration,
    bindings,
    exchanges,
    moves,
    queues,
    stream_exchanges,
    super_streams,
)
from shardmq.broker.controller.decisions.decision import Decision, Inputs
from shardmq.broker.controller.decisions.hidden_queues import with_hidden_queues_gone
from shardmq.broker.controller.requests import (
    Closed,
    CutOff,
    Drained,
    Forget,
    Move,
    MoveOn,
    NodesChanged,
    OwnerGone,
    Pause,
    Removal,
    Restore,
    Settled,
    SuperStreamDeclare,
)
from shardmq.broker.model import tables
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import (
    ParameterDelete,
    ParameterPut,
    PermissionDelete,
    PermissionPut,
    TopicPermissionDelete,
    TopicPermissionPut,
    UserDelete,
    UserPut,
    VhostDelete,
    VhostPut,
)
from shardmq.broker.model.checks import PRECONDITION_FAILED, Refusal
from shardmq.broker.model.policies import Policies
from shardmq.broker.routing.placement import Placement
from shardmq.broker.shared.control import (
    Bind,
    BindMany,
    ExchangeDeclare,
    ExchangeRemove,
    QueueDeclare,
    QueueRemove,
    Unbind,
)

PARAMETER_KEY_BYTES_MAX = 65_535  # AMQP, which has shorter keys, does not carry parameters

_DECIDE: Final[dict[type, Callable[[Inputs, Any, str], Decision]]] = {
    ExchangeDeclare: exchanges.declare,
    ExchangeRemove: exchanges.remove,
    QueueDeclare: queues.declare,
    QueueRemove: queues.remove,
    Pause: queues.pause,
    Move: moves.begin,
    MoveOn: moves.go_on,
    Forget: moves.forget,
    Removal: queues.gone,
    Drained: queues.drained,
    OwnerGone: queues.owner_gone,
    Bind: bindings.bind,
    BindMany: bindings.bind_many,
    Unbind: bindings.unbind,
    SuperStreamDeclare: super_streams.declare,
    Restore: stream_exchanges.restore,
    NodesChanged: stream_exchanges.nodes_changed,
    CutOff: stream_exchanges.cut_off,
    Closed: stream_exchanges.closed,
    Settled: stream_exchanges.settled,
    VhostPut: administration.put_vhost,
    VhostDelete: administration.delete_vhost,
    UserPut: administration.put_user,
    UserDelete: administration.delete_user,
    PermissionPut: administration.put_permission,
    PermissionDelete: administration.delete_permission,
    TopicPermissionPut: administration.put_topic_permission,
    TopicPermissionDelete: administration.delete_topic_permission,
    ParameterPut: administration.put_parameter,
    ParameterDelete: administration.delete_parameter,
}


class Decisions:
    """Makes a decision of each request; the arguments are those of `Inputs`."""

    def __init__(
        self,
        catalog: Catalog,
        new_queue_id: Callable[[], int],
        new_name: Callable[[], str],
        placement: Placement,
        leaving: Container[int] = (),
    ) -> None:
        self._inputs = Inputs(catalog, new_queue_id, new_name, placement, leaving)

    def decide(self, request: Any, owner: str, asked_at: str = "") -> Decision:
        """Decide about a request of the connection `owner` ("" for none). Raises Refusal.

        `asked_at` is the name of the node whose HTTP API was asked.
        """
        _check_values(request)
        inputs = self._inputs._replace(asked_at=asked_at) if asked_at else self._inputs
        decision = _DECIDE[type(request)](inputs, request, owner)
        return with_hidden_queues_gone(self._inputs, decision)

    def reshape(self, decided: Decision, before: Policies) -> Decision:
        """Return what stream exchanges need after a decision whose changes are in the catalog.

        `before` holds the former policies of the vhost whose policies the decision changes.
        """
        decision = stream_exchanges.follow(self._inputs, decided, before)
        return with_hidden_queues_gone(self._inputs, decision)

    def restore(self) -> Decision:
        """Return what stream exchanges need at the start of the controller."""
        return stream_exchanges.reshape_all(self._inputs)


def _check_values(request: Any) -> None:
    """Check that the values of a request can be kept. Raises Refusal.

    This comes before anything else. A value that cannot be kept would end whoever tries, again at
    each start.
    """
    if isinstance(request, BindMany):
        for _, _, key in request.binds:
            _check_key(key)
        return
    _check_key(getattr(request, "routing_key", ""))
    if arguments := getattr(request, "arguments", None):
        fault = tables.fault_in(arguments)
    elif isinstance(request, ParameterPut):  # kept as JSON, but with integers of 64 bits too
        fault = tables.fault_in(request.value, key_bytes_max=PARAMETER_KEY_BYTES_MAX)
    else:
        return
    if fault:
        raise Refusal(PRECONDITION_FAILED, f"invalid arguments: {fault}")


def _check_key(key: str) -> None:
    if len(key) > tables.KEY_BYTES_MAX // 4 and len(key.encode()) > tables.KEY_BYTES_MAX:
        raise Refusal(
            PRECONDITION_FAILED, f"a routing key of more than {tables.KEY_BYTES_MAX} bytes"
        )
