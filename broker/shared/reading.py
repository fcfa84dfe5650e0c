"""Consumers of streams at the front door: their arguments and the offsets of their deliveries.

A shard that starts anew knows no consumer, and a stream marks no message as delivered. So the front
door knows where a consumer goes on: by the offsets of what the consumer has not acknowledged. Pure.
"""

from __future__ import annotations

import datetime
import re
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from shardmq.broker.amqp import properties
from shardmq.broker.model.checks import Refusal, named
from shardmq.shardd.wire.messages import ReadFrom

PRECONDITION_FAILED: Final = 406
NOT_IMPLEMENTED: Final = 540
OFFSET_HEADER: Final = b"x-stream-offset"
OFFSET = "x-stream-offset"
FILTER = "x-stream-filter"
UNFILTERED = "x-stream-match-unfiltered"
TRACKING = "x-stream-automatic-offset-tracking"
SERVER_TAG_PREFIX = "amq.ctag-"
INTERVAL: Final = re.compile(r"([0-9]+)([YMDhms])")
UNIT_MS: Final = {
    "Y": 365 * 86_400_000,
    "M": 30 * 86_400_000,
    "D": 86_400_000,
    "h": 3_600_000,
    "m": 60_000,
    "s": 1000,
}
OFFSET_MAX = (1 << 63) - 1
FILTERS_MAX = 256
# So many runs of deliveries are remembered before it pays to look which of them are settled.
LOOK_MIN = 64


