"""The Spark session of the jobs: few log lines, times in UTC, workers that run this Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_shardmq.prerequisites import check

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.session.timeZone": "UTC",
    # The broker gives times in microseconds and the archive keeps them.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.python.filterPushdown.enabled": "true",
    # The manifests say which files count, so Spark's marker files would only cost time.
    "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # A micro-batch writes small files into its checkpoint on this host. Hadoop's default classes
    # start programs for each file (chmod, readlink), which takes a tenth of a second a micro-batch.
    # The classes named here only write and rename.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


def session(name: str, master: str, more: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session, named after the job; raise NotInstalled if Java or a package is missing.

    more: settings of Spark, which override those above.
    """
    os.environ.setdefault("JAVA_HOME", str(check()))
    from pyspark.sql import SparkSession

    local = master.startswith("local")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Spark's workers must import this package from where this process does.
        root = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join(
            [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"shardmq {name}").master(master)
    for key, value in {**SETTINGS, **(LOCAL if local else {}), **(more or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
