"""Spark's door to shardmq: `spark.read.format("shardmq")`, `readStream`, `write`, `writeStream`.

Spark imports every package whose name begins with `pyspark_` when it looks for data sources, and takes
`DefaultSource`. What is heavy is imported only when a source is made of it: the look-up has ten seconds, on a busy
machine too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_shardmq.default_source import DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_shardmq.default_source import DefaultSource

    return DefaultSource
