"""Captures every so many minutes. One process of the job asks for them, beside its steps, as somebody would by
`profdeck capture job`: so all processes agree on the steps, whatever their clocks say.
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
"""So many are read in a second at most while a capture is under way: of large jobs less often."""
_JOIN_S = 10.0
"""For how long the processes of a store may take to say that they look for a request."""
_MOST_S = 1800.0
"""For how long a capture is waited for, at least: a process of another host that is gone says nothing."""


class StandingCaptures:
    """Asks until it is told to leave."""

    def __init__(self, store: Store, wanted: TimedSteps) -> None:
        """Args:
        store: where requests are.
        wanted: how often, and how many steps.
        """
        self._store = store
        self._wanted = wanted
        self._left = threading.Event()
        self._request: OnDemandRequest | None = None
        """What it asked for last."""
        threading.Thread(target=self._ask, name="profdeck standing captures", daemon=True).start()

    def close(self) -> None:
        """Ask no more. What is under way goes on."""
        self._left.set()

    def _ask(self) -> None:
        due_s = time.monotonic() + self._wanted.every_s
        while not self._left.wait(max(due_s - time.monotonic(), 0)):
            try:
                self._forget()  # what an error left
                self._capture()
                self._forget()
            except (OSError, CaptureError) as error:  # somebody else asks, or the store is away
                logger.info("Skipped a capture for '%s' in 'steps': %s", self._wanted.spec, describe_error(error))
            due_s = max(due_s + self._wanted.every_s, time.monotonic())

    def _capture(self) -> None:
        """Ask for a capture, and wait until it is over."""
        there = [process for process in requests.read_processes(self._store) if not process.gone]
        if not there:
            return
        in_steps = requests.default_in_steps(there)
        request = self._request = requests.ask(self._store, in_steps, self._wanted.count, standing=True)
        asked, began_s = {process.id for process in there}, time.monotonic()
        with requests.beats(self._store, request):
            if self._store.remote:
                until_s = began_s + _JOIN_S
                while time.monotonic() < until_s and any(one.is_blind(request) for one in self._read(asked, request)):
                    if self._left.wait(_POLL_S / 4):
                        return
                requests.release(self._store, request)
            until_s = began_s + max(_MOST_S, self._wanted.every_s)
            while time.monotonic() < until_s and not all(_is_over(one, request) for one in self._read(asked, request)):
                if self._left.wait(max(_POLL_S, len(asked) / _PROCESSES_PER_S)):
                    return

    def _forget(self) -> None:
        """End the last request, so that there can be another one."""
        request = self._request
        if request is not None and not requests.abandon(self._store, request):
            requests.remove_request(self._store, request)
        self._request = None

    def _read(self, asked: set[str], request: OnDemandRequest) -> list[JobProcess]:
        found = requests.read_processes(self._store)
        return [process for process in found if process.token == request.token or process.id in asked]


def _is_over(process: JobProcess, request: OnDemandRequest) -> bool:
    return process.gone or (process.token == request.token and process.done)
