"""Rules about the host and the steps of one rank; also about single gaps of its devices."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from profdeck_traces.analysis.contributions import OUTLIER
from profdeck_traces.analysis.detail_model import StageSummary, StepPart
from profdeck_traces.analysis.host_states import OUTSIDE_OPERATORS
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.run_model import Evidence
from profdeck_traces.analysis.short_names import short_kernel
from profdeck_traces.analysis.step_names import DECODE, ITERATION
from profdeck_traces.findings.rank_finding import RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.event_names import is_data_loading, is_garbage_collection

_FEWEST_STEPS = 3


def _is_loading(stage: StageSummary) -> bool:
    return is_data_loading(stage.name) or stage.loading_us >= 0.5 * stage.total_us


def _outside_us(stage: StageSummary) -> float:
    return sum(state.time_us for state in stage.host if state.state in OUTSIDE_OPERATORS)


def _is_idle(view: RankView, stage: StageSummary) -> bool:
    """Return whether a stage takes over 10 % of the step but hardly runs operators, communicates or loads data."""
    return (
        stage.total_us / view.host_steps > 0.1 * view.host_step_us
        and _outside_us(stage) >= 0.9 * stage.total_us
        and stage.communication_us < 0.1 * stage.total_us
        and not _is_loading(stage)
    )


def data_loading(view: RankView) -> Iterator[RankFinding]:
    """Data loading over 5 % of the step (torch-tb-profiler); with a device, at most the device's idle time counts.

    Stages load data if their names say so, or while they fetch from a DataLoader or read files.
    """
    times = {
        stage.name: (stage.total_us if _is_loading(stage) else stage.loading_us) / view.host_steps
        for stage in view.stages
    }
    time_us = sum(times.values())
    gain_us = min(time_us, view.idle_us) if view.rank.devices else time_us
    if time_us and gain_us > 0.05 * view.step_us:
        longest = max(times, key=lambda name: times[name])
        yield draft(
            view,
            "data-loading",
            f"Loading data takes {percent(time_us / view.host_step_us)} of {view.each} ({ms(time_us)}) in {longest}",
            "raise num_workers of the DataLoader"
            if any("_MultiProcessingDataLoaderIter" in mark.name for mark in view.rank.annotations)
            else "load the next batch in the background, such as with num_workers of DataLoader",
            gain_us=gain_us,
        )


def idle_stage(view: RankView) -> Iterator[RankFinding]:
    """A stage over 10 % of the step, 90 % of it outside operators; with a device, at most device idle time counts."""
    for stage in view.stages:
        time_us = stage.total_us / view.host_steps
        gain_us = min(time_us, view.idle_us) if view.rank.devices else time_us
        if _is_idle(view, stage) and gain_us > 0.1 * view.step_us:
            yield draft(
                view,
                "idle-stage",
                f"{stage.name} takes {percent(time_us / view.host_step_us)} of {view.each} ({ms(time_us)}); "
                f"{percent(_outside_us(stage) / stage.total_us)} of it is outside operators",
                _show_python(view),
                gain_us=gain_us,
                step_us=view.host_step_us,
                key=stage.name,
            )


def outside_operators(view: RankView) -> Iterator[RankFinding]:
    """Without a device: over 30 % of the step outside of all operators, where the job sleeps, waits or runs Python.
    Data loading and stages without operators have their own rules.
    """
    times = view.rank.host_times
    if times is None or view.rank.devices:
        return
    of_stages = {stage.name: _outside_us(stage) / times.steps for stage in times.stages}
    for stage in times.stages:
        if _is_loading(stage) or _is_idle(view, stage):
            of_stages[stage.name] = -of_stages[stage.name]
    outside = view.outside_operators_us + sum(time_us for time_us in of_stages.values() if time_us < 0)
    if outside <= 0.3 * view.host_step_us:
        return
    name = max(of_stages, key=lambda name: of_stages[name], default=None)
    where = f", {ms(of_stages[name])} of it in {name}" if name and of_stages[name] > 0.5 * outside else ""
    yield draft(
        view,
        "outside-operators",
        f"The recorded threads run no operator {percent(outside / view.host_step_us)} of {view.each} "
        f"({ms(outside)}){where}",
        _show_python(view),
        gain_us=outside,
        step_us=view.host_step_us,
        key=name or "",
    )


def _show_python(view: RankView) -> str:
    """Return advice on finding the Python code that runs outside operators."""
    if view.rank.functions:
        return "see its Python functions: `profdeck report`"
    return "record with with_stack: true to see the Python code"


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
        _show_python(view) if gap.step is None else f"see it: `profdeck view TRACE --steps {gap.step}`",
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
        if is_garbage_collection(mark.name) and of_step_us > 1_000:
            yield draft(
                view,
                "garbage-collection",
                f"Garbage collection ({mark.name}) takes {ms(of_step_us)} {view.per}",
                "collect less often: gc.disable() before the loop, and gc.collect() once in many steps",
                gain_us=of_step_us,
                key=mark.name,
            )


def unsteady(view: RankView) -> Iterator[RankFinding]:
    """The longest step over 1.25 times the median, or a deviation over 10 %; decode with p99 over twice the median."""
    steps = [step for step in view.steps if step.kind != ITERATION]
    if len(steps) >= _FEWEST_STEPS and (text := _unsteady(view, steps)):
        slowest = max(steps, key=lambda step: step.duration_us)
        yield draft(
            view,
            "unsteady-steps",
            text,
            _step_cure(view, slowest),
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
            "see the longest decode iteration: `profdeck report`",
            gain_us=max(0.0, decode.mean_us - decode.p50_us),
            step_us=decode.mean_us,
            evidence=view.evidence(slow),
        )


def _unsteady(view: RankView, steps: list[StepSummary]) -> str | None:
    durations = [step.duration_us for step in steps]
    if not (median := statistics.median(durations)):
        return None
    deviation = statistics.median(abs(duration - median) for duration in durations)
    slowest = max(steps, key=lambda step: step.duration_us)
    if _has_outlier(steps):
        which = f"Step {slowest.step}" if slowest.step is not None else "The slowest step"
        outliers = sum(duration > OUTLIER * median for duration in durations)
        more = f"; {outliers} of {len(steps)} steps exceed {OUTLIER:g} times the median" if outliers > 1 else ""
        part = _main_part(view, slowest)
        why = f": {part.name} {ms(part.time_us)} instead of {ms(part.median_us)}" if part else ""
        return f"{which} takes {ms(slowest.duration_us)} instead of {ms(median)}{why}{more}"
    if deviation > 0.1 * median:
        return f"Steps differ by {percent(deviation / median)} from their median of {ms(median)}"
    return None


def _main_part(view: RankView, slowest: StepSummary) -> StepPart | None:
    """Return the stage, device work or host state that explains at least half of a step's excess over the median."""
    longest = view.rank.host_times.longest_step if view.rank.host_times else None
    if longest is None or longest.step != slowest.step:
        return None
    parts = [part for part in longest.parts if part.kind == "stage"]
    on_device = [step.device_us for step in view.steps if step.device_us is not None]
    if slowest.device_us is not None:
        median_us = statistics.median(on_device)
        parts.append(StepPart(name="device work", kind="device", time_us=slowest.device_us, median_us=median_us))
    parts += [part for part in longest.parts if part.kind == "host state"]
    least_us = 0.5 * (longest.duration_us - longest.median_us)
    return next((part for part in parts if part.time_us - part.median_us >= least_us), None)


