"""How an operation on one target of many came out, as a code: reports and policies read no words."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Outcome(StrEnum):
    """The result of starting or stopping a target."""

    STARTED = "started"
    """All of its selected ranks record, or wait for their window."""
    FLUSHED = "flushed"
    """It was stopped, and says that all of its files are whole."""
    ENDED_BY_ITSELF = "ended_by_itself"
    """Its window was full before the stop, which had nothing left to end; its files are whole."""
    REFUSED = "refused"
    """It answered, and did not do what it was asked for; or the request could not even be made. The reason says why."""
    ALREADY_ACTIVE = "already_active"
    """It refused because another capture or profile is active there."""
    NOT_ENABLED = "not_enabled"
    """It answered, and has neither our routes nor a profiler of its own that is switched on."""
    UNREACHABLE = "unreachable"
    """There was no connection, or it broke, or what is at the address does not speak HTTP."""
    TIMED_OUT = "timed_out"
    """It did not answer, or its files were not whole, in time."""
    FILES_MISSING = "files_missing"
    """It was stopped, and files of a rank that should have recorded are not here: it left none, or they are on another
    host."""

    @property
    def ends_well(self) -> bool:
        """Whether it is the end of a capture whose files are whole."""
        return self in {Outcome.FLUSHED, Outcome.ENDED_BY_ITSELF}

    @property
    def fix(self) -> str:
        """What to do about it in general; empty where there is nothing to do."""
        return _FIXES.get(self, "")

    @classmethod
    def from_refusals(cls, codes: Iterable[object]) -> Outcome:
        """Return how an operation came out that processes of one target have refused, by the codes that they gave."""
        told = list(codes)
        return next((code for code in (cls.ALREADY_ACTIVE, cls.TIMED_OUT) if code in told), cls.REFUSED)


_FIXES = {
    Outcome.REFUSED: "Correct what the reason names; nothing has changed in the target.",
    Outcome.ALREADY_ACTIVE: "Wait until the other capture has ended, or stop it.",
    Outcome.NOT_ENABLED: "Start the engine with PROFDECK_CONFIG in its environment, so that it loads profdeck.",
    Outcome.UNREACHABLE: "Start it again, or correct its address.",
    Outcome.TIMED_OUT: "See in its log whether it hangs; if it is only slow, raise rpc_timeout_s or flush_timeout_s.",
    Outcome.FILES_MISSING: "The reason says where they are; if a rank left none, see its log and manifest.",
}
