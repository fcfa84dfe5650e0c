"""The list of files that need not follow the rules for docstrings and for 100 columns only gets shorter."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUFF = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
IGNORED: dict[str, list[str]] = RUFF["lint"]["per-file-ignores"]
RULES = {"D205", "D400", "D401", "D404", "D415"}
# Packages whose lines end at 100 columns. This list only gets longer.
NARROW: dict[str, list[str]] = {"supervisor": []}

# What `per-file-ignores` of pyproject.toml names. A file that is rewritten leaves both lists; nothing is added.
LISTED = """
bench/**
deploy/**
shardd/**
tests/**
broker/amqp/connection.py
broker/amqp/deaths.py
broker/amqp/events.py
broker/amqp/methods.py
broker/amqp/properties.py
broker/controller/__main__.py
broker/controller/authority.py
broker/controller/config.py
broker/controller/decisions.py
broker/controller/groups/groups.py
broker/controller/groups/memberships.py
broker/controller/management/answers/listing.py
broker/controller/management/answers/turns.py
broker/controller/management/call.py
broker/controller/management/guard.py
broker/controller/management/hosts.py
broker/controller/management/metrics/gathered.py
broker/controller/management/metrics/internals.py
broker/controller/management/metrics/node_metrics.py
broker/controller/management/metrics/object_metrics.py
broker/controller/management/metrics/prometheus.py
broker/controller/management/page.py
broker/controller/management/resources/attempts.py
broker/controller/management/resources/channels.py
broker/controller/management/resources/connections.py
broker/controller/management/resources/definitions.py
broker/controller/management/resources/garbage.py
broker/controller/management/resources/health.py
broker/controller/management/resources/identity.py
broker/controller/management/resources/loglines.py
broker/controller/management/resources/messages.py
broker/controller/management/resources/parameters.py
broker/controller/management/resources/policies.py
broker/controller/management/resources/processes.py
broker/controller/management/resources/queues.py
broker/controller/management/resources/shards.py
broker/controller/management/resources/streams.py
broker/controller/management/resources/users.py
broker/controller/management/resources/vhosts.py
broker/controller/memory.py
broker/controller/peers/links.py
broker/controller/peers/method_frames.py
broker/controller/peers/presence.py
broker/controller/peers/shard_links.py
broker/controller/policies.py
broker/controller/requests.py
broker/controller/resharding/cuts.py
broker/controller/resharding/resharding.py
broker/controller/resharding/settling.py
broker/controller/resharding/shard_sets.py
broker/controller/server.py
broker/controller/stored/definitions.py
broker/controller/stored/imported.py
broker/controller/stored/installation.py
broker/controller/stored/offline.py
broker/controller/stored/room.py
broker/controller/streams/stream_ranges.py
broker/controller/streams/stream_reader.py
broker/controller/without_effect.py
broker/front_door/connection/channel.py
broker/front_door/connection/channel_work.py
broker/front_door/connection/client.py
broker/front_door/connection/output.py
broker/front_door/connection/transport.py
broker/front_door/consume/consumers.py
broker/front_door/consume/consuming.py
broker/front_door/consume/grants.py
broker/front_door/consume/rewinding.py
broker/front_door/consume/unacked.py
broker/front_door/consume/virtual.py
broker/front_door/counts.py
broker/front_door/links/catalog_link.py
broker/front_door/links/shard_link.py
broker/front_door/login.py
broker/front_door/pace.py
broker/front_door/proxy.py
broker/front_door/publish/confirms.py
broker/front_door/publish/message.py
broker/front_door/publish/once.py
broker/front_door/publish/publishing.py
broker/front_door/publish/releasing.py
broker/front_door/publish/replies.py
broker/front_door/publish/scope.py
broker/front_door/publish/tracing.py
broker/front_door/publish/transactions.py
broker/front_door/server.py
broker/front_door/tls.py
broker/front_door/topology/pipeline.py
broker/front_door/topology/topology.py
broker/routing/delaying.py
broker/routing/explain.py
broker/routing/hashing.py
broker/routing/keeping.py
broker/routing/matching.py
broker/routing/placement.py
broker/routing/route.py
broker/routing/spreading.py
broker/routing/table.py
broker/shared/certificates.py
broker/shared/config.py
broker/shared/control.py
broker/shared/deduplication.py
broker/shared/failures.py
broker/shared/logins.py
broker/shared/reading.py
broker/shared/rights.py
pyspark_shardmq/archive.py
pyspark_shardmq/fetch.py
pyspark_shardmq/jobs/analytics.py
pyspark_shardmq/jobs/archive.py
pyspark_shardmq/jobs/command.py
pyspark_shardmq/jobs/progress.py
pyspark_shardmq/jobs/report.py
pyspark_shardmq/offsets.py
pyspark_shardmq/options.py
pyspark_shardmq/pushdown.py
pyspark_shardmq/schema.py
pyspark_shardmq/setup.py
pyspark_shardmq/sink.py
pyspark_shardmq/source.py
"""
EXEMPT = set(LISTED.split())


def test_no_file_becomes_exempt_from_the_rules_for_docstrings() -> None:
    assert sorted(set(IGNORED) - EXEMPT) == [], "write the docstrings of these files anew instead"


def test_a_file_that_was_rewritten_cannot_become_exempt_again() -> None:
    assert sorted(EXEMPT - set(IGNORED)) == [], "these are done: take them off EXEMPT"


@pytest.mark.parametrize("package", ["broker", "pyspark_shardmq", "supervisor"])
def test_the_packages_are_exempt_by_file_not_by_folder(package: str) -> None:
    names = [name for name in IGNORED if name.startswith(package)]
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_the_rules_are_selected_for_the_whole_repository() -> None:
    assert set(RUFF["lint"]["select"]) >= RULES
    assert not set(RUFF["lint"]["ignore"]) & {"E501", "D", *RULES}


@pytest.mark.parametrize("package", NARROW)
def test_lines_of_finished_packages_end_at_100_columns(package: str) -> None:
    own = tomllib.loads((ROOT / package / "ruff.toml").read_text())
    assert own["extend"] == "../pyproject.toml"
    assert own["line-length"] == 100
    assert own.get("format", {}).get("exclude", []) == NARROW[package]
    assert set(own) <= {"extend", "line-length", "cache-dir", "src", "format"}, "no other rule is laxer here"
