"""Where the steps of a trace went on the host: its stages, and what the threads did in each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import (
    HostState,
    HostTimes,
    LongestStep,
    StageSummary,
    StepPart,
    TimelineMark,
)
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.host_states import CAUSES, Host, by_time
from profdeck_traces.analysis.steps import StepWindows, TraceSteps, outermost
from profdeck_traces.reading.columns import Columns
from profdeck_traces.reading.event_names import is_file_read, is_host_collective, is_loader
from profdeck_traces.reading.intervals import Int, groups, time_before, union

RECORDING = "recording"
"""The basis of a trace without steps."""

_NS_PER_US = 1000
_FEWEST_STEPS = 3
_MOST_PARTS = 5


class StageTimes:
    """Host activity in the steps of a trace and in their stages.

    A stage is an annotation inside a step, on the thread that annotates the steps. An annotation nested in a stage
    belongs to that stage. If several threads annotate steps, only the thread with the most time in steps is used.
    Excluded steps are skipped.
    """

    def __init__(
        self, events: Columns, marks: Columns, is_stage: NDArray[np.bool_], steps: TraceSteps, host: Host | None
    ) -> None:
        """Find the stages, and compute the host activity in them.

        Args:
            events: All events of the trace, sorted by start.
            marks: All annotations of the trace.
            is_stage: For each event name, whether it can be a stage: a host annotation that is not a step.
            steps: Steps of the trace.
            host: Host activity, or ``None`` if the trace has no host events.
        """
        kind = step_kind(steps)
        self._basis = kind or RECORDING
        self._numbers = [steps.marks[name].step for name in steps.name.tolist()]
        own = marks[is_stage[marks.name] & (marks.end_ns > marks.start_ns)]
        own = own[np.lexsort((-own.end_ns, own.start_ns))]
        self._steps: StepWindows | None = None if kind is None else _on_main_thread(steps, steps.host[kind])
        track = _main_track(own) if self._steps is None else int(steps.track[self._steps.step[0]])
        own = own[own.track == track]
        own = own[outermost(own.track, own.end_ns)]
        step = np.zeros(len(own), dtype=np.int64) if self._steps is None else _local(self._steps).of(own.start_ns)
        own, step = own[step >= 0], step[step >= 0]
        start, end = own.start_ns, own.end_ns
        if self._steps is not None and self._steps.end_ns is not None:
            # Clip annotations that end after their step.
            end = np.minimum(end, self._steps.end_ns[step])
        self.track: int = track
        """The thread of the stages: an index into the tracks of the trace, or -1."""
        self._pictured = [marks.tables.names[code] for code in own.name.tolist()], start, end
        if self._steps is not None and not (excluded := steps.excluded[self._steps.step]).all():
            counted = ~excluded[step]
            own, step, start, end = (
                own[counted],
                (np.cumsum(~excluded) - 1)[step[counted]],
                start[counted],
                end[counted],
            )
            self._steps = _without(self._steps, excluded)
        codes, self._stage = np.unique(own.name, return_inverse=True)
        self._names = [marks.tables.names[code] for code in codes.tolist()]
        self._step_of, self._start, self._end = step, start, end
        self._communication = np.zeros(len(self._names), dtype=np.int64)
        self._of_stage = np.zeros((len(CAUSES), len(self._names)), dtype=np.int64)
        self._loading = np.zeros(len(self._names), dtype=np.int64)
        self._of_steps = np.zeros((len(CAUSES), 0), dtype=np.int64)
        if host is not None:
            self._add_activity(events, host)

    def _add_activity(self, events: Columns, host: Host) -> None:
        spans = self._start, self._end
        for row, of_state in enumerate(host.times(spans)):
            np.add.at(self._of_stage[row], self._stage, of_state)
        is_collective = np.array([is_host_collective(name) for name in events.tables.names], dtype=bool)
        collectives = events[np.flatnonzero(is_collective[events.name])]
        waits = union(collectives.start_ns, collectives.end_ns)
        np.add.at(self._communication, self._stage, time_before(waits, spans[1]) - time_before(waits, spans[0]))
        is_loading = np.array([is_loader(name) or is_file_read(name) for name in events.tables.names], dtype=bool)
        loading = events[np.flatnonzero(is_loading[events.name] & (events.track == self.track))]
        reads = union(loading.start_ns, loading.end_ns)
        np.add.at(self._loading, self._stage, time_before(reads, spans[1]) - time_before(reads, spans[0]))
        recorded = events.start_ns[:1], np.array([events.end_ns.max()]) if len(events) else events.end_ns
        if self._steps is not None and self._steps.end_ns is not None:
            recorded = self._steps.start_ns, self._steps.end_ns
        self._of_steps = np.array([*host.times(recorded)])

    def summary(self, recorded_ns: int) -> HostTimes:
        """Return the sums; the time of the recording counts where there are no steps."""
        count, total_ns = 1, recorded_ns
        if self._steps is not None and self._steps.end_ns is not None:
            count, total_ns = len(self._steps.step), int((self._steps.end_ns - self._steps.start_ns).sum())
        rows = groups(self._stage)  # one group per stage, because each stage has at least one event
        stages = [self._of(stage, mine, total_ns) for stage, mine in enumerate(rows)]
        stages.sort(key=lambda stage: (-stage.total_us, stage.name))
        return HostTimes(
            basis=self._basis,
            steps=count,
            total_us=total_ns / _NS_PER_US,
            states=_states(self._of_steps.sum(axis=1)),
            stages=tuple(stages),
            longest_step=self._longest_step(),
        )

    def _longest_step(self) -> LongestStep | None:
        windows = self._steps
        if windows is None or windows.end_ns is None or len(windows.step) < _FEWEST_STEPS:
            return None
        duration = windows.end_ns - windows.start_ns
        longest, count = int(duration.argmax()), len(duration)
        own = self._end - self._start
        in_longest = self._step_of == longest
        of_stage = np.bincount(self._stage[in_longest], weights=own[in_longest], minlength=len(self._names))
        stages = []
        for stage in np.argsort(-of_stage, kind="stable")[:_MOST_PARTS].tolist():
            of_steps = np.bincount(
                self._step_of[self._stage == stage], weights=own[self._stage == stage], minlength=count
            )
            stages.append(_step_part(self._names[stage], "stage", of_steps, longest))
        states = [
            _step_part(cause, "host state", of_steps, longest)
            for cause, of_steps in zip(CAUSES, self._of_steps, strict=True)
            if len(of_steps) == count
        ]
        parts = [
            part
            for of_kind in (stages, states)
            for part in sorted(of_kind, key=lambda part: part.median_us - part.time_us)[:_MOST_PARTS]
            if part.time_us > part.median_us
        ]
        return LongestStep(
            step=self._numbers[windows.step[longest]],
            duration_us=int(duration[longest]) / _NS_PER_US,
            median_us=float(np.median(duration)) / _NS_PER_US,
            parts=tuple(sorted(parts, key=lambda part: part.median_us - part.time_us)),
        )

    def at(self, time_ns: Int) -> tuple[Int, list[str]]:
        """Return the stage that is open at each time, as an index or -1, and the names of the stages."""
        names, starts, ends = self._pictured
        if not names:
            return np.full(len(time_ns), -1), []
        last = np.searchsorted(starts, time_ns, side="right") - 1
        is_open = (last >= 0) & (time_ns < ends[last])
        return np.where(is_open, last, -1), names

    def marks(self, origin_ns: int) -> list[TimelineMark]:
        """Return the positions of the stages, with times relative to an origin."""
        names, starts, ends = self._pictured
        rows = zip(names, starts.tolist(), ends.tolist(), strict=True)
        return [
            TimelineMark(
                name=name,
                kind="stage",
                start_us=(start - origin_ns) / _NS_PER_US,
                duration_us=(end - start) / _NS_PER_US,
            )
            for name, start, end in rows
        ]

    def _of(self, stage: int, mine: Int, total_ns: int) -> StageSummary:
        duration = self._end[mine] - self._start[mine]
        _, step = np.unique(self._step_of[mine], return_inverse=True)
        in_step = np.bincount(step, weights=duration)
        return StageSummary(
            name=self._names[stage],
            count=len(mine),
            steps=len(in_step),
            total_us=int(duration.sum()) / _NS_PER_US,
            share=int(duration.sum()) / total_ns if total_ns else 0.0,
            median_us=float(np.median(in_step)) / _NS_PER_US,
            max_us=float(in_step.max()) / _NS_PER_US,
            communication_us=int(self._communication[stage]) / _NS_PER_US,
            loading_us=int(self._loading[stage]) / _NS_PER_US,
            host=_states(self._of_stage[:, stage]),
        )


def _step_part(name: str, kind: str, of_steps: NDArray[np.number], step: int) -> StepPart:
    return StepPart(
        name=name,
        kind=kind,
        time_us=float(of_steps[step]) / _NS_PER_US,
        median_us=float(np.median(of_steps)) / _NS_PER_US,
    )


def _on_main_thread(steps: TraceSteps, windows: StepWindows) -> StepWindows:
    """Return the steps of the thread that has the most time in steps."""
    _, thread = np.unique(steps.track[windows.step], return_inverse=True)
    ends = windows.start_ns if windows.end_ns is None else windows.end_ns
    mine = thread == int(np.bincount(thread, weights=ends - windows.start_ns).argmax())
    return StepWindows(windows.step[mine], windows.start_ns[mine], ends[mine])


def _without(windows: StepWindows, excluded: NDArray[np.bool_]) -> StepWindows:
    ends = None if windows.end_ns is None else windows.end_ns[~excluded]
    return StepWindows(windows.step[~excluded], windows.start_ns[~excluded], ends)


def _local(windows: StepWindows) -> StepWindows:
    return StepWindows(np.arange(len(windows.step)), windows.start_ns, windows.end_ns)


def _main_track(marks: Columns) -> int:
    if not len(marks):
        return -1
    kept = outermost(marks.track, marks.end_ns)
    return int(np.bincount(marks.track[kept], weights=(marks.end_ns - marks.start_ns)[kept]).argmax())


def _states(times_ns: Int) -> tuple[HostState, ...]:
    return tuple(
        HostState(state=state, time_us=time_ns / _NS_PER_US, share=share)
        for state, time_ns, share in by_time(times_ns.tolist())
    )
