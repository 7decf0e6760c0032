"""What one trace says, in one pass over it: a :class:`~profdeck.traces.analysis.model.RankSummary`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck.base.progress import Progress
from profdeck.records.artifact import CLOCK_ANCHOR
from profdeck.traces.analysis.classes import COMMUNICATION, MEMORY_COPY, MEMORY_SET, UNCLASSIFIED, Classifier
from profdeck.traces.analysis.collectives import Collectives, is_message
from profdeck.traces.analysis.devices import DeviceTimes
from profdeck.traces.analysis.host_states import HostStates
from profdeck.traces.analysis.model import (
    CategorySummary,
    CopySummary,
    CoreSummary,
    DeviceSummary,
    KernelSummary,
    OperatorSummary,
    PerStep,
    RankSummary,
    RecorderTables,
)
from profdeck.traces.analysis.step_names import StepNames
from profdeck.traces.analysis.step_times import StepTimes
from profdeck.traces.analysis.steps import find_steps
from profdeck.traces.kinds import kind_of
from profdeck.traces.reading.columns import (
    ANNOTATION,
    DEVICE_CATEGORIES,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    Tables,
    concatenated,
)
from profdeck.traces.reading.intervals import Int, self_times
from profdeck.traces.reading.reader import read_trace
from profdeck.traces.reading.time_slices import Slice
from profdeck.traces.reading.trace import Trace
from profdeck.traces.sources import TraceSource

_NS_PER_US = 1000
# Kernels of more names than any program has: to classify a long one takes a millisecond.
_MAX_CLASSIFIED = 5000
_DEVICE = DEVICE_CATEGORIES | DEVICE_PROCESSES
# Kineto's categories of copies and fills.
_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
# What launches a captured graph of kernels, by the beginning of its name: CUDA's runtime and driver, HIP's runtime.
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


@attrs.frozen
class Reading:
    """A summary, and what is needed of the trace to compare it with those of other ranks."""

    summary: RankSummary
    collectives: Collectives


def summarise_trace(
    source: TraceSource | Path,
    *,
    devices_only: bool = False,
    classifier: Classifier | None = None,
    step_names: StepNames | None = None,
    on_progress: Progress | None = None,
) -> RankSummary:
    """Summarise a trace in one pass and bounded memory; of a damaged one, what is readable.

    Only complete events (``ph`` "X") count. Self time nests operators and annotations together, per thread; what
    the host runtime and Python frames take inside an operator stays its own.

    Args:
        source: A Chrome trace, plain or gzip, or what a plugin reads: see `profdeck.traces.kinds`.
        devices_only: Read the lanes of devices and annotations only, three times as fast; see
            :func:`profdeck.traces.reading.reader.read_trace`.
        classifier: What class a kernel is of; the built-in table, if not given.
        step_names: What steps are called; what the installed plugins say, if not given.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    return read_summary(
        source if isinstance(source, TraceSource) else TraceSource(source),
        devices_only=devices_only,
        classifier=classifier or Classifier(),
        step_names=step_names or StepNames.load(),
        on_progress=on_progress,
    ).summary


def read_summary(
    source: TraceSource,
    *,
    devices_only: bool,
    classifier: Classifier,
    step_names: StepNames,
    on_progress: Progress | None = None,
) -> Reading:
    """Do the same, with the calls of collectives."""
    trace = read_trace(
        source.path,
        devices_only=devices_only,
        is_step=lambda name: step_names.parse(name) is not None,
        on_progress=on_progress,
    )
    return summary_of(trace, source, classifier=classifier, step_names=step_names)


