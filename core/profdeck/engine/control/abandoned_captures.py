"""Captures whose driver is gone: the next driver finds them when its own start is refused, and ends them.

A request names the process that owns it. Whether that still runs can be known on its own host only, so what a living
process owns, or one of another host, is left alone. A stop names the token of the request, so that it ends that one or
nothing.
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
"""How long the files of an orphan may take before the start that waits for them is given up."""


@attrs.frozen
class _Active:
    """What is active in an engine."""

    request: str
    token: str
    owner: ProcessId

    @property
    def whose(self) -> str:
        """Say who owns it."""
        return "this process" if self.owner == ProcessId() else str(self.owner)


async def end_abandoned(engine: Engine, refusal: TargetError) -> str:
    """End what keeps an engine from starting, if its owner is gone.

    Args:
        engine: what has refused to start.
        refusal: what it said.

    Returns:
        What has been done, for the notes of the capture that can now be tried again.

    Raises:
        TargetError: nothing has been done, as the owner is alive or cannot be known; says who it is.
        CaptureError: the engine does not answer.
    """
    answer = await engine.command("status", {})
    busy = [reply for reply in answer.all if reply.state in _BUSY]
    if not busy:
        return "What was active there when it was first asked to start has ended meanwhile."
    # A request that somebody made by hand has no owner.
    active = {_Active(one.request, one.token, one.owner) for one in busy if one.request and one.token and one.owner}
    if not active:
        raise refusal
    for one in active:
        if one.owner.alive is not False:
            raise _occupied(refusal, one)
    for one in active:
        reason = f"{one.whose}, which asked for it, is gone; {ProcessId()} ended it"
        await engine.end({"request": one.request, "token": one.token, "reason": reason}, _FLUSH_S)
    ended = ", ".join(f"{one.request} of {one.whose}" for one in active)
    return f"It ended what was active there, as its owner is gone: {ended}."


def _occupied(refusal: TargetError, active: _Active) -> TargetError:
    text = f"{refusal} It belongs to {active.whose}"
    if active.owner.alive is None:
        return TargetError(
            f"{text}; whether that still runs cannot be known here.",
            Outcome.ALREADY_ACTIVE,
            "Wait until it has ended, or end that process. If it is gone, post its id and token, which "
            "/profdeck/status tells, to /profdeck/stop.",
        )
    return TargetError(
        f"{text}, which is alive.", Outcome.ALREADY_ACTIVE, "Wait until it has ended, or end that process."
    )
