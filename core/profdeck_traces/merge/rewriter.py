"""Makes the events of one source fit for the new trace."""

from __future__ import annotations

import itertools
import json
import math
import re
from decimal import Decimal
from typing import Any

import attrs
import msgspec

from profdeck_traces.base.byte_search import stringzilla
from profdeck_traces.base.errors import TraceError
from profdeck_traces.merge.event_texts import (
    Event,
    encoded,
    encoded_all,
    encoded_event,
    integer_of,
    labelled,
    later,
    members_of,
    split_array,
    text_of,
    value_of,
)
from profdeck_traces.merge.ids import ASYNC_PHASES, FLOW_PHASES, Ids
from profdeck_traces.merge.overlaps import OtherLanes, OverlappingLanes, Overlaps
from profdeck_traces.merge.source import MergeSource
from profdeck_traces.merge.substitution import PROCESS, Substituted, Substitution
from profdeck_traces.reading.integrity import CountingHandler

BASE = "baseTimeNanoseconds"
COMMON_KEYS = ("schemaVersion", "displayTimeUnit")
SOURCE_KEYS = ("distributedInfo", "deviceProperties")
_NS_PER_US = 1000

# Process ids that mean a process of an operating system are kept where they are free. Smaller ones are devices, and
# new ones are larger than any thread id: Perfetto takes a thread with the id of its process for the main thread.
FIRST_KEPT_PID, FIRST_NEW_PID, _LAST_PID = 1000, 1_000_000_000, 2**31 - 1

_MOST_PIDS, _MOST_PROCESSES = 1_000_000, 50_000

_SEPARATOR = b",\n"
# Events that were taken apart keep the layout of their neighbours, so that readers can go on in batches.
_LAYOUT = re.compile(rb'\}([ \t\n\r]*,[ \t\n\r]*)\{([ \t\n\r]*)"')


