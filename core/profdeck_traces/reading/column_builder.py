"""Turns decoded events into columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import attrs
import msgspec
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import Columns, Tables, concatenated
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.kineto_events import KinetoEvent
from profdeck_traces.reading.times import nanoseconds, nanoseconds_of_floats, written_nanoseconds

_BLOCK_EVENTS = 1 << 16
_NO_CATEGORY = ""

# Tables grow with what is distinct in a trace; a hostile one must not fill the memory with names.
MAX_NAMES, MAX_NAME_LENGTH, _OTHER_NAMES = 100_000, 4096, "(other names)"
_MAX_NAMES_LENGTH = 20_000_000
_MAX_CATEGORIES, _OTHER_CATEGORIES = 256, "(other categories)"
MAX_TRACKS, _OTHER_TRACK = 100_000, ("(other threads)", None)


class _Category(dict[str, int]):
    """The codes of the names of one category, given in the order in which they come."""

    def __init__(self, tables: Tables, code: int, of_all: _Categories) -> None:
        super().__init__()
        self._tables = tables
        self._of_all = of_all
        self.code = code

    def __missing__(self, name: str) -> int:
        names = self._tables.names
        if len(name) > MAX_NAME_LENGTH:
            return self[name[: MAX_NAME_LENGTH - 1] + "…"]
        if name != _OTHER_NAMES:
            self._of_all.length += len(name)
            if len(names) >= MAX_NAMES or self._of_all.length > _MAX_NAMES_LENGTH:
                return self[_OTHER_NAMES]
        code = self[name] = len(names)
        names.append(name)
        self._tables.name_category.append(self.code)
        return code


class _Categories(dict[Any, _Category]):
    """By name. That of events without one depends on their process: its key is a tuple of the process id."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._tables = tables
        self.length = 0
        """Of all names together."""

    def __missing__(self, key: str | tuple[Id]) -> _Category:
        categories = self._tables.categories
        if len(categories) >= _MAX_CATEGORIES and key != _OTHER_CATEGORIES:
            return self[_OTHER_CATEGORIES]
        category = self[key] = _Category(self._tables, len(categories), self)
        categories.append(key if isinstance(key, str) else _NO_CATEGORY)
        return category

    def name_processes(self, names: dict[Id, str]) -> None:
        """Let the name of the process stand for the category of events without one."""
        for key, category in self.items():
            if isinstance(key, tuple):
                self._tables.categories[category.code] = names.get(key[0], _NO_CATEGORY)


class _Tracks(dict[tuple[Id, Id], int]):
    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self._tracks = tables.tracks

    def __missing__(self, key: tuple[Id, Id]) -> int:
        if len(self._tracks) >= MAX_TRACKS and key != _OTHER_TRACK:
            return self[_OTHER_TRACK]
        code = self[key] = len(self._tracks)
        self._tracks.append(key)
        return code


class FastEvent(msgspec.Struct, gc=False):
    """An event with members of any type that makes sense."""

    ph: str
    name: str = ""
    cat: str = _NO_CATEGORY
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | str | None = None
    dur: float | str | None = None


class DecimalEvent(msgspec.Struct, gc=False):
    """The same, with every digit of the times in microseconds, in a third of the speed."""

    ph: str
    name: str = ""
    cat: str = _NO_CATEGORY
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None


class CompleteEvent(NamedTuple):
    """A complete event of which all is known."""

    name: str
    category: str
    pid: Id
    tid: Id
    start_ns: int
    duration_ns: int


@attrs.frozen
class KnownCodes:
    """What has codes in the tables of a builder."""

    categories: list[str | tuple[Id]]
    """Those of events without one are a tuple of their process."""
    names: list[str]
    name_category: list[int]
    tracks: list[tuple[Id, Id]]

    @property
    def is_all(self) -> bool:
        """Whether nothing fell together because there was too much of it."""
        return (
            _OTHER_CATEGORIES not in self.categories
            and _OTHER_TRACK not in self.tracks
            and _OTHER_NAMES not in self.names
        )

    def since(self, before: KnownCodes) -> KnownCodes:
        """Return what came after an earlier state of the same builder."""
        return KnownCodes(
            self.categories[len(before.categories) :],
            self.names[len(before.names) :],
            self.name_category[len(before.name_category) :],
            self.tracks[len(before.tracks) :],
        )


