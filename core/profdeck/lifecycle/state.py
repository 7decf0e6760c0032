"""What a controller is doing: nothing, the stages of a step, or a capture."""

from __future__ import annotations

import attrs

from profdeck.backends.recording import Recording


@attrs.frozen(eq=False)
class ControllerState:
    """What is under way; the same object, `IDLE`, whenever nothing is."""

    recording: Recording | None = None
    """That of the capture that is under way."""
    armed: int | None = None
    """In discrete mode: the global step that has begun and whose stages are captured."""
    announced: int | None = None
    """The next global step of the same capture, which `step` has announced and `start` has not begun yet."""
    between: bool = False
    """Whether a global step of the capture is over and the next one, which belongs to it too, has not begun."""


CLOSED = "the profiler was closed in mid-capture"
IDLE = ControllerState()


@attrs.frozen
class PendingEnd:
    """An end that was asked for and waits for a moment when it can be carried out."""

    reason: str | None
    """Why it ends before its time; None if it does not."""
    host_is_done: bool = False
    """Whether it ends because the host has nothing more to do."""

    @property
    def is_no_failure(self) -> bool:
        """Whether it ends because it is due, or the host is done."""
        return self.reason is None or self.host_is_done
