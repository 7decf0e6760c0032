"""Rules about the host and the steps of one rank; also about single gaps of its devices."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from profdeck_traces.analysis.host_states import OUTSIDE_OPERATORS
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.analysis.short_names import short_kernel
from profdeck_traces.analysis.step_names import DECODE, ITERATION
from profdeck_traces.findings.rank_finding import RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView

_LOADER = re.compile(r"data_?load|load_?batch|next_?batch|fetch_?batch|get_?batch", re.IGNORECASE)
_GARBAGE = re.compile(r"(?:^|[^a-z])gc\.?(?:collect)?(?:$|[^a-z])|garbage", re.IGNORECASE)
_FEWEST_STEPS = 3


def data_loading(view: RankView) -> Iterator[RankFinding]:
    """Loading data over 5 % of the step (torch-tb-profiler); with a device, as far as that waits."""
    found = [stage for stage in view.stages if _LOADER.search(stage.name)]
    steps = view.rank.host_times.steps if view.rank.host_times else 1
    time_us = sum(stage.total_us for stage in found) / steps
    gain_us = min(time_us, view.idle_us) if view.rank.devices else time_us
    if found and gain_us > 0.05 * view.step_us:
        longest = max(found, key=lambda stage: stage.total_us)
        yield draft(
            view,
            "data-loading",
            f"Loading data takes {percent(time_us / view.host_step_us)} of {view.each} ({ms(time_us)}) in "
            f"{longest.name}",
            "more workers, prefetch_factor, or prepare the data before the job",
            gain_us=gain_us,
        )


def outside_operators(view: RankView) -> Iterator[RankFinding]:
    """Without a device: over 30 % of the step outside of all operators, where the job sleeps, waits or runs Python."""
    times = view.rank.host_times
    outside = view.outside_operators_us
    if times is None or view.rank.devices or outside <= 0.3 * view.host_step_us:
        return
    of_stages = {
        stage.name: sum(state.time_us for state in stage.host if state.state in OUTSIDE_OPERATORS) / times.steps
        for stage in times.stages
    }
    name = max(of_stages, key=lambda name: of_stages[name], default=None)
    where = f", {ms(of_stages[name])} of it in {name}" if name and of_stages[name] > 0.5 * outside else ""
    yield draft(
        view,
        "outside-operators",
        f"The recorded threads run no operator {percent(outside / view.host_step_us)} of {view.each} "
        f"({ms(outside)}){where}",
        "find what they wait for: another process, loading, logging, a thread that is not recorded; with_stack shows "
        "the Python",
        gain_us=outside,
        step_us=view.host_step_us,
        key=name or "",
    )


def long_gap(view: RankView) -> Iterator[RankFinding]:
    """A gap longer than 10 ms and than 5 % of a step (nsys gpu_gaps)."""
    limit_us = max(10_000, 0.05 * view.step_us)
    gaps = [gap for device in view.rank.devices for gap in device.gaps if gap.duration_us > limit_us]
    excluded = {step.step for step in view.excluded}
    in_steps = [gap for gap in gaps if gap.step is not None and gap.step not in excluded] if view.on_devices else gaps
    if not in_steps:
        return
    gap = max(in_steps, key=lambda gap: gap.duration_us)
    where = f" in step {gap.step}" if gap.step is not None else ""
    while_ = f" while the host is in {short_kernel(gap.host, 48)}" if gap.host else ""
    per_step = sum(gap.duration_us for gap in in_steps) / view.count
    yield draft(
        view,
        "long-gap",
        f"The device does nothing for {ms(gap.duration_us)} at a time{where}{while_}",
        "look there: loader, garbage collection, checkpoint, logging",
        gain_us=min(per_step, view.step_us),
        evidence=_gap_evidence(view, gap.start_us, gap.duration_us),
        key=gap.host or "",
    )


def _gap_evidence(view: RankView, start_us: float, duration_us: float) -> Evidence:
    margin_us = duration_us / 4
    return Evidence(path=view.rank.path, start_us=start_us - margin_us, duration_us=duration_us + 2 * margin_us)


def garbage(view: RankView) -> Iterator[RankFinding]:
    """Marks of garbage collection longer than 1 ms a step (nsys; the marks come from the job)."""
    for mark in view.rank.annotations:
        of_step_us = (mark.total_us - mark.cold_us) / view.count
        if _GARBAGE.search(mark.name) and of_step_us > 1_000:
            yield draft(
                view,
                "garbage-collection",
                f"Garbage collection ({mark.name}) takes {ms(of_step_us)} {view.per}",
                "gc.disable() in the loop and gc.collect() every so many steps",
                gain_us=of_step_us,
                key=mark.name,
            )


def unsteady(view: RankView) -> Iterator[RankFinding]:
    """The longest step over 1.25 times the median, or a deviation over 10 %; decode with p99 over twice the median."""
    steps = [step for step in view.steps if step.kind != ITERATION]
    if len(steps) >= _FEWEST_STEPS and (text := _unsteady(steps)):
        slowest = max(steps, key=lambda step: step.duration_us)
        yield draft(
            view,
            "unsteady-steps",
            text,
            f"compare step {slowest.step} with the typical one: `profdeck trim` cuts single steps out",
            # Of steps that differ to both sides the mean is no longer than the median: no bound is known.
            gain_us=_over_median(steps) if _has_outlier(steps) else None,
            step_us=statistics.fmean(step.duration_us for step in steps),
            evidence=view.evidence(slowest),
        )
    decode = next((of for of in view.rank.iterations if (of.kind, of.stage) == (ITERATION, DECODE)), None)
    if decode is not None and decode.count >= 100 and decode.p99_us > 2 * decode.p50_us:
        slow = max(view.of_kind(ITERATION, DECODE), key=lambda step: step.duration_us)
        yield draft(
            view,
            "unsteady-decode",
            f"Of {decode.count:,} decode iterations the slowest 1% take over {ms(decode.p99_us)}, the median "
            f"{ms(decode.p50_us)}",
            "look at the slow ones: prefills between them, preemption, logging",
            gain_us=max(0.0, decode.mean_us - decode.p50_us),
            step_us=decode.mean_us,
            evidence=view.evidence(slow),
        )


def _unsteady(steps: list[StepSummary]) -> str | None:
    durations = [step.duration_us for step in steps]
    if not (median := statistics.median(durations)):
        return None
    deviation = statistics.median(abs(duration - median) for duration in durations)
    slowest = max(steps, key=lambda step: step.duration_us)
    if _has_outlier(steps):
        which = f"Step {slowest.step}" if slowest.step is not None else "The slowest step"
        return f"{which} takes {ms(slowest.duration_us)}, {slowest.duration_us / median:.1f} times the median step"
    if deviation > 0.1 * median:
        return f"Steps differ by {percent(deviation / median)} from their median of {ms(median)}"
    return None


def _has_outlier(steps: list[StepSummary]) -> bool:
    durations = [step.duration_us for step in steps]
    return max(durations) > 1.25 * statistics.median(durations)


def _over_median(steps: list[StepSummary]) -> float:
    durations = [step.duration_us for step in steps]
    return max(0.0, statistics.fmean(durations) - statistics.median(durations))


def busy_machine(view: RankView) -> Iterator[RankFinding]:
    """The recording thread waited for a CPU, or its cgroup was throttled, over 5 % of the recording."""
    load = view.rank.host_load
    if load is not None and (reason := load.describe_contention()):
        yield draft(
            view,
            "busy-machine",
            f"The machine was busy: {reason}",
            "record again on an idle machine",
            gain_us=None if load.run_queue_s is None else load.run_queue_s / load.wall_s * view.host_step_us,
            step_us=view.host_step_us,
        )


RULES = (data_loading, outside_operators, long_gap, garbage, unsteady, busy_machine)