def _step_cure(view: RankView, slowest: StepSummary) -> str:
    part = _main_part(view, slowest)
    if part is not None and any(_is_loading(stage) and stage.name == part.name for stage in view.stages):
        return "load batches further ahead, such as with a larger prefetch_factor of DataLoader"
    number = "" if slowest.step is None else f" --steps {slowest.step}"
    return f"see it: `profdeck view TRACE{number}`"


def _has_outlier(steps: list[StepSummary]) -> bool:
    durations = [step.duration_us for step in steps]
    return max(durations) > OUTLIER * statistics.median(durations)


def _over_median(steps: list[StepSummary]) -> float:
    durations = [step.duration_us for step in steps]
    return max(0.0, statistics.fmean(durations) - statistics.median(durations))


def busy_machine(view: RankView) -> Iterator[RankFinding]:
    """The recording thread waited for a CPU, or its cgroup was throttled, for over 5 % of the recording."""
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


RULES = {
    data_loading: ("data-loading",),
    idle_stage: ("idle-stage",),
    outside_operators: ("outside-operators",),
    long_gap: ("long-gap",),
    garbage: ("garbage-collection",),
    unsteady: ("unsteady-steps", "unsteady-decode"),
    busy_machine: ("busy-machine",),
}
"""Rules, and the causes that each of them searches for."""
