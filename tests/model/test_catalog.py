"""Copies that apply the same changes are equal, rights hold at once, and deletes leave nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardmq.broker.model.catalog import PREDECLARED, Catalog
from shardmq.broker.model.changes import (
    AnyChange,
    BindingDelete,
    BindingPut,
    ExchangePut,
    PermissionPut,
    QueueDelete,
    QueuePut,
    UserPut,
    VhostPut,
)
from shardmq.broker.model.permissions import INTERNAL_USER, shown_user
from tests.support.catalogs import rebuilt, state
from tests.support.changes import any_change, bindings


def catalog_of(*changes: AnyChange) -> Catalog:
    catalog = Catalog()
    for change in changes:
        catalog.apply(change)
    return catalog


@given(st.lists(any_change(), max_size=60))
def test_a_catalog_rebuilt_from_its_changes_is_equal(history: list[AnyChange]) -> None:
    catalog = catalog_of(VhostPut("/"), *history)
    copy = rebuilt(catalog.version, catalog.changes())
    assert state(copy) == state(catalog)
    assert copy.version == catalog.version


@given(st.lists(any_change(), max_size=60), st.integers(0, 60))
def test_a_door_that_joins_late_ends_up_equal(history: list[AnyChange], joins_at: int) -> None:
    early = catalog_of(VhostPut("/"), *history[:joins_at])
    late = rebuilt(early.version, early.changes())
    for change in history[joins_at:]:
        early.apply(change)
        late.apply(change)
    assert state(late) == state(early)
    assert late.version == early.version


@given(st.lists(any_change() | bindings(), max_size=60))
def test_changes_applied_together_are_those_applied_one_by_one(history: list[AnyChange]) -> None:
    history = [VhostPut("/"), *history]
    one_by_one, together = catalog_of(*history), Catalog()
    together.apply_all(history)
    assert state(together) == state(one_by_one)
    assert together.version == one_by_one.version
    for name, vhost in together.vhosts.items():
        for exchange in vhost.exchanges:
            same = one_by_one.vhosts[name].table.exchange(exchange)
            assert vhost.table.exchange(exchange).bindings == same.bindings


@given(st.lists(any_change() | bindings(), max_size=60))
def test_indexes_agree_with_what_exists(history: list[AnyChange]) -> None:
    catalog = catalog_of(VhostPut("/"), *history)
    queues = [queue for vhost in catalog.vhosts.values() for queue in vhost.queues.values()]
    assert all(catalog.queue(queue.vhost, queue.name) is queue for queue in queues)
    assert {queue.id for queue in catalog.index.all()} == {queue.id for queue in queues}
    assert all(
        catalog.index.count_on(shard) == sum(queue.shard == shard for queue in queues)
        for shard in range(4)
    )
    for vhost in catalog.vhosts.values():
        for binding in vhost.bindings():
            assert binding.source in vhost.exchanges
            assert vhost.destination(binding.kind, binding.destination) is not None
            assert binding in vhost.bindings_from(binding.source)
            assert binding in vhost.bindings_to(binding.kind, binding.destination)


def test_a_vhost_comes_with_its_predeclared_exchanges() -> None:
    assert set(catalog_of(VhostPut("/")).vhosts["/"].exchanges) == set(PREDECLARED)


def test_bindings_with_other_arguments_are_others_and_order_does_not_count() -> None:
    bind = [
        BindingPut("/", "amq.direct", "queue", "q", "k", args)
        for args in ({}, {"a": 1, "b": 2}, {"b": 2, "a": 1})
    ]
    catalog = catalog_of(VhostPut("/"), QueuePut("/", "q", 1, 0), *bind)
    assert len(list(catalog.vhosts["/"].bindings())) == 2
    catalog.apply(BindingDelete("/", "amq.direct", "queue", "q", "k", {"b": 2, "a": 1}))
    assert [binding.arguments for binding in catalog.vhosts["/"].bindings()] == [{}]


def test_a_deleted_queue_takes_its_bindings() -> None:
    catalog = catalog_of(
        VhostPut("/"),
        ExchangePut("/", "e", "fanout"),
        QueuePut("/", "q", 1, 0, owner="0.1.2"),
        BindingPut("/", "e", "queue", "q", ""),
    )
    assert [queue.id for queue in catalog.queues_of("0.1.2")] == [1]
    catalog.apply(QueueDelete("/", "q"))
    assert not list(catalog.vhosts["/"].bindings())
    assert catalog.queue_by_id(1) is None
    assert catalog.index.owners() == []


def test_a_change_of_permissions_holds_at_once() -> None:
    catalog = catalog_of(VhostPut("/"), UserPut("u", ""), PermissionPut("/", "u", "^a", "", ".*"))
    assert catalog.permissions.may("u", "/", "configure", "abc")
    assert not catalog.permissions.may("u", "/", "configure", "bac")
    assert not catalog.permissions.may("u", "/", "write", "abc")
    assert catalog.permissions.may("u", "/", "read", "")
    catalog.apply(PermissionPut("/", "u", "", "^amq\\.default$", ".*"))
    assert not catalog.permissions.may("u", "/", "configure", "abc")
    assert catalog.permissions.may("u", "/", "write", "")
    assert not catalog.permissions.may("nobody", "/", "read", "x")


def test_the_broker_itself_may_do_everything_in_vhosts_that_are_there() -> None:
    permissions = catalog_of(VhostPut("/"), UserPut("none", "")).permissions
    for user, vhost, may in ((INTERNAL_USER, "/", True), (INTERNAL_USER, "v", False),
                             ("none", "/", False)):  # fmt: skip
        assert permissions.may_enter(user, vhost) is may
        assert permissions.may(user, vhost, "write", "x") is may
        assert permissions.may_all(user, vhost, "x") is may
    assert shown_user(INTERNAL_USER) == shown_user("none") == "none"
