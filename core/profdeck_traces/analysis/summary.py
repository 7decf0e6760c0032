"""Summarises one trace in one pass, as a :class:`~profdeck_traces.analysis.model.RankSummary`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.call_tree import CallTree
from profdeck_traces.analysis.classes import COMMUNICATION, MEMORY_COPY, MEMORY_SET, UNCLASSIFIED, Classifier
from profdeck_traces.analysis.collectives import (
    Collectives,
    StatedCollective,
    collective_calls,
    is_message,
    stated_collectives,
)
from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.devices import COMMUNICATES, COMPUTES, MOVES, DeviceTimes
from profdeck_traces.analysis.host_collectives import ONLY_GROUP, host_collectives
from profdeck_traces.analysis.host_states import KNOWN_CATEGORIES, Host
from profdeck_traces.analysis.launches import Launches, launched_work
from profdeck_traces.analysis.memory import memory_of
from profdeck_traces.analysis.model import CategorySummary, DeviceSummary, ImplausibleEvents, RankSummary, StepSummary
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.recorder_model import CoreSummary, RecorderTables
from profdeck_traces.analysis.shapes import OperatorShapes
from profdeck_traces.analysis.stages import StageTimes
from profdeck_traces.analysis.step_names import GLOBAL_STEP, StepNames
from profdeck_traces.analysis.step_times import StepTimes
from profdeck_traces.analysis.steps import find_steps
from profdeck_traces.analysis.timeline import Kinds, Picture
from profdeck_traces.analysis.totals_by_name import NameSums
from profdeck_traces.analysis.typical_step import candidates, marks_of, span_of
from profdeck_traces.analysis.utilization import TraceUtilization, common_device, utilization_of
from profdeck_traces.attribution.event_work import counted_calls, event_work
from profdeck_traces.attribution.model import AttributedTimes
from profdeck_traces.attribution.rows import Attribution, values_at
from profdeck_traces.attribution.time_by_owner import time_by_owner
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import kind_of
from profdeck_traces.inputs.facts import CLOCK_ANCHOR
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_WORK,
    OPERATOR,
)
from profdeck_traces.reading.intervals import Int, self_times
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace

_NS_PER_US = 1000
_LEAST_KNOWN, _SHOWN_CATEGORIES = 0.01, 5
# Kernels of more names than any program has: to classify a long one takes a millisecond.
_MAX_CLASSIFIED = 5000
# 2010 and 2100.
_EARLIEST_UNIX_NS, _LATEST_UNIX_NS = 1_262_304_000 * 10**9, 4_102_444_800 * 10**9


def summarise_trace(
    source: TraceSource | Path,
    *,
    classifier: Classifier | None = None,
    step_names: StepNames | None = None,
    buckets: int = 0,
    on_progress: Progress | None = None,
) -> RankSummary:
    """Summarise a trace. If the trace is corrupt, summarise only its readable part.

    Only complete events (``ph`` "X") are included. Self times are computed per thread, treating operators and
    annotations as one hierarchy. Runtime calls and Python frames inside an operator are part of its self time.

    Args:
        source: A Chrome trace, plain or compressed, or an artifact that a plugin can read; see
            `profdeck_traces.inputs.artifact_kinds`.
        classifier: Assigns kernel classes. Default: the built-in table.
        step_names: Patterns that identify steps. Default: the patterns of the installed plugins.
        buckets: Number of intervals in the pictures of the trace. With 0, no pictures are made, which saves a fifth of
            the time.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    return read_summary(
        source if isinstance(source, TraceSource) else TraceSource(source),
        classifier=classifier or Classifier(),
        step_names=step_names or StepNames.load(),
        buckets=buckets,
        on_progress=on_progress,
    ).summary


