"""Status of one rank's capture."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Status of one rank's capture."""

    RECORDING = "recording"
    """The capture has not ended."""
    COMPLETE = "complete"
    """All requested data was recorded, and all files are intact."""
    PARTIAL = "partial"
    """Some of the requested data was recorded and is readable."""
    MISSING = "missing"
    """The rank was selected, but it recorded nothing."""
    FAILED = "failed"
    """The rank tried to record, but produced no readable file."""
