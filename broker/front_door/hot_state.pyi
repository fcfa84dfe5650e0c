from collections.abc import Callable
from typing import Any, Protocol

from shardmq.broker.amqp.frames import Sizes
from shardmq.shardd.wire.codec import Packer, Tally

RUN_S_MAX: float
PUBLISH_WINDOW_BYTES: int
ACKS_TOGETHER_MAX: int
RANGES_MAX: int
NO_HURRY: int
DELIVERY_CREDIT_BYTES: int
CREDITS_MAX: int
BATCH_BYTES_MIN: int
SHARED_BATCH_BYTES_MIN: int
PASSES_HELD_MAX: int
TIMES_ITS_WORK: float
ALONE_PASSES: int
AT_ONCE_PASSES: int
COMPANY_PASSES: int
MUCH: int
UNANSWERED_MAX: int
NO_PIPE: int

class MessageCounts:
    received: int
    received_confirm: int
    confirmed: int
    returned: int
    delivered_auto: int
    delivered_manual: int
    got_auto: int
    got_manual: int
    got_empty: int
    channels_opened: int
    sizes: Sizes

def ack_frame(channel: int, tag: int, multiple: bool) -> bytes: ...
def nack_frame(channel: int, tag: int) -> bytes: ...

class SpansState:
    until_chosen: int

class Waiting:
    @property
    def confirms(self) -> Any: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    shards: int
    nacked: bool
    @property
    def in_sequence(self) -> bool: ...
    def refuse(self, connection: int, channel: int, first: int, last: int) -> None: ...
    def confirmed(self) -> None: ...
    def lost(self) -> None: ...

class ConfirmsState:
    client: Any
    channel: int
    next_seq: int
    nacked: int
    refused: set[int]
    closed: bool
    in_sequence: bool
    failure: Any
    due: Any
    counts: MessageCounts
    @property
    def unconfirmed(self) -> int: ...
    def wait(self, count: int, shards: int) -> Waiting: ...
    def finished(self) -> None: ...
    def answers(self) -> bytes: ...

class PublishingState:
    number: int
    is_open: bool
    published: int
    returned: int
    unroutable_dropped: int
    confirms: Any
    transaction: Any
    consuming_if_any: Any

NOTHING: int
GRANTED: int
LEFT: int

class LimitState:
    most: int
    unacked: int
    allotted: int
    members: int
    nested: int
    waits_for: int
    turn_ends: float
    def go_on(self, now: float) -> int: ...

class AllotmentState:
    number: int
    shard: int
    allowed: int
    used: int
    mode: int
    wants: bool
    gave_back: bool
    used_all: bool
    def use(self, count: int) -> bool: ...
    def place(self) -> int: ...

class ConsumingState:
    client: Any
    number: int
    limit: Any
    next_tag: int
    delivered_auto: int
    acked: int
    redelivered: int
    unacked: Any

class ConsumerState:
    channel: Any
    client: Any
    number: int
    shard: int
    tag: str
    queue_name: str
    tag_bytes: bytes
    group: Any
    allotment: Any
    reading: Any
    group_limit: Any
    announced: bool
    no_ack: bool
    affinity: bool
    delivered: int
    prefetch: int
    held: int
    counted: int
    def hold(self, count: int) -> None: ...
    def let_go(self, count: int, counts: bool) -> bool: ...

class UnackedState:
    count: int
    def add(
        self,
        first_tag: int,
        count: int,
        consumer: Any,
        epoch: int,
        first_number: int,
        at: float = 0.0,
    ) -> None: ...
    def has(self, tag: int) -> bool: ...
    def cut_through(self, tag: int) -> list[tuple[int, int, Any, int, int, float]] | None: ...
    def cut_from(self, first: int, last: int) -> tuple[int, int, Any, int, int, float] | None: ...
    def all_runs(self) -> list[tuple[int, int, Any, int, int, float]]: ...
    def insert(
        self,
        first_tag: int,
        last_tag: int,
        consumer: Any,
        epoch: int,
        first_number: int,
        at: float,
    ) -> None: ...

def acks_together(prefetch: int, counts_keys: bool) -> int: ...
def worth_a_grant(most: int) -> int: ...

class Due:
    shards: int
    acks_wait: bool

