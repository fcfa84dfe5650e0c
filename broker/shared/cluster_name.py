"""The name of the broker in connection.start, the HTTP API, traces and metrics."""

from __future__ import annotations

import socket
from typing import Final

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import CLUSTER_NAME, GLOBAL

# The RabbitMQ whose protocol and API this is. Clients and tools choose by it how they talk.
RABBITMQ_VERSION: Final = "3.13.7"
DEFAULT: Final = f"shardmq@{socket.gethostname()}"  # as rabbit@HOST


def cluster_name(catalog: Catalog) -> str:
    """Return the name that `set_cluster_name` has set, or the default."""
    put = catalog.parameters.get(("", GLOBAL, CLUSTER_NAME))
    return put.value if put is not None and isinstance(put.value, str) else DEFAULT
