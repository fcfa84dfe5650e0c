"""Spans as the OpenTelemetry SDK has them, and the sender. OpenTelemetry is imported here.

Only the thread of span_export.py imports this module, and only if tracing is enabled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
from opentelemetry.util.re import parse_env_headers

from shardmq.broker.shared.control import Span

PATH = "/v1/traces"
DEFAULT_NAME = "shardmq"
KINDS: Final[Mapping[str, Any]] = {
    "consumer": SpanKind.CONSUMER,
    "producer": SpanKind.PRODUCER,
    "internal": SpanKind.INTERNAL,
}


class Sender:
    """Sends spans to a collector. What an empty setting leaves open, variables of the SDK say."""

    def __init__(self, endpoint: str, headers: str, service_name: str) -> None:
        """Begin.

        Args:
            endpoint: A URL, which may lack the path.
            headers: Headers of HTTP, as "name=value,name=value".
            service_name: The name of the broker among the services.
        """
        # The SDK would log each failure. The caller says when failures begin and end.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(
            endpoint=_url(endpoint) or None,
            headers=parse_env_headers(headers, liberal=True) or None,
            session=_session(),
        )
        resource = Resource.create({"service.name": service_name} if service_name else {})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": DEFAULT_NAME}))
        self._resource = resource
        self._scope = InstrumentationScope("shardmq")

    def send(self, spans: list[Span]) -> bool:
        """Send spans; return whether the collector has taken them."""
        done = self._exporter.export([self._readable(span) for span in spans])
        return bool(done is SpanExportResult.SUCCESS)

    def _readable(self, span: Span) -> Any:
        state = TraceState.from_header([span.state]) if span.state else None
        trace_id, flags = int.from_bytes(span.trace_id, "big"), TraceFlags(TraceFlags.SAMPLED)
        span_id, parent_id = (
            int.from_bytes(each, "big") for each in (span.span_id, span.parent_id)
        )
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, span_id, False, flags, state),
            parent=SpanContext(trace_id, parent_id, True, flags, state) if parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.started_ns,
            end_time=span.ended_ns,
            instrumentation_scope=self._scope,
        )


def _url(endpoint: str) -> str:
    """Return the URL for traces of an endpoint that may lack the path."""
    if endpoint and urlsplit(endpoint).path in ("", "/"):
        return endpoint.rstrip("/") + PATH
    return endpoint


def _session() -> Any:
    """Return a session that leaves the bodies of answers unread, which may have any length."""
    session = requests.Session()
    session.request = functools.partial(session.request, stream=True)
    session.hooks["response"].append(_close)
    return session


def _close(response: Any, *args: Any, **named: Any) -> None:
    response.close()
