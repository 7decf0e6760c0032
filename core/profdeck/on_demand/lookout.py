"""Background polling of a remote store for requests, so that global steps make no network calls.

Keys in the store::

    demand.beat       changes every second while a requester waits for a capture
    alive.<id>        changes with every poll of process <id> while a request is pending

Each process polls the store twice a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

from profdeck.on_demand import requests
from profdeck.on_demand.requests import BEAT, LOST_S, REQUEST, JobProcess, OnDemandRequest, decode
from profdeck.on_demand.stores import Store
from profdeck_traces.base.errors import describe_error

logger = logging.getLogger("profdeck")

_POLL_S = 0.5
_RETRY_S = 5.0
_PROCESSES_PER_S = 2000
"""So many look in a second at most: large jobs look less often."""


class Entry(Protocol):
    """What a process says of itself."""

    process: JobProcess

    def join(self) -> None:
        """Say that it takes requests."""

    def say(self, **changes: object) -> None:
        """Change what it says."""

    def close(self) -> None:
        """Say that it takes none any more."""


class Lookout:
    """Looks for requests until it is told to leave."""

    def __init__(self, store: Store, entry: Entry) -> None:
        """Args:
        store: where requests are.
        entry: what the process says of itself.
        """
        self.is_asked = False
        """Whether a request waits for this process, so that each boundary has to look."""
        self.is_reached = False
        """Whether the store answered when it was last asked."""
        self._store = store
        self._entry = entry
        self._left = threading.Event()
        self._beat: bytes | None = None
        self._beat_s = 0.0
        self._looks = 0
        self._interval_s = max(_POLL_S, entry.process.world_size / _PROCESSES_PER_S)
        self._thread = threading.Thread(target=self._watch, name="profdeck requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Never raises."""
        if self._entry.process.at.pid != os.getpid():  # a forked child, in which another thread may hold the store
            return
        self._left.set()
        self._entry.close()
        self._store.close()

    def _watch(self) -> None:
        joined, wait_s, told = False, 0.0, False
        while not self._left.wait(wait_s):
            try:
                if not joined:
                    self._entry.join()
                    joined = True
                self._look()
                self.is_reached = True
                wait_s = self._interval_s
            except OSError as error:
                level = logging.DEBUG if told else logging.INFO
                logger.log(level, "Captures cannot be requested now: %s", describe_error(error))
                # A store that comes back may be another one, which knows nothing of this process.
                self.is_reached, joined, wait_s, told = False, False, _RETRY_S, True

    def _look(self) -> None:
        text = self._store.read(REQUEST)
        request = None if text is None else decode(text, OnDemandRequest)
        if request is None:
            self.is_asked, self._beat = False, None
            return
        self._looks += 1
        self._store.put(f"alive.{self._entry.process.id}", str(self._looks).encode())
        process = self._entry.process
        if process.ended or (process.token == request.token and process.done):
            self.is_asked = False
        else:
            self.is_asked = self.is_reached = True  # first, so that what is said next is true
            if process.looks_for != request.token:
                self._entry.say(looks_for=request.token)
        self._end_abandoned(request)

    def _end_abandoned(self, request: OnDemandRequest) -> None:
        """Take a request back for which nobody waits any more."""
        beat, now_s = self._store.read(BEAT) or b"", time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        elif now_s - self._beat_s > LOST_S:
            logger.warning("The request of %s is taken back: that process does not wait for it any more.", request.by)
            if not requests.abandon(self._store, request, f"its processes, as {request.by} was gone"):
                requests.remove_request(self._store, request)
