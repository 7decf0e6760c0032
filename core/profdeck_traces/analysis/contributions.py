"""Contributions of stages and host states to the change in the mean step, and counts of unusually long steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from profdeck_traces.analysis.capture_matching import RankPair
from profdeck_traces.analysis.diff_model import Bursts, Contribution
from profdeck_traces.analysis.host_states import NOTHING
from profdeck_traces.analysis.model import RankSummary

OUTLIER = 1.25
"""A step is an outlier, or a burst in comparisons, if it exceeds this multiple of the median step."""
_MIN_SHARE = 0.05


def contributions_of(pairs: Sequence[RankPair]) -> tuple[Contribution, ...]:
    """Break down the change in the mean step by stage, and by host state outside stages.

    The contributions add up to the change in the mean step on the host, averaged over the traces of each rank, then
    over the ranks. The result is empty if a trace has no steps or no host times.
    """
    traces = [trace for pair in pairs for side in pair.sides for trace in side]
    bases = {trace.host_times.basis if trace.host_times else None for trace in traces}
    if len(bases) != 1 or None in bases or "recording" in bases:
        return ()
    sides = [[[_parts(trace) for trace in pair.sides[side]] for pair in pairs] for side in (0, 1)]
    keys = dict.fromkeys(key for side in sides for of_rank in side for parts in of_rank for key in parts)
    found = []
    for kind, name in keys:
        before_us, after_us = (
            statistics.fmean(
                statistics.fmean(parts.get((kind, name), 0.0) for parts in of_rank) for of_rank in sides[side]
            )
            for side in (0, 1)
        )
        found.append(
            Contribution(name=name, kind=kind, before_us=before_us, after_us=after_us, delta_us=after_us - before_us)
        )
    return tuple(sorted(found, key=lambda part: (-abs(part.delta_us), part.name)))


def _parts(trace: RankSummary) -> dict[tuple[str, str], float]:
    """Return the mean time of each part of a trace's steps, in microseconds per step, keyed by kind and name."""
    times = trace.host_times
    assert times is not None  # noqa: S101  # checked by the caller
    parts: dict[tuple[str, str], float] = {}
    outside = {state.state: state.time_us for state in times.states}
    for stage in times.stages:
        parts["stage", stage.name] = stage.total_us / times.steps
        for state in stage.host:
            outside[state.state] = outside.get(state.state, 0.0) - state.time_us
    if not outside:  # only devices were read
        outside = {NOTHING: times.total_us - sum(stage.total_us for stage in times.stages)}
    parts |= {("outside stages", name): time_us / times.steps for name, time_us in outside.items()}
    return parts


def _chance_of_one_cause(steps: Sequence[float], causes: Sequence[Sequence[float]]) -> float:
    """Return the probability that randomly timed delays would all fall into the cause that explains every burst.

    A cause explains a burst if it accounts for at least half of the burst's excess. The probability that a random delay
    falls into a cause is the cause's share of the median step, or 5 % if the share is smaller. Return 1 if no cause
    explains every burst. The result is multiplied by the number of causes, because the best is selected (Bonferroni).
    """
    median = statistics.median(steps)
    bursts = [index for index, time in enumerate(steps) if time > OUTLIER * median]
    chances = [1.0]
    for cause in causes:
        if len(cause) == len(steps):
            usual = statistics.median(cause)
            if all(2 * (cause[index] - usual) >= steps[index] - median for index in bursts):
                chances.append(len(causes) * max(_MIN_SHARE, usual / median) ** len(bursts))
    return min(chances)


def bursts_of(before: Sequence[float], after: Sequence[float], causes: Sequence[Sequence[float]] = ()) -> Bursts | None:
    """Count the steps on each side that exceed 1.25 times that side's median. Return ``None`` if there are none.

    The p-value comes from Fisher's exact test for two proportions and is doubled to make the test two-sided (Fisher,
    Statistical Methods for Research Workers, 5th edition, 1934). If all bursts are on the later side and have the same
    cause, the p-value is multiplied by the probability that random delays would all fall into this cause.

    Args:
        before: Durations of the earlier steps.
        after: Durations of the later steps.
        causes: Time of each cause in each later step.
    """
    if not before or not after:
        return None
    old, new = (sum(time > OUTLIER * statistics.median(side) for time in side) for side in (before, after))
    if not old and not new:
        return None
    total, bursts = len(before) + len(after), old + new
    ways = math.comb(total, bursts)

    def tail(count: int, size: int) -> float:
        """Return the probability that `size` randomly chosen steps include at least `count` bursts."""
        most = min(bursts, size)
        return sum(math.comb(size, k) * math.comb(total - size, bursts - k) for k in range(count, most + 1)) / ways

    p_value = min(1.0, 2 * min(tail(new, len(after)), tail(old, len(before))))
    if not old:
        p_value *= _chance_of_one_cause(after, causes)
    return Bursts(before=old, steps_before=len(before), after=new, steps_after=len(after), p_value=p_value)
