"""Complete events of a trace as numeric columns.

Categories are those of Kineto (``libkineto/src/ActivityType.cpp`` in pytorch/kineto). Ascend's
``trace_view.json`` contains events without a category; their process name is used instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.intervals import Int

MAX_NAME_LENGTH = 4096
OPERATOR = "cpu_op"
PYTHON = "python_function"
ANNOTATION = "user_annotation"
DEVICE_ANNOTATION = "gpu_user_annotation"
COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
"""Categories of copies and fills on a device."""
DEVICE_CATEGORIES = COPIES | {"kernel", "mtia_ccp_events", "hpu_op"}
"""Categories of device work. The ``pid`` of such an event identifies the device."""
DEVICE_WAIT = "device wait"
"""Category for device events that represent waiting, as on MTIA. A waiting device counts as idle."""
MARKS = frozenset({ANNOTATION, DEVICE_ANNOTATION})
"""Categories of annotations, which may mark steps."""
DEVICE_PROCESSES = frozenset({"Ascend Hardware"})
"""Names of processes whose uncategorized events are device work."""
DEVICE_WORK = DEVICE_CATEGORIES | DEVICE_PROCESSES
"""Categories of device work, including events categorized by the name of their process."""

RUNTIMES = frozenset(
    {
        *("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime", "glow_runtime"),
        *("privateuse1_runtime", "privateuse1_driver", "CANN"),
    }
)
"""Categories of calls into the runtime or driver of a device. ``CANN`` is the process name of Ascend's runtime."""
TASK_QUEUES = frozenset({"enqueue", "dequeue"})
"""Event categories of Ascend's task queue on the host."""
PROFILER_OVERHEAD = "overhead"


@attrs.frozen
class Tables:
    """Lookup tables for the codes in columns."""

    names: list[str] = attrs.field(factory=list)
    """Names by code. A name has a separate code for each category in which it occurs."""
    name_category: list[int] = attrs.field(factory=list)
    """Category of each name, as an index into ``categories``."""
    categories: list[str] = attrs.field(factory=list)
    tracks: list[tuple[Id, Id]] = attrs.field(factory=list)
    """Process and thread of each track or, for device work, device and stream."""

    def category_of_names(self) -> NDArray[np.int16]:
        """Return ``name_category`` as an array."""
        return np.array(self.name_category, dtype=np.int16)

    def names_of_categories(self, categories: frozenset[str]) -> NDArray[np.bool_]:
        """Return a mask of the names that are in one of these categories."""
        codes = [code for code, category in enumerate(self.categories) if category in categories]
        return np.isin(self.category_of_names(), codes)


@attrs.frozen
class Columns:
    """Complete events (``ph`` "X"): parallel arrays with one value per event."""

    tables: Tables
    name: NDArray[np.int32]
    """Index into ``tables.names``."""
    track: NDArray[np.int32]
    """Index into ``tables.tracks``."""
    start_ns: Int
    end_ns: Int
    row: Int
    """Row in the trace's `profdeck_traces.reading.events.Events`; -1 for events from other files."""

    @property
    def duration_ns(self) -> Int:
        """End minus start."""
        return self.end_ns - self.start_ns

    def __len__(self) -> int:
        return len(self.name)

    def __getitem__(self, selected: Any) -> Columns:
        """Select events by a slice, indices or a mask."""
        arrays = (self.name, self.track, self.start_ns, self.end_ns, self.row)
        return Columns(self.tables, *(array[selected] for array in arrays))


class CompleteEvent(NamedTuple):
    """A complete event from a file that is not a Chrome trace."""

    name: str
    category: str
    pid: Id
    tid: Id
    start_ns: int
    duration_ns: int


def columns_of(events: Iterable[CompleteEvent]) -> Columns:
    """Convert events to columns in the same order. Names are truncated to `MAX_NAME_LENGTH` characters."""
    names: dict[tuple[str, str], int] = {}
    categories: dict[str, int] = {}
    tracks: dict[tuple[Id, Id], int] = {}
    name, track, start, end = array("i"), array("i"), array("q"), array("q")
    for event in events:
        categories.setdefault(event.category, len(categories))
        name.append(names.setdefault((shortened(event.name), event.category), len(names)))
        track.append(tracks.setdefault((event.pid, event.tid), len(tracks)))
        start.append(event.start_ns)
        end.append(event.start_ns + event.duration_ns)
    tables = Tables(
        [text for text, _ in names], [categories[category] for _, category in names], list(categories), list(tracks)
    )
    return Columns(
        tables,
        np.array(name, dtype=np.int32),
        np.array(track, dtype=np.int32),
        np.array(start, dtype=np.int64),
        np.array(end, dtype=np.int64),
        np.full(len(name), -1, dtype=np.int64),
    )


def shortened(name: str) -> str:
    """Truncate a name to `MAX_NAME_LENGTH` characters."""
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def combined(parts: Sequence[Columns]) -> list[Columns]:
    """Convert parts that have separate tables into parts that share the same tables."""
    names: dict[tuple[str, str], int] = {}
    categories: dict[str, int] = {}
    tracks: dict[tuple[Id, Id], int] = {}
    codes = []
    for part in parts:
        of_part = part.tables
        categories_of_names = (of_part.categories[code] for code in of_part.name_category)
        keys = list(zip(of_part.names, categories_of_names, strict=True))
        codes.append(
            (
                np.array([names.setdefault(key, len(names)) for key in keys], dtype=np.int32),
                np.array([tracks.setdefault(track, len(tracks)) for track in of_part.tracks], dtype=np.int32),
            )
        )
    name_category = [categories.setdefault(category, len(categories)) for _, category in names]
    tables = Tables([name for name, _ in names], name_category, list(categories), list(tracks))
    return [
        Columns(tables, of_name[part.name], of_track[part.track], part.start_ns, part.end_ns, part.row)
        for part, (of_name, of_track) in zip(parts, codes, strict=True)
    ]


def by_start(columns: Columns) -> Columns:
    """Return events sorted by start."""
    return columns[np.argsort(columns.start_ns, kind="stable")]


def concatenated(tables: Tables, parts: Sequence[Columns]) -> Columns:
    """Concatenate the events of parts that share `tables`."""
    none, codes = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    return Columns(
        tables,
        np.concatenate([codes, *(part.name for part in parts)]),
        np.concatenate([codes, *(part.track for part in parts)]),
        np.concatenate([none, *(part.start_ns for part in parts)]),
        np.concatenate([none, *(part.end_ns for part in parts)]),
        np.concatenate([none, *(part.row for part in parts)]),
    )
