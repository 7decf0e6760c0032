"""Tests of Perfetto traces, read with an independent reader of the wire format."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.account.model import OwnerIdentity
from profdeck_traces.account.owned_path import OwnedPath
from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.columns import CompleteEvent, columns_of
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.writing import nested_tracks, perfetto, perfetto_path
from profdeck_traces.writing.nested_tracks import place_on_lanes
from profdeck_traces.writing.perfetto import PerfettoSource, encode_source
from profdeck_traces.writing.perfetto_path import encode_path

KERNEL, OPERATOR = "kernel", "cpu_op"
STREAM: tuple[Id, Id] = (0, 7)
THREAD: tuple[Id, Id] = (1234, 1234)

LINE = "train.py(3): forward"

Event = tuple[str, str, tuple[Id, Id], int, int]
"""Name, category, process and thread, start and end."""


def source(**changes: object) -> PerfettoSource:
    plain = PerfettoSource(label="rank 0", index=0, sort_index=0, shift_ns=0, process_names={}, thread_names={})
    return attrs.evolve(plain, **changes)  # type: ignore[arg-type]


def encoded(events: Sequence[Event], **changes: object) -> bytes:
    columns = columns_of(
        CompleteEvent(name, category, *track, start, end - start) for name, category, track, start, end in events
    )
    return b"".join(encode_source(source(**changes), columns))


def varint(data: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        value |= (byte & 0x7F) << shift
        offset, shift = offset + 1, shift + 7
        if byte < 0x80:
            assert shift <= 70
            return value, offset


def fields(data: bytes) -> dict[int, list[int | bytes]]:
    values_by_field: dict[int, list[int | bytes]] = defaultdict(list)
    offset = 0
    while offset < len(data):
        key, offset = varint(data, offset)
        value: int | bytes
        if key & 7 == 0:
            value, offset = varint(data, offset)
        else:
            assert key & 7 == 2
            length, offset = varint(data, offset)
            value = data[offset : offset + length]
            assert len(value) == length
            offset += length
        values_by_field[key >> 3].append(value)
    return values_by_field


def integer(message: dict[int, list[int | bytes]], number: int) -> int:
    (value,) = message[number]
    assert isinstance(value, int)
    return value


def text(message: dict[int, list[int | bytes]], number: int) -> str:
    (value,) = message[number]
    assert isinstance(value, bytes)
    return value.decode()


@attrs.define
class Track:
    parent: int
    name: str
    rank: int
    slices: list[tuple[str, str, int, int]] = attrs.field(factory=list)
    """Name, category, start and end."""
    args: list[dict[str, str]] = attrs.field(factory=list, eq=False)
    """Args of each slice."""
    depth: int = 0
    """Maximum number of open slices."""


class ReadTrace:
    """A parsed trace. As in Perfetto, packets are sorted by time, and an end closes the last open slice of a track."""

    def __init__(self, data: bytes) -> None:
        self.tracks: dict[int, Track] = {}
        strings: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
        events: list[tuple[int, int, dict[int, list[int | bytes]]]] = []
        for packet in map(fields, self._messages(fields(data), 1)):
            sequence = integer(packet, 10)
            if packet[13] == [1]:
                assert sequence not in {started for started, _ in strings}
                strings[sequence, 2][0] = ""  # start of the sequence
            assert (sequence, 2) in strings
            for interned in map(fields, self._messages(packet, 12)):
                for kind in (1, 2, 3, 29):
                    for entry in map(fields, self._messages(interned, kind)):
                        assert integer(entry, 1) not in strings[sequence, kind]
                        strings[sequence, kind][integer(entry, 1)] = text(entry, 2)
            for track in map(fields, self._messages(packet, 60)):
                assert integer(track, 11) == 3
                rank = integer(track, 12)
                rank -= 2**64 if rank >= 2**63 else 0
                new_track = Track(integer(track, 5) if track[5] else 0, text(track, 2), rank)
                assert self.tracks.setdefault(integer(track, 1), new_track) == new_track
            for event in map(fields, self._messages(packet, 11)):
                assert packet[13] == [2]
                assert integer(event, 11) in self.tracks
                if integer(event, 9) == 1:
                    assert integer(event, 10) in strings[sequence, 2]
                    assert integer(event, 3) in strings[sequence, 1]
                events.append((integer(packet, 8), sequence, event))
        self._pair(strings, events)

    @staticmethod
    def _messages(message: dict[int, list[int | bytes]], number: int) -> Iterator[bytes]:
        for value in message[number]:
            assert isinstance(value, bytes)
            yield value

    def _pair(
        self,
        strings: dict[tuple[int, int], dict[int, str]],
        events: list[tuple[int, int, dict[int, list[int | bytes]]]],
    ) -> None:
        stacks: dict[int, list[tuple[str, str, int]]] = defaultdict(list)
        for time, sequence, event in sorted(events, key=lambda event: event[0]):
            uuid = integer(event, 11)
            if integer(event, 9) == 1:
                name, category = strings[sequence, 2][integer(event, 10)], strings[sequence, 1][integer(event, 3)]
                stacks[uuid].append((name, category, time))
                annotations = list(map(fields, self._messages(event, 4)))
                self.tracks[uuid].args.append(
                    {
                        strings[sequence, 3][integer(arg, 1)]: strings[sequence, 29][integer(arg, 17)]
                        for arg in annotations
                    }
                )
                self.tracks[uuid].depth = max(self.tracks[uuid].depth, len(stacks[uuid]))
            else:
                assert integer(event, 9) == 2
                self.tracks[uuid].slices.append((*stacks[uuid].pop(), time))
        assert not any(stacks.values())

    def path(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return f"{self.path(track.parent)}/{track.name}" if track.parent else track.name

    def slices(self) -> dict[str, list[tuple[str, str, int, int]]]:
        return {self.path(uuid): track.slices for uuid, track in self.tracks.items() if track.slices}

    def track_names(self) -> list[str]:
        """Return the names of all tracks from top to bottom."""

        def below(parent: int) -> Iterator[str]:
            children = [(track.rank, uuid) for uuid, track in self.tracks.items() if track.parent == parent]
            for rank, uuid in sorted(children):
                assert rank < 2**31
                yield self.tracks[uuid].name
                yield from below(uuid)

        return list(below(0))


def test_critical_path_is_a_track_with_the_owners_in_its_args(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_path, "_BLOCK", 300)
    owners = (
        OwnerIdentity(
            kind="operator",
            name="aten::mm",
            operator="aten::mm",
            module="GPT > Linear",
            annotation="forward",
            line=LINE,
        ),
        OwnerIdentity(kind="between", name=None, operator=None, module=None, annotation=None, line=None),
    )
    number = np.tile(np.array([0, 1], np.int32), 1_000)
    times = np.arange(len(number) + 1) * 10
    path = OwnedPath(times[:-1], times[1:], number, owners, 1)
    events = encoded([("k", KERNEL, STREAM, 5, 9), ("a", OPERATOR, THREAD, 0, 4)], shift_ns=100)

    read = ReadTrace(events + b"".join(encode_path(source(shift_ns=100), path)))

    assert read.track_names() == ["Ranks", "rank 0", "critical path", "device 0", "stream 7", "thread 1234"]
    slices = read.slices()["Ranks/rank 0/critical path"]
    assert slices[:2] == [("operator aten::mm", "critical_path", 100, 110), ("between", "critical_path", 110, 120)]
    assert len(slices) == len(number)
    (track,) = (track for track in read.tracks.values() if track.name == "critical path")
    assert (track.depth, track.args[1]) == (1, {"kind": "between"})
    assert track.args[0] == {
        "kind": "operator",
        "operator": "aten::mm",
        "module": "GPT > Linear",
        "annotation": "forward",
        "line": LINE,
    }


def test_critical_path_outside_the_formats_range_is_an_error() -> None:
    path = OwnedPath(np.array([0]), np.array([5]), np.array([0], np.int32), (), None)
    with pytest.raises(TraceError, match="outside the range"):
        next(encode_path(source(shift_ns=-1), path))


TIMES = st.one_of(st.integers(0, 12), st.integers(0, 2**62))
TRACKS: st.SearchStrategy[tuple[Id, Id]] = st.sampled_from([STREAM, (0, 20), THREAD, ("Spans", None), (None, -1)])


@st.composite
def events_in_time(draw: st.DrawFn) -> list[Event]:
    """Draw intervals that may nest, overlap, touch, be equal or empty."""
    events = []
    for track in draw(st.lists(TRACKS, max_size=14)):
        start, end = sorted((draw(TIMES), draw(TIMES)))
        category = draw(st.sampled_from([KERNEL, OPERATOR, ""]))
        events.append((draw(st.sampled_from(["a", "b", "", "é\ud800"])), category, track, start, end))
    return events


@given(events_in_time(), st.integers(0, 2**61))
def test_each_event_is_one_slice_of_a_lane_of_its_track(events: list[Event], shift_ns: int) -> None:
    read = ReadTrace(encoded(events, shift_ns=shift_ns))

    expected = Counter(
        (name.replace("\ud800", "?"), category, start + shift_ns, end + shift_ns)
        for name, category, _, start, end in events
    )
    assert Counter(event for slices in read.slices().values() for event in slices) == expected
    by_track = Counter(track for _, _, track, _, _ in events)
    lanes: Counter[str] = Counter()
    for path, slices in read.slices().items():
        lanes[path.partition(" (")[0]] += len(slices)
    assert sorted(lanes.values()) == sorted(by_track.values())


def test_tracks_are_device_streams_and_host_threads() -> None:
    read = ReadTrace(
        encoded(
            [
                ("gemm", KERNEL, (0, 7), 10, 20),
                ("step", "gpu_user_annotation", (1, 20), 10, 20),
                ("aten::mm", OPERATOR, THREAD, 0, 30),
                ("load", OPERATOR, (1234, 5), 0, 30),
            ],
            thread_names={(0, 7): "stream 7 ", THREAD: "thread 1234 (python)"},
        )
    )

    assert read.slices() == {
        "Ranks/rank 0/device 0/stream 7": [("gemm", KERNEL, 10, 20)],
        "Ranks/rank 0/device 1/stream 20": [("step", "gpu_user_annotation", 10, 20)],
        "Ranks/rank 0/thread 1234 (python)": [("aten::mm", OPERATOR, 0, 30)],
        "Ranks/rank 0/thread 5": [("load", OPERATOR, 0, 30)],
    }


def test_ascend_processes_are_devices_and_threads_have_process_names() -> None:
    hardware = "Ascend Hardware"
    read = ReadTrace(
        encoded(
            [("MatMul", hardware, (800, 3), 0, 1), ("mm", "", (1, 5), 0, 1), ("aclnnMm", "CANN", (2, 5), 0, 1)],
            process_names={800: hardware, 2: "CANN"},
        )
    )

    assert read.track_names() == ["Ranks", "rank 0", hardware, "stream 3", "process 1: thread 5", "CANN: thread 5"]


def test_tracks_are_sorted_by_number_with_devices_first() -> None:
    tracks: list[tuple[Id, Id]] = [(3, 1), (3, "main"), (10, 3), (10, 20), (2, 7)]
    events = [
        ("x", OPERATOR if process == 3 else KERNEL, (process, thread), 0, 1) for process, thread in reversed(tracks)
    ]
    events += [("y", KERNEL, (10, 3), 0, 2), ("x", KERNEL, (10, 3), 1, 3)]

    track_names = ReadTrace(encoded(events)).track_names()[2:]

    assert track_names[:2] == ["device 2", "stream 7"]
    assert track_names[2:6] == ["device 10", "stream 3", "stream 3 (2)", "stream 20"]
    assert track_names[6:] == ["thread 1", "main"]


def test_lanes_do_not_exceed_perfettos_maximum_depth() -> None:
    events = [("f", "python_function", THREAD, 0, 2000 - depth) for depth in range(600)]
    events += [("empty", OPERATOR, THREAD, 0, 0)]

    read = ReadTrace(encoded(events))

    assert sorted(track.depth for track in read.tracks.values() if track.slices) == [600 - 511, 512]


def test_concatenated_sources_are_sorted() -> None:
    traces = [
        encoded([("x", KERNEL, STREAM, 0, 1 + index)], label=f"rank {sort_index}", index=index, sort_index=sort_index)
        for index, sort_index in enumerate([10, 2])
    ]

    read = ReadTrace(b"".join(traces))

    assert read.track_names() == ["Ranks", "rank 2", "device 0", "stream 7", "rank 10", "device 0", "stream 7"]
    assert read.slices() == {
        "Ranks/rank 10/device 0/stream 7": [("x", KERNEL, 0, 1)],
        "Ranks/rank 2/device 0/stream 7": [("x", KERNEL, 0, 2)],
    }


def test_many_events_are_written_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_BLOCK_PACKETS", 3)
    events = [("x", KERNEL, STREAM, time, time + 1) for time in range(5)]

    assert ReadTrace(encoded(events)).slices() == {
        "Ranks/rank 0/device 0/stream 7": [("x", KERNEL, time, time + 1) for time in range(5)]
    }


@pytest.mark.parametrize(("start", "end", "shift_ns"), [(5, 9, -6), (5, 2**62, 2**62)])
def test_times_outside_the_formats_range_are_an_error(start: int, end: int, shift_ns: int) -> None:
    with pytest.raises(TraceError, match="rank 0: times .* are outside the range of a Perfetto trace"):
        encoded([("x", KERNEL, STREAM, start, end)], shift_ns=shift_ns)


INTERVALS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1])), max_size=24)


@given(INTERVALS, st.integers(1, 4))
def test_each_interval_is_placed_in_the_first_lane_where_it_nests(
    intervals: list[tuple[int, int]], max_depth: int
) -> None:
    ordered = sorted(intervals, key=lambda interval: (interval[0], -interval[1]))
    expected: list[int] = []
    stacks: list[list[int]] = []
    for start, end in ordered:
        stacks = [[open_end for open_end in stack if open_end > start] for stack in stacks]
        fits = [not stack or (end <= stack[-1] and len(stack) < max_depth) for stack in stacks]
        lane = [*fits, True].index(True) if end > start else 0
        expected.append(lane)
        if end > start:
            stacks += [[]] * (lane == len(stacks))
            stacks[lane] = [*stacks[lane], end]

    starts, ends = np.array(ordered, dtype=np.int64).reshape(-1, 2).T

    assert place_on_lanes(starts, ends, max_depth).tolist() == expected


def test_nested_intervals_are_placed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nested_tracks, "_first_fit", None)
    starts, ends = np.array([0, 0, 1, 4, 6]), np.array([6, 5, 4, 5, 9])

    assert place_on_lanes(starts, ends, 9).tolist() == [0] * 5
