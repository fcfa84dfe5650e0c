"""JSON Schemas of rows in responses, with RabbitMQ's fields and our own, and of small bodies.

A field is written as "name:type", with "?" behind a type that may be null. The fields in `MORE` are
not always there. Rows may have fields that are named nowhere here.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_TYPES: Final[dict[str, Schema]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "num": {"type": "number"},
    "bool": {"type": "boolean"},
    "map": {"type": "object"},
    "list": {"type": "array"},
    "strs": {"type": "array", "items": {"type": "string"}},
    "any": {},
}

ROWS: Final[dict[str, str]] = {
    "Overview": (
        "product_name:str product_version:str rabbitmq_version:str management_version:str "
        "erlang_version:str erlang_full_version:str cluster_name:str node:str rates_mode:str "
        "statistics_db_event_queue:int object_totals:map queue_totals:map message_stats:map "
        "churn_rates:map listeners:list contexts:list exchange_types:list"
    ),
    "Node": (
        "name:str type:str running:bool processors:int os_pid:str mem_used:int? mem_alarm:bool "
        "disk_free_alarm:bool alarms:strs partitions:list uptime:int rates_mode:str"
    ),
    "Queue": (
        "name:str vhost:str durable:bool auto_delete:bool exclusive:bool arguments:map type:str "
        "node:str shard:int policy:str? operator_policy:str? effective_policy_definition:map "
        "state:str"
    ),
    "Exchange": (
        "name:str vhost:str type:str durable:bool auto_delete:bool internal:bool arguments:map "
        "policy:str? user_who_performed_action:str"
    ),
    "Binding": (
        "source:str vhost:str destination:str destination_type:str routing_key:str arguments:map "
        "properties_key:str"
    ),
    "Connection": (
        "name:str user:str vhost:str node:str peer_host:str peer_port:int host:str port:int "
        "protocol:str auth_mechanism:str ssl:bool frame_max:int channel_max:int timeout:int "
        "connected_at:int client_properties:map type:str state:str"
    ),
    "Channel": "name:str number:int vhost:str user:str node:str state:str connection_details:map",
    "Consumer": (
        "consumer_tag:str queue:map channel_details:map ack_required:bool exclusive:bool "
        "prefetch_count:int active:bool activity_status:str arguments:map"
    ),
    "Vhost": (
        "name:str description:str tags:strs metadata:map default_queue_type:str tracing:bool "
        "cluster_state:map messages:int messages_ready:int messages_unacknowledged:int "
        "message_stats:map recv_oct:int send_oct:int"
    ),
    "User": "name:str password_hash:str hashing_algorithm:str tags:strs limits:map",
    "WhoAmI": "name:str tags:strs",
    "Permission": "user:str vhost:str configure:str write:str read:str",
    "TopicPermission": "user:str vhost:str exchange:str write:str read:str",
    "Policy": "vhost:str name:str pattern:str apply-to:str definition:map priority:num",
    "Parameter": "vhost:str component:str name:str value:any",
    "GlobalParameter": "name:str value:any",
    "Shovel": (
        "node:str name:str vhost:str type:str state:str timestamp:str src_protocol:str "
        "dest_protocol:str error:str message_count:int message_bytes:int refused:int pending:int "
        "failures:int retry_in_s:num blocked:str"
    ),
    "FederationLink": (
        "node:str vhost:str id:str type:str upstream:str policy:str uri:str status:str "
        "timestamp:str error:str message_count:int message_bytes:int refused:int dropped:int "
        "pending:int failures:int retry_in_s:num is_pulling:bool blocked:str"
    ),
    "VhostLimits": "vhost:str value:map",
    "UserLimits": "user:str value:map",
    "Message": (
        "payload_bytes:int redelivered:bool exchange:str routing_key:str message_count:int "
        "properties:any payload:str payload_encoding:str"
    ),
    "Routed": "routed:bool",
    "Moved": "moved:int left:int",
    "Hashed": "password_hash:str",
    "Explained": "exchange:str vhost:str routing_key:str",
    "Check": "status:str",
    "Definitions": (
        "rabbit_version:str queues:list exchanges:list bindings:list policies:list parameters:list"
    ),
    "Process": "name:str kind:str index:int front_door:int? state:str restarts:int",
    "Shard": "shard:int pid:int ready:bool alarm:str queues:int warnings:strs",
    "StreamGroup": "name:str lag:int shards:list",
    "StreamPublisher": (
        "reference:str publisher_id:int published:int confirmed:int errored:int queue:map "
        "connection_details:map"
    ),
    "StreamTracking": "offsets:map writers:map",
    "Load": "shard:int ready:bool alarm:str queues:int",
    "LogLine": "time:num level:str process:str logger:str message:str",
    "Warned": "warnings:strs",
    "Import": (
        "id:int user:str vhost:str? begun_at:num state:str done:int total:int ended_at:num "
        "warnings:strs"
    ),
    "Error": "error:str reason:any",
}

MORE: Final[dict[str, str]] = {
    "Queue": (
        "messages:int messages_ready:int messages_unacknowledged:int consumers:int memory:int "
        "message_bytes:int message_bytes_ready:int message_bytes_unacknowledged:int "
        "message_stats:map consumer_details:list owner_pid_details:map exclusive_consumer_tag:str? "
        "single_active_consumer_tag:str? messages_details:map messages_ready_details:map "
        "messages_unacknowledged_details:map incoming:list deliveries:list "
        "messages_persistent:int? message_bytes_persistent:int? messages_ram:int "
        "message_bytes_ram:int oldest_message_age:num? idle_since:str? consumer_utilisation:num? "
        "consumer_capacity:num? replicas:int min_in_sync:int replicas_wanted:int "
        "min_in_sync_wanted:int"
    ),
    "Exchange": "message_stats:map messages_delayed:int incoming:list outgoing:list",
    "Connection": (
        "channels:int recv_oct:int recv_cnt:int send_oct:int send_cnt:int send_pend:int "
        "reductions:int reductions_details:map user_provided_name:str?"
    ),
    "Channel": (
        "prefetch_count:int global_prefetch_count:int messages_unacknowledged:int "
        "consumer_count:int confirm:bool transactional:bool messages_unconfirmed:int "
        "messages_uncommitted:int acks_uncommitted:int message_stats:map idle_since:str "
        "user_who_performed_action:str consumer_details:list publishes:list deliveries:list"
    ),
    "Shovel": (
        "src_uri:str dest_uri:str src_queue:str src_exchange:str src_exchange_key:str "
        "dest_queue:str dest_exchange:str dest_exchange_key:str dest_address:str "
        "blocked_status:str reason:str"
    ),
    "FederationLink": (
        "queue:str upstream_queue:str exchange:str upstream_exchange:str local_connection:str "
        "local_channel:map"
    ),
    "Vhost": "recv_oct_details:map send_oct_details:map replicas:int min_in_sync:int",
    "Node": "disk_free:int disk_free_limit:int",
    "Load": (
        "messages:int messages_ready:int messages_unacknowledged:int message_bytes:int "
        "consumers:int rss_bytes:num? published:int delivered:int acked:int cpu_seconds:num "
        "syncs:num publish_per_s:num deliver_per_s:num ack_per_s:num cpu:num "
        "syncs_per_s:num"
    ),
}


STRING: Final[Schema] = {"type": "string"}
INTEGER: Final[Schema] = {"type": "integer"}
DOCUMENT: Final[Schema] = {"type": "object"}  # definitions to import


def object_of(optional: Schema | None = None, **required: Schema) -> Schema:
    """Return the schema of an object with these properties."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required]}


def of_row(name: str) -> Schema:
    """Return the schema of a row. No field is required, as `columns` in a query picks some."""
    return {
        "type": "object",
        "properties": {**_properties(ROWS[name]), **_properties(MORE.get(name, ""))},
    }


def _properties(text: str) -> dict[str, Schema]:
    found = {}
    for field in text.split():
        name, _, kind = field.rpartition(":")
        schema = _TYPES[kind.removesuffix("?")]
        found[name] = {"type": [schema["type"], "null"]} if kind.endswith("?") else schema
    return found


PAGE_FIELDS: Final = (
    "filtered_count:int item_count:int page:int page_count:int page_size:int total_count:int"
)


def of_list(name: str) -> Schema:
    """Return the schema of a list: all rows, or a page of rows that may lack fields."""
    rows = {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}
    page = _properties(PAGE_FIELDS)
    properties = {**page, "items": {"type": "array", "items": {"type": "object"}}}
    return {
        "anyOf": [rows, {"type": "object", "properties": properties, "required": [*properties]}]
    }
