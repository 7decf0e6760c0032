"""Summarises one trace in one pass, as a :class:`~profdeck_traces.analysis.model.RankSummary`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.arrivals import ArrivalFinder, Arrivals, no_arrivals
from profdeck_traces.account.idle_periods import NO_PERIODS, IdleFinder, IdlePeriods
from profdeck_traces.account.model import Account
from profdeck_traces.account.owned_path import OwnedPath
from profdeck_traces.account.table import account_of, owned_path
from profdeck_traces.account.walk import Path as WalkedPath
from profdeck_traces.account.windows import PathWindow
from profdeck_traces.analysis.call_tree import CallTree
from profdeck_traces.analysis.classes import COMMUNICATION, MEMORY_COPY, MEMORY_SET, Classifier
from profdeck_traces.analysis.collectives import (
    Collectives,
    StatedCollective,
    collective_calls,
    is_message,
    stated_collectives,
    waits_for_all,
)
from profdeck_traces.analysis.critical_path import captured_operators, path_windows
from profdeck_traces.analysis.detail_model import Timeline
from profdeck_traces.analysis.device_speed import block_counts, mean_blocks, slowdowns
from profdeck_traces.analysis.device_steps import step_kind
from profdeck_traces.analysis.devices import COMMUNICATES, COMPUTES, MOVES, DeviceTimes
from profdeck_traces.analysis.host_collectives import ONLY_GROUP, host_collectives
from profdeck_traces.analysis.host_states import KNOWN_CATEGORIES, Host
from profdeck_traces.analysis.launches import Launches, launched_work
from profdeck_traces.analysis.memory import memory_of
from profdeck_traces.analysis.model import CategorySummary, DeviceSummary, ImplausibleEvents, RankSummary, StepSummary
from profdeck_traces.analysis.periods import stage_periods, weight_sync_periods, work_periods
from profdeck_traces.analysis.rank_reading import RankReading
from profdeck_traces.analysis.recorder_model import CoreSummary, RecorderTables
from profdeck_traces.analysis.shapes import operator_shapes
from profdeck_traces.analysis.stages import StageTimes
from profdeck_traces.analysis.step_names import GLOBAL_STEP, StepNames
from profdeck_traces.analysis.step_times import StepTimes
from profdeck_traces.analysis.steps import find_steps
from profdeck_traces.analysis.timeline import Kinds, Picture
from profdeck_traces.analysis.totals_by_name import NameSums
from profdeck_traces.analysis.typical_step import candidates, marks_of, span_of
from profdeck_traces.analysis.utilization import common_device, is_cpu_only, utilization_of
from profdeck_traces.attribution.event_work import CountedCalls, EventWork, counted_calls, event_work
from profdeck_traces.attribution.graph_captures import GraphOperators
from profdeck_traces.attribution.model import AttributedTimes, Utilization
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
    Columns,
)
from profdeck_traces.reading.intervals import Int, self_times
from profdeck_traces.reading.reader import read_trace
from profdeck_traces.reading.trace import Trace

_NS_PER_US = 1000
_LEAST_KNOWN, _SHOWN_CATEGORIES = 0.01, 5
# 2010 and 2100.
_EARLIEST_UNIX_NS, _LATEST_UNIX_NS = 1_262_304_000 * 10**9, 4_102_444_800 * 10**9


def summarise_trace(
    source: TraceSource | Path,
    *,
    classifier: Classifier | None = None,
    step_names: StepNames | None = None,
    pictures: bool = False,
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
        pictures: If True, also generate pictures of the trace, which takes 25 % longer.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    source = source if isinstance(source, TraceSource) else TraceSource(source)
    reading = read_summary(
        source,
        classifier=classifier or Classifier(),
        step_names=step_names or StepNames.load(),
        cold_first_step=source.cold_first_step,
        last_step=source.last_step,
        pictures=pictures,
        on_progress=on_progress,
    )
    return reading.with_facts(source).summary


def read_summary(  # noqa: PLR0913 - two parameters are facts from the manifest
    source: TraceSource,
    *,
    classifier: Classifier,
    step_names: StepNames,
    cold_first_step: bool = False,
    last_step: int | None = None,
    pictures: bool = False,
    on_progress: Progress | None = None,
) -> RankReading:
    """Summarise a trace like `summarise_trace`, and also return its collective calls.

    The reading does not contain the facts of the source. `RankReading.with_facts` adds them.
    """
    trace = read_trace(source.path, is_step=step_names.is_step, on_progress=on_progress)
    _check_categories(trace)
    graphs = captured_operators(source, trace, step_names)
    return _Summary(
        source.path,
        trace if graphs is None else attrs.evolve(trace, raw=graphs.events),
        graphs,
        classifier,
        step_names,
        cold_first_step=cold_first_step,
        last_step=last_step,
        with_pictures=pictures,
    ).reading()


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

    def __init__(  # noqa: PLR0913, PLR0915 - one parameter per option; a single pass that frees memory early
        self,
        path: Path,
        trace: Trace,
        graphs: GraphOperators | None,
        classifier: Classifier,
        step_names: StepNames,
        *,
        cold_first_step: bool,
        last_step: int | None,
        with_pictures: bool,
    ) -> None:
        self._graph_note = None if graphs is None else graphs.note
        self._path, self._trace, self._device = path, trace, common_device(trace)
        self._with_pictures = with_pictures
        self._critical_path: OwnedPath | None = None
        self._step_names = step_names
        self._analysed = _tables(path)
        tables = trace.tables
        self._on_device = tables.names_of_categories(DEVICE_WORK)
        operators, annotations = (tables.names_of_categories(frozenset({kind})) for kind in (OPERATOR, ANNOTATION))
        # Some recorders mark steps by operators, which are no work of the host.
        of_steps = operators.copy()
        of_steps[operators] = [step_names.parse(tables.names[code]) is not None for code in np.flatnonzero(operators)]
        is_own = np.array([name == CLOCK_ANCHOR for name in tables.names], dtype=bool)
        self._is_operator, self._is_annotation = operators & ~of_steps, (annotations | of_steps) & ~is_own
        self._on_host = operators | annotations
        self._classes = classifier.classes_of(trace)
        self._communicates = np.array([found == COMMUNICATION for found in self._classes], dtype=bool)
        events, annotated = trace.events, trace.annotations
        self._origin_ns = int(events.start_ns[0]) if len(events) else 0
        self._end_ns = int(events.end_ns.max()) if len(events) else 0
        calls = None if graphs is None else graphs.calls
        names = None if trace.raw is None else Attribution(trace.raw, step_names.is_step, calls)
        self._counted = counted = None if names is None else counted_calls(names.events, names.is_operator)
        self._trace_steps = steps = find_steps(
            annotated,
            step_names,
            trace.arg("External id", annotated.row),
            launched_work(trace, names),
            cold_first_step=cold_first_step,
            last_step=last_step,
        )
        self_ns = _self_times(events, self._on_host)
        self._host = Host.of(events, of_steps) if trace.has_host else None
        self._launches = Launches.of(trace, self._host, steps)
        self._sums = NameSums(events, self_ns)
        of_operators = np.flatnonzero(self._is_operator[events.name])
        own_times = events[of_operators], self_ns[of_operators]
        work = events[np.flatnonzero(self._on_device[events.name])]
        del self_ns, of_operators
        self._steps = StepTimes(
            steps,
            work,
            own_times,
            events[np.flatnonzero(self._is_annotation[events.name])],
            self._launches.unrecorded_steps,
        )
        is_stage = annotations & ~is_own
        is_stage[is_stage] = [step_names.parse(tables.names[code]) is None for code in np.flatnonzero(is_stage)]
        self._stages = StageTimes(events, annotated, is_stage, steps, self._host)
        self._attributed: AttributedTimes | None = None
        self._event_work: EventWork | None = None
        self._communication = events[np.flatnonzero(self._communicates[events.name])]
        self._collectives, self._matched = self._collected()
        self._account: Account | None = None
        self._arrivals, self._idle = no_arrivals(len(self._collectives)), NO_PERIODS
        if names is not None and counted is not None:
            timed = (work.row, work.duration_ns) if len(work) else (own_times[0].row, own_times[1])
            self._attribute(names, counted, *timed, on_device=len(work) > 0)
            # Free these per-event arrays before allocating the next ones.
            del own_times, work, timed
            self._account, self._arrivals, self._idle = self._account_of(names)
            names = None
        self._calls = CallTree(events, self._is_operator | is_stage, trace.thread_names)
        moves = np.array([found in {MEMORY_COPY, MEMORY_SET} for found in self._classes], dtype=bool)
        self._work = np.where(self._communicates, COMMUNICATES, np.where(moves, MOVES, COMPUTES))
        unrecorded = self._launches.unrecorded_steps
        self._devices = DeviceTimes(events, self._work, trace.device_names, steps, self._host, unrecorded)

    def _attribute(
        self, names: Attribution, counted: CountedCalls, rows: Int, time_ns: Int, *, on_device: bool
    ) -> None:
        """Attribute the time of device events or operators to their owners."""
        on_cpu = not on_device and is_cpu_only(self._trace)
        of_events = event_work(counted, names, rows, time_ns, self._device.peaks, on_device=on_device, on_cpu=on_cpu)
        basis = "device" if on_device else "host"
        attributed = _attributed(names, basis, rows, time_ns, self._stages, of_events)
        self._attributed = attrs.evolve(attributed, note=self._graph_note)
        self._event_work = of_events if on_device else None

    def reading(self) -> RankReading:
        """Return the reading, not yet including the facts about its source."""
        summary = self._summary()
        if self._with_pictures and summary.span_us:
            summary = attrs.evolve(summary, timelines=self._timelines(summary))
        return RankReading(summary, self._matched, self._arrivals, self._idle, self._origin_ns, self._trace.base_ns)

    def _timelines(self, summary: RankSummary) -> tuple[Timeline, ...]:
        """Return pictures of the recording and of each step that is a candidate for the typical step."""
        origin_ns, trace = self._origin_ns, self._trace
        work = np.where(self._on_device, self._work, -1)
        track_ns = np.bincount(
            trace.events.track, weights=trace.events.duration_ns, minlength=len(trace.tables.tracks)
        ).astype(np.int64)
        kinds = Kinds(trace.tables, work, self._classes, trace.thread_names, self._devices.spans(), track_ns)
        marks = [*marks_of(summary), *self._stages.marks(origin_ns)]
        pictures = [Picture("recording", origin_ns, self._end_ns, kinds)]
        for step in candidates(summary):
            begin_ns, end_ns = (origin_ns + round(time_us * _NS_PER_US) for time_us in span_of(step))
            pictures.append(Picture(step.name, begin_ns, end_ns, kinds))
        return tuple(
            picture.of(trace.events, self._host, marks, origin_ns, self._critical_path) for picture in pictures
        )

    def _summary(self) -> RankSummary:
        trace, analysed = self._trace, self._analysed
        origin_ns = self._origin_ns
        sums, on_host = self._sums, trace.has_host
        shapes, product_flops = operator_shapes(trace, self._counted)
        collectives = stated_collectives(trace, self._communication)
        devices, of_devices = self._devices.summaries(), self._devices.by_step()
        times = self._steps
        kernels = trace.events[np.flatnonzero((self._on_device & (self._work == COMPUTES))[trace.events.name])]
        blocks = block_counts(trace, kernels)
        slowdown = slowdowns(self._trace_steps, kernels, blocks)
        steps = tuple(
            attrs.evolve(step, devices=of_devices.get(row, ()), slowdown=slowdown.get(row))
            for row, step in enumerate(times.summaries(origin_ns))
        )
        utilization, steps = self._utilization(devices, steps)
        engine = next((mark.engine for mark in self._trace_steps.marks if mark.engine), None)
        work = work_periods(trace.events, self._is_operator | self._on_device, origin_ns, self._end_ns)
        return RankSummary(
            path=str(self._path),
            role=None,
            replica=None,
            rank=trace.rank,
            world_size=trace.world_size,
            host=None,
            capture=None,
            run=None,
            whole=trace.check.whole and not analysed.problems,
            problem=" ".join(filter(None, [trace.check.problem, *analysed.problems])) or None,
            events=trace.check.events,
            span_us=_us(self._end_ns - origin_ns),
            busy_us=_sum_of(devices, lambda device: device.busy_us),
            idle_us=_sum_of(devices, lambda device: device.idle_us),
            communication_us=_sum_of(devices, lambda device: device.communication_us),
            overlap_us=_sum_of(devices, lambda device: device.overlap_us),
            graph_launches=sums.graph_launches() if on_host else None,
            kernels=sums.kernels(
                self._classes,
                trace.kernel_types,
                times.per_step(times.kernels),
                times.cold_ns(times.kernels),
                mean_blocks(kernels, blocks),
            ),
            categories=self._categories(),
            copies=sums.copies(trace),
            operators=sums.operators(
                self._is_operator, times.per_step(times.operators), times.cold_ns(times.operators), on_host=on_host
            ),
            annotations=sums.operators(
                self._is_annotation,
                times.per_step(times.annotations),
                times.cold_ns(times.annotations),
                on_host=on_host,
            ),
            devices=devices,
            steps=steps,
            iterations=times.statistics(),
            cores=self._cores(),
            device_steps=analysed.device_steps,
            communication=analysed.communication,
            origin_unix_ns=self._unix_ns(origin_ns),
            host_times=self._stages.summary(self._end_ns - origin_ns),
            runtime=sums.runtime_calls(),
            kernel_durations=sums.kernel_durations(),
            collectives=collective_calls(*collectives, self._communication),
            shapes=shapes,
            product_flops=product_flops,
            memory=memory_of(trace, origin_ns),
            functions=self._calls.functions(),
            stacks=self._calls.frames(),
            implausible=tuple(ImplausibleEvents(name=name, count=count) for name, count in trace.implausible),
            launches=self._launches.count,
            launches_without_work=self._launches.without_work,
            unrecorded_steps=self._unrecorded_steps(),
            attributed=self._attributed,
            account=self._account,
            utilization=utilization,
            engine=engine,
            work=() if engine else work,
            stage_periods=weight_sync_periods(trace.events, work, origin_ns)
            if engine
            else stage_periods(self._stages.marks(origin_ns)),
        )

    def _utilization(
        self, devices: tuple[DeviceSummary, ...], steps: tuple[StepSummary, ...]
    ) -> tuple[Utilization | None, tuple[StepSummary, ...]]:
        """Return the device utilization and the list of steps, each with its own utilization.

        The device utilization is ``None`` if no device work was counted.
        """
        if self._event_work is None:
            return None, steps
        events = self._trace.events
        work = events[np.flatnonzero(self._on_device[events.name])]
        computes = self._work[work.name] == COMPUTES
        return utilization_of(self._device, self._event_work, work, computes, self._trace_steps, steps, devices)

    def _account_of(self, names: Attribution) -> tuple[Account | None, Arrivals, IdlePeriods]:
        """Return the account, the critical paths to the collectives, and the idle periods on the critical path.

        The account is ``None`` if the steps have zero duration.
        """
        steps, events = self._trace_steps, self._trace.events
        names.events.storage.release()
        windows = path_windows(self._trace, names, steps, self._step_names, self._classes)
        calls, collectives = self._collectives, self._matched
        is_awaited = np.array([waits_for_all(name) for name in collectives.names], dtype=bool)
        rows = np.where(is_awaited[collectives.name], calls.row, -1) if len(calls) else calls.row
        # Group codes with the same text are the same group.
        numbers = {text: number for number, text in enumerate(collectives.groups)}
        groups = np.array([numbers[text] for text in collectives.groups], dtype=np.int64)[collectives.group]
        finder = ArrivalFinder(names, windows.kinds, rows, groups, self._trace.base_ns)
        idle = IdleFinder(names, windows.kinds, self._trace.base_ns)

        def add(window: PathWindow, path: WalkedPath) -> None:
            finder.add(window, path)
            idle.add(path)

        account = account_of(windows, names, step_kind(steps) or "recording", self._counted, add)
        self._critical_path = owned_path(windows, names) if self._with_pictures else None
        if account is not None and not (events.row >= 0).all():
            note = "Device work was recorded without launches, so all owners are on the host."
            account = attrs.evolve(account, notes=(*account.notes, note))
        if account is not None and self._graph_note is not None:
            account = attrs.evolve(account, notes=(*account.notes, self._graph_note))
        return account, finder.arrivals(), idle.periods()

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
            for of_class in self._sums.classes(found, number_of_name, self._steps.cold_ns(self._steps.kernels))
        )

    def _cores(self) -> tuple[CoreSummary, ...]:
        cores = sorted(self._trace.cores.items(), key=lambda item: -item[1][1])
        all_ns = sum(total_ns for _, (_, total_ns) in cores)
        return tuple(
            CoreSummary(core=core, count=count, total_us=_us(total_ns), share=total_ns / all_ns if all_ns else 0.0)
            for core, (count, total_ns) in cores
        )

    def _unix_ns(self, time_ns: int) -> int | None:
        """Convert a trace time to Unix time without a clock offset. Return ``None`` if the result is implausible."""
        # Kineto traces without a base time contain Unix times.
        unix_ns = time_ns + self._trace.base_ns
        return unix_ns if _EARLIEST_UNIX_NS < unix_ns < _LATEST_UNIX_NS else None

    def _collected(self) -> tuple[Columns, Collectives]:
        """Return the collective calls as events, and in the form used for comparisons with other ranks."""
        trace = self._trace
        calls = self._communication
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
        sizes = {said.group: said.group_size for said in distinct if said.group_size is not None}
        if on_hosts and trace.world_size is not None:
            sizes[ONLY_GROUP] = trace.world_size
        numbers = [-1 if (number := mark.step) is None else number for mark in self._trace_steps.marks]
        # Without known ends, calls may be assigned to the step after their own.
        has_steps = kind == GLOBAL_STEP and len(windows.step) and (on_hosts or windows.end_ns is not None)
        if has_steps:
            step = windows.of(calls.start_ns)
            step = np.where(step < 0, -1, np.array(numbers, dtype=np.int64)[self._trace_steps.name[step]])
        return calls, Collectives(
            path=str(self._path),
            rank=trace.rank,
            names=[_collective(trace.tables.names[kernel], stated[code]) for kernel, code in kernels],
            groups=[
                said.group if (said := stated[code]) else ONLY_GROUP if on_hosts else str(trace.tables.tracks[track][1])
                for track, code in streams
            ],
            # What HCCL runs has a process group instead of a stream, of which kernels know the last digits only.
            meant={f"group {digits}": group for digits, group in self._analysed.groups.items()},
            sizes=sizes,
            name=name,
            group=group,
            warm_from_ns=None if warm_from_ns is None else warm_from_ns + trace.base_ns,
            start_ns=calls.start_ns + trace.base_ns,
            end_ns=calls.end_ns + trace.base_ns,
            step=step if has_steps else None,
        )


def _self_times(events: Columns, on_host: NDArray[np.bool_]) -> Int:
    """Return the self time of each event, or 0 if `on_host` is False for its name."""
    self_ns = np.zeros(len(events), dtype=np.int64)
    rows = np.flatnonzero(on_host[events.name])
    self_ns[rows] = self_times(events.track[rows], events.start_ns[rows], events.end_ns[rows])
    return self_ns


def _attributed(  # noqa: PLR0913, PLR0917 - one parameter per kind of input
    names: Attribution, basis: str, rows: Int, time_ns: Int, stages: StageTimes, of_events: EventWork
) -> AttributedTimes:
    """Return the device time, or the self time of operators, by owner; see `time_by_owner`."""
    events = names.events
    host = values_at(names.host, rows)
    has_host = np.flatnonzero(host >= 0)
    host = host[has_host]
    of_host, stage_names = stages.at(events.start_ns[host])
    # Autograd threads run the backward pass while the thread with the stages waits for them.
    threads = np.append(np.unique(events.track[names.is_backward]), stages.track)
    stage = np.full(len(rows), -1)
    stage[has_host] = np.where(np.isin(events.track[host], threads), of_host, -1)
    return time_by_owner(names, basis, rows, time_ns, (stage, stage_names), of_events)


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
