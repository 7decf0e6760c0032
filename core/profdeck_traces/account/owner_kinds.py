"""Kinds of owners to which the time of a step is assigned."""

from __future__ import annotations

from enum import IntEnum


class OwnerKind(IntEnum):
    """Kind of owner. `label` is its name in tables."""

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
    WAIT_FOR_THREAD = 9
    SYNCHRONISATION = 10
    """Synchronisation call, excluding the time it spends waiting for device work."""
    QUEUE_FULL = 11
    """Launch that waits because the stream's queue is full."""
    DEVICE_GAP = 12
    DEVICE_HELD = 13
    """Device gap of more than 100 µs for which the trace shows no cause."""
    DATA_LOADING = 14
    GARBAGE_COLLECTION = 15
    CHECKPOINT = 16
    COMPILATION = 17
    """Calls inside torch.compile or the Triton compiler."""
    OUTPUT = 18
    """Formatting and writing logs, printed text and files."""
    VALIDATION = 19
    PROFILER = 20
    NOT_RECORDED = 21
    """No event in the trace explains the time."""
    WAIT_FOR_RANK = 22
    """Time in a collective before the last rank of its group arrives."""
    WAIT_FOR_ROLE = 23
    """Time when only another role is working, for example rollout servers while the trainer waits."""
    ANOMALY_DETECTION = 24
    """Stack formatting and NaN checks of autograd's anomaly detection."""

    @classmethod
    def from_label(cls, label: str) -> OwnerKind:
        """Return the kind with the given label."""
        return cls[label.upper().replace(" ", "_")]

    @property
    def label(self) -> str:
        """Name in tables, such as ``launch latency``."""
        return self.name.lower().replace("_", " ")

    @property
    def side(self) -> str:
        """Side on which the time is spent: ``host``, ``device``, ``communication``, ``other roles`` or ``unknown``."""
        return _SIDES.get(self, "host")

    @property
    def with_side(self) -> str:
        """Side and kind for use in a sentence, such as ``the host (operator)``."""
        text = KIND_TEXTS.get(self.label, self.label)
        return f"the {self.side} ({text})" if self.side in {"host", "device"} else text


KIND_TEXTS = {"between": "outside operators", "device held": "device idle, cause unknown", "wait for thread": "wait"}
"""Display texts, by label, for kinds whose label needs an explanation."""
_SIDES = {
    **dict.fromkeys(
        (
            *(OwnerKind.KERNEL, OwnerKind.COPY, OwnerKind.LAUNCH_LATENCY),
            *(OwnerKind.QUEUE_FULL, OwnerKind.DEVICE_GAP),
        ),
        "device",
    ),
    **dict.fromkeys((OwnerKind.COLLECTIVE, OwnerKind.WAIT_FOR_RANK), "communication"),
    OwnerKind.WAIT_FOR_ROLE: "other roles",
    **dict.fromkeys((OwnerKind.DEVICE_HELD, OwnerKind.NOT_RECORDED), "unknown"),
}
