"""Steps of a trace: global steps and the iterations of engines, and what each of them took of the device and the host.

Global steps are ``ProfilerStep#N``, which torch.profiler marks. What engines call their iterations, their plugins tell
by entry points of the group ``profdeck.trace_names``: each a regular expression for the whole name, with any of these
groups:

- ``prefill``, ``decode``, ``mixed``: which of them matched is the stage; or else
- ``stage``: the engine's own word for it;
- ``requests``, ``prefill_requests``, ``decode_requests``, ``prefill_tokens``, ``decode_tokens``: what the batch holds.
  Without a stage, the requests tell it.
- the fields of `profdeck_traces.analysis.detail_model.BatchDetails`, such as ``waiting_requests``.

Tokens are those that the model was given; with speculation that is more than it put out.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.step_names import DECODE, GLOBAL_STEP, ITERATION, StepName, StepNames
from profdeck_traces.reading.columns import ANNOTATION, DEVICE_ANNOTATION, OPERATOR, Columns
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int


@attrs.frozen(eq=False)
class StepWindows:
    """Intervals of time that belong to steps, by start."""

    step: Int
    start_ns: Int
    end_ns: Int | None
    """``None``: each lasts until the next one starts."""

    def of(self, time_ns: Int) -> Int:
        """Return the step at each of these times, -1 where there is none."""
        if not len(self.step):
            return np.full(len(time_ns), -1, dtype=np.int64)
        last = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        outside = last < 0
        if self.end_ns is not None:
            outside |= time_ns > self.end_ns[last]
        return np.where(outside, -1, self.step[last])


@attrs.frozen(eq=False)
class TraceSteps:
    """Steps of a trace, sorted by start time on the host."""

    names: tuple[str, ...]
    marks: tuple[StepName, ...]
    """Parsed form of each of ``names``."""
    name: Int
    """Index into ``names``, for each step."""
    pids: tuple[Id, ...]
    track: Int
    """Track of each step's annotation, as numbered by the columns."""
    start_ns: Int
    end_ns: Int
    host: dict[str, StepWindows]
    """Host windows of the steps of each kind."""
    device: dict[str, StepWindows]
    """Device windows of the steps of each kind."""
    work: dict[str, StepWindows]
    """Windows of the device work launched in the steps, from the first to the last kernel. Steps without known work are
    omitted."""
    cold: NDArray[np.bool_]
    """For each step, whether the recorder started in it."""
    excluded: NDArray[np.bool_]
    """For each step, whether statistics exclude it because it is cold and its kind has other steps."""

    def __len__(self) -> int:
        return len(self.name)

    def warm_from_ns(self, windows: StepWindows) -> int | None:
        """Return the start of the first step that is not excluded; ``None`` if no step is excluded."""
        excluded = self.excluded[windows.step]
        return int(windows.start_ns[~excluded].min()) if excluded.any() and not excluded.all() else None


@attrs.frozen(eq=False)
class LaunchedWork:
    """Device work with a known launch, as parallel arrays."""

    launch_ns: Int
    """Time at which the work was launched on the host."""
    start_ns: Int
    end_ns: Int


