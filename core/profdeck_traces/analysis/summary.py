"""Summarises one trace in one pass, as a :class:`~profdeck_traces.analysis.model.RankSummary`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.call_tree import CallTree
from profdeck_traces.analysis.classes import COMMUNICATION, MEMORY_COPY, MEMORY_SET, UNCLASSIFIED, Classifier
from profdeck_traces.analysis.collectives import Collectives, collective_calls, is_message
from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.devices import COMMUNICATES, COMPUTES, MOVES, DeviceTimes
from profdeck_traces.analysis.host_collectives import ONLY_GROUP, host_collectives
from profdeck_traces.analysis.host_states import HostStates
from profdeck_traces.analysis.memory import memory_of
from profdeck_traces.analysis.model import CategorySummary, DeviceSummary, RankSummary
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.recorder_model import CoreSummary, RecorderTables
from profdeck_traces.analysis.shapes import product_flops, shape_calls
from profdeck_traces.analysis.stages import StageTimes
from profdeck_traces.analysis.step_names import GLOBAL_STEP, StepNames
from profdeck_traces.analysis.step_times import StepTimes
from profdeck_traces.analysis.steps import find_steps
from profdeck_traces.analysis.timeline import Kinds, TimelineParts
from profdeck_traces.analysis.totals_by_name import NameSums
from profdeck_traces.analysis.typical_step import candidates, marks_of, span_of
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import kind_of
from profdeck_traces.inputs.facts import CLOCK_ANCHOR
from profdeck_traces.inputs.sources import TraceSource
from profdeck_traces.reading.collective_fields import StatedCollective
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_CATEGORIES,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    concatenated,
)
from profdeck_traces.reading.intervals import Int, self_times
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.time_slices import Slice
from profdeck_traces.reading.trace import Trace

_NS_PER_US = 1000
# Kernels of more names than any program has: to classify a long one takes a millisecond.
_MAX_CLASSIFIED = 5000
_DEVICE = DEVICE_CATEGORIES | DEVICE_PROCESSES
# 2010 and 2100.
_EARLIEST_UNIX_NS, _LATEST_UNIX_NS = 1_262_304_000 * 10**9, 4_102_444_800 * 10**9


def summarise_trace(  # noqa: PLR0913 - all but the source have defaults
    source: TraceSource | Path,
    *,
    devices_only: bool = False,
    classifier: Classifier | None = None,
    step_names: StepNames | None = None,
    buckets: int = 0,
    on_progress: Progress | None = None,
) -> RankSummary:
    """Summarise a trace in one pass and bounded memory. For a damaged trace, summarise only the readable part.

    Only complete events (``ph`` "X") count. Self times are computed per thread, with operators and
    annotations in one hierarchy. Runtime calls and Python frames inside an operator count as self time of the operator.

    Args:
        source: A Chrome trace, plain or gzip, or an artifact that a plugin reads; see
            `profdeck_traces.inputs.artifact_kinds`.
        devices_only: Read only the lanes of devices and annotations, which is three times as fast; see
            :func:`profdeck_traces.reading.reader.read_trace`.
        classifier: Assigns kernel classes. Default: the built-in table.
        step_names: Patterns that identify steps. Default: the patterns of the installed plugins.
        buckets: Number of intervals in the pictures of the trace; 0 for no pictures. Pictures take a fifth of the time.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    return read_summary(
        source if isinstance(source, TraceSource) else TraceSource(source),
        devices_only=devices_only,
        classifier=classifier or Classifier(),
        step_names=step_names or StepNames.load(),
        buckets=buckets,
        on_progress=on_progress,
    ).summary


