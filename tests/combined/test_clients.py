"""Clients see no difference if shards are front doors: tests of other folders run again."""

from __future__ import annotations

from tests.acknowledgements.test_settling_by_clients import *  # noqa: F403
from tests.clients.test_pika import *  # noqa: F403
from tests.deduplication.test_front_doors import *  # noqa: F403
from tests.replies.test_replies import *  # noqa: F403
from tests.transactions.test_transactions import *  # noqa: F403

# The client's front door would have to outlive the shard.
del test_replies_cross_front_doors_and_outlive_a_shard  # noqa: F821
del test_whatever_dies_no_publish_is_lost_or_unanswered  # noqa: F821
