"""Which step of a trace is typical, and where it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from profdeck.traces.analysis.detail_model import TimelineMark
from profdeck.traces.analysis.model import RankSummary, StepSummary
from profdeck.traces.analysis.step_names import GLOBAL_STEP

# The middle one in time is typical unless it differs from the median by more.
_NEAR = 0.1


def typical_step(rank: RankSummary) -> StepSummary | None:
    """Return a step of about median duration: the middle one in time, if it is, so that all ranks have the same."""
    kinds = {step.kind for step in rank.steps}
    kind = GLOBAL_STEP if GLOBAL_STEP in kinds else next(iter(kinds), None)
    steps = [step for step in rank.steps if step.kind == kind]
    if not steps:
        return None
    median = statistics.median(map(_duration, steps))
    middle = steps[len(steps) // 2]
    if abs(_duration(middle) - median) <= _NEAR * median:
        return middle
    return min(steps, key=lambda step: abs(_duration(step) - median))


def span_of(step: StepSummary) -> tuple[float, float]:
    """Return when a step begins and ends, on the host and on its devices."""
    begins = [step.start_us, *(of.start_us for of in step.devices)]
    ends = [step.start_us + step.duration_us, *(of.start_us + of.duration_us for of in step.devices)]
    return min(begins), max(ends)


def marks_of(rank: RankSummary) -> Iterator[TimelineMark]:
    """Yield the steps of a trace as marks."""
    for step in rank.steps:
        yield TimelineMark(name=step.name, kind=step.kind, start_us=step.start_us, duration_us=step.duration_us)


def _duration(step: StepSummary) -> float:
    return max([step.duration_us, *(of.duration_us for of in step.devices)])
