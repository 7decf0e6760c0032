"""The events of a trace as columns."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.base.progress import Progress
from profdeck_traces.reading.columns import DEVICE_ANNOTATION, MAX_NAME_LENGTH, shortened
from profdeck_traces.reading.content import read_content
from profdeck_traces.reading.event_names import is_profiler_frame, is_thread_entry
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import MAX_JSON_BYTES, TraceCheck, file_size
from profdeck_traces.reading.intervals import order_by, parents
from profdeck_traces.reading.parsers import new_parser
from profdeck_traces.reading.storage import Storage
from profdeck_traces.reading.walking import NO_TIME, Kind, Parser, walk

Int = NDArray[np.int64]
Mask = NDArray[np.bool_]

INTEGER, TEXT = Kind.INTEGER, Kind.TEXT
ARGS: dict[str, int] = {
    **dict.fromkeys(("External id", "correlation", "Sequence number", "Fwd thread id", "stream", "device"), INTEGER),
    **dict.fromkeys(("Ev Idx", "Python id", "Python parent id", "Python module id", "graph node id"), INTEGER),
    **dict.fromkeys(("bytes", "Group size", "In msg nelems", "Out msg nelems", "sort_index"), INTEGER),
    **dict.fromkeys(("Total Allocated", "Total Reserved", "Device Id", "Device Type", "Bytes", "Addr", "@id"), INTEGER),
    **dict.fromkeys(("wait_on_stream", "wait_on_cuda_event_record_corr_id"), INTEGER),
    **dict.fromkeys(("Collective name", "Process Group Name", "Process Group Ranks", "dtype"), TEXT),
    **dict.fromkeys(("Input Dims", "Input type", "Concrete Inputs", "name", "labels", "grid"), TEXT),
}
"""Args to read as columns. Text values are JSON. A key such as ``@id`` selects a member of the event itself."""
_MAX_CATEGORIES = 255
_CATEGORIES = {
    "Operator": "cpu_op",
    "Runtime": "cuda_runtime",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
}
"""Maps category names in traces from torch 1.8 and 1.9 to the current names."""
_BEGIN, _END, _COMPLETE, _METADATA = (ord(phase) for phase in "BEXM")
_MAX_ENTRIES = 4  # outermost frames that are checked: up to three of `threading`, and the thread's own function
_MAX_DURATION_NS = 2**53  # 104 days; sums of longer durations can overflow
# Above these limits, columns are stored in temporary files. The file limit assumes a compression ratio of 8 to 30.
_LARGE_JSON_BYTES, _LARGE_FILE_BYTES = 1 << 30, 100 << 20


@attrs.frozen
class EventCheck(TraceCheck):
    """A `TraceCheck` that also lists the malformed parts."""

    skips: int = 0
    """Number of malformed parts that were skipped."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Byte ranges of the skipped parts in the JSON (at most 1,000 ranges)."""


@attrs.frozen
class Pairs:
    """Values of one arg, sorted by row. For text-valued args, the values are codes."""

    row: NDArray[np.uint32]
    value: NDArray[np.integer[Any]]

    def __len__(self) -> int:
        return len(self.row)

    def index_of(self, rows: NDArray[np.integer[Any]]) -> Int:
        """Return the index of each row's first value, or of the next row's first value if it has none."""
        # With a different dtype, NumPy would convert the whole column on every call.
        return np.searchsorted(self.row, rows.astype(self.row.dtype, copy=False))

    def selected(self, rows: Int) -> Pairs:
        """Return the values of the given rows, renumbered by index in `rows`, which must be sorted."""
        if not len(self):
            return self
        at = np.minimum(self.index_of(rows), len(self) - 1)
        has_value = np.flatnonzero(self.row[at] == rows)
        return Pairs(has_value.astype(np.uint32), self.value[at[has_value]])

    def with_rows(self, first: int, shift: int, added: Sequence[Pairs]) -> Pairs:
        """Return the values with rows from `first` onwards shifted and the values of new rows inserted."""
        index = int(np.searchsorted(self.row, first))
        row = [self.row[:index], *(pairs.row for pairs in added), self.row[index:] + np.uint32(shift)]
        return Pairs(
            np.concatenate(row), np.concatenate([self.value[:index], *(p.value for p in added), self.value[index:]])
        )


