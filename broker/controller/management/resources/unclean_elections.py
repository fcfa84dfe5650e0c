"""/api/shards/SHARD/elect-unclean/NODE: an operator gives up messages, so that a shard goes on."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from shardmq.broker.controller.management.api_error import bad_request, not_found
from shardmq.broker.controller.management.call import Call, Route
from shardmq.broker.controller.management.numbers import number
from shardmq.cluster.unclean import (
    Elections,
    NoCopies,
    NotElected,
    OutcomeUnknown,
    Prospect,
)

log = logging.getLogger(__name__)


class LoseBody(msgspec.Struct):
    """`lose` says that messages which were confirmed may be lost."""

    lose: bool = False


def _asked(call: Call) -> tuple[Elections, int, str]:
    """Return who elects, the shard and the full name of the node."""
    shard, name = number("shard", call.part("shard")), call.part("node")
    names = (each.name for each in call.context.cluster.nodes)
    node = next((each for each in names if name in (each, each.partition("@")[2])), None)
    if node is None:
        raise not_found()
    if call.context.elections is None:
        raise bad_request("there is no cluster")
    return call.context.elections, shard, node


def _shown(shard: int, node: str, prospect: Prospect) -> dict[str, Any]:
    return {"shard": shard, "node": node, "term": prospect.record.term, "loss": prospect.loss}


async def look(call: Call) -> dict[str, Any]:
    """Show how much may be lost if the copy of a node leads a shard whose in-sync nodes are gone.

    `term` is the one in which the node would lead, `loss` a sentence for people.
    """
    elections, shard, node = _asked(call)
    try:
        return _shown(shard, node, await elections.look(shard, node))
    except NoCopies:
        raise not_found() from None
    except NotElected as error:
        raise bad_request(f"shard {shard} is not given to '{node}': {error}") from None


async def elect(call: Call) -> dict[str, Any]:
    """Let the copy of a node lead a shard whose in-sync nodes are gone; messages may be lost."""
    elections, shard, node = _asked(call)
    body, user = await call.body(LoseBody), call.user.name

    def announce(prospect: Prospect) -> None:
        log.critical(
            "user '%s' has %s elected to lead shard %d in term %d, uncleanly: %s",
            user, node, shard, prospect.record.term, prospect.loss,
        )  # fmt: skip

    try:
        if not body.lose:
            found = await elections.look(shard, node)
            raise bad_request(
                f"shard {shard} is not given to '{node}' without the option to lose messages: "
                f"{found.loss}"
            )
        found = await elections.elect(shard, node, announce)
    except NoCopies:
        raise not_found() from None
    except NotElected as error:
        log.warning(
            "user '%s' may not let %s lead shard %d uncleanly: %s", user, node, shard, error
        )
        raise bad_request(f"shard {shard} is not given to '{node}': {error}") from None
    except OutcomeUnknown as error:
        log.critical("nobody knows whether %s leads shard %d now: %s", node, shard, error)
        raise bad_request(
            f"nobody knows whether '{node}' leads shard {shard} now, so look: {error}"
        ) from None
    log.critical("%s leads shard %d in term %d now", node, shard, found.record.term)
    return _shown(shard, node, found)


PATH = "/api/shards/{shard}/elect-unclean/{node}"

ROUTES = [
    Route("GET", PATH, look, "administrator"),
    Route("POST", PATH, elect, "administrator", body=LoseBody),
]
