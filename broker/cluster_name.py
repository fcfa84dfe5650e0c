"""The broker's name for operators and clients: in connection.start, the HTTP API, traces and metrics."""

from __future__ import annotations

import socket
from typing import Final

from broker.catalog import Catalog

GLOBAL: Final = ""  # the component of global parameters, which have no vhost either
PARAMETER: Final = "cluster_name"  # the global parameter that holds the name, as in RabbitMQ
DEFAULT: Final = f"shardmq@{socket.gethostname()}"  # as rabbit@HOST


def cluster_name(catalog: Catalog) -> str:
    """Return the name that `set_cluster_name` has set, or the default."""
    put = catalog.parameters.get(("", GLOBAL, PARAMETER))
    return put.value if put is not None and isinstance(put.value, str) else DEFAULT