class Events:
    """All events of a trace.

    Each row is one event. Rows ``0:complete`` are the complete events, sorted by track, then by start time, longest
    first. Events of other phases follow in file order. A ``B`` event with a matching ``E`` event becomes a complete
    event. `start_ns`, `duration_ns`, `end_ns`, `name`, `category`, `track` and `parent` cover only the complete
    events; `all` covers all rows.

    Each event takes 28 bytes, and each arg value 8 to 12 bytes. In PyTorch traces, this amounts to 44 to 66 bytes per
    event, including its args.
    """

    def __init__(  # noqa: PLR0913 - one parameter per attribute
        self,
        path: Path,
        check: EventCheck,
        columns: dict[str, NDArray[Any]],
        args: dict[str, Pairs],
        *,
        complete: int,
        names: list[str],
        categories: list[str],
        tracks: list[tuple[Id, Id]],
        texts: dict[str, list[str]],
        member_texts: list[tuple[bytes, bytes]],
        pairs: tuple[Int, Int],
        untimed: Int,
        storage: Storage,
    ) -> None:
        self.path, self.check = path, check
        self.all = columns
        """Columns of all rows: ``start_ns``, ``duration_ns``, ``name``, ``track``, ``phase``, ``category``, ``row``."""
        self.args = args
        self.complete = complete
        """Number of complete events."""
        self.names, self.categories, self.tracks = names, categories, tracks
        """Strings for the name and category codes, and the process and thread of each track."""
        self.texts = texts
        """JSON texts for the codes of each text-valued arg."""
        self.member_texts = member_texts
        """Top-level members, with key and value as JSON text. The value of ``traceEvents`` is empty."""
        self.pairs = pairs
        """File positions of the ``B`` events that became complete events, and of their matching ``E`` events."""
        self.storage = storage
        """Allocator for arrays of the same length as the columns."""
        self.untimed = untimed
        """Rows of ``X`` events whose ``ts`` or ``dur`` is missing or invalid, such as ``NaN`` or a negative ``dur``.
        A ``dur`` over 104 days is also invalid. Without a valid ``ts``, the event is not a complete event. Without a
        valid ``dur``, its duration is 0."""

    def __len__(self) -> int:
        return len(self.all["phase"])

    @property
    def start_ns(self) -> Int:
        """Start times of the complete events."""
        return self.all["start_ns"][: self.complete]

    @property
    def duration_ns(self) -> Int:
        """Durations of the complete events."""
        return self.all["duration_ns"][: self.complete]

    @functools.cached_property
    def end_ns(self) -> Int:
        """End times of the complete events."""
        return self.start_ns + self.duration_ns

    @property
    def name(self) -> NDArray[np.int32]:
        """Name of each complete event, as an index into `names`."""
        return self.all["name"][: self.complete]

    @property
    def category(self) -> NDArray[np.uint8]:
        """Category of each complete event, as an index into `categories`."""
        return self.all["category"][: self.complete]

    @property
    def track(self) -> NDArray[np.integer[Any]]:
        """Track of each complete event, as an index into `tracks`."""
        return self.all["track"][: self.complete]

    @functools.cached_property
    def parent(self) -> NDArray[np.int32]:
        """For each complete event, the innermost complete event open on its track when it starts, or -1."""
        return parents(self.track, self.start_ns, self.end_ns)

    @functools.cached_property
    def members(self) -> dict[str, Any]:
        """Decoded top-level members other than ``traceEvents``, such as ``distributedInfo``."""
        return {json.loads(key): _decode(value) for key, value in self.member_texts if value}

    @functools.cached_property
    def process_names(self) -> dict[Id, str]:
        """Process names from metadata events, by pid."""
        return {self.tracks[track][0]: name for track, name in self._metadata("process_name")}

    @functools.cached_property
    def thread_names(self) -> dict[tuple[Id, Id], str]:
        """Thread names from metadata events, by pid and tid."""
        return {self.tracks[track]: name for track, name in self._metadata("thread_name")}

    def has_category(self, categories: Iterable[str]) -> Mask:
        """Return a mask of the complete events that have one of these categories."""
        selected = np.zeros(256, np.bool_)
        wanted = set(categories)
        selected[[code for code, category in enumerate(self.categories) if category in wanted]] = True
        return selected[self.category]

    def with_name(self, kind: Mask, matches: Callable[[str], bool]) -> Mask:
        """Return a mask of the events of a kind whose names match. The predicate is called once per distinct name."""
        names = np.zeros(len(self.names), np.bool_)
        codes = np.unique(self.name[kind])
        names[codes] = [matches(self.names[code]) for code in codes.tolist()]
        selected: Mask = kind & names[self.name]
        return selected

    def rows_of(self, phase: str) -> Int:
        """Return the rows of events with the given phase, which must not be ``X``."""
        return self.complete + np.flatnonzero(self.all["phase"][self.complete :] == ord(phase))

    def arg(self, key: str, rows: NDArray[np.integer[Any]] | None = None, *, missing: int = -1) -> Int:
        """Return the values of an arg for `rows` or all complete events, with `missing` for events without the arg."""
        pairs = self.args[key]
        if rows is None:
            found = np.full(self.complete, missing, np.int64)
            inside = np.searchsorted(pairs.row, self.complete)
            found[pairs.row[:inside]] = pairs.value[:inside]
            return found
        if not len(pairs):
            return np.full(len(rows), missing, np.int64)
        at = np.minimum(pairs.index_of(rows), len(pairs) - 1)
        # NumPy 2.5 converts a Python integer to the type of the values, which can be int32.
        return np.where(pairs.row[at] == rows, pairs.value[at], np.int64(missing))

    def track_bounds(self) -> list[tuple[int, int]]:
        """Return, for each track with complete events, its first row and the row after its last."""
        track = self.track
        inner = 1 + np.flatnonzero(track[1:] != track[:-1])
        return list(itertools.pairwise([0, *inner.tolist(), self.complete])) if self.complete else []

    @functools.cached_property
    def is_profiler_track(self) -> Mask:
        """True for each track whose thread was started by profdeck, for example to check limits.

        With stacks, the outermost function of such a thread, ignoring `threading` functions, belongs to profdeck.
        """
        found = np.zeros(len(self.tracks), np.bool_)
        for first, last in self.track_bounds():
            names = [self.names[code] for code in self.name[first : min(last, first + _MAX_ENTRIES)].tolist()]
            own = list(itertools.dropwhile(is_thread_entry, names))
            found[self.track[first]] = len(own) < len(names) and bool(own) and is_profiler_frame(own[0])
        return found

    def innermost(self, kind: Mask) -> NDArray[np.int32]:
        """Return, for each complete event, the innermost event of a kind open on its track when it starts, or -1.

        For an event of that kind, the result is the event itself.

        Args:
            kind: Mask of the complete events of that kind.
        """
        # Set the duration of all other events to 0, so that they never count as open.
        around = parents(self.track, self.start_ns, self.start_ns + self.duration_ns * kind)
        return np.where(kind, np.arange(self.complete, dtype=np.int32), around)

    def selected(self, rows: Int, args: Iterable[str]) -> Events:
        """Return selected complete events with selected args.

        Args:
            rows: Sorted rows of the complete events to keep.
            args: Args to keep.
        """
        return Events(
            self.path,
            self.check,
            {name: column[rows] for name, column in self.all.items()},
            {key: self.args[key].selected(rows) for key in args},
            complete=len(rows),
            names=self.names,
            categories=self.categories,
            tracks=self.tracks,
            texts={key: self.texts[key] for key in args if key in self.texts},
            member_texts=[],
            pairs=(rows[:0], rows[:0]),
            storage=Storage(),
            untimed=np.flatnonzero(np.isin(rows, self.untimed)),
        )

    def followed_by(self, others: Sequence[Events], args: Iterable[str]) -> Events:
        """Return these events with the complete events of other traces appended on separate tracks.

        The times of the other events are shifted so that they end before the first of these events. The result cannot
        be used to copy a trace.

        Args:
            others: Events of the other traces.
            args: Text-valued args of the other events to keep.
        """
        names, categories = ({text: code for code, text in enumerate(texts)} for texts in (self.names, self.categories))
        tracks, texts = list(self.tracks), dict(self.texts)
        first_ns = int(self.start_ns.min()) if self.complete else 0
        parts: list[dict[str, NDArray[Any]]] = []
        added: dict[str, list[Pairs]] = {key: [] for key in args}
        complete = self.complete
        for number, other in enumerate(others):
            part = {name: column[: other.complete] for name, column in other.all.items()}
            part["name"] = _codes(names, other.names, part["name"])
            part["category"] = _codes(categories, other.categories, part["category"])
            part["track"] = part["track"].astype(np.int64) + len(tracks)
            part["start_ns"] = part["start_ns"] + (first_ns - int(other.end_ns.max(initial=first_ns)))
            tracks += [(f"graph capture {number}: {pid}", tid) for pid, tid in other.tracks]
            for key, of_key in added.items():
                if key in other.args:
                    pairs = other.args[key]
                    of_key.append(Pairs(pairs.row + np.uint32(complete), pairs.value + len(texts[key])))
                    texts[key] = [*texts[key], *other.texts[key]]
            parts.append(part)
            complete += other.complete
        columns = {}
        for name, column in self.all.items():
            dtype = np.int32 if name == "track" and len(tracks) > 1 << 16 else column.dtype
            inside = [part[name].astype(dtype) for part in parts]
            columns[name] = np.concatenate([column[: self.complete], *inside, column[self.complete :]], dtype=dtype)
            columns[name] = self.storage.stored(columns[name])
        shift = complete - self.complete
        return Events(
            self.path,
            self.check,
            columns,
            {key: pairs.with_rows(self.complete, shift, added.get(key, [])) for key, pairs in self.args.items()},
            complete=complete,
            names=list(names),
            categories=list(categories),
            tracks=tracks,
            texts=texts,
            member_texts=self.member_texts,
            pairs=self.pairs,
            untimed=np.where(self.untimed < self.complete, self.untimed, self.untimed + shift),
            storage=self.storage,
        )

    def in_file_order(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reorder an array with one value per row into file order, as needed for copying events."""
        found = np.empty_like(values)
        found[self.all["row"]] = values
        return found

    def _metadata(self, kind: str) -> list[tuple[int, str]]:
        """Return the track and the name from each metadata event of this kind, in file order."""
        rows = self.rows_of("M")
        rows = rows[[self.names[code] == kind for code in self.all["name"][rows].tolist()]] if len(rows) else rows
        names = [_decode(text.encode("utf-8", "surrogatepass")) for text in self.texts["name"]]
        return [
            (track, str(names[code])[:MAX_NAME_LENGTH])
            for track, code in zip(self.all["track"][rows].tolist(), self.arg("name", rows).tolist(), strict=True)
            if code >= 0
        ]


def read_events(
    path: Path,
    *,
    args: dict[str, int] = ARGS,
    on_progress: Progress | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
    in_python: bool = False,
) -> Events:
    """Read a Chrome trace.

    Malformed events are skipped and listed in the check.

    Args:
        path: A plain, gzip, bzip2 or zip file in UTF-8, UTF-16 or UTF-32.
        args: The args to read and their kinds, in the form of `ARGS`.
        on_progress: Called from another thread with the number of bytes read so far and the file size.
        max_json_bytes: Stop after this many bytes of JSON.
        in_python: Use the slower Python parser.

    Raises:
        TraceError: The file cannot be read.
    """
    size_bytes = file_size(path)
    parser = new_parser(args, in_files=size_bytes > _LARGE_FILE_BYTES, in_python=in_python)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    result = walk(read_content(path, on_read=on_read), parser, max_json_bytes=max_json_bytes)
    check = EventCheck(
        size_bytes=size_bytes,
        json_bytes=result.json_bytes,
        events=parser.rows,
        whole=result.problem is None,
        problem=result.problem,
        skips=result.skips,
        skipped=tuple(result.skipped),
    )
    return _Builder(parser, args, Storage(in_files=result.json_bytes > _LARGE_JSON_BYTES)).build(path, check)


class _Builder:
    """Sorts the columns of a parser, and frees each one before sorting the next to limit peak memory."""

    def __init__(self, parser: Parser, args: dict[str, int], storage: Storage) -> None:
        self._parser, self._args, self._storage = parser, args, storage

    def build(self, path: Path, check: EventCheck) -> Events:
        parser = self._parser
        names, name_codes = _unique(parser.strings("name"), _name)
        categories, category_codes = _unique(parser.strings("category"), _category)
        tracks, track_codes = _unique(parser.strings("track"), _track)
        phase, start = parser.column("phase").copy(), parser.column("start_ns")
        duration, track = parser.column("duration_ns").copy(), _recoded(parser.column("track"), track_codes)
        is_annotation = np.array([category == DEVICE_ANNOTATION for category in categories], np.bool_)
        is_annotation = is_annotation[_recoded(parser.column("category"), category_codes)]
        pairs = _pair(phase, start, duration, track, is_annotation)
        del is_annotation
        is_complete = (phase == _COMPLETE) & (start != NO_TIME)
        untimed = np.flatnonzero(
            (phase == _COMPLETE) & ((start == NO_TIME) | (duration < 0) | (duration > _MAX_DURATION_NS))
        )
        duration[untimed] = 0
        order = _order(is_complete, track, start, duration)
        complete = int(np.count_nonzero(is_complete))
        del is_complete
        columns: dict[str, NDArray[Any]] = {}
        self._keep(columns, "start_ns", start, order)
        del start
        self._keep(columns, "duration_ns", duration, order)
        del duration
        self._keep(columns, "phase", phase, order)
        del phase
        self._keep(columns, "track", track.astype(np.uint16) if len(tracks) <= 1 << 16 else track, order)
        del track
        self._keep(columns, "name", _recoded(parser.column("name"), name_codes), order)
        self._keep(columns, "category", _recoded(parser.column("category"), category_codes), order)
        columns["row"] = self._storage.stored(order.astype(np.uint32))
        place = np.empty(len(order), np.uint32)
        place[order] = np.arange(len(order), dtype=np.uint32)
        del order
        untimed = np.sort(place[untimed]).astype(np.int64)
        args = {key: self._pairs(key, place) for key in self._args}
        texts = {
            key: [text.decode("utf-8", "surrogatepass") for text in parser.texts(key)]
            for key, kind in self._args.items()
            if kind != INTEGER
        }
        events = Events(
            path,
            check,
            columns,
            args,
            complete=complete,
            names=names,
            categories=categories,
            tracks=tracks,
            texts=texts,
            member_texts=parser.members(),
            pairs=pairs,
            untimed=untimed,
            storage=self._storage,
        )
        _name_categories(events)
        return events

    def _keep(self, columns: dict[str, NDArray[Any]], name: str, values: NDArray[Any], order: Int) -> None:
        columns[name] = self._storage.taken(values, order)
        del values
        self._parser.drop(name)

    def _pairs(self, key: str, place: NDArray[np.uint32]) -> Pairs:
        rows, values = self._parser.pairs(key)
        rows = place[rows]
        if len(rows) and not (rows[1:] > rows[:-1]).all():
            order = np.argsort(rows, kind="stable")
            rows, values = rows[order], values[order]
        small = not len(values) or (values.min() >= -(2**31) and values.max() < 2**31)
        kept = self._storage.stored(values.astype(np.int32 if small else np.int64))
        self._parser.drop_pairs(key)
        return Pairs(self._storage.stored(rows), kept)


def _unique(texts: list[bytes], decode: Callable[[bytes], Any]) -> tuple[list[Any], NDArray[np.int32] | None]:
    """Decode and deduplicate strings. Return the unique strings, and the new codes or None if the codes are unchanged.

    Duplicates arise because the same name can be written with different escapes.
    """
    codes: dict[Any, int] = {}
    found = [codes.setdefault(decode(text), len(codes)) for text in texts]
    return list(codes), None if len(codes) == len(texts) else np.array(found, np.int32)


def _recoded(values: NDArray[Any], codes: NDArray[np.int32] | None) -> NDArray[Any]:
    return values if codes is None else codes[values].astype(values.dtype)


def _name(text: bytes) -> str:
    return shortened(json.loads(b'"%b"' % text) if b"\\" in text else text.decode("utf-8", "surrogatepass"))


def _category(text: bytes) -> str:
    category = _name(text)
    return _CATEGORIES.get(category, category)


def _track(text: bytes) -> tuple[Id, Id]:
    pid, tid = _decode(b"[%b]" % text) or (None, None)
    return _id(pid), _id(tid)


def _id(value: Any) -> Id:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if value is None or (isinstance(value, int | str) and not isinstance(value, bool)) else str(value)


def _codes(codes: dict[str, int], texts: Sequence[str], values: NDArray[Any]) -> NDArray[np.int32]:
    """Convert indices into `texts` to codes. Texts without a code are added to `codes`."""
    used = np.flatnonzero(np.bincount(values, minlength=len(texts))).tolist()
    of_text = np.zeros(len(texts), np.int32)
    of_text[used] = [codes.setdefault(texts[index], len(codes)) for index in used]
    codes_of_values: NDArray[np.int32] = of_text[values]
    return codes_of_values


def _decode(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # for example, a number with more digits than Python converts
        return None


def _order(is_complete: Mask, track: NDArray[Any], start: Int, duration: Int) -> Int:
    """Return the sort order of rows: complete events by track, then start, longest first; then all other events."""
    rows = np.flatnonzero(is_complete)
    if not len(rows):
        return np.arange(len(is_complete))
    starts = start[rows]
    first, last = int(starts.min()), int(starts.max())
    span = last - first + 1
    if span * (int(track.max()) + 1) < 2**62:
        starts -= first
        starts += track[rows].astype(np.int64) * span
        order = order_by(starts, lambda tied: -duration[rows[tied]])
    else:
        order = np.lexsort((-duration[rows], starts, track[rows]))
    others = np.flatnonzero(~is_complete)
    return np.concatenate([rows[order], others])


def _pair(phase: NDArray[Any], start: Int, duration: Int, track: NDArray[Any], is_annotation: Mask) -> tuple[Int, Int]:
    """Convert matching ``B`` and ``E`` events to complete events. Return the rows of the ``B`` and of the ``E`` events.

    If a stream's annotation and its first kernel start at the same time, the annotation is treated as the outer event.

    An ``E`` event ends the last open ``B`` event on its track. Between two consecutive events at the same depth, the
    depth never drops below that level. A ``B`` event therefore matches an ``E`` event that is next at its depth.
    """
    rows = np.flatnonzero(((phase == _BEGIN) | (phase == _END)) & (start != NO_TIME))
    rows = rows[np.lexsort((start[rows], track[rows]))]
    is_begin = phase[rows] == _BEGIN
    together = is_begin[1:] & is_begin[:-1]
    for column in (start, track):
        together &= column[rows[1:]] == column[rows[:-1]]
    if together.any():
        rows = rows[np.lexsort((~is_annotation[rows], np.append(0, np.cumsum(~together))))]
    depth = np.cumsum(np.where(is_begin, 1, -1)) - is_begin
    order = np.lexsort((np.arange(len(rows)), depth, track[rows]))
    first, second = rows[order[:-1]], rows[order[1:]]
    matches = (
        (phase[first] == _BEGIN)
        & (phase[second] == _END)
        & (track[first] == track[second])
        & (depth[order[:-1]] == depth[order[1:]])
    )
    begins = first[matches]
    duration[begins] = start[second[matches]] - start[begins]
    phase[begins] = _COMPLETE
    return begins, second[matches]


def _name_categories(events: Events) -> None:
    """Use the process name as the category of events without a category, which occur in Ascend traces."""
    category = events.all["category"]
    missing = category == 0
    if not missing[: events.complete].any() or not events.process_names:
        return
    codes = {name: code for code, name in enumerate(events.categories)}
    of_track = np.zeros(len(events.tracks), np.uint8)
    for track in np.unique(events.all["track"][missing]).tolist():
        name = events.process_names.get(events.tracks[track][0], "")
        if name not in codes:
            if len(codes) >= _MAX_CATEGORIES:
                continue
            codes[name] = len(codes)
            events.categories.append(name)
        of_track[track] = codes[name]
    category[missing] = of_track[events.all["track"][missing]]
