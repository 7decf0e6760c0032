"""Critical path of a trace, for its account and for a track in trace viewers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profdeck_traces.account.contexts import (
    mark_anomaly_detection,
    mark_checkpoint_loads,
    mark_file_functions,
    mark_profiler_frames,
)
from profdeck_traces.account.owned_path import OwnedPath, RankWaits
from profdeck_traces.account.recording import StepAnnotations
from profdeck_traces.account.row_kinds import RowKind, row_kinds
from profdeck_traces.account.table import owned_path
from profdeck_traces.account.windows import PathWindows
from profdeck_traces.analysis.classes import COMMUNICATION, Classifier
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.launches import launched_work
from profdeck_traces.analysis.step_names import GLOBAL_STEP, ITERATION, StepNames
from profdeck_traces.analysis.steps import TraceSteps, find_steps
from profdeck_traces.attribution.graph_captures import GraphOperators, graph_operators
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.trace import Trace

PATH_NAME, PATH_CATEGORY = "critical path", "critical_path"
"""Name of the critical-path track, and category of its events."""


def critical_path(trace: Trace, waits: RankWaits | None = None) -> OwnedPath:
    """Return the critical path of a trace's steps, as used in its account.

    Args:
        trace: The trace.
        waits: The rank's waits for other ranks, to be inserted into the path as segments.

    Raises:
        TraceError: The trace has no account, or already contains its critical path.
    """
    if trace.raw is None:
        raise TraceError("A kernel table has no critical path because it contains no host events.")
    if PATH_CATEGORY in trace.tables.categories:
        raise TraceError("The trace already contains its critical path.")
    step_names, classes = StepNames.load(), Classifier().classes_of(trace)
    graphs = captured_operators(TraceSource(trace.path), trace, step_names)
    events, calls = (trace.raw, None) if graphs is None else (graphs.events, graphs.calls)
    names = Attribution(events, step_names.is_step, calls)
    steps = find_steps(
        trace.annotations, step_names, trace.arg("External id", trace.annotations.row), launched_work(trace, names)
    )
    path = owned_path(path_windows(trace, names, steps, step_names, classes), names)
    if not len(path):
        raise TraceError("The trace has no critical path because its steps have zero duration.")
    return path if waits is None else path.with_waits(waits, trace.base_ns)


def captured_operators(source: TraceSource, trace: Trace, step_names: StepNames) -> GraphOperators | None:
    """Return a trace's events and the operators inside its graphs, or ``None`` if there are no graph captures.

    Raises:
        TraceError: `TraceSource.captures` is set, but one of the graph-capture traces cannot be used.
    """
    captures = source.graph_captures
    if trace.raw is None or not captures:
        return None
    return graph_operators(trace.raw, captures, step_names.is_step, is_required=source.captures is not None)


def path_windows(
    trace: Trace, names: Attribution, steps: TraceSteps, step_names: StepNames, classes: Sequence[str]
) -> PathWindows:
    """Prepare the data from which a trace's critical path is computed.

    Args:
        trace: The trace.
        names: Attribution of the trace's events to operators, modules and lines.
        steps: Steps of the trace. The path covers the global steps, or the iterations if there are no global steps.
        step_names: Patterns of step names.
        classes: Result of `profdeck_traces.analysis.classes.Classifier.classes_of`.
    """
    kind, events = step_kind(steps), trace.events
    # The tables of a trace and its raw events number the tracks differently.
    tracks = {track: number for number, track in enumerate(names.events.tracks)}
    track = np.array([tracks.get(trace.tables.tracks[number], -1) for number in steps.track.tolist()], dtype=np.int64)
    of_kind = np.array([steps.marks[name].kind == kind for name in steps.name.tolist()], dtype=bool) & (track >= 0)
    is_valid = np.zeros(names.events.complete, dtype=bool)
    is_valid[events.row[events.row >= 0]] = True
    annotations = StepAnnotations(
        track[of_kind], steps.start_ns[of_kind], steps.end_ns[of_kind], _switches(steps)[of_kind]
    )
    collectives = {trace.tables.names[code] for code, of_name in enumerate(classes) if of_name == COMMUNICATION}
    kinds = row_kinds(names.events, step_names.is_step, collectives.__contains__)
    kinds[~is_valid] = RowKind.OTHER
    mark_profiler_frames(names.events, kinds)
    mark_checkpoint_loads(names.events, kinds)
    mark_anomaly_detection(names.events, kinds)
    mark_file_functions(names.events, kinds)
    return PathWindows(names, kinds, annotations, steps.excluded[of_kind])


def _switches(steps: TraceSteps) -> Int:
    """Return the time at which the profiler began switching to each step, or the step's start if there was no switch.

    When ``torch.profiler.profile.step`` is called, it ends the annotation of one global step and then starts the next
    annotation. Engines run iterations rather than training steps, so they are idle between steps instead of switching.
    """
    switched_from = steps.start_ns.copy()
    if len(steps.host[ITERATION].step):
        return switched_from
    numbers = [mark.step if mark.kind == GLOBAL_STEP else None for mark in steps.marks]
    previous: dict[tuple[int, int], int] = {}
    for row, (name, track) in enumerate(zip(steps.name.tolist(), steps.track.tolist(), strict=True)):
        number = numbers[name]
        if number is None:
            continue
        switched_from[row] = min(steps.start_ns[row], previous.get((track, number - 1), steps.start_ns[row]))
        previous = {(track, number): int(steps.end_ns[row])}
    return switched_from
