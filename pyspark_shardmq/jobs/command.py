"""The common part of the jobs' command lines: connection, Spark, progress, summary, exit status.

The exit status is 0 for done, 1 for failed (one line says why), 2 for wrong arguments, and 69 if
something that Spark needs is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark_shardmq.jobs import progress
from pyspark_shardmq.jobs.session import session
from pyspark_shardmq.prerequisites import NotInstalled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

DONE, FAILED, UNAVAILABLE = 0, 1, 69
POLL_S = 0.5
REASON_CHARS_MAX = 600
# Spark's error if a Python worker does not connect within ten seconds of its start, which happens
# on a busy machine. No setting makes this time longer.
STARTS_SLOWLY = "failed to connect back"
STARTS_MAX = 4
STARTING_S = 0.1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# The line of a worker's traceback that has the name of one of our errors and its text.
REASON = re.compile(
    r"^\S*?(?:OptionError|DataLoss|RowsExpired|StreamGone|BrokerError|Untrusted|Transient): (.*)$",
    re.MULTILINE,
)


class JobError(RuntimeError):
    """The job cannot do what its arguments ask for."""


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all jobs have."""
    made = argparse.ArgumentParser(
        prog=f"python -m pyspark_shardmq.jobs.{name}",
        description=text,
        epilog="Password: --password-file, or SHARDMQ_PASSWORD in the environment; else guest.",
    )
    made.add_argument(
        "--url",
        default="http://127.0.0.1:15672",
        help="the broker's HTTP address, several with commas",
    )
    made.add_argument("--vhost", default="/")
    made.add_argument("--user", default=os.environ.get("SHARDMQ_USER", "guest"))
    made.add_argument("--password-file")
    made.add_argument("--master", default="local[*]", help="of Spark")
    made.add_argument(
        "--conf",
        type=pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of Spark",
    )
    made.add_argument(
        "--option",
        type=pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the connector",
    )
    made.add_argument("--json", action="store_true", help="the summary as one line of JSON")
    return made


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be an integer of at least {least}, not {text!r}"
            )
        return int(text)

    return parse


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    return name, value


def moment(text: str) -> str:
    """Return a time as an expression of SQL; a time without a zone is in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write it as 2026-11-20T12:00:00Z"
        ) from None
    found = found if found.tzinfo else found.replace(tzinfo=UTC)
    return f"timestamp_micros({(found - EPOCH) // timedelta(microseconds=1)})"


def connector_options(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the connector's options for the connection; they do not include --option."""
    found = {
        "shardmq.url": arguments.url,
        "shardmq.vhost": arguments.vhost,
        "shardmq.user": arguments.user,
    }
    if arguments.password_file:
        found["shardmq.passwordFile"] = arguments.password_file
    return found


@contextlib.contextmanager
def writer_metrics() -> Iterator[Path]:
    """Give a file for the writer's option metricsPath, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="shardmq-job-") as directory:
        yield Path(directory) / "metrics"


def stored_and_known(metrics: Path) -> dict[str, Any]:
    """Return the sums over a writer's metrics: rows stored, and rows that a queue had before.

    The result is empty where rows have no producer, since the broker cannot tell then.
    """
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    said = [json.loads(line) for line in lines]
    if any(one["known"] is None for one in said):
        return {}
    return {
        "stored": sum(one["stored"] for one in said),
        "known before": sum(one["known"] for one in said),
    }


def run(
    name: str, arguments: argparse.Namespace, job: Callable[[SparkSession, argparse.Namespace], Any]
) -> int:
    """Run a job and print its summary; return the exit status.

    job: called with the Spark session and the arguments; it returns the summary by name.
    """
    begun = time.monotonic()
    try:
        spark = session(name, arguments.master, dict(arguments.conf))
        try:
            with progress.task_progress(spark, name):
                summary = dict(job(spark, arguments))
        finally:
            spark.stop()
    except NotInstalled as missing:
        print(f"{name}: {missing}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        print(
            f"{name}: interrupted; what is committed stays, the next run goes on there",
            file=sys.stderr,
        )
        return FAILED
    except Exception as error:
        print(f"{name}: {reason(error)}", file=sys.stderr)
        return FAILED
    summary["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(summary) if arguments.json else _table(name, summary))
    return DONE


def reason(error: BaseException) -> str:
    """Return the line of an error of Spark, often pages long, that says what happened."""
    text = str(error)
    if found := REASON.findall(text):
        return str(found[-1])
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:REASON_CHARS_MAX]


def _table(name: str, summary: dict[str, Any]) -> str:
    width = max(map(len, summary))
    return "\n".join(
        [f"{name}: done", *(f"  {key.ljust(width)}  {value}" for key, value in summary.items())]
    )


# -- streaming queries -----------------------------------------------------------------------------


def start(begin: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Return a query whose sources have started.

    The query is started again if a Python worker started too slowly. Another error stays with the
    query, where `follow` finds it.
    """
    for _ in range(STARTS_MAX - 1):
        query = begin()
        while query.isActive and query.status["message"].startswith("Initializing"):
            time.sleep(STARTING_S)
        error = query.exception()
        if error is None or STARTS_SLOWLY not in str(error):
            return query
    return begin()


def follow(query: StreamingQuery, name: str) -> progress.Epochs:
    """Wait until the query ends; raise its error. A terminal shows the progress meanwhile."""
    seen = progress.Epochs(name, sys.stderr.isatty())
    try:
        while not query.awaitTermination(POLL_S):
            seen.poll(query)
        seen.poll(query)
    finally:
        seen.end()
    if (error := query.exception()) is not None:
        raise error
    return seen


def trigger(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.continuous is None:
        return {"availableNow": True}
    return {"processingTime": f"{arguments.continuous} seconds"}


def add_trigger(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--continuous",
        type=at_least(0),
        metavar="SECONDS",
        help="go on for ever, an epoch every so often (0: as soon as the last is done); "
        "else end when all is taken",
    )