def summary_of(trace: Trace, source: TraceSource, *, classifier: Classifier, step_names: StepNames) -> Reading:
    """Do the same for a trace that was read; the answer does not depend on how large its slices are."""
    return _Summary(source, trace, _tables(source.path), classifier, step_names).finish()


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
        self._is_copy = tables.names_of_categories(_COPIES)
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
        self._sums = _Sums(len(tables.names))
        self._steps = StepTimes(find_steps(trace.marks, step_names, trace.annotations.of(trace.marks)))
        host = None if trace.devices_only else HostStates(tables, of_steps)
        self._devices = DeviceTimes(tables, self._communicates, moves, trace.device_names, host=host)
        self._collectives: list[Columns] = []
        self._origin_ns: int | None = None
        self._end_ns = 0

    def finish(self) -> Reading:
        for piece in self._trace.slices():
            self._add(piece)
        summary = self._summary()
        return Reading(summary, self._collected(summary))

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
        self._devices.add(piece)
        self._collectives.append(piece.whole(self._communicates[columns.name] & piece.first))

    def _summary(self) -> RankSummary:
        trace, analysed, manifest = self._trace, self._analysed, self._source.manifest
        origin_ns = self._origin_ns or 0
        kernels, categories = self._kernels()
        devices = self._devices.summaries()
        return RankSummary(
            path=str(self._source.path),
            role=manifest.role if manifest else None,
            replica=manifest.replica if manifest else None,
            rank=manifest.rank if manifest else trace.rank,
            world_size=manifest.world_size if manifest else trace.world_size,
            host=manifest.host if manifest else None,
            capture=manifest.capture if manifest else None,
            whole=trace.check.whole and not trace.searched and not analysed.problems,
            problem=" ".join(filter(None, [trace.check.problem, *analysed.problems])) or None,
            events=None if trace.searched else trace.check.events,
            span_us=_us(self._end_ns - origin_ns),
            busy_us=_sum_of(devices, lambda device: device.busy_us),
            idle_us=_sum_of(devices, lambda device: device.idle_us),
            communication_us=_sum_of(devices, lambda device: device.communication_us),
            overlap_us=_sum_of(devices, lambda device: device.overlap_us),
            graph_launches=None if trace.devices_only else self._graph_launches(),
            kernels=kernels,
            categories=categories,
            copies=self._copies(),
            operators=self._operators(self._is_operator, self._steps.operators()),
            annotations=self._operators(self._is_annotation, self._steps.annotations()),
            devices=devices,
            steps=self._steps.summaries(origin_ns),
            iterations=self._steps.statistics(),
            cores=self._cores(),
            device_steps=analysed.device_steps,
            communication=analysed.communication,
            unit=self._source.unit,
        )

    def _kernels(self) -> tuple[tuple[KernelSummary, ...], tuple[CategorySummary, ...]]:
        sums, tables = self._sums, self._trace.tables
        used = self._on_device & (sums.counts > 0)
        all_ns = int(sums.total_ns[used].sum())
        per_step = self._steps.kernels()
        kernels = tuple(
            KernelSummary(
                name=tables.names[code],
                category=self._classes[code],
                kind=tables.categories[tables.name_category[code]],
                count=int(sums.counts[code]),
                total_us=_us(sums.total_ns[code]),
                mean_us=_us(sums.total_ns[code]) / int(sums.counts[code]),
                max_us=_us(sums.max_ns[code]),
                share=_share(sums.total_ns[code], all_ns),
                per_step=per_step.get(code),
                type=self._trace.kernel_types.get(tables.names[code]),
            )
            for code in _largest(tables, sums.total_ns, used)
        )
        found = sorted({self._classes[code] for code in np.flatnonzero(used).tolist()})
        numbers = {name: number for number, name in enumerate(found)}
        class_of_name = np.array([numbers.get(name, len(found)) for name in self._classes], dtype=np.int64)
        counts = np.bincount(class_of_name[used], weights=sums.counts[used], minlength=len(found))
        totals = np.bincount(class_of_name[used], weights=sums.total_ns[used], minlength=len(found))
        of_classes = self._steps.classes(class_of_name)
        categories = tuple(
            CategorySummary(
                category=found[number],
                count=int(counts[number]),
                total_us=_us(totals[number]),
                share=_share(totals[number], all_ns),
                per_step=of_classes.get(number),
            )
            for number in np.argsort(-totals, kind="stable").tolist()
        )
        return kernels, categories

    def _cores(self) -> tuple[CoreSummary, ...]:
        cores = sorted(self._trace.cores.items(), key=lambda item: -item[1][1])
        all_ns = sum(total_ns for _, (_, total_ns) in cores)
        return tuple(
            CoreSummary(core=core, count=count, total_us=_us(total_ns), share=_share(total_ns, all_ns))
            for core, (count, total_ns) in cores
        )

    def _operators(self, of_kind: NDArray[np.bool_], per_step: dict[int, PerStep]) -> tuple[OperatorSummary, ...]:
        sums, on_host = self._sums, not self._trace.devices_only
        return tuple(
            OperatorSummary(
                name=self._trace.tables.names[code],
                count=int(sums.counts[code]),
                self_us=_us(sums.self_ns[code]) if on_host else None,
                total_us=_us(sums.total_ns[code]),
                max_us=_us(sums.max_ns[code]),
                per_step=per_step.get(code),
            )
            for code in _largest(
                self._trace.tables, sums.self_ns if on_host else sums.total_ns, of_kind & (sums.counts > 0)
            )
        )

    def _copies(self) -> tuple[CopySummary, ...]:
        sums, tables = self._sums, self._trace.tables
        copies = []
        for code in _largest(tables, sums.total_ns, self._is_copy & (sums.counts > 0)):
            name, count = tables.names[code], int(sums.counts[code])
            category = tables.categories[tables.name_category[code]]
            told, size_bytes = self._trace.copied.get((category, name), (0, 0))
            copies.append(
                CopySummary(
                    name=name,
                    count=count,
                    total_us=_us(sums.total_ns[code]),
                    size_bytes=size_bytes if told == count else None,
                )
            )
        return tuple(copies)

    def _graph_launches(self) -> int:
        tables = self._trace.tables
        of_runtime = tables.names_of_categories(_RUNTIME)
        return sum(
            int(self._sums.counts[code])
            for code in np.flatnonzero(of_runtime).tolist()
            if tables.names[code].startswith(_GRAPH_LAUNCHES)
        )

    def _collected(self, summary: RankSummary) -> Collectives:
        trace = self._trace
        calls = concatenated(trace.tables, self._collectives)
        stated = [*trace.collectives.stated, None]
        of_args = trace.collectives.of(calls)
        kernels, name = _pairs(calls.name, of_args, len(stated))
        streams, group = _pairs(calls.track, of_args, len(stated))
        offset_ns = self._source.clock_offset_ns
        return Collectives(
            path=summary.path,
            rank=summary.rank,
            role=summary.role,
            replica=summary.replica,
            capture=summary.capture,
            host=summary.host,
            anchor_offset_ns=None if offset_ns is None else offset_ns - trace.base_ns,
            names=[_collective(trace.tables.names[kernel], stated[code]) for kernel, code in kernels],
            groups=[
                found[1] if (found := stated[code]) else str(trace.tables.tracks[track][1]) for track, code in streams
            ],
            # What HCCL runs has a process group instead of a stream, of which kernels know the last digits only.
            meant={f"group {digits}": group for digits, group in self._analysed.groups.items()},
            name=name,
            group=group,
            start_ns=calls.start_ns + trace.base_ns,
            end_ns=calls.end_ns + trace.base_ns,
        )


