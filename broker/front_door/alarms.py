"""Alarms: while there is one, publishers are told why and are not read."""

from __future__ import annotations

import logging

log = logging.getLogger("shardmq.broker.front_door.alarms")

WHOLE_BROKER = -1  # in the place of a shard's number


class Alarms:
    """The alarms that are on. `text` names their reasons; it is empty when there is none."""

    __slots__ = ("_reasons", "text")

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self.text = ""

    def set(self, source: int, reason: str) -> bool:
        """Set the alarm of a shard or WHOLE_BROKER; an empty reason ends it.

        Returns whether clients have to be told.
        """
        if reason:
            self._reasons[source] = reason
        else:
            self._reasons.pop(source, None)
        text = " & ".join(sorted(set(self._reasons.values())))
        if text == self.text:
            return False
        log.warning("alarm: %s", text or "over")
        self.text = text
        return True