@attrs.frozen
class SegmentPlace:
    """Where a source stands among the others, and what it must know of them."""

    rank: int
    ranks: int
    shift_ns: int
    """What to add to each ``ts``."""
    taken_pids: frozenset[int]
    """Those of host processes that belong to sources in front of it."""

    @property
    def pids_each(self) -> int:
        """How many new pids there are for each source."""
        return min(_MOST_PIDS, (_LAST_PID - FIRST_NEW_PID) // self.ranks)


@attrs.define
class MergedProcess:
    """One process of a source."""

    pid: int
    """In the new trace."""
    original: bytes
    """The pid in its source, as JSON; empty if its events have none."""
    named: bool = False
    sort_index: float = 0


class Rewriter(CountingHandler):
    """Takes the events of a source from the scanner and makes texts of them.

    Args:
        source: The source.
        place: Its place.
        overlaps: The events that go to lanes of their own, if that is known; otherwise :attr:`lanes` collects what
            is needed to find them.
    """

    wants_text = True
    keys = frozenset({BASE, *COMMON_KEYS, *SOURCE_KEYS})

    def __init__(self, source: MergeSource, place: SegmentPlace, overlaps: Overlaps | None) -> None:
        self._label = source.label
        self._select = source.select
        self._place = place
        self._ids = Ids(place.rank, place.ranks)
        # Three decimals, as profilers write them, however the shift is made.
        self._shift_us = Decimal(place.shift_ns) / _NS_PER_US
        if place.shift_ns % _NS_PER_US:
            self._shift_us = self._shift_us.quantize(Decimal("0.001"))
        self._by_text: dict[bytes, MergedProcess] = {}
        self._next_pid = FIRST_NEW_PID + place.rank * place.pids_each
        self._texts: list[bytes | memoryview] = []
        self._layout_known = False
        self._substitution = Substitution(self._pid, self._ids, place.shift_ns)
        self._other_lanes = OtherLanes(overlaps) if overlaps else None
        self.lanes = None if overlaps else OverlappingLanes()
        """Where overlaps are looked for."""
        self.between = _SEPARATOR
        """What to write between events."""
        self.inside = b""
        """White space in front of the first member of an event."""
        self.members: dict[str, bytes] = {}
        """By key, the JSON of members of the top-level object."""
        self.processes: dict[str | None, MergedProcess] = {}
        """By pid, as JSON in one form; in the order of the trace."""
        self.host_pids: set[int] = set()
        """Those that the operating system gave."""
        self.read = 0
        """Objects with a ``ph`` member so far."""
        self.written = 0
        """Those in the new trace."""

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        data = bytes(text)
        if not self._layout_known and (layout := _LAYOUT.search(data)):
            self._layout_known = True
            self.between, self.inside = layout.groups()
        if self._select is None:
            count = self._take_batch(data)
        else:
            count = super().batch(text)
            if count is not None:
                self._take_batch(self._select.apply(data))
        self.read += count or 0
        return count

    def event(self, text: bytes) -> None:
        """Take one event."""
        array = b"[%b]" % text
        self.read += sum("ph" in event for event in split_array(array) or [])
        self._take(split_array(array if self._select is None else self._select.apply(array)) or [])

    def member(self, key: str, text: bytes) -> None:
        """Keep the value."""
        self.members[key] = text

    def take(self) -> list[bytes | memoryview]:
        """Return the texts of the events since the last call, which need :attr:`between` between them."""
        texts, self._texts = self._texts, []
        return texts

    def base_ns(self) -> int | None:
        """Return ``baseTimeNanoseconds``, if it is there and a whole number."""
        return integer_of(self.members.get(BASE, b""))

    def complete(self) -> None:
        """Add what names the new lanes; to be called at the end of the source."""
        if self._other_lanes is not None:
            names = self._other_lanes.metadata(lambda pid: self._process(pid).pid)
            self.written += len(names)
            self._texts.append(encoded_all(names, self.between, self.inside))

    def _take_batch(self, data: bytes) -> int | None:
        whole = self._substituted(data)
        taken = [(data, whole)] if whole is not None else self._taken_apart(self._without_metadata(data))
        if taken is None:  # it was cut where it cannot be, or is not JSON
            taken = self._taken_apart([data])
        count = 0
        for part, new in taken or []:
            if isinstance(new, list):
                count += sum("ph" in event for event in new)
                self._take(new)
                continue
            count += new.events
            self.written += new.events
            if new.text:
                self._texts.append(new.text)
            if self.lanes is not None:
                self.lanes.batch(part, new.complete)
        return None if taken is None else count

    def _taken_apart(self, parts: list[bytes]) -> list[tuple[bytes, Substituted | list[Event]]] | None:
        """Return each part with its new text, or with its events where that cannot be had; ``None``: not JSON."""
        taken: list[tuple[bytes, Substituted | list[Event]]] = []
        for part in parts:
            new = self._substituted(part) or split_array(part)
            if new is None:
                return None
            if isinstance(new, list):  # their processes come before those of the next part
                for event in new:
                    self._process(bytes(event.get("pid", b"")))
            taken.append((part, new))
        return taken

    def _substituted(self, data: bytes) -> Substituted | None:
        moved = data if self._other_lanes is None else self._other_lanes.batch(data)
        return None if moved is None else self._substitution.apply(moved)

    def _without_metadata(self, data: bytes) -> list[bytes]:
        """Cut an array where metadata of processes begins and ends, so that only that has to be taken apart.

        A cut in the wrong place shows: what is in front of it is no JSON.
        """
        boundary = b"}%b{" % self.between
        first = stringzilla.find(data, PROCESS)
        begin = data.rfind(boundary, 0, first) if first >= 0 else -1
        end = data.find(boundary, data.rfind(PROCESS)) if first >= 0 else -1
        cuts = [cut + 1 for cut in (begin, end) if cut >= 0]
        skip = len(self.between)
        edges = [1 - skip, *cuts, len(data) - 1]
        return [b"[%b]" % data[begin + skip : end] for begin, end in itertools.pairwise(edges)] if cuts else [data]

    def _take(self, events: list[Event]) -> None:
        kept = [event for event in events if self._rewrite(event)]
        self.written += sum("ph" in event for event in kept)
        if kept:
            self._texts.append(encoded_all(kept, self.between, self.inside))

    def _rewrite(self, event: Event) -> bool:
        """Change the members in place; ``False`` if the event is to be left out."""
        phase = value_of(bytes(event.get("ph", b"")))
        process = self._process(bytes(event.get("pid", b"")))
        if phase == "M":
            name = value_of(bytes(event.get("name", b"")))
            if name == "process_sort_index":
                process.sort_index = _sort_index(event)
                return False
            if name == "process_name":
                self._rename(process, event)
        if self._other_lanes is not None:
            self._other_lanes.event(event, phase)
        elif self.lanes is not None and phase == "X":
            self.lanes.event(event)
        event["pid"] = msgspec.Raw(b"%d" % process.pid)
        self._rewrite_ids(event, phase)
        if self._shift_us and "ts" in event:
            event["ts"] = msgspec.Raw(later(bytes(event["ts"]), self._shift_us))
        return True

    def _rewrite_ids(self, event: Event, phase: Any) -> None:
        if "id" in event and isinstance(phase, str) and len(phase) == 1:
            if phase in FLOW_PHASES:
                event["id"] = msgspec.Raw(self._ids.new(bytes(event["id"])))
            elif phase in ASYNC_PHASES:
                event["id"] = msgspec.Raw(self._ids.new(bytes(event["id"]), of_flow=False))
        if "bind_id" in event:
            event["bind_id"] = msgspec.Raw(self._ids.new(bytes(event["bind_id"])))
        if "id2" in event:
            scoped = members_of(event["id2"])
            if scoped is not None and "global" in scoped:
                scoped["global"] = msgspec.Raw(self._ids.new(bytes(scoped["global"]), of_flow=False))
                event["id2"] = msgspec.Raw(encoded_event(scoped))

    def _rename(self, process: MergedProcess, event: Event) -> None:
        args = members_of(event.get("args"))
        if args is not None:
            name = labelled(self._label, text_of(bytes(args.get("name", b""))))
            args["name"] = msgspec.Raw(encoded(name))
            event["args"] = msgspec.Raw(encoded_event(args))
            process.named = True

    def _pid(self, text: bytes) -> bytes:
        return b"%d" % self._process(text).pid

    def _process(self, text: bytes) -> MergedProcess:
        """Return the process whose pid is this JSON text, or which has none."""
        process = self._by_text.get(text)
        if process is None:
            value = value_of(text)
            key = json.dumps(value) if text else None
            process = self.processes.get(key)
            if process is None:
                if len(self.processes) >= min(_MOST_PROCESSES, self._place.pids_each):
                    raise TraceError(f"There are {len(self.processes):,} processes in it and more: too many to merge.")
                process = self.processes[key] = MergedProcess(self._allot(value), text)
            self._by_text[text] = process
        return process

    def _allot(self, original: Any) -> int:
        if isinstance(original, int) and FIRST_KEPT_PID <= original < FIRST_NEW_PID:
            self.host_pids.add(original)
            if original not in self._place.taken_pids:
                return original
        self._next_pid += 1
        return self._next_pid - 1


def _sort_index(event: Event) -> float:
    args = members_of(event.get("args"))
    value = value_of(bytes(args.get("sort_index", b""))) if args else None
    return value if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else 0
