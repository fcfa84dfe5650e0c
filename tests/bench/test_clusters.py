"""The model of a cluster says what follows from the costs that were measured."""

from __future__ import annotations

from typing import Any

from clusters import prefix_at
from crossing import model

from shardmq.broker.routing.placement import Places


def figures(per_cpu_s: float) -> dict[str, Any]:
    return {"median": {"per_cpu_s": per_cpu_s}}


def test_the_model_follows_from_the_costs_here_and_elsewhere() -> None:
    small = {"shardmq": figures(1e6), "elsewhere": figures(5e5)}  # 1 us here, 2 us elsewhere
    kib = {"shardmq": figures(5e5), "elsewhere": figures(1e6 / 5.016)}  # 2 us and 5.016 us
    text = model({"cluster-small": small, "cluster-kib": kib, "small": figures(1)})
    assert "| small | 1.00 | 2.00 | 1.00 |" in text
    assert "costs 0.97 us a message and 2.00 ns a byte" in text
    # On two nodes of 8 cores half of all messages cross: 16 cores / 1.5 us.
    assert "| 1 | 8,000,000 | 4,000,000 |" in text
    assert "| 2 | 10,666,667 | 4,561,003 |" in text


def test_there_is_no_model_without_measurements() -> None:
    assert model({"small": {"shardmq": figures(1)}}) == ""
    failed: dict[str, Any] = {"median": {}}
    assert model({"cluster-small": {"shardmq": failed, "elsewhere": failed}}) == ""


def test_the_name_of_a_queue_chooses_its_node() -> None:
    places = Places((0, 1))
    for shard in range(2):
        assert places.by_name("/", f"{prefix_at(shard, of=2)}-0") == shard
