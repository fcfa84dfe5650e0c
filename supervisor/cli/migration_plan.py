"""What a migration takes over from another broker, and what behaves differently here. Pure.

Definitions come in as the JSON of RabbitMQ, and a list of findings comes out. A finding is about
any number of objects of one kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from shardmq.supervisor.cli import arguments
from shardmq.supervisor.cli.definitions import RABBITMQ_HASHES
from shardmq.supervisor.cli.migration_rules import Queue

# What a finding says: taken over as it is, taken over and different, not taken over, there already,
# and what hinders the migration.
TAKEN, DIFFERS, LEFT, KNOWN, HINDERS = "taken", "differs", "left", "known", "hinders"
VERDICTS: Final = (HINDERS, LEFT, DIFFERS, KNOWN, TAKEN)

Thing = dict[str, Any]
Document = Mapping[str, list[Thing]]

# The hashes of passwords that this broker reads: those of RabbitMQ, and its own.
READABLE: Final = frozenset(
    (*RABBITMQ_HASHES, *RABBITMQ_HASHES.values(), "shardmq_password_hashing_scrypt")
)
# Parameters that would go on moving messages, at both brokers at once.
MOVERS: Final = ("shovel", "shovel-paused", "federation-upstream", "federation-upstream-set")
OF_CLUSTER: Final = ("cluster_name", "internal_cluster_id")
FEDERATION_KEYS: Final = (
    "federation-upstream", "federation-upstream-set", "federation-upstream-pattern",
)  # fmt: skip
PROTOCOLS: Final = {
    "mqtt": "MQTT", "stomp": "STOMP", "stream": "the stream protocol", "amqp1.0": "AMQP 1.0",
}  # fmt: skip
TTL: Final = (
    "the time to live of a message begins anew when it arrives here, and messages expire while they"
    " wait here: move the consumers first"
)
# What is to be known of queues that do not move.
APART: Final = (
    "what is published at the other broker does not reach it: move publishers and consumers"
    " together, or federate the exchange until then"
)
RPC: Final = (
    "a reply (reply_to) does not reach a requester at the other broker: move those who ask and"
    " those who answer together"
)
PAUSES: Final = (
    "it is here already: start pauses it while the old broker uses the queue of its name, and"
    " resumes it, also if it was paused before"
)
LENGTH: Final = (
    "the limit of length counts at each broker: while messages come, what is too much here dies or"
    " is refused as it would there"
)
# What is to be known of queues with an argument. A policy key is the argument without x-.
NOTES: Final = {
    "x-message-ttl": TTL,
    "x-expires": "the queue is deleted here if nobody uses it for that long, also with messages"
    " that wait for its consumers: move the consumers first",
    "x-max-length": LENGTH,
    "x-max-length-bytes": LENGTH,
    "x-dead-letter-exchange": "a message that dies before it has come is dead-lettered by the old"
    " broker, and comes from the queue it went to there",
    "x-max-priority": "order is kept within a priority",
    "x-single-active-consumer": "each broker has one active consumer while both have some",
    "x-delivery-limit": "returns of a message are counted anew here",
}  # fmt: skip


class Finding(NamedTuple):
    """What is to be known about some objects; `things` are their names."""

    verdict: str
    kind: str
    why: str
    things: list[str]


class Brokers(NamedTuple):
    """What is known of both brokers.

    old, own: their definitions.
    queues: the rows of /api/queues of the old broker.
    overview: /api/overview of the old broker.
    types: the types of exchanges that this broker has.
    user: the user as whom messages are taken from the old broker.
    """

    old: Document
    own: Document
    queues: list[Thing]
    overview: Mapping[str, Any]
    types: frozenset[str]
    user: str


class Plan(NamedTuple):
    """What a migration does.

    findings: what is to be known, the worst first.
    document: the definitions that are imported.
    queues: those whose messages come, in the order of their names.
    unreadable: those of them that the user of the old broker may not read.
    """

    findings: list[Finding]
    document: dict[str, list[Thing]]
    queues: list[Queue]
    unreadable: set[Queue]

    @property
    def is_hindered(self) -> bool:
        return any(found.verdict == HINDERS for found in self.findings)


class _Findings:
    """Findings, put together by what they say."""

    def __init__(self) -> None:
        self._things: dict[tuple[str, str, str], list[str]] = {}

    def add(self, verdict: str, kind: str, why: str, thing: str) -> None:
        things = self._things.setdefault((verdict, kind, why), [])
        if thing not in things[-1:]:
            things.append(thing)

    def sorted(self) -> list[Finding]:
        found = [Finding(*said, things) for said, things in self._things.items()]
        return sorted(found, key=lambda each: (VERDICTS.index(each.verdict), each.kind, each.why))


def product_of(overview: Mapping[str, Any]) -> str:
    """Return the name and version of a broker, from its overview."""
    if version := overview.get("lavinmq_version"):
        return f"LavinMQ {version}"
    name = overview.get("product_name") or "RabbitMQ"
    return f"{name} {overview.get('product_version') or overview.get('rabbitmq_version', '')}"


def of_vhost(document: Document, vhost: str) -> dict[str, list[Thing]]:
    """Return the definitions of one vhost with its users; "" returns those of all vhosts."""
    if not vhost:
        return dict(document)
    found = {
        kind: [row for row in rows if row.get("vhost", vhost) == vhost]
        for kind, rows in document.items()
        if isinstance(rows, list) and kind != "global_parameters"
    }
    users = {row.get("user") for row in found.get("permissions", [])}
    found["users"] = [row for row in document.get("users", []) if row.get("name") in users]
    found["vhosts"] = [row for row in document.get("vhosts", []) if row.get("name") == vhost]
    return found


def plan(brokers: Brokers) -> Plan:
    """Return what a migration takes over, and what is to be known before."""
    found = _Findings()
    document: dict[str, list[Thing]] = {}
    for kind, look in _LOOKS.items():
        document[kind] = []
        known = {_key(kind, row): row for row in brokers.own.get(kind, [])}
        for row in brokers.old.get(kind, []):
            if look(found, row, known.get(_key(kind, row)), brokers):
                document[kind].append(row)
    _drop_bindings(document, found, brokers)
    queues, unreadable = _bridged(found, brokers)
    _see_protocols(found, brokers)
    found.add(DIFFERS, "clients", RPC, "RPC")
    return Plan(found.sorted(), document, queues, unreadable)


def _key(kind: str, row: Thing) -> tuple[Any, ...]:
    if kind == "permissions":
        return row.get("vhost"), row.get("user")
    if kind == "topic_permissions":
        return row.get("vhost"), row.get("user"), row.get("exchange")
    if kind == "parameters":
        return row.get("vhost"), row.get("component"), row.get("name")
    return row.get("vhost"), row.get("name")


def _shown(row: Thing) -> str:
    name = row.get("name") or row.get("user") or ""
    return f"{row['vhost']}: {name}" if "vhost" in row else str(name)


# -- kinds of definitions: each returns whether the row is imported --------------------------------


def _user(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    algorithm = str(row.get("hashing_algorithm") or "SHA256")
    if known is not None:
        found.add(KNOWN, "user", "the user here keeps password and tags", row["name"])
        return False
    if row.get("password_hash") and algorithm not in READABLE:
        why = f"the hash of the password cannot be read here ({algorithm}): add_user"
        found.add(LEFT, "user", why, row["name"])
        return False
    found.add(TAKEN, "user", "with password, tags and limits", row["name"])
    return True


def _vhost(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    found.add(*(KNOWN, "vhost", "") if known else (TAKEN, "vhost", ""), row["name"])
    return known is None


def _permission(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    if known is not None:
        found.add(KNOWN, "permission", "the permissions here stay", _shown(row))
    return known is None


def _parameter(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    component = str(row.get("component"))
    shown = f"{_shown(row)} ({component})"
    if component in MOVERS:
        why = "it would move messages at both brokers: set it here when all has moved"
        found.add(LEFT, "parameter", why, shown)
        return False
    if component == "operator_policy" and known is None and isinstance(row.get("value"), dict):
        _see_keys(found, "operator policy", row["value"].get("definition") or {}, row)
    if component == "vhost-limits" and known is None:
        why = "bridges count as connections of their vhost while messages come"
        found.add(DIFFERS, "parameter", why, shown)
    else:
        found.add(KNOWN if known else TAKEN, "parameter", "", shown)
    return known is None


def _global(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    if row["name"] in OF_CLUSTER:
        return False
    if str(row["name"]).startswith("mqtt_"):
        found.add(LEFT, "global parameter", "there is no MQTT", row["name"])
        return False
    found.add(KNOWN if known else TAKEN, "global parameter", "", row["name"])
    return known is None


def _policy(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    if known is not None:
        found.add(KNOWN, "policy", "the policy here stays", _shown(row))
        return False
    _see_keys(found, "policy", row.get("definition") or {}, row)
    found.add(TAKEN, "policy", "", _shown(row))
    return True


def _see_keys(found: _Findings, kind: str, definition: Thing, row: Thing) -> None:
    """Find what is to be known of the keys of a policy."""
    for key in definition:
        if key in FEDERATION_KEYS:
            why = "it federates nothing until its upstream is set here"
            found.add(DIFFERS, kind, why, _shown(row))
        elif key.startswith("ha-"):
            why = f"{key} has no effect: cluster.replicas says how many nodes have each message"
            found.add(DIFFERS, kind, why, _shown(row))
        elif key not in arguments.POLICY_KEYS:
            found.add(DIFFERS, kind, f"{key} has no effect", _shown(row))
        elif f"x-{key}" in NOTES:
            found.add(DIFFERS, kind, NOTES[f"x-{key}"], _shown(row))


def _exchange(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    name, kind = str(row["name"]), str(row.get("type"))
    if _is_internal(name) or "x-internal-purpose" in (row.get("arguments") or {}):
        return False
    if known is not None:
        is_same = known.get("type") == kind and known.get("arguments") == row.get("arguments")
        why = "" if is_same else "it is declared otherwise here, and stays so"
        found.add(KNOWN, "exchange", why, _shown(row))
        return False
    if kind not in brokers.types:
        why = f"there is no type {kind} here: publishes to it are refused"
        found.add(HINDERS, "exchange", why, _shown(row))
        return False
    if kind == "x-delayed-message":
        why = (
            "messages that it delays at the old broker come when they are due, maybe after the end"
        )
        found.add(DIFFERS, "exchange", why, _shown(row))
    for argument in row.get("arguments") or {}:
        if argument not in arguments.EXCHANGE:
            found.add(DIFFERS, "exchange", f"{argument} has no effect", _shown(row))
    found.add(TAKEN, "exchange", "", _shown(row))
    return True


def _queue(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    given = _arguments(row)
    if why := unmoved(row):
        found.add(LEFT, "queue", why, _shown(row))
        return False
    if known is not None:
        is_same = _arguments(known) == given and known.get("durable") == row.get("durable")
        why = "" if is_same else "it is declared otherwise here, and stays so"
        found.add(KNOWN, "queue", why, _shown(row))
        if not _is_stream(row) and not _is_stream(known):
            found.add(DIFFERS, "queue", PAUSES, _shown(row))
        return False
    kind = given.get("x-queue-type", "classic")
    if kind == "quorum":
        why = "a durable queue with as many copies as cluster.replicas says; on one host it has one"
        found.add(DIFFERS, "queue", why, _shown(row))
    elif kind == "stream":
        why = "the stream is made, its messages do not come: a consumer from `first` copies them"
        found.add(DIFFERS, "queue", why, _shown(row))
    for argument in given:
        if argument not in arguments.QUEUE:
            found.add(DIFFERS, "queue", f"{argument} has no effect", _shown(row))
        elif argument in NOTES and kind != "stream":
            found.add(DIFFERS, "queue", NOTES[argument], _shown(row))
    found.add(TAKEN, "queue", "", _shown(row))
    return True


def _binding(found: _Findings, row: Thing, known: Thing | None, brokers: Brokers) -> bool:
    return True  # to make a binding again changes nothing


_LOOKS: Final[dict[str, Callable[[_Findings, Thing, Thing | None, Brokers], bool]]] = {
    "users": _user,
    "vhosts": _vhost,
    "permissions": _permission,
    "topic_permissions": _permission,
    "parameters": _parameter,
    "global_parameters": _global,
    "policies": _policy,
    "exchanges": _exchange,
    "queues": _queue,
    "bindings": _binding,
}


def unmoved(row: Thing) -> str:
    """Return why a queue of the old broker is neither made here nor bridged, "" if it is."""
    name, given = str(row["name"]), _arguments(row)
    if row.get("exclusive"):
        return f"it is exclusive: its client declares it again; {APART}"
    if _is_internal(name):
        return f"the old broker has chosen its name: its client declares another; {APART}"
    if row.get("auto_delete"):
        return f"it is deleted with its last consumer: its clients declare it again; {APART}"
    if "x-internal-purpose" in given:
        return "it serves a plugin of the old broker"
    return ""


def _is_internal(name: str) -> bool:
    return not name or name.startswith("amq.")


def _arguments(row: Thing) -> dict[str, Any]:
    given = dict(row.get("arguments") or {})
    kind = row.get("type")
    if kind and kind != "classic":
        given.setdefault("x-queue-type", kind)
    if given.get("x-queue-type") == "classic":
        del given["x-queue-type"]
    return given


def _drop_bindings(document: dict[str, list[Thing]], found: _Findings, brokers: Brokers) -> None:
    """Leave out what names a user, an exchange or a queue that is not taken over."""
    users = {row["name"] for kind in (document, brokers.own) for row in kind.get("users", [])}
    for kind in ("permissions", "topic_permissions"):
        document[kind] = [row for row in document[kind] if row.get("user") in users]
    ends: dict[str, set[tuple[str, str]]] = {}
    for kind in ("exchanges", "queues"):
        rows = (*document[kind], *brokers.own.get(kind, []))
        ends[kind] = {(row["vhost"], row["name"]) for row in rows}

    def is_there(kind: str, vhost: str, name: str) -> bool:
        return (vhost, name) in ends[kind] or (kind == "exchanges" and name.startswith("amq."))

    known = {_binding_key(row) for row in brokers.own.get("bindings", [])}
    document["bindings"] = [
        row
        for row in document["bindings"]
        if is_there("exchanges", row["vhost"], row["source"])
        and is_there(f"{row['destination_type']}s", row["vhost"], row["destination"])
        and _binding_key(row) not in known
    ]
    if document["bindings"]:
        found.add(TAKEN, "binding", "", f"{len(document['bindings'])} bindings")


def _binding_key(row: Thing) -> tuple[str, ...]:
    names = ("vhost", "source", "destination_type", "destination", "routing_key")
    return (*(str(row.get(name)) for name in names), repr(row.get("arguments") or {}))


def moved_queues(old: Iterable[Thing], own: Iterable[Thing]) -> list[Queue]:
    """Return the queues whose messages come, in the order of their names.

    Args:
        old: The queues of the old broker, as in definitions or in /api/queues.
        own: Those of this broker.
    """
    streams = {Queue(row["vhost"], row["name"]) for row in own if _is_stream(row)}
    return sorted(
        queue
        for row in old
        if not unmoved(row)
        and not _is_stream(row)
        and (queue := Queue(row["vhost"], row["name"])) not in streams
    )


def _is_stream(row: Thing) -> bool:
    return bool(_arguments(row).get("x-queue-type") == "stream")


def _bridged(found: _Findings, brokers: Brokers) -> tuple[list[Queue], set[Queue]]:
    """Return the queues whose messages come, and those of them that cannot be read.

    Queues that no definitions show, such as exclusive ones, are found too.
    """
    named = {(row["vhost"], row["name"]) for row in brokers.old.get("queues", [])}
    for row in brokers.queues:
        if (row["vhost"], row["name"]) not in named and (why := unmoved(row)):
            found.add(LEFT, "queue", why, _shown(row))
    queues = moved_queues(brokers.old.get("queues", []), brokers.own.get("queues", []))
    unreadable = set()
    readable = dict(_readable(brokers))
    is_known = any(row.get("name") == brokers.user for row in brokers.old.get("users", []))
    for queue in queues if is_known else ():
        pattern = readable.get(queue.vhost)
        if pattern is None or not _matches(pattern, queue.name):
            why = f"the user {brokers.user} of the old broker may not read it there"
            found.add(HINDERS, "queue", why, _shown(queue._asdict()))
            unreadable.add(queue)
    return queues, unreadable


def _readable(brokers: Brokers) -> Iterator[tuple[str, str]]:
    """Yield the vhosts of the old broker that its user may enter, with what the user may read."""
    for row in brokers.old.get("permissions", []):
        if row.get("user") == brokers.user:
            yield row["vhost"], str(row.get("read", ""))


def _matches(pattern: str, name: str) -> bool:
    try:
        return bool(pattern) and re.search(pattern, name) is not None
    except re.error:
        return True  # the old broker has its own words for patterns: its answer tells


def _see_protocols(found: _Findings, brokers: Brokers) -> None:
    rows: Iterable[Any] = brokers.overview.get("listeners") or ()
    for row in rows:
        protocol = str(row.get("protocol", "")).partition("/")[0]
        if protocol in PROTOCOLS:
            why = f"{PROTOCOLS[protocol]} is not spoken here: such clients cannot move"
            found.add(LEFT, "clients", why, f"port {row.get('port')}")
