"""Comparison of recorded steps with the unrecorded steps before the capture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from profdeck_traces.analysis.detail_model import RecordingCost
from profdeck_traces.analysis.model import RankSummary, StepSummary
from profdeck_traces.analysis.step_names import GLOBAL_STEP

_FEWEST_DURATIONS = 2


def recording_cost(steps: Sequence[StepSummary], unrecorded_step_s: float | None) -> RecordingCost | None:
    """Return the comparison of recorded and unrecorded steps, or ``None`` if unknown.

    Durations last from the start of a step to the start of the next one, as those of the unrecorded steps. At least
    three adjacent warm steps are required.

    Args:
        steps: Recorded steps.
        unrecorded_step_s: Median duration of the unrecorded steps, in seconds, or ``None`` if unknown.
    """
    if unrecorded_step_s is None:
        return None
    starts_us = {
        (step.pid, step.step): step.start_us
        for step in steps
        if step.kind == GLOBAL_STEP and step.step is not None and step.stage is None and not step.cold
    }
    durations_us = [
        starts_us[pid, number + 1] - start_us
        for (pid, number), start_us in starts_us.items()
        if (pid, number + 1) in starts_us
    ]
    if len(durations_us) < _FEWEST_DURATIONS:
        return None
    recorded_us, unrecorded_us = statistics.median(durations_us), unrecorded_step_s * 1e6
    return RecordingCost(
        recorded_step_us=recorded_us, unrecorded_step_us=unrecorded_us, ratio=recorded_us / unrecorded_us
    )


def median_ratio(ranks: Iterable[RankSummary]) -> float | None:
    """Return the median of the ranks' ratios, or ``None`` if all are unknown."""
    ratios = [rank.recording_cost.ratio for rank in ranks if rank.recording_cost is not None]
    return statistics.median(ratios) if ratios else None
