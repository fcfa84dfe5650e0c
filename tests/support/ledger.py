"""What clients were told over many rounds of kills, and what must be true of it.

Complaints are found as it is told.

A key names one channel's publishes, numbered from 1 (bodies as in history.py). A message may go to
several queues: what is said of deliveries holds for each. Times are of one clock, in seconds.

- A publish is answered once: by an ack or by a nack, never both.
- What was confirmed is delivered.
- No body is damaged, foreign, or in a queue it was not sent to.
- What is delivered as new comes in the order of publishing, and nothing comes twice as new.
- The order falls back only where something was killed or the consumer left, and no more often.
- What was acknowledged, and known to be so to the broker, comes again only if a shard died before
  it was on disk, or if its queue moved to another shard (`move_begins`):
  - The old shard takes back what clients still hold when the messages go over. Their acks come too
    late.
  - A shard that dies while the queue moves may forget that a batch has gone over. The batch goes
    over again, and its first copy may be delivered and acknowledged by then, both after the death.
    So each message that was published before the death may come once more for it, however late,
    unless it was settled before the move.

While connections between the processes are harmed, and for a while after that, they end at moments
that nobody tells the ledger: `unrest_begins`, `unrest_ends`. What the end of a connection explains
is no fault then. At all times what is delivered as new is in order, and what comes again is marked.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

from tests.support.history import read_body

# An acknowledgement reaches the disk within a second and a sync; more on a machine with other work.
ACK_LASTS_S = 5.0
COMPLAINTS_MAX = 20

UNANSWERED, ACKED, NACKED = 0, 1, 2
NEW, MARKED = 1, 2  # how a message was delivered


class Published:
    """All of one key. Index 0 is not used."""

    def __init__(self, queues: tuple[str, ...]) -> None:
        self.queues = queues
        self.answers = bytearray(1)


class Arrived:
    """One key's messages in one queue."""

    def __init__(self) -> None:
        self.seen = bytearray(1)
        self.last_new = 0  # delivered without a mark
        self.last = 0
        self.falls = 0
        self.settled_at = array("d", [0.0])  # 0: not known to be settled
        self.handed_out_at = array("d", [0.0])

    def grow(self, number: int) -> None:
        more = number + 1 - len(self.seen)
        if more > 0:
            self.seen.extend(bytes(more))
            for times in (self.settled_at, self.handed_out_at):
                times.frombytes(bytes(8 * more))


class Death:
    """A shard died while a queue moved: what the queue had may have gone over, and goes again."""

    def __init__(self, move_began: float, last: dict[str, int]) -> None:
        self.move_began = move_began
        self.last = last  # number published by then, by key
        self.explained: set[tuple[str, int]] = set()

    def explains(self, key: str, number: int, settled_at: float) -> bool:
        """Return whether this message may come again for this death, which it may once."""
        message = (key, number)
        if (
            number > self.last.get(key, 0)
            or settled_at < self.move_began
            or message in self.explained
        ):
            return False
        self.explained.add(message)
        return True


