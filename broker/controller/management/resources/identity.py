"""The name that tells this cluster from all others, under which RabbitMQ keeps it and its dashboards join by it."""

from __future__ import annotations

import hashlib
import os
import platform

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import GLOBAL, ParameterPut

CLUSTER_ID = "internal_cluster_id"  # the global parameter


def cluster_id(catalog: Catalog, data_dir: str) -> str:
    """What the global parameter says, as after an import; else the same as long as the data stays where it is."""
    put = catalog.parameters.get(("", GLOBAL, CLUSTER_ID))
    if put is not None and isinstance(put.value, str):
        return put.value
    name = f"{platform.node()}:{os.path.abspath(data_dir)}"
    return f"rabbitmq-cluster-id-{hashlib.sha256(name.encode()).hexdigest()[:22]}"


def global_parameters(catalog: Catalog, data_dir: str) -> list[ParameterPut]:
    """Return all, the id of the cluster among them, though nobody put it."""
    found = {
        put.name: put
        for put in catalog.parameters.values()
        if (put.vhost, put.component) == ("", GLOBAL)
    }
    found.setdefault(
        CLUSTER_ID, ParameterPut("", GLOBAL, CLUSTER_ID, cluster_id(catalog, data_dir))
    )
    return list(found.values())
