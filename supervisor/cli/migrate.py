"""The commands `shardctl migrate`: move in from another broker while its applications run.

**Which way messages go.** Each queue has one home at a time: that broker at which it has consumers.
Messages that are published to a queue at the old broker come here by a bridge, a shovel of this
broker, once the queue has consumers here and none there. Messages that are published here wait here
until then. Nothing goes from here to the old broker: two directions would let a message overtake
others, or go round in a circle. Federated queues, which go both ways, take messages of this broker
first while any are ready, so what waits at the old broker would come last; a queue has one policy
at the most, too, and its operator's stays as it is.

**Publishers first.** New messages wait here. The consumers at the old broker empty its queue, then
they move. The queue here is paused until the old one is empty, so that a consumer that comes early
gets nothing that is newer than what waits at the old broker.

**Consumers first.** The bridge brings all messages of the old queue, in order. When it has caught
up, the publishers stop, what is under way arrives, and they start here.

So whoever moves second, moves when the queue is empty at the old broker: `migrate status` says so
of each queue. Each publisher's messages stay in order in each queue then, and none of a queue that
moves is lost: a message leaves the old broker when this one has it on the disk. What a bridge has
sent when a connection breaks may come twice. If consumers leave a queue of the old broker that has
messages, and newer ones wait here, the queue is held: a consumer at the old broker can take the
rest, or `--any-order` lets it come behind the newer ones.

Queues that do not move, as they are exclusive, go with their last consumer or have a name that a
broker has chosen, get nothing that is published at the other broker: publish and subscribe, and
requests with replies, move together, or their exchange is federated until then. Messages that
expire do so here, too, while they wait: there the consumers move first.

**What is kept where.** `start` makes shovels whose names begin with `migration-`, and pauses
queues; the rest is seen anew at each look. So every command may be interrupted and called again,
from any host. Definitions that are here already stay as they are. The rules are in
`migration_rules.py`, the findings of the plan in `migration_plan.py`; both are pure.

The numbers of a RabbitMQ's HTTP API are up to 5 s old. Messages that are ready and consumers are
asked for by AMQP, so they are exact. Messages that are not acknowledged cannot be asked for, so a
paused queue is resumed when two looks more than 5 s apart say that none is left. A queue whose
numbers the old broker does not know, as its node is down, stays as it is.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from shardmq.supervisor.cli.api import DATA, UNREACHABLE, Api, Rows, fail
from shardmq.supervisor.cli.command import bound
from shardmq.supervisor.cli.definitions import pieces
from shardmq.supervisor.cli.migration_plan import (
    HINDERS,
    LEFT,
    Brokers,
    Plan,
    Thing,
    moved_queues,
    of_vhost,
    plan,
    product_of,
)
from shardmq.supervisor.cli.migration_rules import (
    AT_OLD,
    COMING,
    DOWN,
    HELD,
    LISTED_S,
    STATES,
    Queue,
    Seen,
    Step,
    bridge,
    bridge_name,
    bridges_in,
    has_counts,
    hint,
    is_over,
    seen_of,
    settling_since,
    step,
)
from shardmq.supervisor.cli.old_broker import OldBroker, old_broker

app = typer.Typer(no_args_is_help=True, help="Move in from another broker, without downtime.")

AmqpUri = Annotated[
    str,
    typer.Argument(
        metavar="AMQP_URI",
        help="The old broker as this broker reaches it: amqp://HOST, or amqp://HOST/VHOST.",
    ),
]
HttpUrl = Annotated[
    str, typer.Argument(metavar="HTTP_URL", help="Its HTTP API, such as http://HOST:15672.")
]
OldUser = Annotated[
    str,
    typer.Option(
        envvar="SHARDMQ_OLD_USER",
        help="User at the old broker, an administrator. Default: that of the URIs, or guest.",
    ),
]
OldPassword = Annotated[
    str | None,
    typer.Option(
        envvar="SHARDMQ_OLD_PASSWORD",
        help="Password there. Default: that of the URIs, or ask for it.",
    ),
]
OldPasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SHARDMQ_OLD_PASSWORD_FILE", help="File whose first line is the password there."
    ),
]
AnyOrder = Annotated[
    bool, typer.Option(help="Let older messages come behind newer ones that are here already.")
]
Interval = Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")]

LOOK_S = 2.0
AFTER_S = 0.1  # more than numbers may be old
AGAIN_S = 5.0  # more, while a broker cannot be reached
# The old broker notices for so long, at the most, that a bridge is gone.
GONE_S_MAX = 20.0
GONE_LOOK_S = 0.1
# So many looks without anything at the old broker are needed until all is over.
LOOKS_AT_END = 3
PLAN_COLUMNS = ["verdict", "kind", "count", "example", "why"]
STATUS_COLUMNS = [
    "vhost", "name", "state", "at_old", "old_consumers", "here", "consumers", "hint",
]  # fmt: skip
OWN_COLUMNS = "name,vhost,type,arguments,effective_policy_definition,messages,consumers,state"
NAMES_SHOWN = 10


class Look(NamedTuple):
    """A look at both brokers at one time.

    queues: each queue.
    faults: why the messages of some do not come.
    bridges: the values of the bridges that are there.
    """

    queues: dict[Queue, Seen]
    faults: dict[Queue, str]
    bridges: dict[Queue, dict[str, Any]]

    def totals(self, steps: dict[Queue, Step]) -> dict[str, int]:
        """Return the numbers of queues by state, and those of messages."""
        found = dict.fromkeys(STATES, 0)
        for each in steps.values():
            found[each.state] += 1
        found["messages_at_old"] = sum(seen.at_old for seen in self.queues.values())
        found["messages_here"] = sum(seen.here for seen in self.queues.values())
        return found


# -- commands --------------------------------------------------------------------------------------


def show_plan(
    api: Api,
    amqp_uri: AmqpUri,
    http_url: HttpUrl,
    old_user: OldUser = "",
    old_password: OldPassword = None,
    old_password_file: OldPasswordFile = None,
) -> Rows:
    """Say what would be taken over, and what behaves differently here. Nothing is changed."""
    old = old_broker(amqp_uri, http_url, old_user, old_password, old_password_file, api.timeout_s)
    found, product = _planned(api, old)
    readable = [queue for queue in found.queues if queue not in found.unreadable]
    messages = sum(ready for ready, _ in old.counts(readable).values())
    typer.echo(
        f"{product} at {old.shown()}: {len(found.queues)} queues with {messages} messages", err=True
    )
    rows = [
        {
            "verdict": each.verdict,
            "kind": each.kind,
            "count": len(each.things),
            "example": each.things[0],
            "why": each.why,
        }
        for each in found.findings
    ]
    document = {
        "broker": product,
        "queues": [queue._asdict() for queue in found.queues],
        "messages": messages,
        "hindered": found.is_hindered,
        "findings": [each._asdict() for each in found.findings],
    }
    return Rows(rows, PLAN_COLUMNS, document)


def begin(
    api: Api,
    amqp_uri: AmqpUri,
    http_url: HttpUrl,
    old_user: OldUser = "",
    old_password: OldPassword = None,
    old_password_file: OldPasswordFile = None,
    any_order: AnyOrder = False,
    force: Annotated[bool, typer.Option(help="Begin in spite of what hinders it.")] = False,
    once: Annotated[bool, typer.Option(help="Look once and end; call it again.")] = False,
    interval: Interval = LOOK_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line at each look.")] = (
        False
    ),
) -> None:
    """Import the definitions, and bring the messages of each queue when its consumers move.

    The command goes on until nobody uses the old broker any more. Ctrl-C ends it, and what it has
    made stays: call it again to go on. `migrate status` says who may move.
    """
    old = old_broker(amqp_uri, http_url, old_user, old_password, old_password_file, api.timeout_s)
    found, _ = _planned(api, old)
    if found.is_hindered and not force:
        for each in found.findings:
            if each.verdict == HINDERS:
                typer.echo(f"{each.kind} {_names(each.things)}: {each.why}", err=True)
        fail("nothing is changed: see migrate plan, or say --force")
    _import(api, found)
    quiet, said, is_first = 0, "", True
    since_s: dict[Queue, float] = {}
    while True:
        try:
            # Listed numbers may be old: those of the first look say which queues are paused.
            now_s = time.monotonic()
            look = _look(api, old, found.queues, old.queues(), is_exact=is_first)
            look, since_s = _settled(look, since_s, now_s, any_order)
            steps = _steps(look, any_order)
            _carry_out(api, old, look, steps, is_repairing=is_first)
            waiting = [queue for queue in since_s if steps[queue].is_paused]
            is_quiet = all(map(is_over, look.queues.values())) and not waiting
            quiet = quiet + 1 if is_quiet else 0
            if quiet >= LOOKS_AT_END and not old.connections():
                typer.echo("nobody uses the old broker: shardctl migrate finish", err=True)
                return
            said = _say(look, steps, said, as_json)
        except typer.Exit as ended:  # a line has said why
            # A queue may have been deleted since it was listed; the next look does not list it.
            if once or ended.exit_code not in (UNREACHABLE, DATA):
                raise
            time.sleep(AGAIN_S)
        if once and not (waiting and is_first):
            return
        # A queue is resumed by the second of two looks, also if the command is to look once.
        time.sleep(max(interval, LISTED_S + AFTER_S) if once else interval)
        is_first = False


def status(
    api: Api,
    amqp_uri: AmqpUri,
    http_url: HttpUrl,
    old_user: OldUser = "",
    old_password: OldPassword = None,
    old_password_file: OldPasswordFile = None,
    any_order: AnyOrder = False,
) -> Rows:
    """List the queues that move, with their messages at both brokers, and who may move now."""
    old = old_broker(amqp_uri, http_url, old_user, old_password, old_password_file, api.timeout_s)
    rows, own = old.queues(), _own_queues(api)
    queues = [queue for queue in moved_queues(rows, own.values()) if queue in own]
    bridges = bridges_in(api.get("parameters", "shovel"))
    there = {Queue(row["vhost"], row["name"]) for row in rows}
    alone = [
        queue
        for queue, row in own.items()
        if queue not in there
        and old.vhost in ("", queue.vhost)
        and (row.get("state") == "paused" or queue in bridges)
    ]
    look = _look(api, old, queues + alone, rows)
    look.faults.update(
        dict.fromkeys(
            alone, "paused or bridged here, and not at the old broker (finish, resume_queue)"
        )
    )
    steps = _steps(look, any_order)
    rows = [
        {
            **queue._asdict(),
            **seen._asdict(),
            "state": steps[queue].state,
            "at_old": seen.at_old,
            "hint": look.faults.get(queue) or hint(seen, steps[queue].state),
        }
        for queue, seen in look.queues.items()
    ]
    return Rows(rows, STATUS_COLUMNS)


def finish(
    api: Api,
    amqp_uri: AmqpUri,
    http_url: HttpUrl,
    old_user: OldUser = "",
    old_password: OldPassword = None,
    old_password_file: OldPasswordFile = None,
    any_order: AnyOrder = False,
    force: Annotated[
        bool, typer.Option(help="Also while clients are connected there, or queues are down.")
    ] = False,
    interval: Interval = LOOK_S,
) -> None:
    """Bring the last messages, remove all bridges, and say what is left at the old broker.

    The command fails, and changes nothing, while the old broker has consumers or publishers.
    """
    old = old_broker(amqp_uri, http_url, old_user, old_password, old_password_file, api.timeout_s)
    rows, own = old.queues(), _own_queues(api)
    queues = moved_queues(rows, own.values())
    if lacking := [queue for queue in queues if queue not in own]:
        fail(f"{_names(lacking)} is not here: shardctl migrate start")
    down = {Queue(row["vhost"], row["name"]) for row in rows if row.get("state") in DOWN}
    down_queues = [queue for queue in queues if queue in down]
    queues = [queue for queue in queues if queue not in down]
    if down_queues and not force:
        fail(f"the old broker does not serve {_names(down_queues)}; --force leaves them there")
    look = _look(api, old, queues, rows)
    _check_unused(old, look, force)
    came = sum(seen.at_old for seen in look.queues.values())
    while True:
        steps = _steps(look, any_order, is_finishing=True)
        if held := [queue for queue, each in steps.items() if each.state == HELD]:
            fail(
                f"older messages of {_names(held)} are at the old broker, and newer ones here:"
                f" {hint(look.queues[held[0]], HELD)}"
            )
        _carry_out(api, old, look, steps)
        if not any(seen.at_old or seen.is_unknown for seen in look.queues.values()):
            _remove(api, old)
            ready = _ready_without_bridges(old, queues)
            if not ready:
                break
            look = _look(api, old, queues, old.queues())
            continue
        _say(look, steps, "", False)
        time.sleep(interval)
        look = _look(api, old, queues, old.queues())
        _check_unused(old, look, force)
    paused = []
    for queue, row in _own_queues(api).items():
        if row.get("state") != "paused" or old.vhost not in ("", queue.vhost):
            continue
        if queue in look.queues or queue in down:
            api.put("queues", *queue, "resume")
        else:
            paused.append(queue)
    typer.echo(
        f"the last message is over ({time.strftime('%Y-%m-%d %H:%M:%S')}): {len(queues)}"
        f" queues are empty at the old broker, {came} messages came at the end"
    )
    if paused:
        typer.echo(f"paused here, not at the old broker: {_names(paused)} (resume_queue)")
    for line in _left(api, old):
        typer.echo(line)


# -- what is done ----------------------------------------------------------------------------------


def _planned(api: Api, old: OldBroker) -> tuple[Plan, str]:
    overview = old.api.get("overview")
    if not isinstance(overview, dict) or "exchange_types" not in overview:
        fail(f"{old.api.endpoint.url} does not answer like a broker")
    definitions = old.definitions()
    if old.vhost and all(row["name"] != old.vhost for row in definitions.get("vhosts", [])):
        fail(f"the old broker has no vhost '{old.vhost}'", DATA)
    found = plan(
        Brokers(
            of_vhost(definitions, old.vhost),
            api.get("definitions"),
            old.queues(),
            overview,
            frozenset(row["name"] for row in api.get("overview")["exchange_types"]),
            old.login.user,
        )
    )
    return found, product_of(overview)


def _import(api: Api, found: Plan) -> None:
    for part in pieces(found.document):
        if any(part.values()):
            api.post("definitions", body=part)


def _own_queues(api: Api) -> dict[Queue, Thing]:
    rows = api.get("queues", columns=OWN_COLUMNS)
    return {Queue(row["vhost"], row["name"]): row for row in rows}


def _look(
    api: Api, old: OldBroker, queues: list[Queue], listed: list[Thing], is_exact: bool = True
) -> Look:
    """Look at queues at both brokers.

    Args:
        api: This broker.
        old: The old broker.
        queues: The queues to look at.
        listed: The queues of the old broker, as it has just listed them.
        is_exact: Whether the numbers of all queues are asked for, or only those that decide.
    """
    rows = {Queue(row["vhost"], row["name"]): row for row in listed}
    bridges = bridges_in(api.get("parameters", "shovel"))
    own = _own_queues(api)

    def decides(queue: Queue) -> bool:
        here = own.get(queue, {})
        is_used = here.get("messages") or here.get("consumers")
        return bool(queue in bridges or is_used or not has_counts(rows[queue]))

    asked = [queue for queue in queues if queue in rows and (is_exact or decides(queue))]
    counts = old.counts([queue for queue in asked if rows[queue].get("state") not in DOWN])
    # What a bridge has taken is looked at last: no message is between both numbers.
    states = {(row["vhost"], row["name"]): row for row in api.get("shovels")} if bridges else {}
    seen, faults = {}, {}
    for queue in queues:
        row, here = rows.get(queue), own.get(queue)
        if here is None:
            faults[queue] = "the queue is not here any more: call migrate start again"
            continue
        has_bridge = queue in bridges
        state = states.get((queue.vhost, bridge_name(queue.name)), {}) if has_bridge else None
        seen[queue] = seen_of(row, counts.get(queue), here, state)
        if state and state.get("state") != "running" and state.get("error"):
            faults[queue] = str(state["error"])
        elif row and row.get("state") in DOWN:
            faults[queue] = f"the old broker does not serve the queue ({row['state']})"
        elif seen[queue].is_unknown:
            faults[queue] = "the old broker does not list how many messages the queue has"
    return Look(seen, faults, bridges)


def _settled(
    look: Look, since_s: dict[Queue, float], now_s: float, any_order: bool
) -> tuple[Look, dict[Queue, float]]:
    """Return a look that says which queues may be resumed, and since when others could be.

    Args:
        look: What has been seen.
        since_s: Since when queues could be resumed, as this function has returned it before.
        now_s: When the look began.
        any_order: Whether older messages may come behind newer ones that are here already.
    """
    queues, found = {}, {}
    for queue, seen in look.queues.items():
        since = settling_since(seen, since_s.get(queue), now_s, any_order)
        if since is not None:
            found[queue] = since
        is_settled = since is not None and now_s - since > LISTED_S
        queues[queue] = seen._replace(is_settled=is_settled)
    return look._replace(queues=queues), found


def _steps(look: Look, any_order: bool, is_finishing: bool = False) -> dict[Queue, Step]:
    return {queue: step(seen, any_order, is_finishing) for queue, seen in look.queues.items()}


def _carry_out(
    api: Api, old: OldBroker, look: Look, steps: dict[Queue, Step], is_repairing: bool = False
) -> None:
    """Pause and resume queues, and make bridges.

    A bridge is made before its queue is resumed: an interruption in between loses nothing. A bridge
    that is otherwise, such as with an old password, is made anew with `is_repairing` only: what is
    listed never equals what was put if this broker hides passwords.
    """
    for queue, each in steps.items():
        seen = look.queues[queue]
        value = bridge(queue, old.uri(queue.vhost))
        is_other = is_repairing and look.bridges.get(queue) != value
        if each.has_bridge and (is_other or not seen.has_bridge):
            name = bridge_name(queue.name)
            api.put("parameters", "shovel", queue.vhost, name, body={"value": value})
        if each.is_paused != seen.is_paused:
            api.put("queues", *queue, "pause" if each.is_paused else "resume")


def _remove(api: Api, old: OldBroker) -> None:
    """Remove the bridges of the vhosts that move, also of queues that the old broker has no more.

    Each has the password of the old broker.
    """
    for queue in bridges_in(api.get("parameters", "shovel")):
        if old.vhost in ("", queue.vhost):
            api.delete("parameters", "shovel", queue.vhost, bridge_name(queue.name))


def _ready_without_bridges(old: OldBroker, queues: list[Queue]) -> int:
    """Return the messages at the old broker, when it has noticed that all bridges are gone.

    It has requeued by then what they had not acknowledged.
    """
    rows = {Queue(row["vhost"], row["name"]) for row in old.queues()}
    there = [queue for queue in queues if queue in rows]
    until = time.monotonic() + GONE_S_MAX
    while True:
        counts = old.counts(there)
        used = [queue for queue, (_, consumers) in counts.items() if consumers]
        if not used:
            return sum(ready for ready, _ in counts.values())
        if time.monotonic() > until:
            fail(f"the old broker has consumers of {_names(used)}")
        time.sleep(GONE_LOOK_S)


def _check_unused(old: OldBroker, look: Look, force: bool) -> None:
    """End the command while somebody publishes or consumes at the old broker."""

    def those(is_so: Callable[[Seen], bool]) -> list[Queue]:
        return [queue for queue, seen in look.queues.items() if is_so(seen)]

    if consumed := those(lambda seen: bool(seen.old_consumers)):
        fail(f"the old broker has consumers of {_names(consumed)}")
    if published := those(lambda seen: seen.is_published):
        fail(f"messages are published at the old broker to {_names(published)}")
    if not force and (clients := old.connections()):
        fail(
            f"{len(clients)} clients are connected to the old broker: {_names(clients)};"
            " close them, or say --force"
        )


def _left(api: Api, old: OldBroker) -> list[str]:
    """Return what is left at the old broker, as lines."""
    found, _ = _planned(api, old)
    moved = set(found.queues)
    lines = []
    for row in old.queues():
        if Queue(row["vhost"], row["name"]) not in moved and row.get("messages"):
            lines.append(f"left there: {row['messages']} messages in {row['vhost']}: {row['name']}")
    for each in found.findings:
        if each.verdict == LEFT and each.kind in ("parameter", "user", "global parameter"):
            lines.append(f"not taken over: {each.kind} {_names(each.things)}: {each.why}")
    return lines


# -- what is said ----------------------------------------------------------------------------------


def _say(look: Look, steps: dict[Queue, Step], said: str, as_json: bool) -> str:
    """Print how far the migration is, unless that was said last. Returns what was said."""
    totals = look.totals(steps)
    if as_json:
        print(json.dumps({"time": round(time.time(), 3), **totals}), flush=True)
        return ""
    text = (
        f"queues: {totals[AT_OLD]} at the old broker, {totals[COMING]} coming,"
        f" {totals['here'] + totals['quiet']} over, {totals[HELD]} held;"
        f" messages: {totals['messages_at_old']} at the old broker,"
        f" {totals['messages_here']} here"
    )
    if held := [queue for queue, each in steps.items() if each.state == HELD]:
        text += f"; held: {_names(held)} (migrate status)"
    if look.faults:
        queue, fault = next(iter(look.faults.items()))
        text += f"; faults: {len(look.faults)}, such as {_names([queue])}: {fault}"
    if text != said:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
    return text


def _names(things: list[Any]) -> str:
    """Return some names as a text."""
    shown = [
        f"queue '{each.name}' in vhost '{each.vhost}'" if isinstance(each, Queue) else str(each)
        for each in things[:NAMES_SHOWN]
    ]
    more = f" and {len(things) - NAMES_SHOWN} more" if len(things) > NAMES_SHOWN else ""
    return ", ".join(shown) + more


app.command("plan")(bound(show_plan))
app.command("start")(bound(begin))
app.command("status")(bound(status))
app.command("finish")(bound(finish))
