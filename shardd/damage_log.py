"""Log the damage of stores and streams in words, in a bounded number of lines."""

from __future__ import annotations

import logging

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.segments import SegmentStore
from shardmq.shardd.store.streams import StreamLog

log = logging.getLogger(__name__)

# The lines in the log about the damage of one store; `shardctl store verify` shows all damage.
DAMAGE_LOGGED_MAX = 100
DAMAGE_WORDS = {
    "torn": (
        logging.WARNING,
        "torn end, cut off: it was being written when the last run ended and was not confirmed",
    ),
    "corrupt": (
        logging.ERROR,
        "damaged, messages in it are lost; all others are served. Kept beside it as damaged.{}",
    ),
    "mendable": (
        logging.WARNING,
        "the header was damaged and has been written anew from the index; nothing is lost",
    ),
    "stream": (logging.ERROR, "damaged, messages in it are lost; readers pass over them"),
    "missing": (
        logging.ERROR,
        "the file is not there, messages in it are lost: stop the broker and put it back",
    ),
    "header": (
        logging.ERROR,
        "no readable header, messages in it are lost. Kept beside it as lost.{}",
    ),
}


def log_damage(vhost: str, store: SegmentStore | StreamLog) -> None:
    """Log the damage that was found: file, bytes, and what became of it."""
    for one in store.damage[:DAMAGE_LOGGED_MAX]:
        _log_place(vhost, store.directory, one)
    if len(store.damage) > DAMAGE_LOGGED_MAX:
        log.error(
            "vhost %s: and %d more damaged places", vhost, len(store.damage) - DAMAGE_LOGGED_MAX
        )


def log_later_damage(vhost: str, opened: StreamLog) -> None:
    """Log damage that readers of the stream find from now on, as it is found.

    The number of lines is bounded.
    """
    told = len(opened.damage)

    def heard(damage: Damage) -> None:
        nonlocal told
        told += 1
        if told <= DAMAGE_LOGGED_MAX:
            _log_place(vhost, opened.directory, damage)
        elif told == DAMAGE_LOGGED_MAX + 1:
            log.error("vhost %s: %s: and more damaged places", vhost, opened.directory)

    opened.known_damage.heard = heard


def _log_place(vhost: str, directory: str, one: Damage) -> None:
    level, became = DAMAGE_WORDS["stream" if one.offsets and one.what == "corrupt" else one.what]
    where = f"{directory}/{one.file}"
    if one.stop > one.start:
        where += f", bytes {one.start} to {one.stop} ({one.stop - one.start} bytes)"
    if one.offsets is not None:
        where += f", offsets {one.offsets[0]} to {one.offsets[1] - 1}"
    log.log(level, "vhost %s: %s: %s", vhost, where, became.format(one.file.rpartition(".")[2]))