def read_summary(
    source: TraceSource,
    *,
    classifier: Classifier,
    step_names: StepNames,
    buckets: int = 0,
    on_progress: Progress | None = None,
) -> RankReading:
    """Summarise a trace like `summarise_trace`, and also return its collective calls."""
    trace = read_trace(source.path, is_step=lambda name: step_names.parse(name) is not None, on_progress=on_progress)
    _check_categories(trace)
    return summary_of(trace, source, classifier=classifier, step_names=step_names, buckets=buckets)


def summary_of(
    trace: Trace, source: TraceSource, *, classifier: Classifier, step_names: StepNames, buckets: int = 0
) -> RankReading:
    """Summarise a trace that has already been read."""
    return _Summary(source, trace, _tables(source.path), classifier, step_names).finish(buckets)


def _check_categories(trace: Trace) -> None:
    """Check that the trace contains events with known categories.

    Raises:
        TraceError: Almost no event has a known category.
    """
    events, tables = trace.events, trace.tables
    known = tables.names_of_categories(KNOWN_CATEGORIES | DEVICE_WORK)
    if len(events) and known[events.name].mean() < _LEAST_KNOWN:
        codes = tables.category_of_names()[events.name]
        counts = np.bincount(codes, minlength=len(tables.categories))
        largest = np.argsort(-counts, kind="stable")[:_SHOWN_CATEGORIES].tolist()
        shown = ", ".join(f"{tables.categories[code] or 'none'} ({counts[code]:,})" for code in largest if counts[code])
        raise TraceError(
            f"{trace.path}: nothing to summarise, because profdeck recognises the category of almost none of its "
            f"events. Categories found: {shown}. Use `profdeck view` to see the events."
        )


def _tables(path: Path) -> RecorderTables:
    kind = kind_of(path)
    tables: RecorderTables | None = None if kind is None else kind.tables(path)
    return tables or RecorderTables()


