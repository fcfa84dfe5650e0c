"""A glance at the arguments, the environment and the settings file, before anything else."""

from __future__ import annotations

import os
from collections.abc import Sequence


def may_be_a_node(arguments: Sequence[str]) -> bool:
    """Return whether the settings may name a cluster. An error is for those who read them."""
    if any(each.startswith("--cluster-name") for each in arguments):
        return True
    if "SHARDMQ_CLUSTER_NAME" in os.environ or "SHARDMQ_CLUSTER_NAME_FILE" in os.environ:
        return True
    for flag, value in zip(arguments, [*arguments[1:], ""], strict=True):
        path = value if flag == "--config" else flag.partition("--config=")[2]
        if path:
            try:
                with open(path, "rb") as file:
                    return b"cluster" in file.read()
            except OSError:
                return False
    return False
