"""First pass over a source: selects the events to keep, and plans their new processes, ids and lanes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.progress import Progress
from profdeck_traces.merge.metadata import metadata
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.reading.events import TEXT, Events, read_events
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.walking import Kind
from profdeck_traces.writing.nested_tracks import MAX_LANES, place_on_lanes

BASE = "baseTimeNanoseconds"
COMMON_KEYS = ("schemaVersion", "displayTimeUnit")
SOURCE_KEYS = ("distributedInfo", "deviceProperties")
_MAX_BASE_NS = 2**62

# Kineto's categories for device events. Events in Ascend traces have no category.
_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
_MAX_DEPTH = 512  # kMaxDepth of Perfetto's SliceTracker
# Larger than thread and stream ids, but smaller than new pids.
_FIRST_NEW_TID = 900_000_000

_FLOW_PHASES, _ASYNC_PHASES = "stf", "bneSTpF"
_DROPPED = ("process_name", "process_sort_index")
_ARGS: dict[str, int] = {
    **dict.fromkeys(("@id", "@bind_id"), Kind.ID),
    **dict.fromkeys(("@id2", "name", "sort_index"), TEXT),
}
# Beyond this time, a double that holds microseconds cannot represent every nanosecond.
_LARGE_NS = 2**53 // 1000 * 1000
_KEEP, _MARK = 1, 2
_HEXADECIMAL = re.compile("(?:0[xX])?[0-9a-fA-F]+")
_NO_ID = int(np.iinfo(np.int64).min)


@attrs.frozen
class PlanTask:
    """A source to plan."""

    source: MergeSource
    directory: Path
    """Directory for the source's arrays."""

    def __str__(self) -> str:
        return str(self.source.path)


@attrs.frozen
class SourceProcess:
    """A process in a source."""

    pid: Id
    name: str | None
    """Name in the source; ``None`` if the process has no name."""
    sort_index: float


@attrs.frozen
class NewLane:
    """An additional lane for events that partially overlap other events in their original lane."""

    process: int
    """Index of the lane's process."""
    tid: int
    name: str
    sort_index: bytes | None
    """Sort index of the original lane, as JSON text."""

    def metadata(self, pid: int) -> list[bytes]:
        """Return the metadata events of the lane."""
        events = [metadata("thread_name", pid, self.tid, {"name": self.name})]
        if self.sort_index is not None:  # viewers sort lanes with equal indices by name
            events.append(metadata("thread_sort_index", pid, self.tid, {"sort_index": msgspec.Raw(self.sort_index)}))
        return events


@attrs.frozen(kw_only=True)
class SourcePlan:
    """Result of planning a source."""

    problem: str | None = None
    base_ns: int | None = None
    """Base time of the source; ``None`` if the trace is truncated before the base time."""
    processes: tuple[SourceProcess, ...] = ()
    """Processes of the source, ordered by their first events."""
    new_lanes: tuple[NewLane, ...] = ()
    id_count: int = 0
    """Number of distinct ids."""
    first_large_ns: int | None = None
    """Earliest event time that is too large for nanosecond precision in a double; ``None`` if there is none."""
    members: dict[str, bytes] = attrs.field(factory=dict)
    """JSON texts of the top-level members to include in the new file."""


@attrs.frozen(kw_only=True, eq=False)
class Rows:
    """Planned changes for each event, in file order."""

    keep: NDArray[np.uint8]
    """As in `Changes.keep`. Events with a ``bind_id`` or a global ``id2`` are marked."""
    lane: NDArray[np.int32]
    """Index of the event's process or, for a new lane, the number of processes plus the index of the lane."""
    ids: Int
    """Number of the event's ``id`` within the source, from 0; -1 if the event has no ``id``."""
    bind_ids: dict[int, int] = attrs.field(factory=dict)
    """Maps file positions of events to the numbers of their ``bind_id``."""
    global_ids: dict[int, int] = attrs.field(factory=dict)
    """Maps file positions of events to the numbers of their global ``id2``."""

    def save(self, directory: Path) -> None:
        """Write the arrays to a new directory."""
        directory.mkdir()
        for name in ("keep", "lane", "ids"):
            np.save(directory / name, getattr(self, name))
        pairs = {name: list(getattr(self, name).items()) for name in ("bind_ids", "global_ids")}
        (directory / "marks").write_bytes(msgspec.json.encode(pairs))

    @classmethod
    def load(cls, directory: Path) -> Rows:
        """Load the arrays as memory maps."""
        keep, lane, ids = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("keep", "lane", "ids"))
        marks = msgspec.json.decode((directory / "marks").read_bytes())
        return cls(keep=keep, lane=lane, ids=ids, **{name: dict(pairs) for name, pairs in marks.items()})


