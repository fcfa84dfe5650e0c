"""A Spark session as the jobs want it: quiet, times in UTC, workers with this Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_shardmq.setup import check

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # Rows of the archive are what the broker gave, to the microsecond.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.python.filterPushdown.enabled": "true",
    # What is archived was written once or not at all by a rename of ours; Spark's own crumbs only cost time.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # What a micro-batch notes in its checkpoint are small files of this host. Hadoop's own way starts programs for each
    # (chmod, readlink), a tenth of a second a micro-batch in all; these write, and rename.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def session(name: str, master: str, more: Mapping[str, str] | None = None) -> SparkSession:
    """Missing if there is no Java or a package lacks."""
    os.environ.setdefault("JAVA_HOME", str(check()))
    from pyspark.sql import SparkSession

    local = master.startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Spark's workers find this package as this process does.
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"shardmq {name}").master(master)
    for key, value in {**SETTINGS, **(LOCAL if local else {}), **(more or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
