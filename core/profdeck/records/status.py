"""What a capture of one rank is worth."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """What a capture of one rank is worth."""

    RECORDING = "recording"
    """Not ended yet."""
    COMPLETE = "complete"
    """Everything that was asked for is there and whole."""
    PARTIAL = "partial"
    """Something readable is there, but not all that was asked for."""
    MISSING = "missing"
    """The rank should have recorded and left nothing."""
    FAILED = "failed"
    """The rank tried and has nothing readable to show."""
