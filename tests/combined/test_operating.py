"""Alarms, limits, balancers and TLS with shards that are front doors: tests of other folders."""

from __future__ import annotations

import pytest

from tests.operating.test_operations import operated as operated
from tests.operating.test_operations import (
    test_a_limit_of_connections_holds_over_all_front_doors_and_can_be_lifted as test_limit,
)
from tests.operating.test_operations import (
    test_a_memory_alarm_blocks_publishers_and_is_in_health_nodes_and_metrics_until_it_is_over as test_alarm,  # noqa: E501
)
from tests.operating.test_operations import (
    test_behind_a_balancer_clients_have_their_own_addresses as test_balancer,
)
from tests.tls.test_tls import secured as secured
from tests.tls.test_tls import test_a_certificate_is_as_good_as_a_password as test_certificate
from tests.tls.test_tls import (
    test_many_small_messages_pass_in_order_with_acks_and_confirms as test_tls,
)
from tests.tls.test_tls import (
    test_sighup_shows_new_clients_the_new_certificate_and_keeps_the_old_ones as test_reload,
)

pytestmark = pytest.mark.broker

__all__ = [
    "operated", "secured", "test_alarm", "test_balancer", "test_certificate", "test_limit",
    "test_reload", "test_tls",
]  # fmt: skip
