from shardmq.shardd.reader.ipc import BatchHead
from shardmq.shardd.store.format.columns import Arrays, Sink

class Sender(Sink):
    def __init__(
        self,
        arrays: Arrays,
        head: BatchHead,
        handle: int,
        chunked: bool,
        timeout_ms: int,
        pause_bytes: int,
    ) -> None: ...
    def take_sent(self) -> int: ...
