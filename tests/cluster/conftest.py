"""Fixtures with a real etcd. Without the program (see .ci/etcd) their tests are skipped."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from shardmq.cluster.etcd import Etcd
from tests.support.etcd import PROGRAM, RealEtcd

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def etcd_program() -> str:
    if PROGRAM is None:
        pytest.skip("no etcd: run .ci/etcd")
    return PROGRAM


@pytest.fixture(scope="module")
def real(etcd_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """Yield an etcd of one member for all tests of a file, which leave it running."""
    with RealEtcd(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def own(etcd_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEtcd]:
    """Yield an etcd of one member for one test, which may kill it."""
    with RealEtcd(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
async def etcd(real: RealEtcd) -> AsyncIterator[Etcd]:
    async with Etcd(real.endpoints) as made:
        yield made


@pytest.fixture
def prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"/test/{next(_numbers)}/"