class Ledger:
    """Told by the clients of several threads."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.kills: list[float] = []  # of shards
        self.cuts: list[float] = []  # of connections to shards
        self._unrest: list[tuple[float, float]] = []  # from, to; the last one may not be over
        self._moving: dict[str, float] = {}  # since when, by queue
        # From the begin of each move to the time when its old shard surely hands out no more.
        self._hand_overs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._deaths_in_moves: dict[str, list[Death]] = defaultdict(list)
        self.deaths = 0  # of whatever process
        self.deliveries = 0
        self._comings: Counter[str] = Counter()  # of consumers, by queue
        self._published: dict[str, Published] = {}
        self._arrived: dict[tuple[str, str], Arrived] = defaultdict(Arrived)
        self._unordered: set[str] = set()
        self._repeated: set[str] = set()
        self._waiting: Counter[str] = Counter()  # published, and not seen, by queue
        self._lock = threading.Lock()

    def _complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS_MAX:
            self.complaints.append(text)

    def complain(self, text: str) -> None:
        """Of what a client saw that is no matter of messages."""
        with self._lock:
            self._complain(text)

    # -- what happens ------------------------------------------------------------------------------

    def may_fall(self, queue: str) -> None:
        """Expect no order in a queue, whose consumers are several or give messages back.

        Only damage, loss and unmarked repeats are faults there.
        """
        self._unordered.add(queue)

    def may_repeat(self, queue: str) -> None:
        """Expect each message at least once in a queue, in any order, with a mark or without."""
        self._repeated.add(queue)

    def was_published(self, key: str, queues: tuple[str, ...]) -> int:
        """Note a published message; return its number, to be put into its body."""
        with self._lock:
            published = self._published.get(key)
            if published is None:
                published = self._published[key] = Published(queues)
            published.answers.append(UNANSWERED)
            for queue in queues:
                self._waiting[queue] += 1
            return len(published.answers) - 1

    def was_answered(self, key: str, numbers: Iterable[int], answer: int) -> None:
        with self._lock:
            answers = self._published[key].answers
            for number in numbers:
                if not 0 < number < len(answers):
                    self._complain(f"key {key}: {number} was answered, but never published")
                elif answers[number] != UNANSWERED:
                    self._complain(
                        f"key {key}: {number} was answered twice: {answers[number]}, then {answer}"
                    )
                else:
                    answers[number] = answer
                    if answer == NACKED:  # it may come or not
                        self._waiting.subtract(self._published[key].queues)

    def was_killed(self, now: float, *, shards: bool) -> None:
        """Note that a process was killed a moment after `now`.

        With `shards` a shard was among the killed processes.
        """
        with self._lock:
            self.deaths += 1
            if shards:
                self.kills.append(now)
                for queue, began in self._moving.items():
                    self.deaths += 1  # the order falls once more where a batch begins again
                    self._deaths_in_moves[queue].append(Death(began, self._last_published(queue)))

    def _last_published(self, queue: str) -> dict[str, int]:
        return {
            key: len(published.answers) - 1
            for key, published in self._published.items()
            if queue in published.queues
        }

    def move_begins(self, queue: str, now: float) -> None:
        """Note that the queue may move to another shard from now on."""
        with self._lock:
            self.deaths += 1
            self._moving[queue] = now
            self._hand_overs[queue].append((now, float("inf")))

    def handed_over(self, queue: str, now: float) -> None:
        """Note that only the new shard hands out messages of the queue that moves."""
        with self._lock:
            began, until = self._hand_overs[queue].pop()
            self._hand_overs[queue].append((began, min(until, now)))

    def move_ends(self, queue: str, now: float) -> None:
        """Note that the queue moves no more."""
        self.handed_over(queue, now)
        with self._lock:
            del self._moving[queue]

    def was_cut(self, now: float) -> None:
        """Note that a connection to a shard ended at `now`: what its peer held comes again."""
        with self._lock:
            self.deaths += 1
            self.cuts.append(now)

    def unrest_begins(self, now: float) -> None:
        """Note that connections between processes are harmed from now on."""
        with self._lock:
            self.deaths += 1
            self._unrest.append((now, float("inf")))

    def unrest_ends(self, at: float) -> None:
        """Note the time from which on no connection ends of what was done before."""
        with self._lock:
            began, _ = self._unrest.pop()
            self._unrest.append((began, at))

    def consumer_came(self, queue: str) -> None:
        """Note a new consumer of the queue: the messages that the one before it held go back."""
        with self._lock:
            self._comings[queue] += 1

    def was_delivered(
        self, queue: str, body: bytes, redelivered: bool, now: float, since: float | None = None
    ) -> tuple[str, int]:
        """`since`: it was not handed out before, if that is known."""
        key, number = read_body(body)
        with self._lock:
            self.deliveries += 1
            self._check_delivery(
                queue, key, number, redelivered, now, now if since is None else since
            )
        return key, number

    def was_settled(self, queue: str, known: Iterable[tuple[str, int, float]], now: float) -> None:
        """Note acknowledged messages: key, number, and a time.

        The message was not handed out before that time.

        The shard of the queue has answered a request that came behind the acknowledgement.
        """
        with self._lock:
            for key, number, handed_out_at in known:
                arrived = self._arrived[queue, key]
                arrived.settled_at[number] = now
                arrived.handed_out_at[number] = handed_out_at

    def waiting(self, queue: str) -> int:
        """About how many messages it still has to deliver."""
        return self._waiting[queue]

    # -- what must be true -------------------------------------------------------------------------

    def _check_delivery(
        self, queue: str, key: str, number: int, redelivered: bool, now: float, since: float
    ) -> None:
        published = self._published.get(key)
        if published is None or not 0 < number < len(published.answers):
            self._complain(f"{queue}: {key}:{number} was delivered, but never published")
            return
        if queue not in published.queues:
            self._complain(f"{queue}: {key}:{number} was delivered, but sent to {published.queues}")
        arrived = self._arrived[queue, key]
        arrived.grow(number)
        if queue in self._repeated:
            self._waiting[queue] -= arrived.seen[number] == 0
            arrived.seen[number] |= NEW
            return
        # Of several consumers one may look late at what it was given before another was given it
        # again, and settled it.
        before = (
            arrived.seen[number] if queue not in self._unordered else arrived.seen[number] & NEW
        )
        if before and not redelivered:
            self._complain(f"{queue}: {key}:{number} was delivered again without a mark")
        if queue not in self._unordered:
            self._check_order(queue, key, arrived, number, redelivered, now)
        if 0 < arrived.settled_at[number] < (since if queue in self._unordered else now):
            self._check_settled(queue, key, arrived, number, now)
        self._waiting[queue] -= arrived.seen[number] == 0
        arrived.seen[number] |= MARKED if redelivered else NEW

    def _check_order(
        self,
        queue: str,
        key: str,
        arrived: Arrived,
        number: int,
        redelivered: bool,
        now: float,
    ) -> None:
        if not redelivered:
            if number < arrived.last_new:
                self._complain(
                    f"{queue}: {key}:{number} was delivered as new behind {arrived.last_new}"
                )
            arrived.last_new = number
        if number <= arrived.last and not self._is_unrest(now, now):
            arrived.falls += 1
            if arrived.falls > self.deaths + self._comings[queue]:
                why = (
                    f"{self.deaths} deaths and {self._comings[queue]} consumers do not explain "
                    f"{arrived.falls} falls"
                )
                self._complain(f"{queue}: {key} fell from {arrived.last} to {number}: {why}")
        arrived.last = number

    def _check_settled(
        self, queue: str, key: str, arrived: Arrived, number: int, now: float
    ) -> None:
        """Complain of a message that came again after its ack, unless a kill explains it.

        The kill must be between the delivery and the time when the acknowledgement was surely on
        disk. A cut must be before the shard was known to have the acknowledgement: it was lost with
        the connection then, and the answer that seemed to come behind it came by the next one.
        Moves of the queue explain more (see the head of this file).
        """
        first, settled = arrived.handed_out_at[number], arrived.settled_at[number]
        last = settled + ACK_LASTS_S
        at = bisect_left(self.kills, first)
        cut_at = bisect_left(self.cuts, first)
        if cut_at < len(self.cuts) and self.cuts[cut_at] <= settled:
            return
        if self._is_unrest(first, settled):
            return
        if any(began <= settled and first <= until for began, until in self._hand_overs[queue]):
            return
        if at == len(self.kills) or self.kills[at] > last:
            if any(death.explains(key, number, settled) for death in self._deaths_in_moves[queue]):
                return
            age = now - settled
            unrest = "".join(
                f"; unrest from {now - began:.3f} to {now - ended:.3f} s before"
                for began, ended in self._unrest[-3:]
            )
            self._complain(
                f"{queue}: {key}:{number} came again {age:.3f} s after it was acknowledged, "
                f"nothing was killed; handed out {now - first:.3f} s before{unrest}"
            )

    def _is_unrest(self, first: float, last: float) -> bool:
        return any(began <= last and first <= ended for began, ended in self._unrest[-20:])

    def missing(self) -> list[str]:
        """Return the confirmed messages that were not delivered (yet), by queue and key.

        Each has the number of them and the first.
        """
        found = []
        with self._lock:
            for key, published in self._published.items():
                for queue in published.queues:
                    seen = (
                        self._arrived[queue, key].seen if (queue, key) in self._arrived else b"\0"
                    )
                    gone = [
                        number
                        for number, answer in enumerate(published.answers)
                        if answer == ACKED and not (number < len(seen) and seen[number])
                    ]
                    if gone:
                        found.append(f"{queue}: {len(gone)} of {key}, first {gone[:5]}")
        return found

    def counts(self) -> dict[str, int]:
        with self._lock:
            answers = [published.answers for published in self._published.values()]
            return {
                "published": sum(len(each) - 1 for each in answers),
                "confirmed": sum(each.count(ACKED) for each in answers),
                "nacked": sum(each.count(NACKED) for each in answers),
                "delivered": sum(
                    len(arrived.seen) - arrived.seen.count(0) for arrived in self._arrived.values()
                ),
                "deaths": self.deaths,
            }

    def check(self) -> None:
        """At any time."""
        assert not self.complaints, "\n".join(self.complaints)

    def check_all(self) -> None:
        """When all is still."""
        self.check()
        missing = self.missing()
        assert not missing, "confirmed messages were never delivered: " + "; ".join(
            missing[:COMPLAINTS_MAX]
        )
