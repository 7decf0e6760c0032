"""Reads one trace, whichever kind it is, into a timeline of columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from profdeck_traces.reading.arrow import batches_of
from profdeck_traces.reading.collective_fields import StatedCollectives
from profdeck_traces.reading.columns import (
    Columns,
    Tables,
    concatenated,
)
from profdeck_traces.reading.event_args import AnnotationIds
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.reading.memory_fields import StatedMemory
from profdeck_traces.reading.shape_fields import StatedShapes
from profdeck_traces.reading.time_slices import Slice, TimeSlices

if TYPE_CHECKING:
    import pyarrow as pa
_MAX_BASE_NS = 2**62  # leaves as much for the times that count from it


@attrs.frozen
class Trace:
    """The complete events of one trace, and what the file says of itself."""

    path: Path
    check: TraceCheck
    """Of a trace of which only the lanes were searched, ``events`` counts nothing."""
    devices_only: bool
    """Whether the events are those of devices and annotations only."""
    searched: bool
    """Whether these were searched for: only what was found is proved to be JSON then."""
    tables: Tables
    timeline: TimeSlices
    marks: Columns
    """Annotations, of hosts and devices, and the operators that mark steps, in the order of the file."""
    members: dict[str, Any] = attrs.field(factory=dict)
    """``distributedInfo``, ``deviceProperties`` and ``baseTimeNanoseconds``, as far as they are there."""
    process_names: dict[Id, str] = attrs.field(factory=dict)
    thread_names: dict[tuple[Id, Id], str] = attrs.field(factory=dict)
    copied: dict[tuple[str, str], tuple[int, int]] = attrs.field(factory=dict)
    """By category and name of copies and fills: how many said what they moved, and how many bytes in all."""
    collectives: StatedCollectives = attrs.field(factory=StatedCollectives)
    """What kernels of collectives say of themselves."""
    shapes: StatedShapes = attrs.field(factory=StatedShapes)
    """What operators say of the shapes of their inputs."""
    memory: StatedMemory = attrs.field(factory=StatedMemory)
    """What marks of allocations say."""
    annotations: AnnotationIds = attrs.field(factory=AnnotationIds)
    """What connects annotations of the host with those on devices."""
    kernel_types: dict[str, str] = attrs.field(factory=dict)
    """The type of the operator that a kernel carries out, by the name of the kernel, as far as Ascend tells it."""
    cores: dict[str, tuple[int, int]] = attrs.field(factory=dict)
    """By the kind of core, as far as Ascend tells it: how many kernels, and the sum of their times in nanoseconds."""

    @property
    def rank(self) -> int | None:
        """The rank, by ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "rank")

    @property
    def world_size(self) -> int | None:
        """The number of ranks, by ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "world_size")

    @property
    def process_groups(self) -> int | None:
        """How many process groups the program had, by ``distributedInfo``."""
        return _integer(self.members.get("distributedInfo"), "pg_count")

    @property
    def base_ns(self) -> int:
        """What the times count from, in Unix nanoseconds: ``baseTimeNanoseconds``, or 0."""
        base = self.members.get("baseTimeNanoseconds")
        return base if isinstance(base, int) and abs(base) < _MAX_BASE_NS else 0

    @property
    def device_names(self) -> dict[Id, str]:
        """The names of the devices, by ``deviceProperties``."""
        properties = self.members.get("deviceProperties")
        return {
            device["id"]: str(device.get("name"))
            for device in (properties if isinstance(properties, list) else [])
            if isinstance(device, dict) and isinstance(device.get("id"), int)
        }

    def slices(self) -> Iterator[Slice]:
        """Yield the events in slices of time."""
        return self.timeline.slices()

    def columns(self) -> Columns:
        """Return all events in the order of time, in memory."""
        return concatenated(self.tables, [piece.whole(piece.first) for piece in self.slices()])

    def to_batches(self) -> pa.RecordBatchReader:
        """Return the same as `to_arrow` in batches, in bounded memory.

        Raises:
            ImportError: pyarrow is not installed.
        """
        return batches_of(self.tables, self.slices)

    def to_arrow(self) -> pa.Table:
        """Return all events as a table: ``name``, ``category``, ``pid``, ``tid``, ``start_ns``, ``end_ns``.

        Raises:
            ImportError: pyarrow is not installed.
        """
        return self.to_batches().read_all()


def _integer(members: Any, key: str) -> int | None:
    value = members.get(key) if isinstance(members, dict) else None
    return value if isinstance(value, int) else None
