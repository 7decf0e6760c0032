"""Kinds of owners of a step's time."""

from __future__ import annotations

from enum import IntEnum


class OwnerKind(IntEnum):
    """Kind of an owner. `label` is its name in tables."""

    OPERATOR = 0
    PYTHON = 1
    RUNTIME_CALL = 2
    ALLOCATION = 3
    BETWEEN = 4
    """No event is open on the thread."""
    LAUNCH_LATENCY = 5
    KERNEL = 6
    COPY = 7
    COLLECTIVE = 8
    WAIT_FOR_THREAD = 10
    SYNCHRONISATION = 11
    """The call itself, after the device work that it waits for has ended."""
    QUEUE_FULL = 12
    """A launch that waits because the queue of the stream is full."""
    DEVICE_GAP = 13
    DEVICE_HELD = 14
    """A device gap of over 100 µs. The trace has no cause for it."""
    DATA_LOADING = 15
    GARBAGE_COLLECTION = 16
    CHECKPOINT = 17
    PROFILER = 18
    NOT_RECORDED = 19
    """The trace has no event that explains the time."""

    @classmethod
    def from_label(cls, label: str) -> OwnerKind:
        """Return the kind with a name in tables."""
        return cls[label.upper().replace(" ", "_")]

    @property
    def label(self) -> str:
        """Name in tables, such as ``launch latency``."""
        return self.name.lower().replace("_", " ")
