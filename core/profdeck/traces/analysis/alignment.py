"""What to add to the times of each trace so that those of all traces compare."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import StrEnum

import attrs

from profdeck.base.errors import TraceError
from profdeck.base.progress import Progress
from profdeck.traces.analysis.classes import Classifier
from profdeck.traces.analysis.clocks import OffsetSource, clock_offsets
from profdeck.traces.analysis.collectives import Collectives
from profdeck.traces.analysis.step_names import StepNames
from profdeck.traces.analysis.summary import read_summary
from profdeck.traces.parallel import map_traces
from profdeck.traces.sources import TraceSource


class Alignment(StrEnum):
    """How clocks are aligned."""

    NONE = "none"
    """Not at all: profilers write times of their host's clock, which is the same for all ranks of a host."""
    ANCHORS = "anchors"
    """By the marks that the recorder left in each trace, whose Unix time its manifest tells."""
    COLLECTIVES = "collectives"
    """By the ends of collectives that ranks ran together."""


@attrs.frozen
class Shifts:
    """What alignment found."""

    shift_ns: tuple[int, ...]
    """For each source, what to add to its times, which count from its ``baseTimeNanoseconds``."""
    unknown: tuple[TraceSource, ...]
    """Those about which nothing could be found out; they stay as they are."""


def align(
    sources: Sequence[TraceSource],
    how: Alignment,
    *,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> Shifts:
    """Find out how the clocks of traces stand to each other.

    Args:
        sources: The traces. With `Alignment.COLLECTIVES` the first of each group keeps its times.
        how: By what.
        processes: How many traces are read at once, if they must be.
        on_progress: Called with the bytes read so far and in all.
    """
    if how is Alignment.NONE:
        return Shifts((0,) * len(sources), ())
    if how is Alignment.ANCHORS:
        found = [_by_anchors(source) for source in sources]
    else:
        found = _by_collectives(sources, processes, on_progress)
    return Shifts(
        tuple(shift_ns or 0 for shift_ns in found),
        tuple(source for source, shift_ns in zip(sources, found, strict=True) if shift_ns is None),
    )


def _by_anchors(source: TraceSource) -> int | None:
    base_ns = source.artifact.base_time_ns if source.artifact else None
    offset_ns = source.clock_offset_ns
    return None if offset_ns is None else offset_ns - (base_ns or 0)


def _by_collectives(sources: Sequence[TraceSource], processes: int, on_progress: Progress | None) -> list[int | None]:
    function = functools.partial(_collectives, classifier=Classifier())
    sizes = [source.size_bytes for source in sources]
    read = map_traces(function, sources, sizes, processes=processes, on_progress=on_progress)
    readable = [number for number, found in enumerate(read) if not isinstance(found, TraceError)]
    offsets = clock_offsets([found for found in read if not isinstance(found, TraceError)])
    shifts: list[int | None] = [None] * len(sources)
    for number, offset in zip(readable, offsets, strict=True):
        shifts[number] = None if offset.source is OffsetSource.UNKNOWN else offset.offset_ns
    return shifts


def _collectives(source: TraceSource, on_progress: Progress | None, *, classifier: Classifier) -> Collectives:
    return read_summary(
        source, devices_only=True, classifier=classifier, step_names=StepNames(()), on_progress=on_progress
    ).collectives
