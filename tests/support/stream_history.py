"""Random lives of a StreamLog beside a slow, obvious model, and checks of the files.

The model is a list: the message of each offset that was ever given. What a log owes: offsets count
up without a gap; a committed message is found under its offset until retention lets go of the
segment it is in, and no reader is ever shown another one there, whatever happens in between; what
was committed outlives a power cut at any call. Readers keep nothing but an offset and go on while
messages are appended, segments go and the power fails.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from shardmq.shardd.store.streams import StreamCache, StreamLog, filter_of, wanted_filters
from shardmq.shardd.store.streams.segments import UnderSync
from shardmq.shardd.store.sync import SyncJob
from tests.reference.record import Record, encode_message, split_messages
from tests.support.faulty_files import FaultyFiles, PowerCut

DIRECTORY = "stream"
SEGMENT_BYTES = 4096
CONSUMERS = (b"", b"audit", b"n" * 255)
FILTERS = (b"", b"north", b"south")


@dataclass
class Model:
    messages: list[bytes] = field(default_factory=list)  # by offset
    timestamps: list[int] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)  # filter value of each, b"": none
    first: int = 0  # what is before may be gone
    committed: int = 0
    # all that were stored, the last counts
    positions: dict[bytes, list[int]] = field(default_factory=dict)


class StreamHistory:
    def __init__(self, seed: int, files: FaultyFiles | None = None, *, sync: bool = True) -> None:
        self.random = random.Random(seed)
        self.files = FaultyFiles(seed, self.random.choice([512, 4096])) if files is None else files
        self.sync_mode = sync
        self.filtered = self.random.random() < 0.3
        self.model = Model()
        self.now = 1_000_000
        self.counter = 0
        self.job: SyncJob[UnderSync] | None = None
        self.job_promises = 0
        self.readers = [0, 0, 0]
        self.flushed = 0
        self.log = self.new_log()
        self.log.recover()

    def new_log(self) -> StreamLog:
        # Hardly any room in the cache, so that files are closed and indexes forgotten all the time.
        cache = StreamCache(self.files, handles_max=2, indexes_bytes_max=100)
        return StreamLog(
            DIRECTORY,
            files=self.files,
            segment_bytes=SEGMENT_BYTES,
            sync=self.sync_mode,
            cache=cache,
        )

    def play(self, steps: int) -> None:
        acts = (
            [self.append] * 6
            + [self.read_on] * 3
            + [
                self.read_anywhere,
                self.read_filtered,
                self.find,
                self.store_position,
                self.flush,
                self.retain,
            ]
            + [self.sync, self.sync, self.sync_step, self.seal]
        )
        for _ in range(steps):
            act = self.random.choice(acts)
            if self.random.random() < 0.01:
                act = self.truncate
            act()
            self.check_bounds()

    # -- acts --------------------------------------------------------------------------------------

    def append(self) -> None:
        pick = self.random
        records, values = [], []
        for _ in range(pick.choice([1, 1, 3, 8])):
            self.now += pick.choice([0, 1, 50])
            messages = []
            for _ in range(pick.choice([1, 1, 2, 5])):
                self.counter += 1
                body = bytes([pick.randrange(256)]) * pick.choice(
                    [0, 1, 16, 16, 100, 700, pick.choice([2000, 9000])]
                )
                messages.append(encode_message(body, b"x", b"%d" % self.counter))
                values.append(pick.choice(FILTERS))
            records.append(
                Record(
                    tuple(range(pick.choice([1, 3]))),
                    tuple(messages),
                    self.now,
                    pick.choice([5, 100]),
                )
            )
        filters = (
            array("I", [filter_of(value) if value else 0 for value in values])
            if self.filtered
            else None
        )
        expected = self.log.next_offset
        assert expected == len(self.model.messages)
        for record in records:  # before the call: the power may fail in the middle of it
            self.model.messages += record.messages
            self.model.timestamps += [record.timestamp] * len(record.messages)
        self.model.values += values if self.filtered else [b""] * len(values)
        first = self.log.append(b"".join(record.encode() for record in records), filters)
        assert first == expected and self.log.next_offset == len(self.model.messages)

    def read_on(self) -> None:
        """One of the readers goes on where it was."""
        which = self.random.randrange(len(self.readers))
        self.readers[which] = self.check_read(
            self.readers[which], self.random.choice([1, 300, 5000, 1 << 20])
        )

    def read_anywhere(self) -> None:
        self.check_read(
            self.random.randint(0, self.log.next_offset + 3), self.random.choice([0, 100, 5000])
        )

    def check_read(self, offset: int, bytes_max: int) -> int:
        begin = max(offset, self.log.first_offset)
        found = self.log.read(offset, bytes_max)
        messages = split_messages(found.blob)
        assert list(found.sizes) == [int.from_bytes(message[:4], "little") for message in messages]
        if begin >= self.log.committed_offset:
            assert not messages and found.next_offset == max(offset, begin)
            return found.next_offset
        assert messages == self.model.messages[begin : begin + len(messages)]
        assert messages and list(found.runs) == [begin, len(messages)]
        end = found.next_offset
        assert end == begin + len(messages) <= self.log.committed_offset
        assert len(found.blob) <= bytes_max or len(messages) == 1
        if end < self.log.committed_offset:
            assert len(found.blob) + len(self.model.messages[end]) > bytes_max, "as many as fit"
        return end

    def read_filtered(self) -> None:
        """Whoever asks for some filter values gets all messages that have them."""
        values = set(self.random.sample(FILTERS, 2))
        wanted = wanted_filters([value for value in values if value], unfiltered=b"" in values)
        offset = self.random.randint(self.log.first_offset, self.log.next_offset)
        for _ in range(3):
            found = self.log.read(offset, self.random.choice([100, 3000]), wanted)
            messages = split_messages(found.blob)
            seen = set()
            for first, count in zip(found.runs[::2], found.runs[1::2], strict=True):
                assert (
                    messages[len(seen) : len(seen) + count]
                    == self.model.messages[first : first + count]
                )
                seen.update(range(first, first + count))
            assert len(seen) == len(messages)
            passed = range(max(offset, self.log.first_offset), found.next_offset)
            assert {at for at in passed if self.model.values[at] in values} <= seen <= set(passed)
            assert found.next_offset > offset or offset >= self.log.committed_offset
            offset = found.next_offset

    def find(self) -> None:
        timestamp = self.random.randint(max(self.now - 2000, 0), self.now + 5)
        found = self.log.find(timestamp)
        assert self.log.first_offset <= found <= self.log.committed_offset
        before = self.model.timestamps[self.log.first_offset : found]
        assert all(one < timestamp for one in before), "what is newer lies behind"
        after = self.model.timestamps[found : self.log.committed_offset]
        assert all(one >= timestamp for one in after[40:]), (
            "in the chunk found begins what is newer"
        )

    def store_position(self) -> None:
        name = self.random.choice(CONSUMERS)
        if self.random.random() < 0.2:
            self.model.positions.pop(name, None)
            self.log.positions.forget(name)
        else:
            offset = self.random.randint(0, self.log.committed_offset)
            self.model.positions.setdefault(name, []).append(offset)
            self.log.positions.set(name, offset)
        assert dict(self.log.positions.offsets) == {
            name: stored[-1] for name, stored in self.model.positions.items()
        }

    def retain(self) -> None:
        before = self.log.stats()
        bounds = {
            "max_bytes": self.random.choice([None, 3 * SEGMENT_BYTES, 0]),
            "max_age_ms": self.random.choice([None, 1000, 0]),
            "max_messages": self.random.choice([None, 100]),
        }
        gone = self.log.retain(self.now, **bounds)
        after = self.log.stats()
        assert after["first_offset"] == before["first_offset"] + gone
        assert (after["segments"] < before["segments"]) == (gone > 0)
        assert after["segments"] >= min(before["segments"], 1), "the last one stays"
        if (
            after["segments"] > 1
            and self.log.committed_offset == self.log.next_offset
            and self.job is None
        ):
            assert bounds["max_bytes"] is None or after["disk_bytes"] <= bounds["max_bytes"]
            assert bounds["max_messages"] is None or after["messages"] <= bounds["max_messages"]
        if not any(bound is not None for bound in bounds.values()):
            assert gone == 0
        self.model.first = after["first_offset"]

    def truncate(self) -> None:
        self.end_sync()
        self.model.first = len(self.model.messages)
        self.log.truncate()
        assert self.log.first_offset == self.log.committed_offset == self.log.next_offset
        self.model.committed = self.flushed = self.log.next_offset

    def seal(self) -> None:
        self.log.seal()
        self.flushed = self.log.next_offset

    def flush(self) -> None:
        self.log.flush()
        self.flushed = self.log.next_offset

    def sync(self) -> None:
        if self.job is None:
            self.sync_step()
        self.sync_step()

    def sync_step(self) -> None:
        """Begin one, or end the one that was begun some steps ago."""
        if self.job is None:
            self.job_promises = self.log.next_offset
            self.job = self.log.begin_sync()
            self.flushed = self.log.next_offset
            if self.job is None:
                self.model.committed = self.job_promises
            return
        self.job.run()
        self.log.finish_sync(self.job)
        self.job = None
        self.model.committed = max(self.model.committed, self.job_promises)

    def check_bounds(self) -> None:
        log = self.log
        assert self.model.first == log.first_offset <= log.committed_offset <= log.next_offset
        assert log.next_offset == len(self.model.messages)
        assert log.committed_offset >= self.model.committed
        if self.sync_mode:
            assert log.committed_offset == self.model.committed, (
                "only what is on stable storage is shown"
            )
        assert log.first_offset <= log.last_chunk_offset <= log.committed_offset

    # -- ends --------------------------------------------------------------------------------------

    def end_sync(self) -> None:
        if self.job is not None:
            self.sync_step()

    def stop_cleanly(self) -> None:
        self.end_sync()
        promised = self.log.next_offset
        self.log.close()
        assert not self.files.handles, "every file is closed"
        self.start_again(power_cut=self.sync_mode and self.random.random() < 0.5)
        assert self.log.next_offset == promised and self.log.damage == [], (
            "a clean stop costs nothing"
        )
        assert dict(self.log.positions.offsets) == {
            name: stored[-1] for name, stored in self.model.positions.items()
        }

    def crash(self, *, power_cut: bool) -> None:
        promised = self.model.committed if power_cut else self.flushed
        self.start_again(power_cut=power_cut)
        assert self.log.next_offset >= promised, (
            f"{promised - self.log.next_offset} messages are lost that it owed"
        )
        assert all(damage.what == "torn" for damage in self.log.damage), (
            "nothing is damaged by a power cut"
        )
        for name, offset in dict(self.log.positions.offsets).items():
            assert offset <= max(self.model.positions.get(name, [1 << 62])), (
                "no consumer is put forward"
            )

    def start_again(self, *, power_cut: bool) -> None:
        self.files = self.files.restarted(power_cut=power_cut)
        self.job = None
        self.log = self.new_log()
        self.log.recover()
        model = self.model
        assert self.log.next_offset <= len(model.messages), "a message that was never appended"
        del model.messages[self.log.next_offset :], model.timestamps[self.log.next_offset :]
        del model.values[self.log.next_offset :]
        assert self.log.first_offset <= max(model.first, self.log.next_offset)
        model.first = self.log.first_offset
        model.committed = self.flushed = self.log.next_offset
        assert self.log.committed_offset == self.log.next_offset
        model.positions = {
            name: [offset] for name, offset in dict(self.log.positions.offsets).items()
        }
        self.read_all()

    def read_all(self) -> None:
        offset = self.log.first_offset
        while offset < self.log.committed_offset:
            offset = self.check_read(offset, self.random.choice([1000, 100_000]))


def live_through_power_cut(seed: int, *, sync_lies: bool = False) -> None:
    """Play some lives, each ended by a power cut in the middle of a call."""
    history = StreamHistory(seed)
    for _ in range(3):
        history.files.sync_lies = sync_lies
        history.files.cut_after = history.random.choice([3, 10, 30, 100, 300])
        try:
            history.play(60)
        except PowerCut:
            pass
        history.crash(power_cut=True)
