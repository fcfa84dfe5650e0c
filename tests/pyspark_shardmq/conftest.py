"""One Spark session for all tests of the connector, since a session takes seconds and a JVM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.fake_streams import FakeStreams

ROOT = Path(__file__).parents[2]


def missing() -> str | None:
    """Return what Spark needs and this machine lacks, in one line, or None."""
    from pyspark_shardmq.prerequisites import java_home

    for name in ("pyspark", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed (pip install pyspark-shardmq[spark])"
    if java_home() is None:
        return "there is no Java (apt-get install default-jre-headless)"
    return None


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if lacking := missing():
        pytest.skip(lacking)
    from pyspark_shardmq.jobs.session import session

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    scratch = tmp_path_factory.mktemp("spark")
    made = session(
        "tests",
        "local[2,3]",
        {
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "spark.sql.warehouse.dir": str(scratch / "warehouse"),
            "spark.local.dir": str(scratch / "local"),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    yield made
    made.stop()


@pytest.fixture
def streams() -> FakeStreams:
    pytest.importorskip("pyarrow")
    from tests.support.fake_streams import FakeStreams

    return FakeStreams()


@pytest.fixture
def url(streams: FakeStreams) -> Iterator[str]:
    from tests.support.fake_streams import serving

    with serving(streams) as address:
        yield address
