"""What one trace says: operators by self time, kernels by total time, how busy each device was, the steps."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from profdeck.traces.columns import (
    ANNOTATION,
    DEVICE_CATEGORIES,
    DEVICE_PROCESSES,
    OPERATOR,
    Columns,
    ColumnsHandler,
    Id,
)
from profdeck.traces.integrity import TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck.traces.intervals import Int, self_times, span_and_busy
from profdeck.traces.stream import read_ahead

_STEP = re.compile(r"ProfilerStep#(\d+)")
_NS_PER_US = 1000
# Written by Kineto at the head of the file (libkineto/src/output_json.cpp).
_KEYS = frozenset({"distributedInfo", "deviceProperties"})


@attrs.frozen
class OperatorSummary:
    """All calls of one operator or annotation."""

    name: str
    count: int
    self_us: float
    """Time in which it was the innermost operator or annotation open on its thread."""
    total_us: float
    """Time from start to end, summed; a recursive operator counts its inner calls again."""
    max_us: float


@attrs.frozen
class KernelSummary:
    """All runs of one kernel, copy or fill on a device."""

    name: str
    category: str
    count: int
    total_us: float
    mean_us: float
    max_us: float


@attrs.frozen
class DeviceSummary:
    """How busy one device was, between the first and the last thing that it did in the trace."""

    device: Id
    """The process id of its events: Kineto's device index."""
    name: str | None
    """From ``deviceProperties``."""
    events: int
    span_us: float
    busy_us: float
    """Time in which at least one kernel, copy or fill ran."""
    idle_us: float


@attrs.frozen
class StepSummary:
    """One ``ProfilerStep#N`` mark."""

    step: int
    pid: Id
    start_us: float
    """Since the earliest event that is summarised."""
    duration_us: float


@attrs.frozen
class TraceSummary:
    """One trace, read in one pass. Times are microseconds, exact to the nanosecond."""

    check: TraceCheck
    rank: int | None
    world_size: int | None
    operators: tuple[OperatorSummary, ...]
    """By self time, longest first."""
    annotations: tuple[OperatorSummary, ...]
    """By self time, longest first."""
    kernels: tuple[KernelSummary, ...]
    """By total time, longest first."""
    devices: tuple[DeviceSummary, ...]
    steps: tuple[StepSummary, ...]
    """In the order of time."""

    @property
    def problem(self) -> str | None:
        """Where the trace ended if it is not whole; the summary then covers what came before."""
        return self.check.problem

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as dicts, tuples and scalars."""
        return attrs.asdict(self)


def summarise_trace(path: Path, *, on_progress: Callable[[int, int], None] | None = None) -> TraceSummary:
    """Summarise a Chrome trace, plain or gzip, in one pass; of a truncated one, what is readable.

    Only complete events (``ph`` "X") count. Self time nests operators and annotations together, per thread; what
    the host runtime and Python frames take inside an operator stays its own. Times are exact to the nanosecond, also
    where the file has them as strings or as numbers of more digits than a float holds. Memory is 40 bytes for each
    event summarised, whatever the size of the file.

    Args:
        path: A Chrome trace, plain or gzip.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    handler = ColumnsHandler(_KEYS)
    checker = TraceChecker(handler)
    damage = feed_chunks(checker.feed, read_ahead(path, on_read=on_read))
    check = checker.finish(size_bytes, damage=damage)
    columns = handler.columns()
    info = handler.members.get("distributedInfo")
    operators, annotations = _operators(columns)
    return TraceSummary(
        check=check,
        rank=_integer(info, "rank"),
        world_size=_integer(info, "world_size"),
        operators=operators,
        annotations=annotations,
        kernels=_kernels(columns),
        devices=_devices(columns, handler.members.get("deviceProperties")),
        steps=_steps(columns),
    )


def _operators(columns: Columns) -> tuple[tuple[OperatorSummary, ...], tuple[OperatorSummary, ...]]:
    """Return operators and annotations."""
    events = columns.of_categories(frozenset({OPERATOR, ANNOTATION}))
    own = self_times(columns.track[events], columns.start_ns[events], columns.end_ns[events])
    groups = _Groups(columns, events)
    by_category: dict[str, list[OperatorSummary]] = {OPERATOR: [], ANNOTATION: []}
    self_ns = groups.sums(own)
    for group in np.argsort(-self_ns, kind="stable").tolist():
        by_category[groups.category(group)].append(
            OperatorSummary(
                name=groups.name(group),
                count=int(groups.counts[group]),
                self_us=_us(self_ns[group]),
                total_us=_us(groups.total_ns[group]),
                max_us=_us(groups.max_ns[group]),
            )
        )
    return tuple(by_category[OPERATOR]), tuple(by_category[ANNOTATION])


