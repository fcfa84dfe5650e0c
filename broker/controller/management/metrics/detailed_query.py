"""The query of /metrics/detailed: which objects it selects, and what is wrong with a bad one.

Anybody may call /metrics/detailed, so each parameter is bounded. A Selection is also the key under
which calls share a response.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from multidict import MultiMapping

from shardmq.broker.controller.management.api_error import bad_request
from shardmq.broker.controller.management.call import NAME_CHARS_SHOWN, check_query
from shardmq.broker.controller.management.numbers import number
from shardmq.broker.model import patterns
from shardmq.supervisor.nearest import did_you_mean

TOP_MAX: Final = 1_000
REGEX_CHARS_MAX: Final = 100
# Keeps the time to match one name of 255 bytes below 0.1 ms; most expressions take 1 to 20 us.
REGEX_MEM_BYTES_MAX: Final = 4 << 10
PREFIX_CHARS_MAX: Final = 20
PREFIX: Final = "rabbitmq"
ANY_PREFIX: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
MANY: Final = ("family", "vhost")
ONCE: Final = ("queue", "top", "prefix")
# Families of RabbitMQ and LavinMQ. Those that are not among ours have no series here.
FAMILIES_ELSEWHERE: Final = (
    "auth_attempt_detailed_metrics", "channel_process_metrics", "queue_exchange_metrics",
    "ra_metrics", "vhost_message_stats",
)  # fmt: skip


class Selection(NamedTuple):
    """The families of objects to show, and which objects of them.

    `vhosts`: objects of these vhosts, None: of all. `queue`: the text of a regular expression that
    the names of queues must match somewhere, "": any queues. `top`: show so many objects of each
    kind, those that rank highest; None: show all. `prefix` is the first word of all names.
    """

    families: tuple[str, ...]
    vhosts: frozenset[str] | None = None
    queue: str = ""
    top: int | None = None
    prefix: str = PREFIX

    def pattern(self) -> patterns.Pattern | None:
        return patterns.compiled_by_re2(self.queue, REGEX_MEM_BYTES_MAX) if self.queue else None


def selection(
    query: MultiMapping[str],
    known: Collection[str],
    vhosts: Iterable[str],
    others: Collection[str] = (),
) -> Selection:
    """Return what a query selects among these families and vhosts. Raises ApiError.

    `others` are parameters of the query that say something else.

    Unknown vhosts are ignored, as in RabbitMQ: a scrape goes on when a vhost is deleted.
    """
    check_query(query, (*MANY, *ONCE, *others), (*ONCE, *others))
    found = Selection(
        _families(query.getall("family", []), known),
        frozenset(query.getall("vhost")).intersection(vhosts) if "vhost" in query else None,
        query.get("queue", ""),
        number("top", query["top"], 1, TOP_MAX) if "top" in query else None,
        query.get("prefix", PREFIX),
    )
    if len(found.queue) > REGEX_CHARS_MAX:
        raise bad_request(f"queue: more than {REGEX_CHARS_MAX} characters")
    try:
        found.pattern()
    except patterns.BadPattern as error:
        raise bad_request(f"queue: not a regular expression of RE2: {error}") from None
    if len(found.prefix) > PREFIX_CHARS_MAX or not ANY_PREFIX.fullmatch(found.prefix):
        raise bad_request(
            f"prefix: not the beginning of a metric's name, of at most {PREFIX_CHARS_MAX} "
            "characters (letters, digits, _ and :)"
        )
    return found


def _families(asked: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """Return the families that are asked for and known, each once, or raise ApiError."""
    families = dict.fromkeys(asked)
    for family in families:
        if family not in known and family not in FAMILIES_ELSEWHERE:
            hint = did_you_mean(family, known) or ";"
            raise bad_request(
                f"family: there is no {family[:NAME_CHARS_SHOWN]}{hint} "
                f"known are {', '.join(sorted(known))}"
            )
    return tuple(family for family in families if family in known)
