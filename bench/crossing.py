"""Say what a message costs that crosses from one node to another, and what N nodes would carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brokers import OWN_NAME
from load.families import ELSEWHERE, ON_ONE_NODE

MODEL_NODES = (1, 2, 3, 4, 8, 16, 32, 64)
MODEL_CORES = 8
SIZES = {"small": 16, "kib": 1024}  # scenarios that differ in the bytes of a body alone


def model(scenarios: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what a message costs here and elsewhere, and what N nodes would carry; "" if unknown.

    With queues and clients spread evenly over N nodes, (N - 1) / N of all messages cross from one
    node to another. So a message costs here + (elsewhere - here) (N - 1) / N on average, and N
    nodes carry as many as their cores can pay for. The model assumes that the network is not the
    limit, that batches are as full as here, and that a session to one more node costs nothing:
    a node sends to each of the others what its clients publish within one pass.
    """
    costs = {
        name: (here, elsewhere)
        for name in ON_ONE_NODE
        if (taken := scenarios.get(f"cluster-{name}"))
        and (here := cost_us(taken, OWN_NAME))
        and (elsewhere := cost_us(taken, ELSEWHERE))
    }
    if not costs:
        return ""
    lines = ["| CPU of a message, us | here | elsewhere | crossing |", "| --- | --: | --: | --: |"]
    for name, (here, elsewhere) in costs.items():
        lines.append(f"| {name} | {here:.2f} | {elsewhere:.2f} | {elsewhere - here:.2f} |")
    if SIZES.keys() <= costs.keys():
        lines += ["", crossing({size: costs[name] for name, size in SIZES.items()})]
    lines += ["", table_of_nodes(costs)]
    return "\n".join(lines)


def cost_us(taken: Mapping[str, Any], name: str) -> float:
    medians = taken.get(name, {}).get("median", {})
    if per_s := medians.get("per_cpu_s"):
        return 1e6 / float(per_s)
    return float(medians.get("cpu_us", 0.0))


def crossing(by_bytes: Mapping[int, tuple[float, float]]) -> str:
    """Say how the cost of crossing depends on the bytes of a body, by a line through two sizes."""
    (small, a), (large, b) = sorted(by_bytes.items())
    each_byte = ((b[1] - b[0]) - (a[1] - a[0])) / (large - small)
    fixed = (a[1] - a[0]) - small * each_byte
    return (
        f"Crossing in batches costs {fixed:.2f} us a message and {each_byte * 1000:.2f} ns a byte: "
        "copies into and out of ZeroMQ's parts, encryption and its check, and TCP."
    )


def table_of_nodes(costs: Mapping[str, Sequence[float]]) -> str:
    heads = ["nodes", *(f"{name}, messages/s" for name in costs)]
    lines = [f"Model, nodes of {MODEL_CORES} cores:", ""]
    lines += [f"| {' | '.join(heads)} |", f"| {' | '.join(['--:'] * len(heads))} |"]
    for nodes in MODEL_NODES:
        cells = [
            f"{nodes * MODEL_CORES * 1e6 / (here + (elsewhere - here) * (nodes - 1) / nodes):,.0f}"
            for here, elsewhere in costs.values()
        ]
        lines.append(f"| {nodes} | {' | '.join(cells)} |")
    return "\n".join(lines)
