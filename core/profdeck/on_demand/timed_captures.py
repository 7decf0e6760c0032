"""Captures at time intervals. One process of the job requests them, as `profdeck capture job` would do.

All processes therefore agree on the steps, even if their clocks differ.
"""

from __future__ import annotations

import logging
import threading
import time

from profdeck.base.errors import CaptureError
from profdeck.config.schedule import TimedSteps
from profdeck.on_demand import requests
from profdeck.on_demand.requests import JobProcess, OnDemandRequest
from profdeck.on_demand.stores import Store
from profdeck_traces.base.errors import describe_error

logger = logging.getLogger("profdeck")

_POLL_S = 1.0
_PROCESSES_PER_S = 200
"""Maximum number of process statuses to read per second during a capture. Large jobs are therefore polled less often.
"""
_JOIN_S = 10.0
"""Maximum time for all processes of a remote store to see a request."""
_MIN_TIMEOUT_S = 1800.0
"""Minimum time limit of a capture. A limit is needed because lost processes on other hosts are not detected."""


class TimedCaptures:
    """Background thread that requests captures at a time interval until it is closed."""

    def __init__(self, store: Store, schedule: TimedSteps) -> None:
        """Args:
        store: the job's store.
        schedule: the time interval and the number of steps per capture.
        """
        self._store = store
        self._schedule = schedule
        self._closed = threading.Event()
        self._request: OnDemandRequest | None = None
        """The last request that has not been removed."""
        threading.Thread(target=self._run, name="profdeck timed captures", daemon=True).start()

    def close(self) -> None:
        """Stop requesting captures. A running capture continues."""
        self._closed.set()

    def _run(self) -> None:
        due_s = time.monotonic() + self._schedule.every_s
        while not self._closed.wait(max(due_s - time.monotonic(), 0)):
            try:
                self._end_request()  # in case an error interrupted the previous capture
                self._capture()
                self._end_request()
            except (OSError, CaptureError) as error:  # another request is pending, or the store cannot be reached
                logger.info("Skipped a capture for '%s' in 'steps': %s", self._schedule.spec, describe_error(error))
            due_s = max(due_s + self._schedule.every_s, time.monotonic())

    def _capture(self) -> None:
        """Request a capture and wait until it has ended."""
        processes = [process for process in requests.read_processes(self._store) if not process.is_gone]
        if not processes:
            return
        in_steps = requests.default_in_steps(processes)
        request = self._request = requests.create_request(self._store, in_steps, self._schedule.count, standing=True)
        ids, begun_s = {process.id for process in processes}, time.monotonic()
        with requests.send_heartbeats(self._store, request):
            if self._store.remote:
                join_deadline_s = begun_s + _JOIN_S
                while time.monotonic() < join_deadline_s and any(
                    process.is_unaware_of(request) for process in self._read_processes(ids, request)
                ):
                    if self._closed.wait(_POLL_S / 4):
                        return
                requests.mark_ready(self._store, request)
            deadline_s = begun_s + max(_MIN_TIMEOUT_S, self._schedule.every_s)
            while time.monotonic() < deadline_s and not all(
                _is_over(process, request) for process in self._read_processes(ids, request)
            ):
                if self._closed.wait(max(_POLL_S, len(ids) / _PROCESSES_PER_S)):
                    return

    def _end_request(self) -> None:
        """Withdraw or remove the last request, so that another request can be made."""
        request = self._request
        if request is not None and not requests.withdraw(self._store, request):
            requests.remove_request(self._store, request)
        self._request = None

    def _read_processes(self, ids: set[str], request: OnDemandRequest) -> list[JobProcess]:
        """Return the processes with the given IDs, and all others that have read the request."""
        processes = requests.read_processes(self._store)
        return [process for process in processes if process.token == request.token or process.id in ids]


def _is_over(process: JobProcess, request: OnDemandRequest) -> bool:
    return process.is_gone or (process.token == request.token and process.done)
