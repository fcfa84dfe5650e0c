"""Copy what is readable and still needed out of a store, damaged or not, into a new one.

Order, queue ids, times, priorities and redelivered flags stay; segments and positions are new. The
old files are only read, so a salvage can be repeated.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store.damage import Damage
from shardmq.shardd.store.files import Files
from shardmq.shardd.store.segments.recovery import REDELIVERED, State, read_state
from shardmq.shardd.store.segments.store import SegmentStore
from shardmq.shardd.store.tools.inspection import Contents, contents, encode, groups


@dataclass(slots=True)
class Outcome:
    messages: int = 0
    references: int = 0
    settled: int = 0  # references left behind because nobody needs them
    clean: bool = False  # the old store was stopped cleanly: its redelivered flags are known
    damage: list[Damage] = field(default_factory=list)

    def left_behind_bytes(self) -> int:
        return sum(
            one.stop - one.start for one in self.damage if one.what in ("torn", "corrupt", "header")
        )


def salvage(files: Files, source: str, target: str) -> Outcome:
    """Copy the store in `source` to `target`, a directory that is empty or not there yet."""
    store = SegmentStore(target, files=files)
    store.recover([])
    state = read_state(files, source)
    outcome = Outcome(clean=state is not None)
    live: dict[int, array[int]] = {}
    try:
        for one in contents(files, source):
            outcome.damage += one.damage
            copy_segment(store, one, state, outcome, live)
    finally:
        store.close(live)
    return outcome


def copy_segment(
    store: SegmentStore,
    one: Contents,
    state: State | None,
    outcome: Outcome,
    live: dict[int, array[int]],
) -> None:
    outcome.settled += sum(len(message.queues) - len(message.live) for message in one.messages())
    for group in groups(one.survivors()):
        for arrival in store.append(encode(group)):
            entries = live.setdefault(arrival.queue_id, array("Q"))
            marks = state.marks.get(arrival.queue_id, ()) if state is not None else ()
            marked = {entry & ~15 for entry in marks}
            for message, entry in zip(group, arrival.entries, strict=True):
                known = state is not None and message.segment < state.next_number
                again = not known or message.segment << 32 | message.position << 4 in marked
                entries.append(entry | REDELIVERED if again else entry)
            outcome.references += len(arrival.entries)
        outcome.messages += len(group)
