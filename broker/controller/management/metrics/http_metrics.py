"""Metrics of the HTTP ports: connections and long responses, and which of them were refused."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.context import Context


def metrics(context: Context) -> Iterator[Metric]:
    answers, connections = context.long_responses, context.http_connections
    handshakes = connections.handshakes
    for name, what, value in (
        ("connections", "Connections open to the ports of HTTP and metrics", connections.connected),
        ("handshakes", "TLS handshakes with the HTTPS port under way", len(handshakes)),
        ("answers", "Clients that wait for a long answer or are being sent one", answers.under_way),
        ("answers_waiting", "Long answers that wait to be made", answers.waiting),
        ("answer_bytes", "Long answers in memory, compressed", answers.bytes_held),
    ):
        yield GaugeMetricFamily(f"shardmq_http_{name}", what, value=value)
    for name, value, what in (
        ("answers_made", answers.made, "Long answers made"),
        (
            "answers_shared",
            answers.shared,
            "Calls that got a long answer made for another one, too",
        ),
        ("answers_queued", answers.queued, "Long answers that had to wait before they were made"),
        (
            "answers_unread",
            answers.unread,
            "Long answers broken off because their client did not read them",
        ),
        (
            "connections_closed",
            connections.closed,
            "Connections closed because nothing came of them",
        ),
    ):
        yield CounterMetricFamily(f"shardmq_http_{name}", what, value=value)
    # The reasons are the bounds by which something was refused: of all, or of one address.
    for name, reasons, refused, what in (
        (
            "answers_refused",
            ("answers", "address", "bytes"),
            answers.refused,
            "Calls answered 429 or 503, by the bound",
        ),
        (
            "connections_refused",
            ("connections", "address"),
            connections.refused,
            "Connections not let in, by the bound",
        ),
        (
            "handshakes_refused",
            ("handshakes", "address"),
            handshakes.refused,
            "TLS handshakes not begun, by the bound",
        ),
        (
            "handshakes_cut_off",
            ("handshakes", "address"),
            handshakes.cut_off,
            "TLS handshakes cut off to make room, by the bound",
        ),
    ):
        family = CounterMetricFamily(f"shardmq_http_{name}", what, labels=["reason"])
        for reason in reasons:
            family.add_metric([reason], refused[reason])
        yield family
