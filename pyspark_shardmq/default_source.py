"""The data source by the name `shardmq`: hands Spark the readers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from pyspark_shardmq.sink import ShardmqStreamWriter, ShardmqWriter
    from pyspark_shardmq.source import ShardmqReader, ShardmqStreamReader


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "shardmq"

    def schema(self) -> str:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.schema import ddl

        return ddl(read_options(self.options))

    def reader(self, schema: StructType) -> ShardmqReader:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.source import PushingReader, ShardmqReader

        options = read_options(self.options)
        return PushingReader(options) if options.push_filters else ShardmqReader(options)

    def streamReader(self, schema: StructType) -> ShardmqStreamReader:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.source import ShardmqStreamReader

        return ShardmqStreamReader(read_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> ShardmqWriter:
        from pyspark_shardmq.options import write_options
        from pyspark_shardmq.sink import ShardmqWriter

        return ShardmqWriter(write_options(self.options), schema.names, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> ShardmqStreamWriter:
        from pyspark_shardmq.options import write_options
        from pyspark_shardmq.sink import ShardmqStreamWriter

        return ShardmqStreamWriter(write_options(self.options), schema.names)
