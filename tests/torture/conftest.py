"""`make torture`: the seed to begin from and how many random lives; both are printed and can be given again."""

from __future__ import annotations

import random

import pytest

HISTORIES = 3000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="of the first random life; else another each time")
    parser.addoption("--histories", type=int, default=HISTORIES, help="random lives of each kind")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed", default=None) is None:
        config.option.seed = random.SystemRandom().randrange(1 << 32)


def pytest_report_header(config: pytest.Config) -> str:
    return f"torture: --seed {config.option.seed} --histories {config.getoption('--histories', default=HISTORIES)}"


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> range:
    first = request.config.option.seed
    return range(first, first + request.config.getoption("--histories", default=HISTORIES))
