"""What a controller is doing: nothing, the stages of a step, or a capture."""

from __future__ import annotations

import attrs

from profdeck.backends.recording import Recording


@attrs.frozen
class _Idle:
    """Nothing is captured."""


@attrs.frozen
class Armed:
    """In discrete mode: a global step has begun whose stages are captured."""

    step: int


@attrs.frozen
class Active:
    """A capture is under way."""

    recording: Recording
    armed: int | None = None
    """In discrete mode: the global step whose stages are captured."""
    announced: int | None = None
    """The next global step of the same capture, which `step` has announced and `start` has not begun yet."""


ControllerState = _Idle | Armed | Active
IDLE = _Idle()


@attrs.frozen
class PendingEnd:
    """An end that was asked for and waits for a moment when it can be carried out."""

    reason: str | None
