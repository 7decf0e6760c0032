"""Duration of global steps without a capture, from the start times of the last steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

SLOTS = 16
"""Number of start times kept per role, a power of two. Step ``n`` uses slot ``n & SLOT_MASK``."""
SLOT_MASK = SLOTS - 1
_FEWEST_STEPS = 3


def median_step_s(step: int, steps: Sequence[int | None], starts_s: Sequence[float]) -> float | None:
    """Return the median duration of the unrecorded steps before a step, in seconds, or None for fewer than three.

    A duration is the time between the starts of adjacent steps. The first step of the process is cold and is excluded.

    Args:
        step: the step in which a capture begins.
        steps: the step in each slot; `with_capture` of the step if it was captured; None for an unused slot.
        starts_s: the monotonic start time of the step in each slot, in seconds.
    """
    # Until all slots have been used, the earliest start time is that of the process's first step.
    used = [(start_s, number) for start_s, number in zip(starts_s, steps, strict=True) if number is not None]
    first = min(used)[1] if 0 < len(used) < SLOTS else None
    durations_s = []
    for number in range(max(0, step - SLOTS + 2), step):
        slot, following = number & SLOT_MASK, (number + 1) & SLOT_MASK
        if steps[slot] == number != first and steps[following] in {number + 1, with_capture(number + 1)}:
            durations_s.append(starts_s[following] - starts_s[slot])
    return statistics.median(durations_s) if len(durations_s) >= _FEWEST_STEPS else None


def with_capture(step: int) -> int:
    """Return the entry for a captured step. Its start ends the previous step, but its own duration is ignored."""
    return -1 - step