def find_steps(  # noqa: PLR0913 - the last two come from the manifest
    columns: Columns,
    names: StepNames,
    external_ids: Int | None = None,
    work: LaunchedWork | None = None,
    *,
    cold_first_step: bool = False,
    last_step: int | None = None,
) -> TraceSteps:
    """Find the steps of a trace.

    An annotation nested in another annotation of the same kind, on the same thread, belongs to the same step, because
    the caller of an engine may annotate iterations that the engine annotates as well.

    On the device, a step extends from the first to the last kernel that was launched in it. If the launches are not
    known, the step's extent is derived from the device annotations. For each annotation, Kineto writes the span of its
    kernels on each stream, but it assigns a kernel only to the innermost annotation of the launching thread
    (``GenericTraceActivity`` and ``GpuUserEventMap`` in pytorch/kineto). Therefore, a step includes the kernels of all
    annotations that start in it, including its own. The ``External id`` connects an annotation with its device spans.
    Without it, the spans on a stream are matched in order with the host annotations of the same name, if there are
    equally many of both.

    If any step of a kind has launched work whose device span is still unknown, all steps of that kind are assumed to
    start on the device when they start on the host. Kernels that are still queued when the next step starts then count
    towards that step. For Ascend, a table lists the step of each kernel, so the spans are known.

    Args:
        columns: All host and device annotations of the trace, and the operators with step names, which Ascend uses as
            step annotations. Other events are ignored.
        names: Patterns of step names.
        external_ids: The ``External id`` of each annotation, or -1 if it has none. Default: no annotation has one.
        work: Device work with its launch times, if these are known.
        cold_first_step: Whether the first step, and the iterations that start in it, are cold.
        last_step: Number of the job's last global step, if known. If the job reports the end of this step before it
            stops the recorder, torch annotates an additional step, which is ignored.
    """
    ids = np.full(len(columns), -1, dtype=np.int64) if external_ids is None else external_ids
    marks = {
        code: mark
        for code in np.flatnonzero(columns.tables.names_of_categories(frozenset({ANNOTATION, OPERATOR}))).tolist()
        if (mark := names.parse(columns.tables.names[code]))
    }
    numbers = {code: mark.step for code, mark in marks.items() if mark.kind == GLOBAL_STEP and mark.step is not None}
    if last_step is not None and last_step in numbers.values() and max(numbers.values()) == last_step + 1:
        marks = {code: mark for code, mark in marks.items() if numbers.get(code) != last_step + 1}
    is_global = np.full(len(columns.tables.names), -1, dtype=np.int8)
    is_global[list(marks)] = [mark.kind == GLOBAL_STEP for mark in marks.values()]
    found = columns[np.flatnonzero(is_global[columns.name] >= 0)]
    found = found[np.lexsort((-found.end_ns, found.start_ns))]
    found = found[outermost(found.track * 2 + is_global[found.name], found.end_ns)]
    used, name = np.unique(found.name, return_inverse=True)
    of_kind = {GLOBAL_STEP: is_global[found.name] == 1, ITERATION: is_global[found.name] == 0}
    host = {
        kind: StepWindows(np.flatnonzero(mask), found.start_ns[mask], found.end_ns[mask])
        for kind, mask in of_kind.items()
    }
    on_host = columns.tables.names_of_categories(frozenset({ANNOTATION}))
    twins = {ITERATION: _twins(columns, on_host, ids)}
    # Those of marks that are operators are around all kernels of a global step, and say nothing of iterations.
    named = {columns.tables.names[code] for code in np.flatnonzero(on_host).tolist()}
    for code, mark in marks.items():
        on_host[code] |= mark.kind == GLOBAL_STEP and columns.tables.names[code] not in named
    twins[GLOBAL_STEP] = _twins(columns, on_host, ids)
    launched = twins if work is None else dict.fromkeys(host, work)
    windows_of_work = {kind: _work(windows, launched[kind]) for kind, windows in host.items()}
    cold = _cold(found, of_kind) if cold_first_step else np.zeros(len(found), dtype=bool)
    return TraceSteps(
        names=tuple(columns.tables.names[code] for code in used.tolist()),
        marks=_with_decoded_tokens(tuple(marks[code] for code in used.tolist())),
        name=name,
        pids=tuple(columns.tables.tracks[track][0] for track in found.track.tolist()),
        track=found.track.astype(np.int64),
        start_ns=found.start_ns,
        end_ns=found.end_ns,
        host=host,
        device={
            kind: _on_device(kind, windows, windows_of_work[kind], launched[kind]) for kind, windows in host.items()
        },
        work=windows_of_work,
        cold=cold,
        excluded=cold & np.any([mask & (mask & ~cold).any() for mask in of_kind.values()], axis=0),
    )


