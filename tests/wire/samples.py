"""One of each message, with every field set to something that would be missed.

python -m tests.wire.samples > tests/wire/golden/v2.json     writes the golden bytes anew
"""

from __future__ import annotations

import json
import sys
from typing import get_args

from shardmq.broker.shared.control import AnyControl
from shardmq.shardd.wire import codec, envelope
from shardmq.shardd.wire import messages as wire
from shardmq.shardd.wire.codec import TARGETS, Routes
from tests.reference import wire as reference

SPEC = wire.QueueSpec(7, "/", "orders", True, False, False, {"x-message-ttl": 1000})
CONTROL: list[wire.Control] = [
    wire.Join("ipc:///run/door-0.sock", 99, 3),
    wire.Outdated(100),
    wire.Hello(4711, True),
    wire.Paused(),
    wire.FrontDoorGone(0, 99),
    wire.TakenForGone(99),
    wire.Assign([SPEC], False, [3]),
    wire.CreateQueues(1, [SPEC]),
    wire.DeleteQueue(2, 7, True, False),
    wire.DropVhost(3, "/"),
    wire.AutoDeleted(7, "expired"),
    wire.FirstConsumer(7),
    wire.Stats(4),
    wire.StatsReply(
        5,
        [wire.QueueStats(7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 1, 2, 3, 4, 5, 0.5)],
        [wire.ConsumerStats(7, 0, 1, 2, "tag", False, True, 10, True, 3, False)],
        {"rss_bytes": 1.5},
        3,
        [wire.StreamStats(7, 1, 9, 2, 4096, {"name": 5})],
        [wire.ReaderStats(7, 0, 1, 2, "tag", 5)],
        {7: [(3, 5)]},
    ),
    wire.ListQueues(6),
    wire.QueueIds(6, [7]),
    wire.Alarm("low on disk"),
    wire.Attach(6, 7, 8, 9, 10, "tag", False, True, -1, 20, True, True),
    wire.AttachPart(6, 7, 8, 9, 10, "tag", False, False, 0, 20, limited=True, group=11),
    wire.Attached(7),
    wire.AttachReader(
        23,
        7,
        8,
        9,
        10,
        "tag",
        False,
        False,
        0,
        20,
        False,
        True,
        read=wire.ReadFrom("offset", 5, "name", ["a"], True, 7),
    ),
    wire.AttachBounded(
        23,
        7,
        8,
        9,
        10,
        "tag",
        False,
        False,
        0,
        20,
        False,
        True,
        read=wire.ReadFrom("first"),
        stop=100,
        mark=90,
    ),
    wire.AttachStreamPart(
        23,
        7,
        8,
        9,
        10,
        "tag",
        False,
        False,
        0,
        20,
        limited=True,
        read=wire.ReadFrom("first"),
        stop=100,
        group=11,
    ),
    wire.AttachedAt(23, 5),
    wire.SetBounds(8, 100, None),
    wire.MarkReached(8, 95),
    wire.InspectStream(25, 7, 8, 1000, 2000),
    wire.StreamInspected(25, 1, 9, 3, 4),
    wire.Pull(26, 7, 8, 3, 9, 4096),
    wire.Pulled(26, 1, b"offset78", b"message", 4),
    wire.Unwatch(7, 8),
    wire.StoreOffset(27, 7, "group", 23),
    wire.SyncSettled(8, [9, 10]),
    wire.SettledSynced(8, True),
    wire.Detach(8, 9),
    wire.Release(9, [1, 2]),
    wire.CreditReport(11, 12, True),
    wire.AckTimeout(7, 8, 1800000),
    wire.Cancelled(13),
    wire.Get(14, 7, 8, 9, 10, False),
    wire.Got(15, b"message", 16, True, 17, 25),
    wire.Count(16, 7),
    wire.CountUnsettled(12, 7, 99),
    wire.UnsettledCount(12, 99, 3),
    wire.DeadLetterUpTo(13, 7, 99, "resharded"),
    wire.TakeLetters(14, 7, 1 << 40, 3, 8, True),
    wire.Letters(14, 2, b"records", [(0, 1)], [(1, 3)], 9),
    wire.PutLetters(15, 8, 1 << 40, 3, b"records", [(0, 1)], [(1, 3)]),
    wire.AskLetters(16, 8),
    wire.LastLetters(16, 1 << 40, 3),
    wire.TakeChunks(16, 7, 23),
    wire.Chunks(16, 23, 25, b"chunks", 3, 1_700_000_000_000, 27, 4096, 77),
    wire.PutChunks(17, 8, 23, 25, b"chunks", 3, 1_700_000_000_000, 77),
    wire.TakePlaces(18, 7),
    wire.Places(18, {b"audit": 23}, b"producers"),
    wire.PutPlaces(19, 8, {b"audit": 24}, b"producers", {b"audit": 23}),
    wire.Recall(16, 7, True),
    wire.Purge(17, 7, 2),
    wire.DeadLetters(20, "/", "orders", "expired", "dlx", "dead", True, 1, b"message"),
    wire.DeadLettersPublished(21, [(2, 3)]),
    wire.DedupAsk(
        28,
        5,
        [(7, 128), ("//x", 1000)],
        [(0, b"0123456789abcdef", 0), (1, b"fedcba9876543210", 60_000)],
    ),
    wire.DedupVerdicts(28, bytes([wire.FIRST, wire.FOLLOWS])),
    wire.DedupOutcome([5], [6, 7]),
    wire.DedupForget("//x"),
    wire.Reserve(29, 3, [(7, [4, 300]), (8, [])]),
    wire.Redeem(3),
    wire.Unreserve(3),
    wire.Snapshot(51, "/var/backups/one/shard-00"),
    wire.Done(18, 19, 20, [7, 300]),
    wire.Refused(19, 404, "gone"),
]


def binary() -> dict[str, bytes]:
    """Return samples of the kinds that are not CONTROL."""
    who = (1, 2, 3, 0)
    fact = reference.Facts(1, b"ex", b"key", 0, b"\x10\0\x02", (b"bo", b"dy"), 5000, 2, 9, 0)
    buffer, table = reference.read_of([fact, fact])
    packer, routes = codec.Packer(1), Routes()
    routes.learn(b"\x02ex\x03key\0", TARGETS, [(0, [7, 8])], True)
    packer.pack(routes, buffer, table, 0, 77, 1, 1_700_000_000_000)
    publish = packer.take(0, 1, 2, 3, 4)
    assert publish is not None
    writer = codec.DeliveryWriter(*who)
    writer.add(77, 1, 8, 5, True, 1, reference.stored(fact))
    deliver = writer.take()
    assert deliver is not None
    return {
        "PUBLISH": publish,
        "DELIVER": deliver,
        "SETTLE": envelope.settles(*who, [(8, wire.ACK, 5, 6), (8, wire.REQUEUE, 7, 7)]),
        "CONFIRMED": envelope.confirmed(*who, 4, [(77, 1, 2, 2)]),
        "CREDIT": envelope.credit(*who, [(77, 4096)]),
    }


def golden() -> dict[str, str]:
    """Return the bytes of all samples in hex.

    Return also, by name, the fields of what front doors and the controller say.
    """
    control = {type(what).__name__: envelope.control(1, 2, 3, 4, what).hex() for what in CONTROL}
    stream = {
        f"stream {kind.__name__}": " ".join(kind.__struct_fields__) for kind in get_args(AnyControl)
    }
    return control | {name: message.hex() for name, message in binary().items()} | stream


if __name__ == "__main__":
    json.dump(golden(), sys.stdout, indent=1)
    print()
