"""Clients of one node see no difference if all queues lie on another: tests of other folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acknowledgements.test_settling_by_clients import *  # noqa: F403
from tests.replies.test_replies import *  # noqa: F403
from tests.support.elsewhere import node_without_queues
from tests.support.real_broker import RealBroker
from tests.transactions.test_transactions import *  # noqa: F403

# It kills a shard of the one host that it knows.
del test_replies_cross_front_doors_and_outlive_a_shard  # noqa: F821


@pytest.fixture(scope="module")
def broker(etcd_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    RealBroker.may_start = True
    with node_without_queues(tmp_path_factory.mktemp("elsewhere")) as made:
        yield made
