"""Outcome codes of operations on targets. Reports and policies use these codes and do not parse messages."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Outcome(StrEnum):
    """The result of starting or stopping a target."""

    STARTED = "started"
    """All selected ranks of the target are recording or waiting for their window."""
    FLUSHED = "flushed"
    """The target was stopped and reports that all of its files are complete."""
    ENDED_BY_ITSELF = "ended_by_itself"
    """The target completed its window before it was stopped. Its files are complete."""
    REFUSED = "refused"
    """The target rejected the request, or the request could not be sent. The reason is in the message."""
    ALREADY_ACTIVE = "already_active"
    """The target rejected the request because another capture or profile is active."""
    NOT_ENABLED = "not_enabled"
    """The target has neither profdeck's routes nor an enabled profiler of its own."""
    UNREACHABLE = "unreachable"
    """The connection failed or was lost, or the server at the address does not use HTTP."""
    TIMED_OUT = "timed_out"
    """The target did not reply, or did not complete its files, within the time limit."""
    FILES_MISSING = "files_missing"
    """The target was stopped, but files of a selected rank are missing. The rank wrote no files, or they are on another
    host."""

    @property
    def ends_well(self) -> bool:
        """True if the capture ended and its files are complete."""
        return self in {Outcome.FLUSHED, Outcome.ENDED_BY_ITSELF}

    @property
    def fix(self) -> str:
        """General suggestion to solve the problem; empty if there is no problem."""
        return _FIXES.get(self, "")

    @classmethod
    def from_refusals(cls, codes: Iterable[object]) -> Outcome:
        """Combine the error codes of a target's processes that rejected an operation into one outcome."""
        codes = list(codes)  # remote values may not be hashable
        return next((code for code in (cls.ALREADY_ACTIVE, cls.TIMED_OUT) if code in codes), cls.REFUSED)


_FIXES = {
    Outcome.REFUSED: "Fix the problem described in the reason. The target was not changed.",
    Outcome.ALREADY_ACTIVE: "Wait until the other capture has ended, or stop it.",
    Outcome.NOT_ENABLED: "Start the engine with PROFDECK_CONFIG in its environment, so that it loads profdeck.",
    Outcome.UNREACHABLE: "Restart the target, or correct its address.",
    Outcome.TIMED_OUT: "If the target's log shows no hang, increase rpc_timeout_s or flush_timeout_s.",
    Outcome.FILES_MISSING: "The reason names the location of the files. If a rank wrote none, see its log.",
}
