"""The complete events of one trace and the file's metadata."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.reading.columns import (
    DEVICE_ANNOTATION,
    DEVICE_WAIT,
    DEVICE_WORK,
    MARKS,
    OPERATOR,
    Columns,
    Tables,
)
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.reading.intervals import Int, order_by

# Written by Kineto at the beginning and end of the file (libkineto/src/output_json.cpp).
_MEMBERS = ("distributedInfo", "deviceProperties", "baseTimeNanoseconds")
# Device work may start before the first recorded host event, and end after the last one.
_TOLERANCE_NS, _TOLERANCE_SPANS = 100_000_000, 10
_MTIA, _WAIT = "mtia_ccp_events", re.compile("wait", re.IGNORECASE)
_NO_ROW = np.uint32(2**32 - 1)
_MAX_BASE_NS = 2**62  # so that the sum of base and time fits in 64 bits


@attrs.frozen
class Trace:
    """The complete events of one trace, and the metadata of the file."""

    path: Path
    check: TraceCheck
    events: Columns
    """All complete events, except those of profdeck's own threads, sorted by start."""
    annotations: Columns
    """Host and device annotations, and the operators that mark steps, in file order."""
    raw: Events | None = None
    """Events of all phases, with their args; ``None`` if the file is a table of kernels."""
    members: dict[str, Any] = attrs.field(factory=dict)
    """``distributedInfo``, ``deviceProperties`` and ``baseTimeNanoseconds``, if present."""
    process_names: dict[Id, str] = attrs.field(factory=dict)
    thread_names: dict[tuple[Id, Id], str] = attrs.field(factory=dict)
    kernel_types: dict[str, str] = attrs.field(factory=dict)
    """Operator type by kernel name, if recorded, as in Ascend's files."""
    cores: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """Kernel count and total time in nanoseconds by core type, if recorded, as in Ascend's files."""
    implausible: tuple[tuple[str, int], ...] = ()
    """Names and counts of events with invalid times, and of device events with times outside the recording.

    ``events`` excludes them."""
    has_host: bool = True
    """False if the file is a table of kernels, which has no host events."""

    @property
    def tables(self) -> Tables:
        """Lookup tables for the codes in ``events`` and ``annotations``."""
        return self.events.tables

    @property
    def rank(self) -> int | None:
        """The rank in ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "rank")

    @property
    def world_size(self) -> int | None:
        """The number of ranks in ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "world_size")

    @property
    def process_groups(self) -> int | None:
        """The number of process groups in ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "pg_count")

    @property
    def base_ns(self) -> int:
        """Origin of the times in Unix nanoseconds: ``baseTimeNanoseconds``, or 0 if it is missing or invalid."""
        base = self.members.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) < _MAX_BASE_NS else 0

    @property
    def device_names(self) -> dict[Id, str]:
        """Names of the devices in ``deviceProperties``."""
        properties = self.members.get("deviceProperties")
        return {
            device["id"]: str(device.get("name"))
            for device in (properties if isinstance(properties, list) else [])
            if isinstance(device, dict) and isinstance(device.get("id"), int)
        }

    def arg(self, key: str, rows: Int) -> Int:
        """Return the values of an arg for some events: integers, or codes into `texts`; -1 for events without the arg.

        Args:
            key: Name of the arg.
            rows: Rows of the events, as in ``Columns.row``.
        """
        missing = np.full(len(rows), -1, dtype=np.int64)
        if self.raw is None:
            return missing
        in_file = rows >= 0
        missing[in_file] = self.raw.arg(key, rows[in_file])
        return missing

    def texts(self, key: str) -> list[str]:
        """Return the JSON text for each code of an arg."""
        return [] if self.raw is None else self.raw.texts[key]

    def text(self, key: str, code: int) -> str | None:
        """Decode a code returned by `arg` to a string. Return ``None`` for -1 and for a null value."""
        if code < 0:
            return None
        value = json.loads(self.texts(key)[code])
        return value if isinstance(value, str) else None if value is None else str(value)


def trace_of(raw: Events, is_step: Callable[[str], bool]) -> Trace:
    """Convert the events of a Chrome trace to a `Trace`.

    Args:
        raw: The events.
        is_step: Returns whether a name denotes a step. Called once for each operator name.
    """
    row = raw.all["row"][: raw.complete]
    tables, name = _name_codes(raw, row)
    order = order_by(raw.start_ns, lambda tied: row[tied])
    if raw.is_profiler_track.any():
        order = order[~raw.is_profiler_track[raw.track[order]]]
    start_ns = raw.storage.taken(raw.start_ns, order)
    end_ns = raw.storage.taken(raw.duration_ns, order)
    end_ns += start_ns
    track = raw.storage.stored(raw.track[order].astype(np.int32, copy=False))
    name = raw.storage.taken(name, order)
    events = Columns(tables, name, track, start_ns, end_ns, raw.storage.stored(order))
    del name, track, start_ns, end_ns, order
    is_implausible = _outside_of_recording(events) | np.isin(events.row, raw.untimed)
    counts = Counter(tables.names[code] for code in events.name[is_implausible].tolist())
    counts.update(raw.names[code] for code in raw.all["name"][raw.untimed[raw.untimed >= raw.complete]].tolist())
    events = events[~is_implausible] if is_implausible.any() else events
    is_mark = tables.names_of_categories(MARKS)
    for code in np.flatnonzero(tables.names_of_categories(frozenset({OPERATOR}))).tolist():
        is_mark[code] = is_step(tables.names[code])
    annotations = events[is_mark[events.name]]
    annotations = annotations[np.argsort(row[annotations.row], kind="stable")]
    raw.storage.release()
    members = {key: raw.members[key] for key in _MEMBERS if key in raw.members}
    return Trace(
        raw.path,
        raw.check,
        events,
        annotations,
        raw,
        members,
        raw.process_names,
        raw.thread_names,
        implausible=tuple(counts.items()),
    )


def _outside_of_recording(events: Columns) -> NDArray[np.bool_]:
    """Return a mask of device events that start long before the host's events, or end long after them.

    Device timestamps can be missing (0), come from an earlier recording, or be several seconds late.
    """
    of_devices = events.tables.names_of_categories(DEVICE_WORK | {DEVICE_ANNOTATION})
    is_device = of_devices[events.name]
    host = np.flatnonzero(~is_device)
    if not len(host):
        return np.zeros(len(events), dtype=np.bool_)
    begin_ns, end_ns = int(events.start_ns[host[0]]), int(events.end_ns[host].max())
    tolerance_ns = max(_TOLERANCE_NS, _TOLERANCE_SPANS * (end_ns - begin_ns))
    outside: NDArray[np.bool_] = is_device & (
        (events.start_ns < begin_ns - tolerance_ns) | (events.end_ns > end_ns + tolerance_ns)
    )
    return outside


def _name_codes(raw: Events, row: NDArray[np.uint32]) -> tuple[Tables, NDArray[np.int32]]:
    """Return tables with one code per pair of name and category, ordered by first event, and the code of each event."""
    # Most names occur in only one category. Only names in several categories need additional codes.
    category = np.zeros(len(raw.names), np.uint8)
    category[raw.name] = raw.category
    differs = np.flatnonzero(category[raw.name] != raw.category)
    keys, further = np.unique(raw.category[differs] * np.int64(len(raw.names)) + raw.name[differs], return_inverse=True)
    code = raw.name.copy()
    code[differs] = len(raw.names) + further
    more_categories, more_names = np.divmod(keys, max(1, len(raw.names)))
    first = np.full(len(raw.names) + len(keys), _NO_ROW)
    np.minimum.at(first, code, row)
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first != _NO_ROW)]
    place = np.empty(len(first), dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    names = [raw.names[name] for name in np.append(np.arange(len(raw.names)), more_names)[order].tolist()]
    categories, of_names = list(raw.categories), np.append(category, more_categories)[order].tolist()
    for position, name in enumerate(names):
        if categories[of_names[position]] == _MTIA and _WAIT.search(name):
            of_names[position] = len(raw.categories)
    if len(raw.categories) in of_names:
        categories.append(DEVICE_WAIT)
    return Tables(names, of_names, categories, list(raw.tracks)), place[code]


def _integer(members: Any, key: str) -> int | None:
    value = members.get(key) if isinstance(members, dict) else None
    return value if isinstance(value, int) else None
