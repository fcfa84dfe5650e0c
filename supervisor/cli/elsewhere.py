"""Commands of RabbitMQ's tools that have nothing to do here: each says why in one line, and what to do instead."""

from __future__ import annotations

from typing import Any, Final

import typer

from shardmq.supervisor.cli.api import USAGE, fail

ANYTHING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}

CLUSTER = "a broker is one host, with a shard for each core; there is no cluster to change"
REPLICAS = "queues have no replicas here"
NODE = "the broker is started and stopped as a whole: shardctl start, shardctl stop"
ERLANG = "no Erlang runs here; for what the processes do: shardctl top, and py-spy or kill -USR1 with a pid of status"
STREAM_CLIENTS = "streams are read and written by AMQP and HTTP: list_connections, list_consumers, list_stream_tracking"
SHOVELS = "no shovels here; POST /api/queues/VHOST/NAME/move, or the page, moves messages"
FEDERATION = "no federation here"
INTERCEPTORS = "no interceptors here"
SECRETS = "settings hold no encrypted values; a password's hash: shardctl hash_password"
LISTENERS = (
    "listeners open and close with the broker; shardctl stop lets nobody in any more, and drains"
)
ADDRESSES = "logins are counted by protocol, not by address or user"

NOT_HERE: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("join_cluster", "forget_cluster_node", "change_cluster_node_type", "rename_cluster_node", "force_boot",
         "update_cluster_nodes", "discover_peers", "metadata_store_status"), CLUSTER),
    **dict.fromkeys(
        ("sync_queue", "cancel_sync_queue", "rebalance", "grow", "shrink", "add_member", "delete_member",
         "quorum_status", "transfer_leadership", "reclaim_quorum_memory", "add_replica", "delete_replica",
         "restart_stream", "stream_status", "coordinator_status", "force_checkpoint"), REPLICAS),
    **dict.fromkeys(("stop_app", "start_app"), NODE),
    **dict.fromkeys(
        ("reset", "force_reset"),
        "not while the broker runs: shardctl stop, and start with another or an empty data directory"),
    **dict.fromkeys(
        ("eval", "eval_file", "exec", "remote_shell", "observer", "maybe_stuck", "runtime_thread_stats", "schema_info",
         "erlang_version", "erlang_cookie_hash", "erlang_cookie_sources", "hipe_compile"), ERLANG),
    **dict.fromkeys(
        ("list_stream_connections", "list_stream_publishers", "list_stream_consumers", "list_stream_groups",
         "list_stream_group_consumers", "activate_stream_consumer"), STREAM_CLIENTS),
    "set_stream_retention_policy": "max-age and max-length-bytes of a policy say how long a stream keeps: set_policy",
    "peek": "POST /api/queues/VHOST/NAME/get with ackmode ack_requeue_true, or the page, looks into a queue",
    **dict.fromkeys(("shovel_status", "restart_shovel", "delete_shovel", "list_shovels", "add_shovel"), SHOVELS),
    **dict.fromkeys(
        ("federation_status", "restart_federation_link", "list_federations", "add_federation", "delete_federation"),
        FEDERATION),
    **dict.fromkeys(("list_channel_interceptors", "set_channel_interceptor_priorities"), INTERCEPTORS),
    **dict.fromkeys(("encode", "decode", "encrypt_conf", "list_ciphers", "list_hashes"), SECRETS),
    **dict.fromkeys(("suspend_listeners", "resume_listeners", "drain", "revive"), LISTENERS),
    **dict.fromkeys(("enable_auth_attempt_source_tracking", "disable_auth_attempt_source_tracking"), ADDRESSES),
    "consume_event_stream": "no events are told here; shardctl log_tail_stream shows what is logged",
    **dict.fromkeys(
        ("activate_free_disk_space_monitoring", "deactivate_free_disk_space_monitoring"),
        "the disk is always watched: set_disk_free_limit"),
    "restart_queue": "queues do not fail one by one; a shard that does is restarted with all of its queues",
    **dict.fromkeys(("list_network_interfaces", "resolve_hostname", "resolver_info", "os_env"),
                    "ask the host: ip, getent, /proc"),
}  # fmt: skip


def add_to(app: typer.Typer) -> None:
    """All of them, not shown by --help."""
    for name, why in NOT_HERE.items():
        app.command(name, hidden=True, context_settings=ANYTHING, help=why)(_saying(name, why))


def _saying(name: str, why: str) -> Any:
    def say() -> None:
        fail(f"{name}: {why}", USAGE)

    return say
