"""The id of this cluster, which RabbitMQ keeps as a global parameter and its dashboards join by."""

from __future__ import annotations

import hashlib
import os
import platform

from shardmq.broker.controller.config import ControllerConfig
from shardmq.broker.model.catalog import Catalog
from shardmq.broker.model.changes import GLOBAL, ParameterPut

CLUSTER_ID = "internal_cluster_id"  # the name of the global parameter


def identity(config: ControllerConfig) -> str:
    """Return a text that no other broker has.

    Any node of a cluster may lead, so there it is made of the names of the cluster and its
    definitions.
    """
    if config.cluster is not None:
        return f"{config.cluster.name}:{config.boot}"
    return identity_of_host(config.data_dir)


def identity_of_host(data_dir: str) -> str:
    """Return a text that only the broker with this data directory has."""
    return f"{platform.node()}:{os.path.abspath(data_dir)}"


def cluster_id(catalog: Catalog, identity: str) -> str:
    """Return the global parameter if it is set, else a hash of the identity of the broker."""
    put = catalog.parameters.get(("", GLOBAL, CLUSTER_ID))
    if put is not None and isinstance(put.value, str):
        return put.value
    return f"rabbitmq-cluster-id-{hashlib.sha256(identity.encode()).hexdigest()[:22]}"


def global_parameters(catalog: Catalog, identity: str) -> list[ParameterPut]:
    """Return all global parameters, with the id of the cluster even if it was not set."""
    found = {
        put.name: put
        for put in catalog.parameters.values()
        if (put.vhost, put.component) == ("", GLOBAL)
    }
    found.setdefault(
        CLUSTER_ID, ParameterPut("", GLOBAL, CLUSTER_ID, cluster_id(catalog, identity))
    )
    return list(found.values())
