"""The captures of a server in the request traces of its engine: the spans of OpenTelemetry name those they overlap."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from profdeck.base.outcome import Outcome
from profdeck.engine.server.following import FollowedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span

ATTRIBUTE = "profdeck.captures"
"""A list of ``RUN/ID``."""
_REMEMBERED = 32


class RequestSpans:
    """Marks the spans of requests. OpenTelemetry calls it for each span, as a processor.

    Engines differ: one makes the span of a request as the request ends, with the time at which it began; another one
    at its begin. A span that has ended cannot be marked, so those that are open are marked when a capture begins.
    """

    def __init__(self) -> None:
        self._requests = deque[FollowedRequest](maxlen=_REMEMBERED)
        self._open = weakref.WeakSet[Any]()
        self._lock = threading.Lock()

    # What is told of captures.

    def began(self, request: FollowedRequest) -> None:
        """Mark the spans that are open."""
        with self._lock:
            self._requests.append(request)
            spans = [span for span in self._open if span.is_recording()]
        for span in spans:
            self._mark(span)

    def ended(self, request: FollowedRequest) -> None:
        """Nothing: when it ended is in the request."""

    def refused(self, outcome: Outcome) -> None:
        """Nothing: no request overlaps with it."""

    # What a processor of spans has.

    def on_start(self, span: Span, parent_context: Any = None) -> None:  # noqa: ARG002  # OpenTelemetry's signature
        """Mark a span that begins, or is made now and began before."""
        with self._lock:
            self._open.add(span)
        self._mark(span)

    def on_end(self, span: Any) -> None:
        """Nothing: it cannot be marked any more."""

    def _on_ending(self, span: Any) -> None:
        pass

    def shutdown(self) -> None:
        """Nothing is kept open."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002  # OpenTelemetry's signature
        """Nothing waits."""
        return True

    def _mark(self, span: Span) -> None:
        begin_ns = span.start_time or 0
        with self._lock:
            names = [one.name for one in self._requests if one.ended_ns is None or one.ended_ns >= begin_ns]
        if names:
            span.set_attribute(ATTRIBUTE, names)


def join_request_traces() -> RequestSpans | None:
    """Have the spans of this process marked from now on; None where the engine has set up no traces."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if not hasattr(provider, "add_span_processor"):
        return None
    spans = RequestSpans()
    provider.add_span_processor(spans)
    return spans
