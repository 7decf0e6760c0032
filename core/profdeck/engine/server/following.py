"""Follows the captures that are started through a server's routes, for what shows them elsewhere.

The ranks say how far they are in their answers only. So the engine is asked now and then while nobody else asks it, as
when the client that started a capture has gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import attrs

from profdeck.base.errors import ProfdeckError, target_error
from profdeck.base.outcome import Outcome
from profdeck.base.structuring import unstructure
from profdeck.engine.control.outcomes import AT_REST
from profdeck.engine.engine import Engine
from profdeck.records.request import Answer, CaptureRequest, Recorded, Reply
from profdeck.records.status import Status

logger = logging.getLogger("profdeck")

_ASK_AGAIN_S = 5.0


@attrs.frozen
class EndedCapture:
    """A capture by all ranks of an engine."""

    status: Status
    size_bytes: int
    """Of all ranks."""
    duration_s: float
    """Of the rank that took longest."""
    stall_s: float
    """Of the rank that was held up longest, as the others wait for it."""

    @classmethod
    def of(cls, ranks: Sequence[Recorded]) -> EndedCapture:
        """Put together what ranks have recorded of it; nothing is a failure."""
        found = {rank.status for rank in ranks}
        some = Status.PARTIAL if found & {Status.COMPLETE, Status.PARTIAL} else Status.FAILED
        return cls(
            status=found.pop() if len(found) == 1 else some,
            size_bytes=sum(rank.size_bytes for rank in ranks),
            duration_s=max((rank.duration_s or 0.0 for rank in ranks), default=0.0),
            stall_s=max((rank.stall_s or 0.0 for rank in ranks), default=0.0),
        )


@attrs.define(eq=False)
class FollowedRequest:
    """A request for captures, from its start until no process is at work for it."""

    name: str
    """``RUN/ID``."""
    token: str
    began_ns: int
    """When the engine was asked for it, as Unix time."""
    ended_ns: int | None = None
    """When the last process was known to be at rest."""
    captures: tuple[EndedCapture, ...] = ()
    """What has come of it: several with stages."""


class Onlooker(Protocol):
    """What is told of the requests of a server."""

    def began(self, request: FollowedRequest) -> None:
        """Note a request: processes are at work for it."""

    def ended(self, request: FollowedRequest) -> None:
        """Note that no process is at work for it any more."""

    def refused(self, outcome: Outcome) -> None:
        """Note that no process has taken a request."""


class Following:
    """Follows the requests of one engine, which takes one at a time."""

    def __init__(self) -> None:
        self.onlookers: list[Onlooker] = []
        self._request: FollowedRequest | None = None
        self._heard_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def start(self, engine: Engine, request: CaptureRequest) -> Answer:
        """Ask an engine for captures.

        Raises:
            CaptureError: it does not answer.
        """
        if self._request is not None:  # processes tell of their last request only
            await self._ask(engine)
        asked_ns = time.time_ns()
        try:
            answer = await engine.command("start", unstructure(request))
        except ProfdeckError as error:
            if (outcome := target_error(error).outcome) is Outcome.TIMED_OUT:
                self._follow(engine, request, asked_ns)
            else:
                self._tell(lambda onlooker: onlooker.refused(outcome))
            raise
        if any(reply.error for reply in answer.all) and not _holding(answer, request.token):
            refusal = Outcome.of_refusals(reply.refusal for reply in answer.all)
            self._tell(lambda onlooker: onlooker.refused(refusal))
        else:
            self._follow(engine, request, asked_ns)
        return answer

    def heard(self, answer: Answer, asked_ns: int) -> None:
        """Take what an engine has answered to another command.

        Args:
            answer: what it said.
            asked_ns: when it was asked, as Unix time.
        """
        request = self._request
        if request is None or asked_ns <= request.began_ns:
            return
        self._heard_s = time.monotonic()
        held = _holding(answer, request.token)
        if any(reply.state not in AT_REST for reply in held):
            return
        ranks: dict[str, list[Recorded]] = {}
        for recorded in (recorded for reply in held for recorded in reply.captures):
            ranks.setdefault(recorded.id, []).append(recorded)
        request.captures = tuple(map(EndedCapture.of, ranks.values() or [()]))
        request.ended_ns, self._request = time.time_ns(), None
        self._tell(lambda onlooker: onlooker.ended(request))

    def _follow(self, engine: Engine, request: CaptureRequest, asked_ns: int) -> None:
        followed = FollowedRequest(f"{request.run}/{request.id}", request.token, asked_ns)
        self._request, self._heard_s = followed, time.monotonic()
        self._tell(lambda onlooker: onlooker.began(followed))
        self._asking = asyncio.create_task(self._ask_now_and_then(engine, followed))

    async def _ask_now_and_then(self, engine: Engine, request: FollowedRequest) -> None:
        while self._request is request:
            await asyncio.sleep(_ASK_AGAIN_S)
            if self._request is request and time.monotonic() - self._heard_s >= _ASK_AGAIN_S:
                await self._ask(engine)

    async def _ask(self, engine: Engine) -> None:
        asked_ns = time.time_ns()
        with suppress(ProfdeckError):
            self.heard(await engine.command("status", {}), asked_ns)

    def _tell(self, news: Callable[[Onlooker], None]) -> None:
        for onlooker in self.onlookers:
            try:
                news(onlooker)
            except Exception:  # a full disk of Prometheus, an exporter that fails: the capture goes on
                logger.exception("profdeck could not show a capture outside of its files")


def _holding(answer: Answer, token: str) -> list[Reply]:
    return [reply for reply in answer.all if reply.token == token]
