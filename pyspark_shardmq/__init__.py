"""The data source `shardmq` for Spark's `read`, `readStream`, `write` and `writeStream`.

When Spark looks for data sources, it imports every package whose name begins with `pyspark_` and
takes `DefaultSource` from it. The look-up has ten seconds, also on a busy machine. Therefore this
module imports `DefaultSource`, and with it Spark's own modules, only when somebody asks for it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_shardmq.default_source import DefaultSource

    return DefaultSource
