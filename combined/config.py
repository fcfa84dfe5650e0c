"""Define the settings of a process that is a front door and a shard."""

from __future__ import annotations

import msgspec

from shardmq.broker.shared.config import BrokerConfig
from shardmq.shardd.config import ShardConfig


class CombinedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sections of the two. The front door has the number of the shard."""

    front_door: BrokerConfig
    shard: ShardConfig


def read(text: str) -> CombinedConfig:
    """Return the settings in this JSON.

    Raises msgspec.ValidationError with the path of the wrong value.
    """
    return msgspec.json.decode(text, type=CombinedConfig)
