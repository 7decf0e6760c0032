"""Tracks captures that were started through a server's routes, and updates the server's metrics.

Ranks report their progress only in replies to commands. If no client sends a command, for example because the client
that started the capture has exited, the server polls the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import attrs

from profdeck.base.errors import target_error
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import unstructure
from profdeck.engine.control.outcomes import INACTIVE
from profdeck.engine.engine import Engine
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply
from profdeck.records.status import Status
from profdeck_traces.base.errors import ProfdeckError

logger = logging.getLogger("profdeck")

_POLL_S = 5.0


@attrs.frozen
class EndedCapture:
    """A capture by all ranks of an engine."""

    status: Status
    size_bytes: int
    """Sum over all ranks."""
    duration_s: float
    """Maximum over all ranks."""
    stall_s: float
    """Maximum over all ranks, because the other ranks wait for the slowest rank."""

    @classmethod
    def of(cls, ranks: Sequence[Recorded]) -> EndedCapture:
        """Combine the recordings of all ranks. If there are no recordings, the status is ``failed``."""
        statuses = {rank.status for rank in ranks}
        mixed_status = Status.PARTIAL if statuses & {Status.COMPLETE, Status.PARTIAL} else Status.FAILED
        return cls(
            status=statuses.pop() if len(statuses) == 1 else mixed_status,
            size_bytes=sum(rank.size_bytes for rank in ranks),
            duration_s=max((rank.duration_s or 0.0 for rank in ranks), default=0.0),
            stall_s=max((rank.stall_s or 0.0 for rank in ranks), default=0.0),
        )


@attrs.frozen(eq=False)
class _ActiveRequest:
    """A request for which at least one process is still recording or writing files."""

    request: CaptureRequest
    sent_ns: int
    """Unix time at which the start command was sent, in nanoseconds."""


class CaptureObserver(Protocol):
    """Receives the events of a server's capture requests."""

    def began(self) -> None:
        """Handle the start of a request."""

    def ended(self, captures: Sequence[EndedCapture]) -> None:
        """Handle the end of a request after all processes have finished. A request can have several captures."""

    def refused(self, outcome: Outcome) -> None:
        """Handle a request that every process refused."""


class CaptureTracker:
    """Tracks the requests of one engine. The engine accepts one request at a time."""

    def __init__(self) -> None:
        self.observer: CaptureObserver | None = None
        self._request: _ActiveRequest | None = None
        self._last_answer_s = 0.0
        self._polling: asyncio.Task[None] | None = None

    async def start(self, engine: Engine, request: CaptureRequest) -> Answer:
        """Send a start command to the engine.

        Raises:
            CaptureError: the engine does not reply.
        """
        if self._request is not None:  # the metrics can follow only one request at a time
            await self._query(engine, self._request)
        sent_ns = time.time_ns()
        try:
            answer = await engine.command("start", unstructure(request))
        except ProfdeckError as error:
            if (outcome := target_error(error).outcome) is Outcome.TIMED_OUT:
                self._follow(engine, request, sent_ns)
            else:
                self._notify(lambda observer: observer.refused(outcome))
            raise
        if any(reply.error for reply in answer.all) and not _replies_to(answer, request.token):
            refusal = Outcome.from_refusals(reply.refusal for reply in answer.all)
            self._notify(lambda observer: observer.refused(refusal))
        else:
            self._follow(engine, request, sent_ns)
        return answer

    def process_answer(self, answer: Answer, sent_ns: int) -> None:
        """Process the engine's answer to a ``stop`` or ``status`` command.

        Args:
            answer: the replies of the engine's processes.
            sent_ns: Unix time at which the command was sent, in nanoseconds.
        """
        request = self._request
        if request is None or sent_ns <= request.sent_ns:
            return
        self._last_answer_s = time.monotonic()
        replies = _replies_to(answer, request.request.token)
        if any(reply.state not in INACTIVE for reply in replies):
            return
        if not replies and any(reply.token for reply in answer.all):  # the replies describe another request
            return
        ranks: dict[str, list[Recorded]] = {}
        for recorded in (recorded for reply in replies for recorded in reply.captures):
            ranks.setdefault(recorded.id, []).append(recorded)
        captures = tuple(map(EndedCapture.of, ranks.values() or [()]))
        self._request = None
        self._notify(lambda observer: observer.ended(captures))

    def _follow(self, engine: Engine, capture_request: CaptureRequest, sent_ns: int) -> None:
        request = _ActiveRequest(capture_request, sent_ns)
        self._request, self._last_answer_s = request, time.monotonic()
        self._notify(lambda observer: observer.began())
        self._polling = asyncio.create_task(self._poll(engine, request))

    async def _poll(self, engine: Engine, request: _ActiveRequest) -> None:
        while self._request is request:
            await asyncio.sleep(_POLL_S)
            if self._request is request and time.monotonic() - self._last_answer_s >= _POLL_S:
                await self._query(engine, request)

    async def _query(self, engine: Engine, request: _ActiveRequest) -> None:
        sent_ns = time.time_ns()
        with suppress(ProfdeckError):
            self.process_answer(await engine.command("status", request.request.key), sent_ns)

    def _notify(self, event: Callable[[CaptureObserver], None]) -> None:
        if self.observer is None:
            return
        try:
            event(self.observer)
        except Exception:  # an observer error, such as a full disk, must not stop the capture
            logger.exception("profdeck could not update the metrics of the server")


def _replies_to(answer: Answer, token: str) -> list[Reply]:
    return [reply for reply in answer.all if reply.token == token]