def is_stream(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("x-queue-type") == "stream"


def check_consume(
    vhost: str, queue: str, no_ack: bool, exclusive: bool, prefetch: int, channel_limit: int
) -> None:
    """Raise Refusal if a stream cannot be consumed in this way, in RabbitMQ's words if any."""
    thing = named("queue", queue, vhost)
    if no_ack:
        raise Refusal(NOT_IMPLEMENTED, f"automatic acknowledgement not supported by stream {thing}")
    if channel_limit:
        raise Refusal(NOT_IMPLEMENTED, f"{thing} does not support global qos")
    if exclusive:
        raise Refusal(PRECONDITION_FAILED, "Stream consumers must not be exclusive")
    if not prefetch:
        raise Refusal(PRECONDITION_FAILED, f"consumer prefetch count is not set for stream {thing}")


def no_get(vhost: str, queue: str) -> Refusal:
    return Refusal(
        NOT_IMPLEMENTED, f"basic.get not supported by stream queues {named('queue', queue, vhost)}"
    )


def read_from(arguments: Mapping[str, Any], tag: str) -> ReadFrom:
    """Return what basic.consume asks for. Raises Refusal.

    The tag is a name whose position is kept when the tag is the client's own and no offset is
    given, or when the argument TRACKING says so.
    """
    said = arguments.get(OFFSET)
    start, value = _start(said)
    tracking = arguments.get(TRACKING)
    if tracking is not None and not isinstance(tracking, bool):
        raise Refusal(PRECONDITION_FAILED, f"{TRACKING} must be a boolean")
    if tracking is None:
        tracking = said is None and not tag.startswith(SERVER_TAG_PREFIX)
    unfiltered = arguments.get(UNFILTERED, False)
    if not isinstance(unfiltered, bool):
        raise Refusal(PRECONDITION_FAILED, f"{UNFILTERED} must be a boolean")
    return ReadFrom(
        start, value, tag if tracking else "", _filters(arguments.get(FILTER)), unfiltered
    )


def _start(said: Any) -> tuple[str, int]:
    match said:
        case None:
            return "next", 0
        case "first" | "last" | "next":
            return said, 0
        case str() if found := INTERVAL.fullmatch(said):
            return "ago", min(int(found[1]) * UNIT_MS[found[2]], OFFSET_MAX)
        case datetime.datetime():
            moment = said if said.tzinfo is not None else said.replace(tzinfo=datetime.UTC)
            return "timestamp", max(int(moment.timestamp() * 1000), 0)
        case int() if not isinstance(said, bool):
            return ("back", -said) if said < 0 else ("offset", said)
    raise Refusal(
        PRECONDITION_FAILED,
        f"{OFFSET} must be an integer, a timestamp, an interval, 'first', 'next' or 'last'",
    )


def _filters(said: Any) -> list[str]:
    values = [] if said is None else said if isinstance(said, list) else [said]
    if not all(isinstance(value, str) for value in values):
        raise Refusal(PRECONDITION_FAILED, f"{FILTER} must be a string or a list of strings")
    if len(values) > FILTERS_MAX:
        raise Refusal(PRECONDITION_FAILED, f"{FILTER} has more than {FILTERS_MAX} values")
    return values


class _Run(NamedTuple):
    """Deliveries with consecutive numbers and consecutive offsets."""

    number: int
    offset: int
    messages: int


class Reading:
    """The position of one consumer of a stream.

    Its deliveries are remembered as long as they may be unsettled. `epoch` is that of the shard
    that gave the latest delivery.
    """

    def __init__(self, asked: ReadFrom) -> None:
        self.asked = asked
        self.epoch = 0
        # The offset behind the latest delivery, None until a shard has said where it begins.
        self._position: int | None = None
        self._seen_below = 0
        self._runs: deque[_Run] = deque()
        # Offsets given back that have not come again; at most as many as the prefetch.
        self._again: set[int] = set()
        self._look_at = LOOK_MIN

    def begins(self, offset: int) -> None:
        """Note where the consumer begins, as its shard says before the first delivery."""
        if self._position is None:
            self._position = offset

    @property
    def crowded(self) -> bool:
        """Return whether `forget_before` is to be called."""
        return len(self._runs) > self._look_at

    def forget_before(self, number: int) -> None:
        """Forget deliveries before this number: all of them are settled."""
        while self._runs and self._runs[0].number + self._runs[0].messages <= number:
            self._runs.popleft()
        self._look_at = max(LOOK_MIN, 2 * len(self._runs))

    def take(self, number: int, count: int, blob: memoryview, epoch: int) -> bytes:
        """Return the stored messages of a delivery, each with its offset in a header."""
        self.epoch = epoch
        offsets = array("Q", bytes(blob[: 8 * count]))
        if offsets[-1] - offsets[0] + 1 == count:
            self._add(_Run(number, offsets[0], count))
        else:
            for i, offset in enumerate(offsets):
                self._add(_Run(number + i, offset, 1))
        if self._again:
            self._again.difference_update(offsets)
        self._position = max(self._position or 0, offsets[-1] + 1)
        self._seen_below = max(self._seen_below, self._position)
        return properties.with_offsets(blob[8 * count :], offsets.tobytes(), OFFSET_HEADER)

    def _add(self, run: _Run) -> None:
        last = self._runs[-1] if self._runs else None
        if (
            last
            and last.number + last.messages == run.number
            and last.offset + last.messages == run.offset
        ):
            self._runs[-1] = last._replace(messages=last.messages + run.messages)
        else:
            self._runs.append(run)

    def give_back(self, first: int, last: int) -> None:
        """Note deliveries that are to come again."""
        for run in self._runs:
            start, stop = max(first, run.number), min(last, run.number + run.messages - 1)
            self._again.update(
                range(run.offset + start - run.number, run.offset + stop - run.number + 1)
            )

    def resume(self, unsettled: int | None) -> ReadFrom:
        """Return where to begin in a new life of the shard.

        `unsettled` is the number of the first unsettled delivery of the old life.
        """
        asked = self.asked
        if self._position is None:
            return asked
        offsets = [self._position, *self._again]
        if unsettled is not None:
            behind = (run for run in self._runs if run.number + run.messages > unsettled)
            offsets += [run.offset + max(unsettled - run.number, 0) for run in behind]
        self._position = min(offsets)
        self._runs.clear()
        self._again.clear()
        return ReadFrom(
            "at", self._position, asked.name, asked.filters, asked.unfiltered, self._seen_below
        )
