"""The data source named `shardmq`: it gives Spark the readers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """Parse the options and make the reader or writer that Spark asks for.

    The methods import what they need themselves, because Spark imports this class in each look-up
    of a data source, and a look-up has ten seconds.
    """

    @classmethod
    def name(cls) -> str:
        return "shardmq"

    def schema(self) -> str:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.schema import ddl

        return ddl(read_options(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.source import PushingReader, ShardmqReader

        options = read_options(self.options)
        return PushingReader(options) if options.push_filters else ShardmqReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from pyspark_shardmq.options import read_options
        from pyspark_shardmq.source import ShardmqStreamReader

        return ShardmqStreamReader(read_options(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from pyspark_shardmq.options import write_options
        from pyspark_shardmq.sink import ShardmqWriter

        return ShardmqWriter(write_options(self.options), schema.names, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from pyspark_shardmq.options import write_options
        from pyspark_shardmq.sink import ShardmqStreamWriter

        return ShardmqStreamWriter(write_options(self.options), schema.names)
