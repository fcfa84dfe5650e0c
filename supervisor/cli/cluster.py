"""The commands `shardctl cluster`: the nodes of a cluster."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from shardmq.supervisor.cli.api import Api, Rows, fail
from shardmq.supervisor.cli.command import bound
from shardmq.supervisor.cli.demo import demo

COLUMNS = [
    "name", "running", "is_leader", "being_drained", "shards", "in_sync_shards", "processors",
    "mem_used", "disk_free", "sockets_used", "version", "alarms", "uptime",
]  # fmt: skip

SHARD_COLUMNS = [
    "shard", "node", "replicas", "min_in_sync", "in_sync", "replica_lag_bytes",
    "replica_lag_seconds", "ready", "alarm", "queues",
]  # fmt: skip
PLAN_COLUMNS = ["vhost", "name", "from_node", "from_shard", "to_node", "to_shard"]
LOOK_S = 0.5  # between two looks how far something is

NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Its name, such as shardmq@host2.")]

app = typer.Typer(no_args_is_help=True, help="The nodes of a cluster.")


def status(api: Api) -> Rows:
    """List the nodes: which run, which one leads, and what each of them has."""
    return Rows(api.get("nodes"), COLUMNS)


def shards(api: Api) -> Rows:
    """List the shards: which node leads each of them, which have all of it, and how far behind.

    A shard is to be on as many nodes as replicas says, and needs min_in_sync of them to confirm.
    A shard waits for the slowest of the nodes in sync: so many bytes, for so many seconds.
    """
    return Rows(api.get("shards"), SHARD_COLUMNS)


def drain(
    api: Api,
    name: NodeName,
    cancel: Annotated[bool, typer.Option(help="End the drain; the node takes queues again.")] = (
        False
    ),
    wait: Annotated[bool, typer.Option(help="Return when the node has no queue any more.")] = True,
) -> None:
    """Move all queues of a node to the others, and place no new ones on it.

    Queues that cannot be moved stay; then the command names them and fails. It also names those
    whose moves do not go on, and waits for them.
    """
    path, thing = ("nodes", name, "drain"), f"node '{name}'"
    if cancel:
        api.delete(*path, thing=thing)
        return
    api.put(*path, thing=thing)
    said, held_up = -1, list[str]()
    while wait:
        now = api.get(*path, thing=thing)
        if not now["being_drained"]:
            fail(f"the drain of {thing} was cancelled")
        if now["queues"] != said:
            said = now["queues"]
            typer.echo(f"{_counted(said, 'queue')} left", err=True)
        if not said:
            return
        told, held_up = held_up, []
        for each in now.get("held_up", ()):  # older releases do not say
            held_up.append(f"queue '{each['name']}' in vhost '{each['vhost']}': {each['why']}")
            if held_up[-1] not in told:
                typer.echo(held_up[-1], err=True)
        left = now["left_behind"]
        if len(left) == said:
            for each in left:
                typer.echo(
                    f"queue '{each['name']}' in vhost '{each['vhost']}' stays: {each['why']}",
                    err=True,
                )
            fail(f"{said} queue{'s stay' if said > 1 else ' stays'} on {thing}")
        time.sleep(LOOK_S)


def rebalance(
    api: Api,
    dry_run: Annotated[bool, typer.Option(help="Show the moves, and begin none.")] = False,
) -> Rows:
    """Move the fewest queues that give each shard about as many as the others.

    The moves go on behind the command, two queues and two streams at a time.
    """
    return Rows(api.post("cluster", "rebalance", body={"dry_run": dry_run}), PLAN_COLUMNS)


def forget(
    api: Api,
    name: NodeName,
    lose: Annotated[
        bool, typer.Option(help="Lose the queues that lie on the node, with their messages.")
    ] = False,
) -> None:
    """Take a node that is gone for good out of the cluster. It may not come back.

    Its shards go on at other nodes that have all of them. Those that no other node has are lost.
    With --lose, stop shardmq on that node first, or cut its clients off: if it still runs, cut off
    from etcd, what it confirms is lost, too.
    """
    now = api.post("nodes", name, "forget", body={"lose": lose}, thing=f"node '{name}'")
    typer.echo(f"{now['node']} is forgotten, {_counted(now['queues_lost'], 'queue')} lost")
    for shard, home in now["new_homes"].items():
        typer.echo(f"shard {shard} has its home on {home}")
    if now["shards_lost"]:
        typer.echo(f"lost shards: {', '.join(map(str, now['shards_lost']))}")


def elect_unclean(
    api: Api,
    shard: Annotated[int, typer.Argument(min=0, help="Its number.")],
    name: NodeName,
    lose: Annotated[
        bool, typer.Option(help="Lose messages that were confirmed, if the copy lacks them.")
    ] = False,
) -> None:
    """Let the copy of a node lead a shard whose in-sync nodes have lost their disks.

    The command says first how much may be lost. Without --lose it does nothing more. If a node that
    was in sync can come back, start that one instead: it has all. Before --lose, stop shardmq on
    the nodes that were in sync, or cut their clients off: a leader that is only cut off from etcd
    and the other nodes may go on confirming, and what it confirms is lost, too.
    """
    path, thing = ("shards", str(shard), "elect-unclean", name), f"shard {shard}"
    typer.echo(api.get(*path, thing=thing)["loss"], err=True)
    if not lose:
        fail("nothing is changed: say --lose if this may be lost")
    now = api.post(*path, body={"lose": True}, thing=thing)
    typer.echo(f"{now['node']} leads shard {now['shard']} in term {now['term']}")


def join(
    api: Api,
    name: Annotated[
        str, typer.Argument(metavar="[NODE]", help="Default: the node that is asked.")
    ] = "",
    within: Annotated[float, typer.Option(help="Seconds to wait.")] = 60.0,
) -> None:
    """Wait until a node takes part in the cluster, and say what it has.

    A node joins by its settings when it starts; this command only waits for that.
    """
    name = name or api.get("overview")["node"]
    until, waits = time.monotonic() + within, False
    while True:
        rows = api.get("nodes")
        row = next((row for row in rows if _is_named(row, name)), None)
        if row is not None and row["running"] and "uptime" in row:
            shards = ", ".join(map(str, row.get("shards", ())))
            has = f"with the shards {shards}" if shards else "and leads no shard yet"
            typer.echo(f"{row['name']} takes part, {has}")
            return
        if time.monotonic() > until:
            fail(f"node '{name}' does not take part after {within:g} s")
        if not waits:
            waits = True
            state = "has no such node yet" if row is None else "does not hear of it"
            known = ", ".join(row["name"] for row in rows)
            typer.echo(
                f"waiting up to {within:g} s for node '{name}': the cluster of {known} {state}",
                err=True,
            )
        time.sleep(LOOK_S)


def _counted(count: int, noun: str) -> str:
    """Return how many there are, with the verb."""
    return f"{count} {noun} is" if count == 1 else f"{count} {noun}s are"


def _is_named(row: dict[str, Any], name: str) -> bool:
    return name in (row["name"], row["name"].partition("@")[2])


app.command("status")(bound(status))
app.command("shards")(bound(shards))
app.command("drain")(bound(drain))
app.command("rebalance")(bound(rebalance))
app.command("forget")(bound(forget))
app.command("elect-unclean")(bound(elect_unclean))
app.command("join")(bound(join))
app.command("demo")(demo)