def read_summary(  # noqa: PLR0913 - as above
    source: TraceSource,
    *,
    devices_only: bool,
    classifier: Classifier,
    step_names: StepNames,
    buckets: int = 0,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> RankReading:
    """Do the same, with the calls of collectives; several processes may read a large trace together."""
    trace = read_trace(
        source.path,
        devices_only=devices_only,
        is_step=lambda name: step_names.parse(name) is not None,
        processes=processes,
        on_progress=on_progress,
    )
    return summary_of(trace, source, classifier=classifier, step_names=step_names, buckets=buckets)


def summary_of(
    trace: Trace, source: TraceSource, *, classifier: Classifier, step_names: StepNames, buckets: int = 0
) -> RankReading:
    """Do the same for a trace that was read; the answer does not depend on how large its slices are."""
    return _Summary(source, trace, _tables(source.path), classifier, step_names).finish(buckets)


def _tables(path: Path) -> RecorderTables:
    kind = kind_of(path)
    tables: RecorderTables | None = None if kind is None else kind.tables(path)
    return tables or RecorderTables()


class _Summary:
    """Adds up the slices of one trace."""

    def __init__(
        self, source: TraceSource, trace: Trace, analysed: RecorderTables, classifier: Classifier, step_names: StepNames
    ) -> None:
        self._source = source
        self._trace = trace
        self._analysed = analysed
        tables = trace.tables
        self._on_device = tables.names_of_categories(_DEVICE)
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
        self._sums = NameSums(tables)
        steps = find_steps(
            trace.marks,
            step_names,
            trace.annotations.of(trace.marks),
            cold_first_step=source.facts is not None and source.facts.cold_first_step,
        )
        self._trace_steps = steps
        self._steps = StepTimes(steps)
        self._host = None if trace.devices_only else HostStates(tables, of_steps)
        is_stage = annotations & ~is_own
        is_stage[is_stage] = [step_names.parse(tables.names[code]) is None for code in np.flatnonzero(is_stage)]
        self._stages = StageTimes(trace.marks, is_stage, steps)
        self._calls = CallTree(tables, self._is_operator | is_stage, trace.thread_names)
        self._work = np.where(self._communicates, COMMUNICATES, np.where(moves, MOVES, COMPUTES))
        self._devices = DeviceTimes(tables, self._work, trace.device_names, steps, with_host=self._host is not None)
        self._collectives: list[Columns] = []
        self._origin_ns: int | None = None
        self._end_ns = 0

    def finish(self, buckets: int) -> RankReading:
        for piece in self._trace.slices():
            self._add(piece)
        summary = self._summary()
        if buckets and summary.span_us:
            summary = attrs.evolve(summary, timelines=self._timelines(summary, buckets))
        return RankReading(summary, self._collected(summary))

    def _timelines(self, summary: RankSummary, buckets: int) -> tuple[Timeline, ...]:
        """Return pictures of the recording and of the steps that may be typical, in a second pass over the slices."""
        origin_ns, trace = self._origin_ns or 0, self._trace
        work = np.where(self._on_device, self._work, -1)
        track_ns = self._times_of_tracks() if Kinds.needs_times(trace.tables) else None
        kinds = Kinds(trace.tables, work, self._classes, trace.thread_names, self._devices.spans(), track_ns)
        parts = [TimelineParts("recording", origin_ns, self._end_ns, buckets, kinds)]
        for step in candidates(summary):
            begin_us, end_us = span_of(step)
            begin_ns, end_ns = (origin_ns + round(time_us * _NS_PER_US) for time_us in (begin_us, end_us))
            parts.append(TimelineParts(step.name, begin_ns, end_ns, buckets, kinds))
        for piece in trace.slices():
            host = self._host.of(piece) if self._host else None
            for part in parts:
                part.add(piece, host)
        marks = [*marks_of(summary), *self._stages.marks(origin_ns)]
        return tuple(part.finish(marks, origin_ns) for part in parts)

    def _times_of_tracks(self) -> NDArray[np.int64]:
        time_ns = np.zeros(len(self._trace.tables.tracks), dtype=np.int64)
        for piece in self._trace.slices():
            np.add.at(time_ns, piece.columns.track, piece.columns.end_ns - piece.columns.start_ns)
        return time_ns

    def _add(self, piece: Slice) -> None:
        if self._origin_ns is None:
            self._origin_ns = piece.begin_ns
        columns = piece.columns
        self._end_ns = max(self._end_ns, int(columns.end_ns.max()))
        self._sums.add(columns.name[piece.first], (piece.whole_end_ns - piece.order_ns)[piece.first])
        on_device = np.flatnonzero(self._on_device[columns.name])
        duration = columns.end_ns - columns.start_ns
        self._steps.add_device(piece.order_ns[on_device], columns.name[on_device], duration[on_device])
        on_host = np.flatnonzero(self._on_host[columns.name])
        whole = piece.order_ns[on_host], piece.whole_end_ns[on_host]
        own = self_times(columns.track[on_host], columns.start_ns[on_host], columns.end_ns[on_host], whole)
        self._sums.add_self(columns.name[on_host], own)
        operators = np.flatnonzero(self._is_operator[columns.name[on_host]])
        used = on_host[operators]
        self._steps.add_operators(piece.order_ns[used], columns.name[used], own[operators])
        used = np.flatnonzero(self._is_annotation[columns.name])
        self._steps.add_annotations(piece.order_ns[used], columns.name[used], duration[used])
        self._calls.add(piece)
        host = self._host.of(piece) if self._host else None
        if host is not None:
            self._stages.add(piece, host)
        self._devices.add(piece, host)
        self._collectives.append(piece.whole(self._communicates[columns.name] & piece.first))

    def _summary(self) -> RankSummary:
        trace, analysed, facts = self._trace, self._analysed, self._source.facts
        origin_ns = self._origin_ns or 0
        sums, on_host = self._sums, not trace.devices_only
        devices, of_devices = self._devices.summaries(), self._devices.by_step()
        steps = enumerate(self._steps.summaries(origin_ns))
        return RankSummary(
            path=str(self._source.path),
            role=facts.role if facts else None,
            replica=facts.replica if facts else None,
            rank=facts.rank if facts else trace.rank,
            world_size=facts.world_size if facts else trace.world_size,
            host=facts.host if facts else None,
            capture=facts.capture if facts else None,
            run=facts.run if facts else None,
            whole=trace.check.whole and not trace.searched and not analysed.problems,
            problem=" ".join(filter(None, [trace.check.problem, *analysed.problems])) or None,
            events=None if trace.searched else trace.check.events,
            span_us=_us(self._end_ns - origin_ns),
            busy_us=_sum_of(devices, lambda device: device.busy_us),
            idle_us=_sum_of(devices, lambda device: device.idle_us),
            communication_us=_sum_of(devices, lambda device: device.communication_us),
            overlap_us=_sum_of(devices, lambda device: device.overlap_us),
            graph_launches=sums.graph_launches() if on_host else None,
            kernels=sums.kernels(self._classes, trace.kernel_types, self._steps.kernels(), self._steps.cold_kernels()),
            categories=self._categories(),
            copies=sums.copies(trace.copied),
            operators=sums.operators(
                self._is_operator, self._steps.operators(), self._steps.cold_operators(), on_host=on_host
            ),
            annotations=sums.operators(
                self._is_annotation, self._steps.annotations(), self._steps.cold_annotations(), on_host=on_host
            ),
            devices=devices,
            steps=tuple(attrs.evolve(step, devices=of_devices.get(row, ())) for row, step in steps),
            iterations=self._steps.statistics(),
            cores=self._cores(),
            device_steps=analysed.device_steps,
            communication=analysed.communication,
            origin_unix_ns=self._unix_ns(origin_ns),
            host_times=self._stages.summary(self._end_ns - origin_ns),
            runtime=sums.runtime_calls(),
            kernel_durations=sums.kernel_durations(),
            collectives=collective_calls(trace.collectives, concatenated(trace.tables, self._collectives)),
            shapes=shape_calls(trace.shapes),
            product_flops=product_flops(trace.shapes),
            memory=memory_of(trace.memory, origin_ns),
            functions=self._calls.functions(),
            stacks=self._calls.frames(),
            unit=facts.unit if facts else None,
        )

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
        calls = concatenated(trace.tables, self._collectives)
        on_hosts = not len(calls)
        if on_hosts:
            calls = host_collectives(trace)
        stated = [*trace.collectives.stated, None]
        of_args = trace.collectives.of(calls)
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
