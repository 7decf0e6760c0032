"""Write slim traces in Perfetto's own format: the names, categories and times of events, without their arguments.

Formats: Protocol Buffers' wire format, https://protobuf.dev/programming-guides/encoding, and the messages of
google/perfetto in ``protos/perfetto/trace``: ``trace.proto``, ``trace_packet.proto``,
``interned_data/interned_data.proto``, ``track_event/track_event.proto`` and ``track_event/track_descriptor.proto``.
What the writer takes care of beyond them is how Perfetto's trace processor reads them:

- It sorts packets by their time. Those of the same time stay in the order of the file.
- An end closes the slice of its track that began last, so slices of one track must nest; no more than 512 deep
  (``kMaxDepth`` in ``src/trace_processor/importers/common/slice_tracker.cc``).
- Tracks without a parent are shown in the order of their names, children in the order that the parent asks for
  (``src/trace_processor/perfetto_sql/stdlib/viz/summary/track_event.sql``): hence one root for all sources.
- It takes varints that are longer than they must be. With all of one width, the packets of many events are a matrix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.columns import DEVICE_ANNOTATION, DEVICE_PROCESSES, DEVICE_WORK, Columns, Tables
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int, groups
from profdeck_traces.writing.nested_tracks import place_on_lanes
from profdeck_traces.writing.perfetto_packets import (
    CATEGORY_IIDS,
    EVENT_CATEGORIES,
    EVENT_NAMES,
    INTERNED_DATA,
    MAX_TIME_NS,
    MORE,
    NAME_IID,
    NEEDS_STATE,
    PACKET,
    ROOT_NAME,
    ROOT_UUID,
    SEQUENCE_FLAGS,
    SEQUENCE_ID,
    SLICE_BEGIN,
    SLICE_END,
    STATE_CLEARED,
    TIMESTAMP,
    TRACK_EVENT,
    TRACK_UUID,
    TYPE,
    UUIDS_PER_SOURCE,
    VARINT,
    VARINT_BITS,
    field,
    interned,
    key,
    track,
    varint,
)

Bytes = NDArray[np.uint8]

_MAX_VARINT = 10
# 63, 49, 21 and 28 bits. With these a begin, which says what an end need not say, is as long as an end of which the
# type is padded as far as it may be.
_TIMESTAMP_WIDTH, _UUID_WIDTH, _CATEGORY_WIDTH, _NAME_WIDTH = 9, 7, 3, 4

_MAX_DEPTH = 511  # leaves one for empty slices
_BLOCK_PACKETS = 1 << 15  # about a megabyte, which stays in a core's cache

# Ranks have 32 bits: one for hosts, behind the devices, 20 for the track and 8 for the lane.
_HOST_RANK, _LANE_RANKS = 1 << 29, 1 << 8
_DEVICES = DEVICE_WORK | {DEVICE_ANNOTATION}


@attrs.frozen(kw_only=True)
class PerfettoSource:
    """What the new trace says of one trace that is in it."""

    label: str
    """The name of its uppermost track."""
    index: int
    """Its number, from 0, which no other source has; below 2**16."""
    sort_index: int
    """Where it stands among the sources, in 32 bits."""
    shift_ns: int
    """Added to all times, so that they count from the same moment in all sources."""
    process_names: Mapping[Id, str]
    """What the trace calls its processes."""
    thread_names: Mapping[tuple[Id, Id], str]
    """What the trace calls its threads, and the streams of its devices."""


def encode_source(source: PerfettoSource, events: Columns) -> Iterator[bytes]:
    """Yield a Perfetto trace in which each event is a slice. The traces of several sources can be concatenated.

    Tracks are ``Ranks / label / device 0 / stream 7`` and ``Ranks / label / thread 1234``. Events that overlap
    without nesting are spread over ``stream 7``, ``stream 7 (2)`` and so on.

    Args:
        source: Metadata of the events.
        events: The events.

    Raises:
        TraceError: After the shift, a time is negative or at least 2**63 ns, which the format cannot represent.
        ValueError: Too many events on a track overlap without nesting.
    """
    rows = _Rows(source)
    yield rows.packet(field(SEQUENCE_FLAGS, STATE_CLEARED))
    if len(events):
        # If events start together, the one that ends last comes first.
        events = events[np.lexsort((-events.end_ns, events.start_ns))]
        _check_times(events, source)
        tracks = _Tracks(source, events)
        yield b"".join(map(rows.packet, [*tracks.descriptors, _interned_strings(events)]))
        yield from rows.blocks(events, tracks.uuids)


def _check_times(events: Columns, source: PerfettoSource) -> None:
    first_ns = int(events.start_ns[0]) + source.shift_ns
    last_ns = int(events.end_ns.max()) + source.shift_ns
    if first_ns < 0 or last_ns > MAX_TIME_NS:
        raise TraceError(
            f"{source.label}: times {first_ns} to {last_ns} ns are outside the range of a Perfetto trace, 0 to "
            f"{MAX_TIME_NS} ns. Choose an earlier origin of time, or exclude this trace."
        )


def _interned_strings(events: Columns) -> bytes:
    """Return the packet field that defines all event names and categories. Their ids are the codes plus 1."""
    tables = events.tables
    names = np.unique(events.name).tolist()
    categories = sorted({tables.name_category[name] for name in names})
    return field(
        INTERNED_DATA,
        b"".join(interned(EVENT_CATEGORIES, code, tables.categories[code]) for code in categories)
        + b"".join(interned(EVENT_NAMES, code, tables.names[code]) for code in names),
    )


class _Tracks:
    """Tracks of a source in the new trace."""

    def __init__(self, source: PerfettoSource, events: Columns) -> None:
        """Create the tracks for events, which must be sorted by start, longest first."""
        self._process_names = source.process_names
        self._thread_names = source.thread_names
        self._next_uuid = (source.index + 1) * UUIDS_PER_SOURCE
        self.descriptors = [track(ROOT_UUID, 0, ROOT_NAME, 0)]
        """Packet fields that describe the tracks."""
        tables = events.tables
        self._threads = Counter(thread for _, thread in tables.tracks)
        root = self._make(ROOT_UUID, source.label, source.sort_index)
        order = _positions(tables)
        devices: dict[Id, int] = {}
        is_device = tables.names_of_categories(_DEVICES)[events.name]
        for code in np.unique(events.track[is_device]).tolist():
            process = tables.tracks[code][0]
            if process not in devices:
                name = self._process_names.get(process, "")
                name = name if name in DEVICE_PROCESSES else _numbered("device", process)
                devices[process] = self._make(root, name, order[code] * _LANE_RANKS)
        self.uuids = np.empty(len(events), dtype=np.int64)
        """The track of each event. Events on the same track nest."""
        for of_track in groups(events.track):
            code = int(events.track[of_track[0]])
            process, thread = tables.tracks[code]
            rank = order[code] * _LANE_RANKS
            if process in devices:
                parent = devices[process]
                name = (self._thread_names.get((process, thread)) or _numbered("stream", thread)).strip()
            else:
                parent, name, rank = root, self._host_name(process, thread), rank + _HOST_RANK
            lanes = place_on_lanes(events.start_ns[of_track], events.end_ns[of_track], _MAX_DEPTH)
            uuids = [
                self._make(parent, f"{name} ({lane + 1})" if lane else name, rank + min(lane, _LANE_RANKS - 1))
                for lane in range(int(lanes.max()) + 1)
            ]
            self.uuids[of_track] = np.array(uuids)[lanes]

    def _host_name(self, process: Id, thread: Id) -> str:
        process_name = self._process_names.get(process) or _numbered("process", process)
        if thread is None:
            return process_name
        name = self._thread_names.get((process, thread)) or _numbered("thread", thread)
        # Ascend has a process for each layer of the software, with the same threads.
        return name if self._threads[thread] == 1 else f"{process_name}: {name}"

    def _make(self, parent: int, name: str, rank: int) -> int:
        uuid = self._next_uuid
        self._next_uuid += 1
        self.descriptors.append(track(uuid, parent, name, rank))
        return uuid


def _positions(tables: Tables) -> list[int]:
    """Return where each track stands if they are sorted by process and thread."""
    codes = sorted(range(len(tables.tracks)), key=lambda code: tuple(map(_by_number, tables.tracks[code])))
    positions = [0] * len(codes)
    for position, code in enumerate(codes):
        positions[code] = position
    return positions


def _by_number(number: Id) -> tuple[bool, int, str]:
    return (False, number, "") if isinstance(number, int) else (True, 0, str(number))


def _numbered(kind: str, number: Id) -> str:
    if isinstance(number, str):
        return number
    return kind if number is None else f"{kind} {number}"


class _Rows:
    """Encodes the packets of a source, those of its events as rows of a matrix."""

    def __init__(self, source: PerfettoSource) -> None:
        self._shift_ns = source.shift_ns
        self._sequence = field(SEQUENCE_ID, source.index + 1)
        time_key, uuid = key(TIMESTAMP, VARINT), key(TRACK_UUID, VARINT) + bytes(_UUID_WIDTH)
        head = time_key + bytes(_TIMESTAMP_WIDTH) + self._sequence + field(SEQUENCE_FLAGS, NEEDS_STATE)
        what = key(CATEGORY_IIDS, VARINT) + bytes(_CATEGORY_WIDTH) + key(NAME_IID, VARINT) + bytes(_NAME_WIDTH)
        begin = uuid + what + field(TYPE, SLICE_BEGIN)
        end = uuid + key(TYPE, VARINT) + varint(SLICE_END, _MAX_VARINT)
        packets = [field(PACKET, head + field(TRACK_EVENT, event)) for event in (begin, end)]
        self._templates: Bytes = np.array([list(packet) for packet in packets], dtype=np.uint8)
        width = len(packets[0])
        self._at_time = width - len(field(TRACK_EVENT, begin)) - len(head) + len(time_key)
        self._at_uuid = width - len(begin) + len(uuid) - _UUID_WIDTH
        self._at_category = self._at_uuid + _UUID_WIDTH + len(key(CATEGORY_IIDS, VARINT))
        self._at_name = self._at_category + _CATEGORY_WIDTH + len(key(NAME_IID, VARINT))

    def packet(self, fields: bytes) -> bytes:
        """Return a packet of the source's sequence that is not an event."""
        return field(PACKET, self._sequence + fields)

    def blocks(self, events: Columns, uuids: Int) -> Iterator[bytes]:
        """Yield the packets of events.

        Args:
            events: The events, sorted by start, longest first.
            uuids: The track of each event. Events on the same track must nest.
        """
        event, is_end, time_ns = _edges(events)
        category = events.tables.category_of_names()
        for at in range(0, len(event), _BLOCK_PACKETS):
            block = slice(at, at + _BLOCK_PACKETS)
            of_event = event[block]
            rows = self._templates[is_end[block].view(np.uint8)]
            _fill(rows, self._at_time, _TIMESTAMP_WIDTH, time_ns[block] + self._shift_ns)
            _fill(rows, self._at_uuid, _UUID_WIDTH, uuids[of_event])
            begins = np.flatnonzero(~is_end[block])
            names = events.name[of_event[begins]]
            begin_rows = rows[begins]
            _fill(begin_rows, self._at_category, _CATEGORY_WIDTH, category[names].astype(np.int64) + 1)
            _fill(begin_rows, self._at_name, _NAME_WIDTH, names.astype(np.int64) + 1)
            rows[begins] = begin_rows
            yield rows.tobytes()


def _edges(events: Columns) -> tuple[Int, NDArray[np.bool_], Int]:
    """Return of which event each begin or end is, whether it is an end, and its time; in the order of the packets.

    At one time come the ends of what began before, then the begins, those that contain others first. They are
    followed by the empty events, each of which has begin and end next to each other.
    """
    solid = events.end_ns > events.start_ns
    ends = np.flatnonzero(solid)
    begins = np.repeat(np.arange(len(events)), np.where(solid, 1, 2))
    event = np.concatenate([ends, begins])
    is_end = np.ones(len(event), dtype=np.bool_)
    is_end[len(ends) :] = np.diff(begins, prepend=-1) == 0
    time_ns = np.concatenate([events.end_ns[ends], events.start_ns[begins]])
    order = np.argsort(time_ns, kind="stable")
    return event[order], is_end[order], time_ns[order]


def _fill(rows: Bytes, at: int, width: int, values: Int) -> None:
    """Write varints of this width into the columns from ``at``."""
    for byte in range(width):
        more = MORE if byte < width - 1 else 0
        rows[:, at + byte] = (values >> (byte * VARINT_BITS)) & (MORE - 1) | more
