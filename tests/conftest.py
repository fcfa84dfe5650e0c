"""How random tests run: no time limit per example, and a failure prints the line that repeats it.

`--seed` is of what plays whole lives of a store or rounds of kills; another each time, printed, and
to be given again. Asserts in tests/support say what they compared, as those of the tests do.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")
pytest_plugins = ["tests.support.brokers"]

# A busy machine makes an example slow, not wrong.
settings.register_profile(
    "shardmq", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shardmq")

# The commands of shardctl are put together once, not for each call: a tenth of a second, of a
# crowded machine two.
typer.testing._get_command = functools.cache(typer.testing._get_command)


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Set the level of the log back: a broker in this process may have been told another."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="of the first random life and of the kills"
    )
    parser.addoption(
        "--histories", type=int, default=3000, help="random lives of each kind (make torture)"
    )
    parser.addoption("--rounds", type=int, default=100, help="of kills (make torture)")


def pytest_configure(config: pytest.Config) -> None:
    # A client that cannot connect is what many tests expect, and no fault of the broker.
    logging.getLogger("pika").setLevel(logging.CRITICAL)
    if config.option.seed is None:
        of_whole_run = getattr(config, "workerinput", {}).get("seed")
        config.option.seed = of_whole_run or random.SystemRandom().randrange(1, 1 << 32)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give each worker of a parallel run the seed that is printed."""
    node.workerinput["seed"] = node.config.option.seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take minutes, so that none of them is left for the end.

    These are the files that kill processes, then the others with a broker. The order holds only if
    pytest-xdist is told not to sort files by the number of their tests.
    """
    items.sort(
        key=lambda item: [item.get_closest_marker(mark) is None for mark in ("crash", "broker")]
    )


_lives_played: list[int] = []


@pytest.fixture
def lives_played() -> list[int]:
    """Seeds of the random lives of stores that this run has played, to be told at its end."""
    return _lives_played


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _lives_played:
        terminalreporter.write_line(
            f"{len(_lives_played)} random lives of a store, --seed {config.option.seed}"
        )


def pytest_report_header(config: pytest.Config) -> str:
    return f"--seed {config.option.seed}"
