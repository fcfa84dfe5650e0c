"""The programs and commands of the README run as they stand there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.real_broker import RealBroker, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^    \.venv/bin/shardctl (.*?)(?:  +#.*)?$", re.MULTILINE)
ORDERS, CUSTOMERS = 1000, 50


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RealBroker]:
    made = RealBroker(tmp_path / "data")
    try:
        yield made
        made.stop()
    finally:
        made.clean_up()


# The document that each section with programs is in.
DOCUMENTS = {"Use it": "README.md", "One queue over all cores": "broker/STREAM-EXCHANGES.md"}


def section(title: str) -> str:
    level = "##" if DOCUMENTS[title] == "README.md" else "#"
    text = "\n" + (ROOT / DOCUMENTS[title]).read_text()
    found = text.partition(f"\n{level} {title}\n")[2].partition("\n## ")[0]
    assert found, f"{DOCUMENTS[title]} has no section {title}"
    return found


def programs(broker: RealBroker, title: str) -> list[list[str]]:
    """As command lines."""
    return [
        [sys.executable, "-c", code.replace("localhost", broker.amqp)]
        for code in PROGRAM.findall(section(title))
    ]


def ran(command: list[str]) -> str:
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def shardctl(broker: RealBroker, words: str) -> str:
    return ran(
        [
            sys.executable,
            "-m",
            "shardmq.supervisor.cli",
            *shlex.split(words),
            "--data-dir",
            str(broker.data_dir),
        ]
    )


def test_the_first_program_prints_what_the_readme_says(broker: RealBroker) -> None:
    (program,) = programs(broker, "Use it")
    assert f"prints `{ran(program).strip()}`" in section("Use it")


def test_two_workers_share_an_exchange_and_each_customer_stays_in_order_with_one(
    broker: RealBroker, tmp_path: Path
) -> None:
    title = "One queue over all cores"
    policy, *looks = COMMAND.findall(section(title))
    publisher, worker = programs(broker, title)
    shardctl(broker, policy)
    ran(publisher)
    files = [tmp_path / "a", tmp_path / "b"]
    workers = [subprocess.Popen(worker, stdout=file.open("w")) for file in files]

    def lines() -> list[list[str]]:
        return [file.read_text().splitlines() for file in files]

    try:
        wait_until(lambda: sum(map(len, lines())) == ORDERS, "the first orders")
        wait_until(
            lambda: len(owners(broker)) == 2 and not moving(broker), "both workers to own shards"
        )
        before = list(map(len, lines()))
        ran(publisher)
        wait_until(lambda: sum(map(len, lines())) == 2 * ORDERS, "the next orders")
        found = [found[count:] for found, count in zip(lines(), before, strict=True)]
        customers = [{line.split()[0] for line in one} for one in found]
        assert customers[0] and customers[1] and not customers[0] & customers[1]
        assert len(customers[0] | customers[1]) == CUSTOMERS
        for one in found:
            for customer in {line.split()[0] for line in one}:
                numbers = [int(line.split()[2]) for line in one if line.split()[0] == customer]
                assert numbers == sorted(numbers)
        for words in looks:
            assert shardctl(broker, words).strip() or " set " in words
        assert len(shardctl(broker, "list_queues name").splitlines()) == 1 + 6
        workers[0].kill()
        wait_until(lambda: len(owners(broker)) == 1, "the other worker to own all")
    finally:
        for each in workers:
            each.kill()
            each.wait()


def moving(broker: RealBroker) -> bool:
    """Whether a shard is on its way from one worker to the other."""
    rows = json.loads(shardctl(broker, "list_virtual_queues --formatter json"))
    return any(row["moving"] for row in rows)


def owners(broker: RealBroker) -> set[str]:
    """Tags of consumers."""
    rows = shardctl(broker, "list_shard_owners orders --formatter csv").splitlines()
    at = rows[0].split(",").index("owner")
    return {row.split(",")[at] for row in rows[1:]} - {""}
