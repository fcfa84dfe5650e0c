"""The id of this cluster, which RabbitMQ keeps as a global parameter and its dashboards join by."""

from __future__ import annotations

import hashlib
import os
import platform

from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import GLOBAL, ParameterPut

CLUSTER_ID = "internal_cluster_id"  # the name of the global parameter


def cluster_id(catalog: Catalog, data_dir: str) -> str:
    """Return the global parameter if it is set, else a hash of the host name and the path."""
    put = catalog.parameters.get(("", GLOBAL, CLUSTER_ID))
    if put is not None and isinstance(put.value, str):
        return put.value
    name = f"{platform.node()}:{os.path.abspath(data_dir)}"
    return f"rabbitmq-cluster-id-{hashlib.sha256(name.encode()).hexdigest()[:22]}"


def global_parameters(catalog: Catalog, data_dir: str) -> list[ParameterPut]:
    """Return all global parameters, with the id of the cluster even if it was not set."""
    found = {
        put.name: put
        for put in catalog.parameters.values()
        if (put.vhost, put.component) == ("", GLOBAL)
    }
    found.setdefault(
        CLUSTER_ID, ParameterPut("", GLOBAL, CLUSTER_ID, cluster_id(catalog, data_dir))
    )
    return list(found.values())
