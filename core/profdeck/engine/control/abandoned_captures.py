"""Stops abandoned captures that block a new start. A capture is abandoned if its owner process has exited.

Each request contains its owner process. Processes on other hosts cannot be checked, so their captures are not stopped.
Stop commands contain the request's token and cannot stop another request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from profdeck.base.errors import TargetError
from profdeck.base.outcome import Outcome
from profdeck.base.processes import ProcessId
from profdeck.records.request import RequestState

if TYPE_CHECKING:
    from profdeck.engine.engine import Engine

_BUSY = frozenset({RequestState.ARMED, RequestState.RECORDING, RequestState.WRITING})
_FLUSH_S = 60.0
"""Maximum time to wait for the files of an abandoned capture, in seconds."""


@attrs.frozen
class _ActiveRequest:
    """A request that is active in an engine."""

    id: str
    token: str
    owner: ProcessId

    @property
    def owner_label(self) -> str:
        """Name of the owner in messages."""
        return "this process" if self.owner == ProcessId() else str(self.owner)


async def end_abandoned(engine: Engine, refusal: TargetError) -> str:
    """Stop the captures that prevent a start, if their owners have exited.

    Args:
        engine: the engine that refused the start.
        refusal: the engine's error.

    Returns:
        A note for the new capture. The caller can then retry the start.

    Raises:
        TargetError: an owner is running or its state is unknown. Nothing was stopped. The message names the owner.
        CaptureError: the engine does not reply.
    """
    answer = await engine.command("status", {})
    busy = [reply for reply in answer.all if reply.state in _BUSY]
    if not busy:
        return "The first start was refused because of another capture, which has ended since."
    # Requests sent by hand have no owner.
    active = {
        _ActiveRequest(reply.request, reply.token, reply.owner)
        for reply in busy
        if reply.request and reply.token and reply.owner
    }
    if not active:
        raise refusal
    for request in active:
        if request.owner.alive is not False:
            raise _occupied_error(refusal, request)
    for request in active:
        reason = f"Its owner ({request.owner_label}) has exited; {ProcessId()} stopped it"
        await engine.end({"request": request.id, "token": request.token, "reason": reason}, _FLUSH_S)
    stopped = ", ".join(f"{request.id} of {request.owner_label}" for request in active)
    return f"Stopped abandoned captures whose owner has exited: {stopped}."


def _occupied_error(refusal: TargetError, active: _ActiveRequest) -> TargetError:
    text = f"{refusal} It belongs to {active.owner_label}"
    if active.owner.alive is None:
        return TargetError(
            f"{text}. This host cannot determine whether that process is running.",
            Outcome.ALREADY_ACTIVE,
            "Wait until the capture has ended, or end that process. If the process has exited, send the ID and token "
            "in /profdeck/status to /profdeck/stop.",
        )
    return TargetError(
        f"{text}, which is running.", Outcome.ALREADY_ACTIVE, "Wait until the capture has ended, or end that process."
    )