class _Summary:
    """Summary of one trace."""

    def __init__(
        self, source: TraceSource, trace: Trace, analysed: RecorderTables, classifier: Classifier, step_names: StepNames
    ) -> None:
        self._source = source
        self._trace = trace
        self._analysed = analysed
        tables = trace.tables
        self._on_device = tables.names_of_categories(DEVICE_WORK)
        operators, annotations = (tables.names_of_categories(frozenset({kind})) for kind in (OPERATOR, ANNOTATION))
        # Some recorders mark steps by operators, which are no work of the host.
        of_steps = operators.copy()
        of_steps[operators] = [step_names.parse(tables.names[code]) is not None for code in np.flatnonzero(operators)]
        is_own = np.array([name == CLOCK_ANCHOR for name in tables.names], dtype=bool)
        self._is_operator, self._is_annotation = operators & ~of_steps, (annotations | of_steps) & ~is_own
        self._on_host = operators | annotations
        self._classes = [""] * len(tables.names)
        for place, code in enumerate(np.flatnonzero(self._on_device).tolist()):
            name, kind = tables.names[code], tables.categories[tables.name_category[code]]
            self._classes[code] = (
                classifier.classify(name, kind, trace.kernel_types.get(name, ""))
                if place < _MAX_CLASSIFIED
                else UNCLASSIFIED
            )
        self._communicates = np.array([found == COMMUNICATION for found in self._classes], dtype=bool)
        moves = np.array([found in {MEMORY_COPY, MEMORY_SET} for found in self._classes], dtype=bool)
        events, annotated = trace.events, trace.annotations
        self._origin_ns = int(events.start_ns[0]) if len(events) else 0
        self._end_ns = int(events.end_ns.max()) if len(events) else 0
        self._names = (
            None if trace.raw is None else Attribution(trace.raw, lambda name: step_names.parse(name) is not None)
        )
        self._counted = None
        if trace.raw is not None and self._names is not None:
            self._counted = counted_calls(trace.raw, self._names.is_operator)
        self._trace_steps = steps = find_steps(
            annotated,
            step_names,
            trace.arg("External id", annotated.row),
            launched_work(trace, self._names),
            cold_first_step=source.facts is not None and source.facts.cold_first_step,
        )
        self_ns = np.zeros(len(events), dtype=np.int64)
        on_host = np.flatnonzero(self._on_host[events.name])
        of_host = events[on_host]
        self_ns[on_host] = self_times(of_host.track, of_host.start_ns, of_host.end_ns)
        self._host = Host.of(events, of_steps) if trace.has_host else None
        self._launches = Launches.of(trace, self._host, steps)
        of_operators = np.flatnonzero(self._is_operator[events.name])
        self._operators = events[of_operators], self_ns[of_operators]
        self._sums = NameSums(events, self_ns)
        self._steps = StepTimes(
            steps,
            events[np.flatnonzero(self._on_device[events.name])],
            self._operators,
            events[np.flatnonzero(self._is_annotation[events.name])],
            self._launches.unrecorded_steps,
        )
        is_stage = annotations & ~is_own
        is_stage[is_stage] = [step_names.parse(tables.names[code]) is None for code in np.flatnonzero(is_stage)]
        self._stages = StageTimes(events, annotated, is_stage, steps, self._host)
        self._calls = CallTree(events, self._is_operator | is_stage, trace.thread_names)
        self._work = np.where(self._communicates, COMMUNICATES, np.where(moves, MOVES, COMPUTES))
        unrecorded = self._launches.unrecorded_steps
        self._devices = DeviceTimes(events, self._work, trace.device_names, steps, self._host, unrecorded)
        self._collectives = events[np.flatnonzero(self._communicates[events.name])]

    def finish(self, buckets: int) -> RankReading:
        summary = self._summary()
        if buckets and summary.span_us:
            summary = attrs.evolve(summary, timelines=self._timelines(summary, buckets))
        return RankReading(summary, self._collected(summary))

    def _timelines(self, summary: RankSummary, buckets: int) -> tuple[Timeline, ...]:
        """Return pictures of the recording and of each step that is a candidate for the typical step."""
        origin_ns, trace = self._origin_ns, self._trace
        work = np.where(self._on_device, self._work, -1)
        track_ns = np.bincount(
            trace.events.track, weights=trace.events.duration_ns, minlength=len(trace.tables.tracks)
        ).astype(np.int64)
        kinds = Kinds(trace.tables, work, self._classes, trace.thread_names, self._devices.spans(), track_ns)
        marks = [*marks_of(summary), *self._stages.marks(origin_ns)]
        pictures = [Picture("recording", origin_ns, self._end_ns, buckets, kinds)]
        for step in candidates(summary):
            begin_ns, end_ns = (origin_ns + round(time_us * _NS_PER_US) for time_us in span_of(step))
            pictures.append(Picture(step.name, begin_ns, end_ns, buckets, kinds))
        return tuple(picture.of(trace.events, self._host, marks, origin_ns) for picture in pictures)

    def _summary(self) -> RankSummary:
        trace, analysed, facts = self._trace, self._analysed, self._source.facts
        origin_ns = self._origin_ns
        sums, on_host = self._sums, trace.has_host
        shapes = OperatorShapes.of(trace, self._counted)
        collectives = stated_collectives(trace, self._collectives)
        devices, of_devices = self._devices.summaries(), self._devices.by_step()
        steps = tuple(
            attrs.evolve(step, devices=of_devices.get(row, ()))
            for row, step in enumerate(self._steps.summaries(origin_ns))
        )
        attributed, utilization = self._attributed(devices, steps)
        return RankSummary(
            path=str(self._source.path),
            role=facts.role if facts else None,
            replica=facts.replica if facts else None,
            rank=facts.rank if facts else trace.rank,
            world_size=facts.world_size if facts else trace.world_size,
            host=facts.host if facts else None,
            capture=facts.capture if facts else None,
            run=facts.run if facts else None,
            whole=trace.check.whole and not analysed.problems,
            problem=" ".join(filter(None, [trace.check.problem, *analysed.problems])) or None,
            events=trace.check.events,
            span_us=_us(self._end_ns - origin_ns),
            busy_us=_sum_of(devices, lambda device: device.busy_us),
            idle_us=_sum_of(devices, lambda device: device.idle_us),
            communication_us=_sum_of(devices, lambda device: device.communication_us),
            overlap_us=_sum_of(devices, lambda device: device.overlap_us),
            graph_launches=sums.graph_launches() if on_host else None,
            kernels=sums.kernels(self._classes, trace.kernel_types, self._steps.kernels(), self._steps.cold_kernels()),
            categories=self._categories(),
            copies=sums.copies(trace),
            operators=sums.operators(
                self._is_operator, self._steps.operators(), self._steps.cold_operators(), on_host=on_host
            ),
            annotations=sums.operators(
                self._is_annotation, self._steps.annotations(), self._steps.cold_annotations(), on_host=on_host
            ),
            devices=devices,
            steps=steps if utilization is None else utilization.steps,
            iterations=self._steps.statistics(),
            cores=self._cores(),
            device_steps=analysed.device_steps,
            communication=analysed.communication,
            origin_unix_ns=self._unix_ns(origin_ns),
            host_times=self._stages.summary(self._end_ns - origin_ns),
            runtime=sums.runtime_calls(),
            kernel_durations=sums.kernel_durations(),
            collectives=collective_calls(*collectives, self._collectives),
            shapes=shapes.calls(),
            product_flops=shapes.product_flops(),
            memory=memory_of(trace, origin_ns),
            functions=self._calls.functions(),
            stacks=self._calls.frames(),
            implausible=tuple(ImplausibleEvents(name=name, count=count) for name, count in trace.implausible),
            launches=self._launches.count,
            launches_without_work=self._launches.without_work,
            unrecorded_steps=self._unrecorded_steps(),
            unit=facts.unit if facts else None,
            attributed=attributed,
            utilization=None if utilization is None else utilization.of_trace,
        )

    def _attributed(
        self, devices: tuple[DeviceSummary, ...], steps: tuple[StepSummary, ...]
    ) -> tuple[AttributedTimes | None, TraceUtilization | None]:
        """Return the device time, or the self time of operators, by owner, and the utilization of the devices.

        Both are ``None`` for a kernel table, and the utilization without counted work on a device.
        """
        raw, names, counted = self._trace.raw, self._names, self._counted
        if raw is None or names is None or counted is None:
            return None, None
        events = self._trace.events
        work = events[np.flatnonzero(self._on_device[events.name])]
        rows, time_ns, on_device = work.row, work.duration_ns, len(work) > 0
        if not on_device:
            operators, time_ns = self._operators
            rows = operators.row
        host = values_at(names.host, rows)
        has_host = np.flatnonzero(host >= 0)
        host = host[has_host]
        of_host, stages = self._stages.at(raw.start_ns[host])
        # Autograd threads run the backward pass while the thread with the stages waits for them.
        threads = np.append(np.unique(raw.track[names.is_backward]), self._stages.track)
        stage = np.full(len(rows), -1)
        stage[has_host] = np.where(np.isin(raw.track[host], threads), of_host, -1)
        device = common_device(self._trace)
        of_events = event_work(counted, names, rows, time_ns, device.peaks, on_device=on_device)
        times = time_by_owner(names, "device" if on_device else "host", rows, time_ns, (stage, stages), of_events)
        if not on_device:
            return times, None
        computes = self._work[work.name] == COMPUTES
        return times, utilization_of(device, of_events, work, computes, self._trace_steps, steps, devices)

    def _unrecorded_steps(self) -> tuple[int, ...]:
        steps = self._trace_steps
        names = steps.name[self._launches.unrecorded_steps].tolist()
        numbers = (steps.marks[name].step for name in names)
        return tuple(number for number in numbers if number is not None)

    def _categories(self) -> tuple[CategorySummary, ...]:
        found = sorted({self._classes[code] for code in self._sums.ran_on_device()})
        numbers = {name: number for number, name in enumerate(found)}
        number_of_name = np.array([numbers.get(name, len(found)) for name in self._classes], dtype=np.int64)
        per_step = self._steps.classes(number_of_name)
        return tuple(
            attrs.evolve(of_class, per_step=per_step.get(numbers[of_class.category]))
            for of_class in self._sums.classes(found, number_of_name, self._steps.cold_kernels())
        )

    def _cores(self) -> tuple[CoreSummary, ...]:
        cores = sorted(self._trace.cores.items(), key=lambda item: -item[1][1])
        all_ns = sum(total_ns for _, (_, total_ns) in cores)
        return tuple(
            CoreSummary(core=core, count=count, total_us=_us(total_ns), share=total_ns / all_ns if all_ns else 0.0)
            for core, (count, total_ns) in cores
        )

    @property
    def _clock_offset_ns(self) -> int | None:
        facts = self._source.facts
        return None if facts is None else facts.clock_offset_ns

    def _unix_ns(self, time_ns: int) -> int | None:
        """Return when a time of the trace was."""
        offset_ns = self._clock_offset_ns
        if offset_ns is None:
            # Before it wrote a base, Kineto wrote Unix times themselves.
            offset_ns = self._trace.base_ns
            if not _EARLIEST_UNIX_NS < time_ns + offset_ns < _LATEST_UNIX_NS:
                return None
        return time_ns + offset_ns

    def _collected(self, summary: RankSummary) -> Collectives:
        trace = self._trace
        calls = self._collectives
        on_hosts = not len(calls)
        if on_hosts:
            calls = host_collectives(trace)
        distinct, of_args = stated_collectives(trace, calls)
        stated = [*distinct, None]
        kernels, name = _pairs(calls.name, of_args, len(stated))
        kind = step_kind(self._trace_steps) or GLOBAL_STEP
        windows = (self._trace_steps.host if on_hosts else self._trace_steps.device)[kind]
        warm_from_ns = self._trace_steps.warm_from_ns(windows)
        streams, group = _pairs(calls.track, of_args, len(stated))
        offset_ns = self._clock_offset_ns
        return Collectives(
            path=summary.path,
            rank=summary.rank,
            role=summary.role,
            replica=summary.replica,
            capture=summary.capture,
            run=summary.run,
            host=summary.host,
            anchor_offset_ns=None if offset_ns is None else offset_ns - trace.base_ns,
            names=[_collective(trace.tables.names[kernel], stated[code]) for kernel, code in kernels],
            groups=[
                said.group if (said := stated[code]) else ONLY_GROUP if on_hosts else str(trace.tables.tracks[track][1])
                for track, code in streams
            ],
            # What HCCL runs has a process group instead of a stream, of which kernels know the last digits only.
            meant={f"group {digits}": group for digits, group in self._analysed.groups.items()},
            name=name,
            group=group,
            warm_from_ns=None if warm_from_ns is None else warm_from_ns + trace.base_ns,
            start_ns=calls.start_ns + trace.base_ns,
            end_ns=calls.end_ns + trace.base_ns,
        )


def _collective(kernel: str, stated: StatedCollective | None) -> str:
    """Return what tells most: NCCL carries out some collectives by messages."""
    return stated.name if stated and is_message(kernel) else kernel


def _pairs(first: NDArray[np.integer], second: Int, seconds: int) -> tuple[list[tuple[int, int]], Int]:
    """Return the distinct pairs of numbers, the second one less than `seconds`, and which one each pair is."""
    keys, which = np.unique(first.astype(np.int64) * seconds + second, return_inverse=True)
    return [divmod(key, seconds) for key in keys.tolist()], which


def _sum_of(devices: tuple[DeviceSummary, ...], value: Callable[[DeviceSummary], float]) -> float | None:
    return sum(map(value, devices)) if devices else None


def _us(time_ns: int) -> float:
    return time_ns / _NS_PER_US
