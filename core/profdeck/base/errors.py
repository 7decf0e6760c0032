"""Exceptions raised by captures and plugins.

Each message states the problem and where it is, the allowed values, and how to fix it.
"""

from __future__ import annotations

from typing import Any

from profdeck.base.outcome import Outcome
from profdeck_traces.base.errors import PluginError, ProfdeckError, describe_error


class IncompatibleLibraryError(PluginError):
    """The library is installed in a version that the plugin does not support."""


class CaptureError(ProfdeckError):
    """A capture could not start, step or stop."""

    exit_code = 1


class TargetError(CaptureError):
    """A target refused the request or could not be reached. `outcome` is the error code; `fix` suggests a solution."""

    def __init__(self, text: str, outcome: Outcome, fix: str | None = None) -> None:
        """Args:
        text: the complete message.
        outcome: the outcome of the operation.
        fix: a solution that is more specific than `Outcome.fix`, if there is one.
        """
        super().__init__(text)
        self.outcome = outcome
        self.fix = outcome.fix if fix is None else fix

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.outcome, self.fix)  # pickled between processes


class LeaseError(CaptureError):
    """Another recording is using the device."""

    def __init__(self, text: str, held: str = "a device") -> None:
        """Args:
        text: the complete message.
        held: description of the resource in use and its holder, shown by a waiting recording.
        """
        super().__init__(text)
        self.held = held


def target_error(error: BaseException) -> TargetError:
    """Return the `TargetError` in an error's chain of causes, or a new `TargetError` with the error's message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TargetError):
            return cause
        if isinstance(cause, TimeoutError):
            return TargetError(describe_error(error), Outcome.TIMED_OUT)
        cause = cause.__cause__
    return TargetError(describe_error(error), Outcome.REFUSED)
