"""Metrics of the HTTP ports: connections and long responses, and which of them were refused."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shardmq.broker.controller.management.context import Context

# The bounds by which something was refused: of all, or of one address.
CONNECTIONS_REFUSED = ("connections", "address")
HANDSHAKES_REFUSED = ("handshakes", "address")
ANSWERS_REFUSED = ("answers", "address", "bytes")


def metrics(context: Context) -> Iterator[Metric]:
    answers, connections = context.long_responses, context.http_connections
    for name, what, value in (
        ("connections", "Connections open to the ports of HTTP and metrics", connections.connected),
        ("handshakes", "TLS handshakes with the HTTPS port under way", len(connections.handshakes)),
        ("answers", "Clients that wait for a long answer or are being sent one", answers.under_way),
        ("answers_waiting", "Long answers that wait to be made", answers.waiting),
        ("answer_bytes", "Long answers in memory, compressed", answers.bytes_held),
    ):
        yield GaugeMetricFamily(f"shardmq_http_{name}", what, value=value)
    for name, what, value in (
        ("answers_made", "Long answers made", answers.made),
        (
            "answers_shared",
            "Calls that got a long answer made for another one, too",
            answers.shared,
        ),
        ("answers_queued", "Long answers that had to wait before they were made", answers.queued),
        (
            "answers_unread",
            "Long answers broken off because their client did not read them",
            answers.unread,
        ),
        (
            "connections_closed",
            "Connections closed because nothing came of them",
            connections.closed,
        ),
    ):
        yield CounterMetricFamily(f"shardmq_http_{name}", what, value=value)
    for name, what, reasons, refused in (
        (
            "answers_refused",
            "Calls answered 429 or 503, by the bound",
            ANSWERS_REFUSED,
            answers.refused,
        ),
        (
            "connections_refused",
            "Connections not let in, by the bound",
            CONNECTIONS_REFUSED,
            connections.refused,
        ),
        (
            "handshakes_refused",
            "TLS handshakes not begun, by the bound",
            HANDSHAKES_REFUSED,
            connections.handshakes.refused,
        ),
        (
            "handshakes_cut_off",
            "TLS handshakes cut off to make room, by the bound",
            HANDSHAKES_REFUSED,
            connections.handshakes.cut_off,
        ),
    ):
        family = CounterMetricFamily(f"shardmq_http_{name}", what, labels=["reason"])
        for reason in reasons:
            family.add_metric([reason], refused[reason])
        yield family
