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
"""Maximum number of polls per second in the whole job. In large jobs, each process therefore polls less often."""


class StatusNote(Protocol):
    """Status of this process in the store."""

    process: JobProcess

    def join(self) -> None:
        """Announce that this process accepts requests."""

    def update(self, **changes: object) -> None:
        """Change fields of the status and write it to the store."""

    def close(self) -> None:
        """Announce that this process no longer accepts requests."""


class RequestPoller:
    """Background thread that polls a remote store for requests until it is closed."""

    def __init__(self, store: Store, status_note: StatusNote) -> None:
        """Args:
        store: the job's store.
        status_note: status of this process.
        """
        self.has_request = False
        """True if this process has not completed the pending request. Every step boundary then checks the store."""
        self.is_reachable = False
        """True if the last access to the store succeeded."""
        self._store = store
        self._status_note = status_note
        self._closed = threading.Event()
        self._beat: bytes | None = None
        self._beat_s = 0.0
        self._polls = 0
        self._interval_s = max(_POLL_S, status_note.process.world_size / _PROCESSES_PER_S)
        self._thread = threading.Thread(target=self._run, name="profdeck requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop polling and close the store. Never raises."""
        if self._status_note.process.at.pid != os.getpid():  # after a fork, the store's locks may be held forever
            return
        self._closed.set()
        self._status_note.close()
        self._store.close()

    def _run(self) -> None:
        joined, wait_s, logged = False, 0.0, False
        while not self._closed.wait(wait_s):
            try:
                if not joined:
                    self._status_note.join()
                    joined = True
                self._poll()
                self.is_reachable = True
                wait_s = self._interval_s
            except OSError as error:
                level = logging.DEBUG if logged else logging.INFO
                logger.log(level, "Captures cannot be requested now: %s", describe_error(error))
                # Join again after the error, because the store may have been restarted without its notes.
                self.is_reachable, joined, wait_s, logged = False, False, _RETRY_S, True

    def _poll(self) -> None:
        text = self._store.read(REQUEST)
        request = None if text is None else decode(text, OnDemandRequest)
        if request is None:
            self.has_request, self._beat = False, None
            return
        self._polls += 1
        self._store.put(f"alive.{self._status_note.process.id}", str(self._polls).encode())
        process = self._status_note.process
        if process.ended or (process.token == request.token and process.done):
            self.has_request = False
        else:
            self.has_request = self.is_reachable = True  # before the announcement that boundaries check the store
            if process.looks_for != request.token:
                self._status_note.update(looks_for=request.token)
        self._withdraw_if_abandoned(request)

    def _withdraw_if_abandoned(self, request: OnDemandRequest) -> None:
        """Withdraw a request if its requester no longer sends heartbeats."""
        beat, now_s = self._store.read(BEAT) or b"", time.monotonic()
        if beat != self._beat:
            self._beat, self._beat_s = beat, now_s
        elif now_s - self._beat_s > LOST_S:
            logger.warning("The capture request is withdrawn, because its requester (%s) is gone.", request.by)
            if not requests.withdraw(self._store, request, f"the job, because {request.by} is gone"):
                requests.remove_request(self._store, request)
