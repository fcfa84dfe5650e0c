"""Send the spans of front doors to an OpenTelemetry collector, by OTLP over HTTP.

The OpenTelemetry SDK encodes and sends (otlp.py), in a thread of its own that imports it. The
thread takes batches from a queue with QUEUE_BATCHES_MAX places. If the collector is away, slow or
refuses spans, the queue fills up, and batches that find no place are dropped and counted. No
message passes through this process, so that nothing but the page and the HTTP API can become
slower by what happens here.

The spans themselves are made in broker/front_door/publish/spans.py, which says what they mean.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable

from shardmq.broker.controller.config import Tracing
from shardmq.broker.shared.control import Span

# A front door sends at most 512 spans at once.
QUEUE_BATCHES_MAX = 32
# How long the end of this process waits for the last spans to be sent.
STOP_S_MAX = 1.0

log = logging.getLogger(__name__)

# Sends a batch to the collector; returns whether the collector has taken it.
Send = Callable[[list[Span]], bool]


class SpanExport:
    """The queue of spans, and the thread that sends them.

    `exported` spans were taken by the collector; `dropped` ones were not.
    """

    def __init__(self, config: Tracing, sender: Callable[[Tracing], Send] | None = None) -> None:
        """Begin; `sender` makes what sends, in the thread. Tests give another one."""
        self._config = config
        self._sender = sender or _otlp_sender
        self._queue: queue.Queue[list[Span] | None] = queue.Queue(QUEUE_BATCHES_MAX)
        self._thread = threading.Thread(target=self._run, name="span-export", daemon=True)
        self.exported = 0
        # Two numbers, because two threads count.
        self._refused = self._failed = 0

    @property
    def dropped(self) -> int:
        return self._refused + self._failed

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what waits, for at most STOP_S_MAX. The rest is lost with this process."""
        try:
            self._queue.put(None, timeout=STOP_S_MAX / 2)
        except queue.Full:
            return
        self._thread.join(STOP_S_MAX / 2)

    def add(self, spans: list[Span]) -> None:
        """Have spans sent, if there is room for them."""
        try:
            self._queue.put_nowait(spans)
        except queue.Full:
            self._refused += len(spans)

    def _run(self) -> None:
        send: Send | None = None
        try:
            send = self._sender(self._config)
        except Exception as error:
            log.error("no spans are sent: %s", error)
        is_well = True
        while (spans := self._queue.get()) is not None:
            taken = send is not None and self._try(send, spans)
            if taken:
                self.exported += len(spans)
            else:
                self._failed += len(spans)
            if send is not None and taken != is_well:
                is_well = taken
                if taken:
                    log.info("the collector takes spans again; %d were dropped", self.dropped)
                else:
                    log.warning("the collector does not take spans: they are dropped, and counted")

    def _try(self, send: Send, spans: list[Span]) -> bool:
        try:
            return send(spans)
        except Exception:
            log.exception("spans cannot be sent")
            return False


def _otlp_sender(config: Tracing) -> Send:
    """Return what sends spans by OTLP. Raises ImportError if OpenTelemetry is not installed."""
    otlp = importlib.import_module("shardmq.broker.controller.otlp")
    sender: Send = otlp.Sender(config.endpoint, config.headers, config.service_name).send
    return sender
