"""Capture metrics in an engine's ``/metrics``, exported with the engine's own Prometheus client."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from profdeck.base.outcome import Outcome
from profdeck.engine.server.capture_tracking import EndedCapture
from profdeck.records.status import Status

_FINAL_STATUSES = (Status.COMPLETE, Status.PARTIAL, Status.FAILED, Status.MISSING)
_REFUSALS = (Outcome.ALREADY_ACTIVE, Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.NOT_ENABLED)


class PrometheusMetrics:
    """Metrics of captures, in the process's default registry or in the files of Prometheus's multiprocess mode."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Summary

        self._active = Gauge(
            "profdeck_active",
            "1 while a rank of the engine waits for its window, records or writes files for a capture, else 0.",
            multiprocess_mode="livemostrecent",
        )
        self._ended = Counter("profdeck_captures", "Captures that have ended, by status.", ["status"])
        self._refused = Counter("profdeck_refusals", "Starts that no rank accepted, by reason.", ["reason"])
        self._size = Summary("profdeck_capture_size_bytes", "Total size of a capture's files, over all ranks.")
        self._duration = Summary(
            "profdeck_capture_duration_seconds", "Time from the start of a capture until its files were complete."
        )
        self._stall = Summary(
            "profdeck_capture_stall_seconds", "Time for which the start and the stop of a capture blocked the engine."
        )
        self._active.set(0)
        for status in _FINAL_STATUSES:  # initialize all label values: rate() needs a sample before the first increment
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
    """Return the metrics of this process, or None if the engine has not imported prometheus_client.

    The engine must import the library first, because the import selects single-process or multiprocess mode.
    """
    return _metrics() if "prometheus_client" in sys.modules else None


_metrics = functools.cache(PrometheusMetrics)
