"""Whoever reads RabbitMQ's JSON finds the same keys here, but for those that are known not to be.

SHOWN is what RabbitMQ 3.10.8 shows of things in use (`rates_mode = basic`), as far as anything here
is comparable.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final
from urllib.parse import quote

import pytest

from shardmq.broker.controller.management.metrics.churn import churn_rates
from shardmq.broker.controller.management.resources.processes import own_node
from shardmq.broker.model.catalog import PREDECLARED
from tests.http_api.conftest import CONNECTION, Api
from tests.http_api.test_api import make

CHANNEL = quote(f"{CONNECTION} (1)", safe="")
QUEUE = (
    "arguments auto_delete backing_queue_status consumer_capacity consumer_utilisation consumers "
    "durable effective_policy_definition exclusive exclusive_consumer_tag garbage_collection "
    "head_message_timestamp memory message_bytes message_bytes_paged_out message_bytes_persistent "
    "message_bytes_ram message_bytes_ready message_bytes_unacknowledged message_stats messages "
    "messages_details messages_paged_out messages_persistent messages_ram messages_ready "
    "messages_ready_details messages_ready_ram messages_unacknowledged "
    "messages_unacknowledged_details messages_unacknowledged_ram name node operator_policy policy "
    "recoverable_slaves reductions reductions_details single_active_consumer_tag state type vhost "
)
EXCHANGE = (
    "arguments auto_delete durable internal message_stats name policy type "
    "user_who_performed_action vhost "
)
CHANNEL_KEYS = (
    "acks_uncommitted confirm connection_details consumer_count garbage_collection "
    "global_prefetch_count message_stats messages_unacknowledged messages_uncommitted "
    "messages_unconfirmed name node number pending_raft_commands prefetch_count reductions "
    "reductions_details state transactional user user_who_performed_action vhost "
)
SHOWN: Final = {
    "overview": (
        "churn_rates cluster_name contexts disable_stats enable_queue_totals erlang_full_version "
        "erlang_version exchange_types listeners management_version message_stats node "
        "object_totals product_name product_version queue_totals rabbitmq_version rates_mode "
        "release_series_support_status sample_retention_policies statistics_db_event_queue"
    ),
    "overview message_stats": (
        "ack ack_details confirm confirm_details deliver deliver_details deliver_get "
        "deliver_get_details deliver_no_ack deliver_no_ack_details disk_reads disk_writes "
        "drop_unroutable drop_unroutable_details get get_details get_empty get_empty_details "
        "get_no_ack get_no_ack_details publish publish_details redeliver redeliver_details "
        "return_unroutable return_unroutable_details"
    ),
    "nodes": (
        "applications auth_mechanisms cluster_links config_files contexts db_dir disk_free_alarm "
        "enabled_plugins exchange_types fd_total fd_used fd_used_details io_sync_avg_time "
        "io_sync_count io_sync_count_details log_files mem_alarm mem_calculation_strategy "
        "mem_limit mem_used mem_used_details name net_ticktime os_pid partitions proc_total "
        "proc_used proc_used_details processors rates_mode run_queue running sockets_total "
        "sockets_used sockets_used_details type uptime"
    ),
    "queues": QUEUE,
    "queues/%2F/q": QUEUE + "consumer_details deliveries incoming",
    "exchanges": EXCHANGE,
    "exchanges/%2F/e": EXCHANGE + "incoming outgoing",
    "bindings": "arguments destination destination_type properties_key routing_key source vhost",
    "connections": (
        "auth_mechanism channel_max channels client_properties connected_at frame_max "
        "garbage_collection host name node peer_cert_issuer peer_cert_subject peer_cert_validity "
        "peer_host peer_port port protocol recv_cnt reductions send_cnt ssl ssl_cipher ssl_hash "
        "ssl_key_exchange ssl_protocol state timeout type user user_provided_name "
        "user_who_performed_action vhost"
    ),
    "channels": CHANNEL_KEYS,
    f"channels/{CHANNEL}": CHANNEL_KEYS + "consumer_details deliveries publishes",
    "consumers": (
        "ack_required active activity_status arguments channel_details consumer_tag exclusive "
        "prefetch_count queue"
    ),
    "consumers channel_details": "connection_name name node number peer_host peer_port user",
    "vhosts": (
        "cluster_state default_queue_type description message_stats messages messages_details "
        "messages_ready messages_ready_details messages_unacknowledged "
        "messages_unacknowledged_details metadata name recv_oct send_oct tags tracing"
    ),
    "users": "hashing_algorithm limits name password_hash tags",
    "permissions": "configure read user vhost write",
    "topic-permissions": "exchange read user vhost write",
    "policies": "apply-to definition name pattern priority vhost",
    "parameters": "component name value vhost",
    "global-parameters": "name value",
    "vhost-limits": "value vhost",
    "user-limits": "user value",
    "definitions": (
        "bindings exchanges global_parameters parameters permissions policies product_name "
        "product_version queues rabbit_version rabbitmq_version topic_permissions users vhosts"
    ),
}
ERLANGS = (
    "garbage_collection reductions reductions_details pending_raft_commands net_ticktime "
    "recoverable_slaves "
)
NOT_HERE: Final = {
    "queues": ERLANGS + (
        "backing_queue_status message_bytes_paged_out messages_paged_out messages_ready_ram "
        "messages_unacknowledged_ram"
    ),
    "channels": ERLANGS,
    "connections": "garbage_collection peer_cert_validity ssl_hash ssl_key_exchange",
    # Messages are counted by queue and by client.
    "exchanges": "message_stats",
    "overview": "release_series_support_status",
    "overview message_stats": "disk_reads disk_writes",
    "nodes": ERLANGS + "contexts",
}  # fmt: skip


async def rows(api: Api, what: str) -> list[dict[str, Any]]:
    path, _, inside = what.partition(" ")
    found = await api.get(f"/api/{path}")
    shown = found if isinstance(found, list) else [found]
    return [row[inside] for row in shown] if inside else shown


async def be_sampled(api: Api) -> None:
    """Let the broker look at everything a while ago, and again: rates are made of two looks."""
    stats = api.context.stats
    now = stats._clock
    stats._clock = lambda: now() - 5.0
    stats.noted = [partial(churn_rates, api.context), partial(own_node, api.context)]
    await stats.sample()
    stats._clock = now


@pytest.mark.row("G4.1", "G4.2", "G4.3", "G4.4", "G4.5", "G4.6")
@pytest.mark.parametrize("what", SHOWN)
async def test_the_keys_of_rabbitmq_are_there(api: Api, what: str) -> None:
    await make(api)
    kind = what if what in NOT_HERE else what.partition("/")[0]
    absent = set(NOT_HERE.get(kind, "").split())
    await be_sampled(api)
    found = await rows(api, what)
    assert found
    for row in found:
        assert set(SHOWN[what].split()) - absent <= row.keys()
        assert absent.isdisjoint(row.keys())  # else it is there, and no more to be excused


async def test_nobody_is_named_as_the_user_who_declared_an_exchange(api: Api) -> None:
    """The catalog does not store who declared what, and the broker itself did not declare it."""
    await make(api)
    listed = await api.get("/api/exchanges")
    found = {row["name"]: row["user_who_performed_action"] for row in listed}
    assert found.pop("e") == "unknown"
    assert found.keys() == PREDECLARED.keys() and {*found.values()} == {"rmq-internal"}
    one = await api.get("/api/exchanges/%2F/e")
    assert one["user_who_performed_action"] == "unknown"


async def test_messages_are_counted_as_where_rates_mode_is_basic(api: Api) -> None:
    await make(api)
    assert (await api.get("/api/overview"))["rates_mode"] == "basic"
    for path, fields in (
        ("exchanges/%2F/e", ("incoming", "outgoing")),
        ("queues/%2F/q", ("incoming", "deliveries")),
        (f"channels/{CHANNEL}", ("publishes", "deliveries")),
    ):
        found = await api.get(f"/api/{path}")
        assert [found[field] for field in fields] == [[], []], path
    about = (await api.get("/api/openapi.json"))["info"]["description"]
    assert "`rates_mode: basic`" in about


async def test_totals_of_queues_come_without_other_numbers(api: Api) -> None:
    await make(api)
    query = "disable_stats=true&enable_queue_totals=true"
    for path in (f"/api/queues?{query}", f"/api/queues?{query}&page=1"):
        found = await api.get(path)
        for row in found["items"] if isinstance(found, dict) else found:
            assert (row["messages"], row["messages_ready"], row["messages_unacknowledged"]) == (
                4,
                3,
                1,
            )
            assert row.keys().isdisjoint({"message_stats", "consumers", "messages_details"})
    assert "messages" not in (await api.get("/api/queues?disable_stats=true"))[0]


async def test_what_has_nothing_to_do_here_is_done_at_once(api: Api) -> None:
    await make(api)
    for method, path, body in (
        ("POST", "rebalance/queues", None),
        ("PUT", "feature-flags/all/enable", {}),
        ("POST", "queues/%2F/q/actions", {"action": "sync"}),
        ("POST", "queues/%2F/q/actions", {"action": "cancel_sync"}),
    ):
        assert (await api.call(method, f"/api/{path}", body))[0] == 204, path
    assert (await api.call("POST", "/api/queues/%2F/x/actions", {"action": "sync"}))[0] == 404


async def test_nothing_is_bound_to_the_default_exchange(api: Api) -> None:
    await make(api)
    for method, path in (
        ("POST", "bindings/%2F/e/amq.default/q/q"),
        ("DELETE", "bindings/%2F/e/amq.default/q/q/q"),
    ):
        status, found = await api.call(method, f"/api/{path}", {})
        assert (status, found["error"]) == (401, "not_authorised"), path


async def test_message_sizes_are_told_in_classes_that_something_fell_into(api: Api) -> None:
    found = await api.get("/api/message-sizes")
    assert [(row["above"], row["up_to"], row["messages"]) for row in found] == [
        (None, 1, 2), (64, 128, 4), (1 << 29, 1 << 30, 1),
    ]  # fmt: skip
    assert sum(row["percent"] for row in found) == pytest.approx(100, abs=0.01)