def _collective(kernel: str, stated: tuple[str, str] | None) -> str:
    """Return what tells most: NCCL carries out some collectives by messages."""
    return stated[0] if stated and is_message(kernel) else kernel


def _pairs(first: NDArray[np.integer], second: Int, seconds: int) -> tuple[list[tuple[int, int]], Int]:
    """Return the distinct pairs of numbers, the second one less than `seconds`, and which one each pair is."""
    keys, which = np.unique(first.astype(np.int64) * seconds + second, return_inverse=True)
    return [divmod(key, seconds) for key in keys.tolist()], which


class _Sums:
    """Counts and times by name, in nanoseconds."""

    def __init__(self, names: int) -> None:
        self.counts = np.zeros(names, dtype=np.int64)
        self.total_ns = np.zeros(names, dtype=np.int64)
        self.max_ns = np.zeros(names, dtype=np.int64)
        self.self_ns = np.zeros(names, dtype=np.int64)

    def add(self, name: NDArray[np.int32], duration: NDArray[np.int64]) -> None:
        self.counts += np.bincount(name, minlength=len(self.counts))
        self.total_ns += _summed(name, duration, len(self.counts))
        np.maximum.at(self.max_ns, name, duration)

    def add_self(self, name: NDArray[np.int32], own: NDArray[np.int64]) -> None:
        self.self_ns += _summed(name, own, len(self.counts))


def _summed(name: NDArray[np.int32], time_ns: NDArray[np.int64], names: int) -> NDArray[np.int64]:
    # A float of 64 bits holds 104 days of nanoseconds exactly.
    return np.bincount(name, weights=time_ns, minlength=names).astype(np.int64)


def _largest(tables: Tables, time_ns: NDArray[np.int64], used: NDArray[np.bool_]) -> list[int]:
    """Return the codes of names by time, the largest first, of equal ones by name and category."""
    codes = np.flatnonzero(used)
    times = dict(zip(codes.tolist(), time_ns[codes].tolist(), strict=True))
    kind = tables.name_category
    return sorted(times, key=lambda code: (-times[code], tables.names[code], tables.categories[kind[code]]))


def _sum_of(devices: tuple[DeviceSummary, ...], value: Callable[[DeviceSummary], float]) -> float | None:
    return sum(map(value, devices)) if devices else None


def _share(part: float | np.number, whole: int) -> float:
    return float(part) / whole if whole else 0.0


def _us(time_ns: float | np.number) -> float:
    return int(time_ns) / _NS_PER_US
