"""Decides about vhosts, users, permissions and parameters."""

from __future__ import annotations

from shardmq.broker.controller import policies
from shardmq.broker.controller.decisions.decision import (
    BAD_REQUEST,
    NOT_FOUND,
    Decision,
    Inputs,
)
from shardmq.broker.controller.decisions.hidden_queues import delay_queue
from shardmq.broker.controller.decisions.stream_exchanges import with_shard_queues
from shardmq.broker.model import checks, patterns
from shardmq.broker.model.arguments import QUEUE_TYPES
from shardmq.broker.model.changes import (
    DRAINED_NODES,
    ExchangePut,
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
from shardmq.broker.model.checks import Refusal
from shardmq.broker.model.erlang import cut
from shardmq.broker.model.permissions import INTERNAL_USER, expanded
from shardmq.broker.model.policies import COMPONENTS, EXCHANGE, Policies, exchange_arguments
from shardmq.broker.model.shovels import PAUSED, SHOVEL
from shardmq.broker.routing import delaying

HTTP_PRECONDITION_FAILED = 412  # the number in AMQP is 406
REGEX_CHARS_SHOWN = 200  # of an expression that is refused


def put_vhost(inputs: Inputs, change: VhostPut, owner: str) -> Decision:
    if not change.name or len(change.name.encode()) > checks.NAME_BYTES_MAX:
        raise Refusal(BAD_REQUEST, f"a vhost's name has 1 to {checks.NAME_BYTES_MAX} bytes")
    if change.default_queue_type not in ("", *QUEUE_TYPES):
        raise Refusal(BAD_REQUEST, f"unsupported default queue type '{change.default_queue_type}'")
    return Decision([change])


def delete_vhost(inputs: Inputs, change: VhostDelete, owner: str) -> Decision:
    found = inputs.catalog.vhosts.get(change.name)
    if found is None:
        raise Refusal(NOT_FOUND, f"vhost '{change.name}' not found")
    if found.put.is_protected:
        raise Refusal(
            HTTP_PRECONDITION_FAILED,
            f"Refusing to delete virtual host '{change.name}' "
            "because it is protected from deletion",
        )
    return Decision([change], drop_vhost=change.name, close_vhost=change.name)


def put_user(inputs: Inputs, change: UserPut, owner: str) -> Decision:
    if change.name == INTERNAL_USER:
        raise Refusal(BAD_REQUEST, "the name of this user is the broker's own")
    return Decision([change])


def delete_user(inputs: Inputs, change: UserDelete, owner: str) -> Decision:
    if change.name not in inputs.catalog.users:
        raise Refusal(NOT_FOUND, f"user '{change.name}' not found")
    return Decision([change], close_user=change.name)


def put_permission(inputs: Inputs, change: PermissionPut, owner: str) -> Decision:
    if change.vhost not in inputs.catalog.vhosts:
        raise Refusal(BAD_REQUEST, f"vhost '{change.vhost}' not found")
    if change.user not in inputs.catalog.users:
        raise Refusal(BAD_REQUEST, f"user '{change.user}' not found")
    for regex in (change.configure, change.write, change.read):
        _check_regex(regex, regex)
    return Decision([change])


def delete_permission(inputs: Inputs, change: PermissionDelete, owner: str) -> Decision:
    if not inputs.catalog.permissions.may_enter(change.user, change.vhost):
        raise Refusal(
            NOT_FOUND, f"no permissions of user '{change.user}' in vhost '{change.vhost}'"
        )
    return Decision([change])


def put_topic_permission(inputs: Inputs, change: TopicPermissionPut, owner: str) -> Decision:
    if change.vhost not in inputs.catalog.vhosts or change.user not in inputs.catalog.users:
        raise Refusal(BAD_REQUEST, "vhost_or_user_not_found")
    for regex in (change.write, change.read):
        _check_regex(regex, expanded(regex, change))
    return Decision([change])


def delete_topic_permission(inputs: Inputs, change: TopicPermissionDelete, owner: str) -> Decision:
    if not inputs.catalog.permissions.has_topic(change.user, change.vhost):
        raise Refusal(
            NOT_FOUND, f"no topic permissions of user '{change.user}' in vhost '{change.vhost}'"
        )
    return Decision([change])


def _check_regex(given: str, regex: str) -> None:
    """Check the expression that is compiled for the given one. Raises Refusal."""
    try:
        patterns.compiled(regex)
    except patterns.BadPattern as error:
        shown = cut(given, REGEX_CHARS_SHOWN)
        raise Refusal(BAD_REQUEST, f"invalid regexp '{shown}': {error}") from None


def put_parameter(inputs: Inputs, change: ParameterPut, owner: str) -> Decision:
    if change.vhost and change.vhost not in inputs.catalog.vhosts:
        raise Refusal(NOT_FOUND, f"vhost '{change.vhost}' not found")
    if change.component == policies.USER_LIMITS and change.name not in inputs.catalog.users:
        raise Refusal(BAD_REQUEST, f"no such user: {change.name}")
    policies.check_parameter(change.vhost, change.component, change.name, change.value)
    return _put_or_deleted(inputs, change)


def delete_parameter(inputs: Inputs, change: ParameterDelete, owner: str) -> Decision:
    if (change.vhost, change.component, change.name) not in inputs.catalog.parameters:
        raise Refusal(NOT_FOUND, "Parameter does not exist")
    paused = (change.vhost, PAUSED, change.name)
    if change.component == SHOVEL and paused in inputs.catalog.parameters:
        return Decision([change, ParameterDelete(*paused)])  # the next of its name is not paused
    return _put_or_deleted(inputs, change)


def _put_or_deleted(inputs: Inputs, change: ParameterPut | ParameterDelete) -> Decision:
    """Return the decision for a parameter that was checked.

    Exchanges that delay messages from now on, by a policy, get a queue to keep them in first.
    """
    if change.component == DRAINED_NODES:
        return Decision([change], next_steps=with_shard_queues(inputs))
    if change.component not in COMPONENTS:
        return Decision([change])
    vhost = inputs.vhost(change.vhost)
    changed = (change.component, change.name)
    puts = [
        put
        for (of_vhost, *_), put in inputs.catalog.parameters.items()
        if of_vhost == change.vhost and (put.component, put.name) != changed
    ]
    new = Policies(
        [*puts, change] if isinstance(change, ParameterPut) else puts, before=vhost.policies
    )
    queues = [
        delay_queue(inputs, vhost, exchange, new)
        for exchange in vhost.exchanges.values()
        if exchange.name
        and _delays_under(new, exchange)
        and vhost.delay_queue(exchange.name) is None
    ]
    return Decision([*queues, change], create=queues, policies_of=change.vhost)


def _delays_under(policies: Policies, exchange: ExchangePut) -> bool:
    """Return whether the exchange keeps messages until they are due when these are in force."""
    definition = policies.of(EXCHANGE, exchange.name).definition
    return delaying.is_delayed(exchange.type, exchange_arguments(exchange.arguments, definition))