class ColumnBuilder:
    """Turns decoded events into columns, and hands them on in blocks.

    Args:
        tables: For the columns; empty at first, or filled by another collector, which is done.
        sink: Takes each block, in the order of the file.
    """

    def __init__(self, tables: Tables, sink: Callable[[Columns], None]) -> None:
        self._tables = tables
        self._categories = _Categories(tables)
        self._tracks = _Tracks(tables)
        self._sink = sink
        self._parts: list[Columns] = []
        self._held = 0

    def add_kineto(self, complete: Sequence[KinetoEvent], *, as_written: bool) -> Int:
        """Take complete events in Kineto's form.

        Args:
            complete: In the order of the file.
            as_written: Whether the times at which they begin are texts.

        Returns:
            How long each took, in nanoseconds; -1 for one that does not say.

        Raises:
            LostDigitsError: They must be decoded otherwise; none was taken.
        """
        if not complete:
            return np.empty(0, dtype=np.int64)
        starts: list[Any] = [event.ts for event in complete]
        if as_written:
            start = written_nanoseconds(starts)
            readable = np.ones(len(start), dtype=np.bool_)
        else:
            start, readable = nanoseconds_of_floats(np.array(starts))
        duration, is_told = nanoseconds_of_floats(np.array([event.dur for event in complete]))
        duration[~is_told] = -1
        categories = self._categories
        name = [categories[event.cat][event.name] for event in complete]
        track = self._track_codes([event.pid for event in complete], [event.tid for event in complete])
        self._keep(name, track, start, duration, readable)
        return duration

    def add(self, events: Sequence[FastEvent | DecimalEvent]) -> None:
        """Take events of any form.

        Raises:
            LostDigitsError: They must be decoded exactly; none was taken.
        """
        complete = [event for event in events if event.ph == "X" and event.ts is not None]
        if not complete:
            return
        start, readable = nanoseconds([event.ts for event in complete])
        duration, _ = nanoseconds([event.dur for event in complete])
        categories, tracks = self._categories, self._tracks
        name = [categories[event.cat or (event.pid,)][event.name] for event in complete]
        track = [tracks[event.pid, event.tid] for event in complete]
        self._keep(name, np.array(track, dtype=np.int32), start, duration, readable)

    def add_spans(self, spans: Sequence[CompleteEvent]) -> None:
        """Take events of other files than traces."""
        if not spans:
            return
        names, categories, pids, tids, starts, durations = zip(*spans, strict=True)
        name = [self._categories[category][name] for category, name in zip(categories, names, strict=True)]
        track = np.array([self._tracks[key] for key in zip(pids, tids, strict=True)], dtype=np.int32)
        start, duration = np.array(starts, dtype=np.int64), np.array(durations, dtype=np.int64)
        self._keep(name, track, start, duration, np.ones(len(spans), dtype=np.bool_))

    def known(self) -> KnownCodes:
        """Return what has codes, each list in the order of the codes."""
        return KnownCodes(
            list(self._categories), self._tables.names[:], self._tables.name_category[:], self._tables.tracks[:]
        )

    def codes_of(self, new: KnownCodes, categories: list[str | tuple[Id]]) -> tuple[list[int], list[int]]:
        """Give codes to what another builder has met, and return those of its names and of its tracks.

        Args:
            new: What it met, in the order of its codes.
            categories: All that it knows, by its codes.
        """
        for category in new.categories:
            self._categories[category]
        names = [
            self._categories[categories[category]][name]
            for name, category in zip(new.names, new.name_category, strict=True)
        ]
        return names, [self._tracks[track] for track in new.tracks]

    def finish(self, process_names: dict[Id, str]) -> None:
        """Hand on the rest."""
        self.hand_on()
        self._categories.name_processes(process_names)

    def _keep(
        self, name: list[int], track: NDArray[np.int32], start: Int, duration: Int, readable: NDArray[np.bool_]
    ) -> None:
        part = Columns(self._tables, np.array(name, dtype=np.int32), track, start, start + np.maximum(duration, 0))
        self._parts.append(part if readable.all() else part[readable])
        self._held += len(part)
        if self._held >= _BLOCK_EVENTS:
            self.hand_on()

    def hand_on(self) -> None:
        """Hand on what is held."""
        if self._parts:
            self._sink(concatenated(self._tables, self._parts))
        self._parts.clear()
        self._held = 0

    def _track_codes(self, pids: list[int | str], tids: list[int | str]) -> NDArray[np.int32]:
        """Return the codes; looks up once what follows each other on the same track."""
        pid, tid = np.array(pids), np.array(tids)
        if pid.dtype != np.int64 or tid.dtype != np.int64:  # names among them, or numbers of more bits
            return np.array([self._tracks[key] for key in zip(pids, tids, strict=True)], dtype=np.int32)
        changes = np.flatnonzero((pid[1:] != pid[:-1]) | (tid[1:] != tid[:-1])) + 1
        begins = [0, *changes.tolist()]
        codes = [self._tracks[pids[begin], tids[begin]] for begin in begins]
        return np.repeat(np.array(codes, dtype=np.int32), np.diff(begins, append=len(pid)))