def plan_source(task: PlanTask, on_progress: Progress | None) -> SourcePlan:
    """Read a source and plan its changes. Arrays with one value per event are written to the task's directory.

    Args:
        task: The source.
        on_progress: Called with the number of source bytes (as on disk) read so far and the total.
    """
    source = task.source
    try:
        path = source.file
        events = read_events(path, args=_ARGS, on_progress=on_progress)
    except TraceError as error:
        return SourcePlan(problem=f"{source.label}: {error}")
    check = events.check
    problems = [f"{source.label} ({path}): {check.problem}"] if check.problem else []
    base_ns = events.members.get(BASE)
    if isinstance(base_ns, bool) or not isinstance(base_ns, int) or not 0 <= base_ns < _MAX_BASE_NS:
        base_ns = 0 if check.whole or not events.member_texts else None
    if not len(events):
        return SourcePlan(problem=" ".join(problems) or None, base_ns=base_ns)
    planner = _Planner(events, source)
    planner.rows().save(task.directory)
    if planner.problem:
        problems.append(f"{source.label} ({path}): {planner.problem}")
    if problems and base_ns is None:
        problems.append(f"Its {BASE} is missing: the smallest base of the other traces is assumed.")
    start = events.all["start_ns"]
    large = start[start >= _LARGE_NS]
    texts = {json.loads(key): value for key, value in events.member_texts if value}
    return SourcePlan(
        problem=" ".join(problems) or None,
        base_ns=base_ns,
        processes=planner.processes,
        new_lanes=tuple(planner.new_lanes),
        id_count=planner.id_count,
        first_large_ns=int(large.min()) if len(large) else None,
        members={key: texts[key] for key in (*COMMON_KEYS, *SOURCE_KEYS) if key in texts},
    )


