"""The columns of lists."""

from typing import Final

# The kind of what each command lists, a key of COLUMNS.
KINDS: Final = {
    "list_queues": "queues",
    "list_unresponsive_queues": "queues",
    "list_exchanges": "exchanges",
    "list_bindings": "bindings",
    "list_virtual_queues": "virtual-queues",
    "list_vhosts": "vhosts",
    "list_connections": "connections",
    "list_channels": "channels",
    "list_consumers": "consumers",
}

# The columns that are known even if there is nothing to list. All columns that the broker returns
# are known too.
COLUMNS: Final = {
    "queues": (
        "arguments auto_delete consumer_capacity consumer_utilisation consumers durable exchange"
        " exclusive exclusive_consumer_tag first_offset head_message_timestamp idle_since index"
        " last_offset memory message_bytes message_bytes_persistent min_in_sync"
        " message_bytes_ready message_bytes_unacknowledged message_stats messages"
        " messages_persistent messages_ready messages_unacknowledged name node"
        " oldest_message_age policy replicas replicas_wanted segments shard shard_state"
        " single_active_consumer_tag state stream_positions type vhost"
    ),
    "exchanges": "arguments auto_delete durable internal name policy shard_queues type vhost",
    "virtual-queues": "consumers groups moving name shards vhost",
    "bindings": (
        "arguments destination destination_kind destination_name destination_type"
        " properties_key routing_key source source_kind source_name vhost"
    ),
    "vhosts": (
        "cluster_state default_queue_type description message_stats messages messages_ready"
        " messages_unacknowledged metadata name protected_from_deletion recv_oct send_oct tags"
        " tracing"
    ),
    "channels": (
        "acks_uncommitted confirm connection consumer_count global_prefetch_count idle_since"
        " message_stats messages_unacknowledged messages_uncommitted messages_unconfirmed name"
        " node number pid prefetch_count state transactional user vhost"
    ),
    "consumers": (
        "ack_required active activity_status arguments channel_details consumer_tag exclusive"
        " prefetch_count priority queue queue_name vhost"
    ),
    "connections": (
        "auth_mechanism channel_max channels client_properties connected_at frame_max host"
        " name node pid peer_host peer_port port protocol recv_cnt recv_oct send_cnt send_oct"
        " send_pend ssl state timeout type user vhost"
    ),
}
