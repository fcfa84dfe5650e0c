"""An OpenTelemetry collector for tests: it keeps the spans that come by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

PATIENCE_S = 60.0


class Seen(NamedTuple):
    """A span that the collector has got, with ids in hex and attributes as a dict."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    started_ns: int
    ended_ns: int
    error: str
    attributes: dict[str, Any]


class Collector:
    """A collector at a free port. `answer` is called for each request, and may do harm."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None] | None = None) -> None:
        self.spans: list[Seen] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.requests = 0
        self._answer = answer or _accept
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(self.path, dict(self.headers), body)
                collector._answer(self)

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

        assert path == "/v1/traces", path
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request: Any = service.ExportTraceServiceRequest.FromString(body)
        self.requests += 1
        self.headers.append(headers)
        for resource in request.resource_spans:
            self.resources.append(_values(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += map(_seen, scope.spans)

    def of(self, trace: str) -> list[Seen]:
        return [span for span in self.spans if span.trace == trace]

    def wait_for(self, trace: str, names: list[str]) -> dict[str, Seen]:
        """Return the spans of a trace by name when exactly these are there."""
        until = time.monotonic() + PATIENCE_S
        while sorted(span.name for span in self.of(trace)) != sorted(names):
            assert time.monotonic() < until, [span.name for span in self.of(trace)]
            time.sleep(0.05)
        return {span.name: span for span in self.of(trace)}


def _accept(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "0")
    request.end_headers()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _seen(span: Any) -> Seen:
    from opentelemetry.proto.trace.v1 import trace_pb2

    kind = trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower()
    return Seen(
        span.name,
        kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else "",
        _values(span.attributes),
    )