class _Planner:
    """Plans the changes to the events of one source."""

    def __init__(self, events: Events, source: MergeSource) -> None:
        self._events = events
        self._source = source
        self.problem: str | None = None
        self.processes: tuple[SourceProcess, ...] = ()
        self.new_lanes: list[NewLane] = []
        self.id_count = 0

    def rows(self) -> Rows:
        """Return the planned changes for all events."""
        events, source = self._events, self._source
        keep = (
            np.full(len(events), _KEEP, np.uint8)
            if source.select is None
            else source.select.rows(events).astype(np.uint8)
        )
        keep[events.in_file_order(events.is_profiler_track[events.all["track"]])] = 0
        is_kept = keep.astype(np.bool_)[events.all["row"]]
        lane = self._lanes(is_kept)
        ids = np.full(len(events), -1, np.int64)
        own, bind, shared = self._ids()
        ids[own[0]] = own[1]
        marks = np.concatenate([bind[0], shared[0]])
        keep[marks] = np.where(keep[marks], _MARK, 0)
        keep[events.all["row"][_named(events, *_DROPPED)]] = 0
        begins, ends = events.pairs
        lane = events.in_file_order(lane)
        lane[ends] = lane[begins]
        return Rows(
            keep=keep,
            lane=lane,
            ids=ids,
            bind_ids=dict(zip(*(values.tolist() for values in bind), strict=True)),
            global_ids=dict(zip(*(values.tolist() for values in shared), strict=True)),
        )

    # ------------------------------------------------------------ processes and lanes

    def _lanes(self, is_kept: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Return the lane of each row. Also set `processes` and `new_lanes`."""
        events = self._events
        row, track = events.all["row"], events.all["track"]
        first = np.full(len(events.tracks), len(events), np.int64)
        np.minimum.at(first, track[is_kept], row[is_kept].astype(np.int64))
        used = np.argsort(first, kind="stable")[: int((first < len(events)).sum())].tolist()
        number_of = {pid: number for number, pid in enumerate(dict.fromkeys(events.tracks[code][0] for code in used))}
        names, indices = events.process_names, self._sort_indices("process_sort_index")
        self.processes = tuple(
            SourceProcess(pid, names.get(pid), _number(indices.get((pid, None)))) for pid in number_of
        )
        process_of_track = np.array([number_of.get(pid, -1) for pid, _ in events.tracks], np.int32)
        lane: NDArray[np.int32] = process_of_track[track]
        self._spread(lane, is_kept)
        return lane

    def _spread(self, lane: NDArray[np.int32], is_kept: NDArray[np.bool_]) -> None:
        """Move device events that overlap without nesting to new lanes, together with the flows at their starts."""
        events = self._events
        # Events without a category use their process name as the category.
        is_device = events.has_category({"", *_DEVICE_CATEGORIES, *events.process_names.values()})
        rows = np.flatnonzero(is_device & is_kept[: events.complete])
        tracks, starts = events.track[rows].astype(np.int64), events.start_ns[rows]
        numbers = self._numbers(rows, tracks)
        if not numbers.any():
            return
        keys, codes = np.unique(tracks * MAX_LANES + numbers, return_inverse=True)
        new = np.array(
            [self._add_lane(*divmod(key, MAX_LANES), lane[rows[at]]) for key, at in _first(keys, codes)], np.int32
        )
        moves = numbers > 0
        lane[rows[moves]] = new[codes[moves]]
        # A flow event keeps its lane if any event that starts at the same time on its track keeps its lane.
        first = np.flatnonzero(np.diff(tracks, prepend=-1) | np.diff(starts, prepend=starts[:1]))
        target = new[np.minimum.reduceat(codes, first)]
        flows = np.concatenate([events.rows_of(phase) for phase in _FLOW_PHASES])
        flows = flows[is_kept[flows]]
        at = _find(tracks[first], starts[first], events.all["track"][flows], events.all["start_ns"][flows])
        moves = (at >= 0) & (target[at] >= 0)
        lane[flows[moves]] = target[at[moves]]

    def _numbers(self, rows: Int, tracks: Int) -> Int:
        """Return the number of each event's new lane, or 0 if the event stays on its lane."""
        events, numbers = self._events, np.zeros(len(rows), np.int64)
        bounds = [0, *(np.flatnonzero(np.diff(tracks)) + 1).tolist(), len(rows)]
        for begin, end in itertools.pairwise(bounds):
            of_track = rows[begin:end]
            try:
                numbers[begin:end] = place_on_lanes(events.start_ns[of_track], events.end_ns[of_track], _MAX_DEPTH)
            except ValueError as error:
                pid, tid = events.tracks[int(tracks[begin])]
                self.problem = (
                    self.problem or f"Process {pid}, thread {tid}: {error}. Viewers will not show all of them."
                )
        return numbers

    def _add_lane(self, track: int, number: int, process: int) -> int:
        """Add a new lane and return its index. For number 0, which is the original lane, return -1."""
        if not number:
            return -1
        pid, tid = self._events.tracks[track]
        name = self._events.thread_names.get((pid, tid), "" if tid is None else str(tid))
        suffix = " (overlapping)" if number == 1 else f" (overlapping {number})"
        new_tid = _FIRST_NEW_TID + len(self.new_lanes)
        self.new_lanes.append(NewLane(int(process), new_tid, name + suffix, self._thread_sort_indices.get((pid, tid))))
        return len(self.processes) + len(self.new_lanes) - 1

    @functools.cached_property
    def _thread_sort_indices(self) -> dict[tuple[Id, Id | None], bytes]:
        return self._sort_indices("thread_sort_index")

    def _sort_indices(self, kind: str) -> dict[tuple[Id, Id | None], bytes]:
        """Return sort indices as JSON texts, keyed by process or by process and thread."""
        events = self._events
        rows = _named(events, kind)
        texts, codes = events.texts["sort_index"], events.arg("sort_index", rows)
        tracks = [events.tracks[code] for code in events.all["track"][rows].tolist()]
        of_process = kind == "process_sort_index"
        return {
            (pid, None if of_process else tid): texts[code].encode("utf-8", "surrogatepass") if code >= 0 else b"0"
            for (pid, tid), code in zip(tracks, codes.tolist(), strict=True)
        }

    # ------------------------------------------------------------ ids

    def _ids(self) -> tuple[tuple[Int, Int], ...]:
        """Assign numbers to all ids. Return file positions and numbers for ``id``, ``bind_id`` and global ``id2``."""
        events = self._events
        phases = np.frombuffer((_FLOW_PHASES + _ASYNC_PHASES).encode(), np.uint8)
        codes: dict[Any, int] = {}
        found: list[tuple[Int, Int]] = []
        for key in ("@id", "@bind_id"):
            rows, values = self._pairs(key)
            if key == "@id":
                has_id = np.isin(events.all["phase"][rows], phases)
                rows, values = rows[has_id], values[has_id]
            found.append((rows, _without_texts(values, events.texts[key], codes)))
        rows, values = self._pairs("@id2")
        shared = np.array([_global_id(text, codes) for text in events.texts["@id2"]], np.int64)[values]
        has_global = shared != _NO_ID
        found.append((rows[has_global], shared[has_global]))
        distinct, numbers = np.unique(np.concatenate([values for _, values in found]), return_inverse=True)
        self.id_count = len(distinct)
        ends = np.cumsum([len(rows) for rows, _ in found])
        return tuple(
            (events.all["row"][rows].astype(np.int64), part)
            for (rows, _), part in zip(found, np.split(numbers, ends[:-1]), strict=True)
        )

    def _pairs(self, key: str) -> tuple[Int, Int]:
        pairs = self._events.args[key]
        return pairs.row.astype(np.int64), pairs.value.astype(np.int64)


def _first(keys: Int, codes: Int) -> Iterator[tuple[int, int]]:
    """Yield each key and the index of its first occurrence in `codes`, which contains indices into `keys`."""
    at = np.full(len(keys), len(codes), np.int64)
    np.minimum.at(at, codes, np.arange(len(codes)))
    return zip(keys.tolist(), at.tolist(), strict=True)


def _find(tracks: Int, starts: Int, of_tracks: NDArray[Any], of_starts: Int) -> Int:
    """Look up pairs of track and start in sorted arrays. Return the index of each pair, or -1 if it is missing."""
    times = np.unique(starts)
    at = np.minimum(np.searchsorted(times, of_starts), len(times) - 1)
    keys, wanted = tracks * len(times) + np.searchsorted(times, starts), of_tracks * np.int64(len(times)) + at
    index: Int = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    index[(times[at] != of_starts) | (keys[index] != wanted)] = -1
    return index


def _without_texts(values: Int, texts: list[str], codes: dict[Any, int]) -> Int:
    """Replace the codes of JSON texts, which are specific to a member, with ids that are comparable across members."""
    of_text = np.array([_id_of(_value(text), codes) for text in texts], np.int64)
    is_text = values < 0
    if is_text.any():
        values = values.copy()
        values[is_text] = of_text[-2 - values[is_text]]
    return values


def _global_id(text: str, codes: dict[Any, int]) -> int:
    value = _value(text)
    shared = value.get("global") if isinstance(value, dict) else None
    return _NO_ID if shared is None else _id_of(shared, codes)


def _id_of(value: Any, codes: dict[Any, int]) -> int:
    """Return the number for a nonnegative integer or hexadecimal string, and a negative code for any other id."""
    if isinstance(value, str):
        number = int(value, 16) if _HEXADECIMAL.fullmatch(value) else None
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    else:
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
    key = json.dumps(value) if number is None else number
    if number is not None and 0 <= number < 2**63:
        return number
    return codes.setdefault(key, -1 - len(codes))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # for example, a number with more digits than Python converts
        return text


def _named(events: Events, *names: str) -> Int:
    """Return the rows of metadata events with one of these names."""
    rows = events.rows_of("M")
    codes = [code for code, name in enumerate(events.names) if name in names]
    return rows[np.isin(events.all["name"][rows], codes)]


def _number(text: bytes | None) -> float:
    value = None if text is None else _value(text.decode("utf-8", "surrogatepass"))
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    return value
