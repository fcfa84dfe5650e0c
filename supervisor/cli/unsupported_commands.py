"""Commands of RabbitMQ's tools that do nothing in this broker.

Each command ends with status 64 and one line that says why and what to do instead. --help does not
list these commands.
"""

from __future__ import annotations

from typing import Any, Final

import typer

from shardmq.supervisor.cli.api import USAGE, fail

# These commands accept any arguments.
ANYTHING: Final[dict[str, Any]] = {"allow_extra_args": True, "ignore_unknown_options": True}

# The names of commands, each group with the reason why the broker does not have them.
GROUPS: Final = (
    (
        "the section [cluster] of the settings makes a host a node; shardctl cluster forget NODE"
        " takes one out for good",
        "join_cluster forget_cluster_node change_cluster_node_type rename_cluster_node force_boot"
        " update_cluster_nodes discover_peers metadata_store_status",
    ),
    (
        "shardctl cluster rebalance moves queues until each shard has about as many",
        "rebalance",
    ),
    (
        "a queue has the copies of its shard: shardctl quorum_status QUEUE shows them, the policy"
        " keys replicas and min-in-sync choose a shard for new queues, and move_queue another one",
        "sync_queue cancel_sync_queue grow shrink add_member delete_member"
        " transfer_leadership reclaim_quorum_memory add_replica delete_replica restart_stream"
        " stream_status coordinator_status force_checkpoint",
    ),
    (
        "the broker is started and stopped as a whole: shardctl start, shardctl stop",
        "stop_app start_app",
    ),
    (
        "not while the broker runs: shardctl stop, and start with another or an empty data"
        " directory",
        "reset force_reset",
    ),
    (
        "no Erlang runs here; for what the processes do: shardctl top, and py-spy or kill -USR1"
        " with a pid of status",
        "eval eval_file exec remote_shell observer maybe_stuck runtime_thread_stats schema_info"
        " erlang_version erlang_cookie_hash erlang_cookie_sources hipe_compile",
    ),
    (
        "streams are read and written by AMQP and HTTP: list_connections, list_consumers,"
        " list_stream_tracking",
        "list_stream_connections list_stream_publishers list_stream_consumers list_stream_groups"
        " list_stream_group_consumers activate_stream_consumer",
    ),
    (
        "max-age and max-length-bytes of a policy say how long a stream keeps: set_policy",
        "set_stream_retention_policy",
    ),
    (
        "shardctl get QUEUE --count N, or the page, looks into a queue",
        "peek",
    ),
    (
        "shardctl shovel_status lists shovels; set_parameter shovel NAME JSON makes one",
        "list_shovels add_shovel",
    ),
    (
        "shardctl federation_status lists links; set_parameter federation-upstream NAME JSON and"
        " set_policy make them",
        "list_federations add_federation delete_federation",
    ),
    (
        "no interceptors here",
        "list_channel_interceptors set_channel_interceptor_priorities",
    ),
    (
        "settings hold no encrypted values; those in URIs of shovels and upstreams:"
        " shardctl generate_secrets_key; a password's hash: shardctl hash_password",
        "encode decode encrypt_conf list_ciphers list_hashes",
    ),
    (
        "listeners open and close with the broker; shardctl stop lets nobody in any more, and"
        " drains",
        "suspend_listeners resume_listeners drain revive",
    ),
    (
        "logins are counted by protocol, not by address or user",
        "enable_auth_attempt_source_tracking disable_auth_attempt_source_tracking",
    ),
    (
        "no events are told here; shardctl log_tail_stream shows what is logged",
        "consume_event_stream",
    ),
    (
        "the disk is always watched: set_disk_free_limit",
        "activate_free_disk_space_monitoring deactivate_free_disk_space_monitoring",
    ),
    (
        "queues do not fail one by one; a shard that does is restarted with all of its queues",
        "restart_queue",
    ),
    (
        "ask the host: ip, getent, /proc",
        "list_network_interfaces resolve_hostname resolver_info os_env",
    ),
)
UNSUPPORTED: Final = {name: why for why, names in GROUPS for name in names.split()}


def refusing(name: str) -> Any:
    """Return the command of this name, which says why it does nothing."""
    why = UNSUPPORTED[name]
    made = typer.Typer(add_completion=False)
    made.command(name, hidden=True, context_settings=ANYTHING, help=why)(
        lambda: fail(f"{name}: {why}", USAGE)
    )
    return typer.main.get_command(made)