def _cold(steps: Columns, of_kind: dict[str, NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Return a mask of the cold steps: the first step, and the iterations that start in it.

    The first step is a global step if the trace has global steps, and an iteration otherwise.

    Args:
        steps: Step annotations, sorted by start time.
        of_kind: Mask of the steps of each kind.
    """
    in_order = np.flatnonzero(of_kind[GLOBAL_STEP] if of_kind[GLOBAL_STEP].any() else of_kind[ITERATION])
    if not len(in_order):
        return np.zeros(len(steps), dtype=bool)
    first = in_order[0]
    cold: NDArray[np.bool_] = (
        of_kind[ITERATION] & (steps.start_ns >= steps.start_ns[first]) & (steps.start_ns < steps.end_ns[first])
    )
    cold[first] = True
    return cold


def outermost(lane: NDArray[np.integer], end_ns: Int) -> NDArray[np.bool_]:
    """Return which intervals lie in no earlier one of their lane; they are sorted by start, the longest first."""
    outermost = np.ones(len(lane), dtype=bool)
    for one in np.unique(lane):
        events = np.flatnonzero(lane == one)
        reach = np.maximum.accumulate(end_ns[events])
        outermost[events[1:]] = end_ns[events[1:]] > reach[:-1]
    return outermost


def _with_decoded_tokens(marks: tuple[StepName, ...]) -> tuple[StepName, ...]:
    """Assume one token per request in decode iterations that state only requests, unless the engine drafts tokens.

    Names that state decode requests separately also state their tokens, if known, so nothing is assumed for them.
    """
    if any(word in (mark.stage or "") for mark in marks for word in ("draft", "verify")):
        return marks
    return tuple(
        attrs.evolve(mark, decode_tokens=mark.requests)
        if mark.stage == DECODE and mark.decode_tokens is None and mark.decode_requests is None
        else mark
        for mark in marks
    )


def _twins(columns: Columns, on_host: NDArray[np.bool_], ids: Int) -> LaunchedWork:
    """Find the host annotations that also appear on a device, and the time span of each annotation's kernels.

    If an annotation's kernels are unknown, its span ends before it starts.

    Args:
        columns: Host and device annotations.
        on_host: For each event name, whether it is the name of a host annotation.
        ids: The ``External id`` of each annotation, or -1 if it has none.
    """
    of_device = columns.tables.names_of_categories(frozenset({DEVICE_ANNOTATION}))
    is_device, is_host = np.flatnonzero(of_device[columns.name]), on_host[columns.name]
    on_device, device_ids = columns[is_device], ids[is_device]
    numbers = {columns.tables.names[code]: number for number, code in enumerate(np.unique(on_device.name).tolist())}
    of_code = np.array([numbers.get(name, -1) for name in columns.tables.names], dtype=np.int64)
    is_host &= of_code[columns.name] >= 0
    host, host_ids = columns[is_host], ids[is_host]
    start = np.full(len(host), np.iinfo(np.int64).max)
    end = np.full(len(host), np.iinfo(np.int64).min)

    def extend(to: Int, by: Columns) -> None:
        np.minimum.at(start, to, by.start_ns)
        np.maximum.at(end, to, by.end_ns)

    by_id = {
        (number, one): row
        for row, (number, one) in enumerate(zip(of_code[host.name].tolist(), host_ids.tolist(), strict=True))
    }
    to = np.array(
        [
            by_id.get((number, one), -1) if one >= 0 else -1
            for number, one in zip(of_code[on_device.name].tolist(), device_ids.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    extend(to[to >= 0], on_device[to >= 0])
    # Match the remaining annotations by their order. On the host, these are the annotations not matched by id.
    connected = np.zeros(len(host), dtype=bool)
    connected[to[to >= 0]] = True
    left = np.flatnonzero(~connected)
    rest = on_device[to < 0]
    host_order, host_counts = _by_name_and_time(of_code[host.name[left]], host.start_ns[left], len(numbers))
    for track in np.unique(rest.track):
        stream = rest[rest.track == track]
        order, counts = _by_name_and_time(of_code[stream.name], stream.start_ns, len(numbers))
        paired = counts == host_counts
        order = order[paired[of_code[stream.name[order]]]]
        rows = left[host_order[(paired & (counts > 0))[of_code[host.name[left][host_order]]]]]
        extend(rows, stream[order])
    # A host annotation whose id appears on no device launched nothing.
    kept = connected | (host_ids < 0) | np.isin(of_code[host.name], of_code[rest.name])
    return LaunchedWork(host.start_ns[kept], start[kept], end[kept])


def _by_name_and_time(name: Int, start_ns: Int, names: int) -> tuple[Int, Int]:
    """Return the order by name, then time, and how many there are of each name."""
    return np.lexsort((start_ns, name)), np.bincount(name, minlength=names)


def _work(host: StepWindows, twins: LaunchedWork) -> StepWindows:
    """Return where the work is of all annotations that began in a step, by its start on the device."""
    local = attrs.evolve(host, step=np.arange(len(host.step)))
    step = local.of(twins.launch_ns)
    known = (step >= 0) & (twins.end_ns >= twins.start_ns)
    start = np.full(len(host.step), np.iinfo(np.int64).max)
    end = np.full(len(host.step), np.iinfo(np.int64).min)
    np.minimum.at(start, step[known], twins.start_ns[known])
    np.maximum.at(end, step[known], twins.end_ns[known])
    order = np.flatnonzero(end >= start)
    order = order[np.argsort(start[order], kind="stable")]
    return StepWindows(host.step[order], start[order], end[order])


def _on_device(kind: str, host: StepWindows, work: StepWindows, twins: LaunchedWork) -> StepWindows:
    """Return where steps are on the device: where their work is, if that is known of every step that launched some."""
    launched = np.unique(host.of(twins.launch_ns))
    if not len(work.step) or not np.isin(launched[launched >= 0], work.step).all():
        return attrs.evolve(host, end_ns=None)
    # Global steps leave nothing between them, but kernels that were launched outside of all annotations.
    return attrs.evolve(work, end_ns=None) if kind == GLOBAL_STEP else work
