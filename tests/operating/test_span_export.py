"""The controller sends spans in a thread, and drops what the collector does not take."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from shardmq.broker.controller.config import Tracing
from shardmq.broker.controller.span_export import QUEUE_BATCHES_MAX, STOP_S_MAX, SpanExport
from shardmq.broker.shared.control import Span
from tests.support.real_broker import wait_until

SPAN = Span("publish x", "consumer", b"\1" * 16, b"\2" * 8, b"", "", 1, 2, {"a": 1}, "")


class Sender:
    """Takes spans while `may_send` is set, and answers what `answers` says."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.taken: list[int] = []
        self.may_send = threading.Event()
        self.may_send.set()

    def __call__(self, config: Tracing) -> Any:
        return self.send

    def send(self, spans: list[Span]) -> bool:
        self.may_send.wait(60)
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        self.taken.append(len(spans))
        return answer


def counts(export: SpanExport) -> tuple[int, int]:
    return export.exported, export.dropped


def test_what_waits_is_sent_before_the_end() -> None:
    sender = Sender()
    export = SpanExport(Tracing(), sender)
    export.start()
    for size in (1, 2, 3):
        export.add([SPAN] * size)
    export.stop()
    assert sender.taken == [1, 2, 3] and counts(export) == (6, 0)


def test_spans_are_dropped_when_the_queue_is_full_and_the_end_does_not_wait() -> None:
    sender = Sender()
    sender.may_send.clear()
    export = SpanExport(Tracing(), sender)
    export.start()
    export.add([SPAN])
    wait_until(lambda: export._queue.empty(), "the thread to take the first")
    for _ in range(QUEUE_BATCHES_MAX + 5):
        export.add([SPAN] * 2)
    assert counts(export) == (0, 10)
    begun = time.monotonic()
    export.stop()
    assert time.monotonic() - begun < STOP_S_MAX + 5
    sender.may_send.set()
    wait_until(lambda: export.exported == 1 + 2 * QUEUE_BATCHES_MAX, "the others")


def test_failures_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender(False, False, OSError("no"), True, False)
    export = SpanExport(Tracing(), sender)
    with caplog.at_level("INFO"):
        export.start()
        for _ in range(5):
            export.add([SPAN])
        export.stop()
    assert counts(export) == (1, 4)
    said = [record.getMessage() for record in caplog.records if record.exc_info is None]
    assert [text.partition(" ")[2].partition(";")[0] for text in said] == [
        "collector does not take spans: they are dropped, and counted",
        "collector takes spans again",
        "collector does not take spans: they are dropped, and counted",
    ]


def test_a_broker_whose_library_is_gone_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(config: Tracing) -> Any:
        raise ImportError("No module named 'opentelemetry'")

    export = SpanExport(Tracing(), fails)
    export.start()
    export.add([SPAN])
    export.stop()
    assert counts(export) == (0, 1)
    assert "no spans are sent: No module named 'opentelemetry'" in caplog.text


# -- by OTLP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "environment", "service"),
    [
        (Tracing(endpoint="{}/", service_name="mine"), {"OTEL_SERVICE_NAME": "theirs"}, "mine"),
        (Tracing(endpoint="{}/v1/traces"), {"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, "shardmq"),
        (Tracing(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "{}", "OTEL_SERVICE_NAME": "a"}, "a"),
    ],
)
def test_settings_win_over_the_variables_of_opentelemetry(
    config: Tracing,
    environment: dict[str, str],
    service: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from shardmq.broker.controller.otlp import Sender as Otlp
    from tests.support.collector import Collector

    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=theirs")
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(collector.url))
    try:
        endpoint = config.endpoint.format(collector.url)
        sender = Otlp(endpoint, config.headers, config.service_name)
        assert sender.send([SPAN, SPAN])
    finally:
        collector.stop()
    assert collector.resources[0]["service.name"] == service
    assert collector.headers[0]["x-key"] == "theirs"
    first, _ = collector.spans
    assert (first.name, first.kind, first.parent) == ("publish x", "consumer", "")
    assert (first.trace, first.id, first.started_ns, first.ended_ns) == ("01" * 16, "02" * 8, 1, 2)
    assert first.attributes == {"a": 1}