def _kernels(columns: Columns) -> tuple[KernelSummary, ...]:
    groups = _Groups(columns, columns.of_categories(DEVICE_CATEGORIES | DEVICE_PROCESSES))
    return tuple(
        KernelSummary(
            name=groups.name(group),
            category=groups.category(group),
            count=int(groups.counts[group]),
            total_us=_us(groups.total_ns[group]),
            mean_us=_us(groups.total_ns[group]) / int(groups.counts[group]),
            max_us=_us(groups.max_ns[group]),
        )
        for group in np.argsort(-groups.total_ns, kind="stable").tolist()
    )


def _devices(columns: Columns, properties: Any) -> tuple[DeviceSummary, ...]:
    device_names = {
        device.get("id"): str(device.get("name"))
        for device in (properties if isinstance(properties, list) else [])
        if isinstance(device, dict) and isinstance(device.get("id"), int)
    }
    events = columns.of_categories(DEVICE_CATEGORIES | DEVICE_PROCESSES)
    tracks_of: dict[Id, list[int]] = {}
    for track in np.unique(columns.track[events]).tolist():
        tracks_of.setdefault(columns.tracks[track][0], []).append(track)
    summaries = []
    for device, tracks in tracks_of.items():
        of_device = events[np.isin(columns.track[events], tracks)]
        span_ns, busy_ns = span_and_busy(columns.start_ns[of_device], columns.end_ns[of_device])
        summaries.append(
            DeviceSummary(
                device=device,
                name=device_names.get(device),
                events=len(of_device),
                span_us=_us(span_ns),
                busy_us=_us(busy_ns),
                idle_us=_us(span_ns - busy_ns),
            )
        )
    return tuple(summaries)


def _steps(columns: Columns) -> tuple[StepSummary, ...]:
    numbers = {code: int(found[1]) for code, name in enumerate(columns.names) if (found := _STEP.fullmatch(name))}
    # Kineto writes them as annotations, Ascend as operators.
    events = columns.of_categories(frozenset({ANNOTATION, OPERATOR}))
    events = events[np.isin(columns.name[events], list(numbers))]
    events = events[np.argsort(columns.start_ns[events], kind="stable")]
    origin_ns = columns.start_ns.min() if len(events) else 0
    return tuple(
        StepSummary(
            step=numbers[int(columns.name[event])],
            pid=columns.tracks[int(columns.track[event])][0],
            start_us=_us(columns.start_ns[event] - origin_ns),
            duration_us=_us(columns.end_ns[event] - columns.start_ns[event]),
        )
        for event in events.tolist()
    )


class _Groups:
    """Events of the same category and name, with their counts and durations."""

    def __init__(self, columns: Columns, events: Int) -> None:
        self._columns = columns
        key = columns.category[events] * len(columns.names) + columns.name[events]
        self._keys, self._group = np.unique(key, return_inverse=True)
        durations = columns.end_ns[events] - columns.start_ns[events]
        self.counts = np.bincount(self._group, minlength=len(self._keys))
        self.total_ns = self.sums(durations)
        self.max_ns = np.zeros(len(self._keys), dtype=np.int64)
        np.maximum.at(self.max_ns, self._group, durations)

    def sums(self, values: Int) -> Int:
        """Sum a value of each event by group, in integers."""
        sums = np.zeros(len(self._keys), dtype=np.int64)
        np.add.at(sums, self._group, values)
        return sums

    def name(self, group: int) -> str:
        return self._columns.names[int(self._keys[group]) % len(self._columns.names)]

    def category(self, group: int) -> str:
        return self._columns.categories[int(self._keys[group]) // len(self._columns.names)]


def _integer(members: Any, key: str) -> int | None:
    value = members.get(key) if isinstance(members, dict) else None
    return value if isinstance(value, int) else None


def _us(time_ns: int | np.int64) -> float:
    return int(time_ns) / _NS_PER_US