class SettlesState:
    due: bool
    hurries: bool
    ranges: list[tuple[int, int, int, int]]
    shard: int
    due_all: Due
    last_range: dict[int, int]
    acks: dict[int, int]
    allots: dict[int, tuple[int, int]]
    def __bool__(self) -> bool: ...
    def fall_due(self) -> None: ...
    def ack(self, consumer: int, first: int, last: int, together: int) -> None: ...

class LinkState:
    shard: int
    epoch: int
    in_flight: int
    settles: Any
    packing: Any
    credits: dict[int, int]
    credit_due: bool
    due: Due
    packer: Packer
    peer: int
    incarnation: int
    batch: int
    away_since: Any
    lane: Any
    sent: Any
    sender: bytes
    outlet: Any
    batch_messages: Tally
    batch_bytes: Tally
    def flush(self) -> None: ...
    def note_batch(self, weight: int, waiting: Any) -> None: ...
    def credit(self, epoch: int, connection: int, count: int) -> None: ...

class LinksState:
    packer: Packer
    links: Any
    due: Due
    freed: dict[Any, None]
    share_freed: Any
    def flush(self, batch_bytes_min: int = 0, shared_bytes_min: int = 0) -> bool: ...
    def crowded(self, shards: int) -> list[int]: ...

class OutputState:
    chunks: list[Any]
    pending: int
    written: int
    writes: int
    has_room: Any
    @property
    def due(self) -> int: ...
    def add(self, data: bytes) -> None: ...
    def add_then_credit(self, data: bytes, shard: int, epoch: int, credit: int) -> None: ...
    def credit_when_written(self, shard: int, epoch: int, credit: int) -> None: ...
    def take_credits(self) -> list[tuple[int, int, int]]: ...

class PassState:
    now: float
    dirty: list[Any]
    confirms_due: list[Any]
    feeders: list[Any]
    held: list[set[Any]]
    in_pass: bool
    end_scheduled: bool
    looks: bool
    read_buffer: Any
    aio: Any
    spin: Any
    beside: Any
    reads: Reads
    pace: Pace
    links: Any
    def begin_pass(self) -> None: ...
    def end_of_pass(self) -> None: ...
    def fed(self, client: SocketState, shards: int) -> None: ...

class SocketState:
    loop: Any
    link_of: list[Any]
    output: Any
    fd: int
    id: int
    fed_shards: int
    closing: bool
    lost: bool
    is_plain: bool
    frame_bytes_max: int
    paused: int
    more_comes: bool
    received_bytes: int
    reads: int
    last_sent: float
    last_received: float
    is_dirty: bool
    is_writing: bool
    def mark_dirty(self) -> None: ...
    def flush(self) -> None: ...
    def write(self, data: bytes) -> None: ...

class Pace:
    def __init__(
        self,
        tick_s: float,
        clock: Callable[[], float] | None = None,
        busy: Callable[[], float] | None = None,
    ) -> None: ...
    def distance(self, now: float, busy: float | None) -> float: ...
    def read_by(self, client: int) -> None: ...
    def came(self, things: int) -> None: ...
    def worth_a_pass(self) -> None: ...

class Reads:
    full: int
    short: int
    held: int
    def may_wait(self) -> bool: ...

class BindRuns:
    epoch: int
    unanswered: int
    pipe: int
    waited_pipe: int
    collected: list[BindRun]
    first: Callable[[BindRun], None]
    def __init__(self) -> None: ...

class _RunWaits(Protocol):
    def begun(self, run: BindRun) -> None: ...
    def came(self, bound: int, code: int, text: str) -> None: ...

class BindRun:
    put_in: int
    waits: _RunWaits | None
    is_collected: bool
    @property
    def vhost(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def queue(self) -> str: ...
    @property
    def ends(self) -> list[tuple[str, str, str]]: ...
    def __init__(self, runs: BindRuns, vhost: str, ends: list[tuple[str, str, str]]) -> None: ...
    def go_on(self, around: Callable[[], tuple[bytes, bytes]]) -> None: ...
    def end(self) -> None: ...
    def answered(self, count: int) -> list[tuple[str, str, str]]: ...
    def bind(self, key: bytes) -> bool: ...
