"""Capture metrics in an engine's ``/metrics``, exported with the Prometheus client that the engine uses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from profdeck.base.outcome import Outcome
from profdeck.engine.server.following import EndedCapture
from profdeck.records.status import Status

_ENDS = (Status.COMPLETE, Status.PARTIAL, Status.FAILED, Status.MISSING)
_REFUSALS = (Outcome.ALREADY_ACTIVE, Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.NOT_ENABLED)


class PrometheusMetrics:
    """Counts captures in the default registry of the process, or in the files that several processes share."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Summary

        self._active = Gauge(
            "profdeck_active",
            "1 while ranks of the engine record, wait for their window or write for a capture, else 0.",
            multiprocess_mode="livemostrecent",
        )
        self._ended = Counter("profdeck_captures", "Captures that have ended, by what they are worth.", ["status"])
        self._refused = Counter("profdeck_refusals", "Starts that no rank took, by why.", ["reason"])
        self._size = Summary("profdeck_capture_size_bytes", "Bytes of the files of a capture, of all ranks.")
        self._duration = Summary(
            "profdeck_capture_duration_seconds", "From the begin of a capture until its files were whole."
        )
        self._stall = Summary(
            "profdeck_capture_stall_seconds", "How long the start and the stop of a capture held up the engine."
        )
        self._active.set(0)
        for status in _ENDS:  # a series that appears with its first count has no rate
            self._ended.labels(status)
        for reason in _REFUSALS:
            self._refused.labels(reason)

    def began(self) -> None:
        """Set the gauge of active captures to 1."""
        self._active.set(1)

    def ended(self, captures: Sequence[EndedCapture]) -> None:
        """Count the captures of a request that has ended."""
        self._active.set(0)
        for capture in captures:
            self._ended.labels(capture.status).inc()
            self._size.observe(capture.size_bytes)
            self._duration.observe(capture.duration_s)
            self._stall.observe(capture.stall_s)

    def refused(self, outcome: Outcome) -> None:
        """Count a start that every rank refused."""
        self._refused.labels(outcome).inc()


def prometheus_metrics() -> PrometheusMetrics | None:
    """Return the metrics of this process; None where the engine has not loaded the library, and so has no ``/metrics``.

    The library must not be loaded by us: it decides then whether several processes share files.
    """
    return _metrics() if "prometheus_client" in sys.modules else None


_metrics = functools.cache(PrometheusMetrics)
