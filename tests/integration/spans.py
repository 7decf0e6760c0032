"""A collector of OpenTelemetry on loopback: it keeps the spans that servers export, as they arrive."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import attrs


@attrs.frozen
class Span:
    """A span as it was exported."""

    name: str
    captures: tuple[str, ...]
    """Its attribute ``profdeck.captures``."""


class Collector:
    """Takes spans by OTLP over HTTP while it is entered."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._spans: dict[str, list[Span]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        """Where it takes them."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a server that shall send them soon."""
        soon = {"OTEL_BSP_SCHEDULE_DELAY": "100", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100"}
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"} | soon

    def spans(self, trace: str, name: str, timeout_s: float = 60) -> list[Span]:
        """Wait for a span of a trace by a part of its name, and return all of that trace that have arrived.

        Args:
            trace: its id, 32 hexadecimal digits.
            name: a part of the name.
            timeout_s: how long to wait.
        """
        with self._arrived:
            there = self._arrived.wait_for(
                lambda: any(name in span.name for span in self._spans.get(trace, ())), timeout_s
            )
            assert there, f"No span {name!r} came for {trace}: {self._spans}"
            return list(self._spans[trace])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _keep(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        with self._arrived:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        values = {one.key: one.value for one in span.attributes}
                        named = values["profdeck.captures"].array_value.values if "profdeck.captures" in values else ()
                        kept = Span(span.name, tuple(value.string_value for value in named))
                        self._spans.setdefault(span.trace_id.hex(), []).append(kept)
            self._arrived.notify_all()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                keep(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
