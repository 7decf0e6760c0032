"""What to add to the times of each trace so that those of all traces compare."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import StrEnum

import attrs

from profdeck_traces.analysis.classes import Classifier
from profdeck_traces.analysis.clocks import OffsetSource, clock_offsets
from profdeck_traces.analysis.collectives import Collectives
from profdeck_traces.analysis.rank_labels import places_in_paths
from profdeck_traces.analysis.step_names import StepNames
from profdeck_traces.analysis.summary import read_summary
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.parallel import map_traces
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.sources import TraceSource


class Alignment(StrEnum):
    """How clocks are aligned."""

    NONE = "none"
    """Not at all: profilers write times of their host's clock, which is the same for all ranks of a host."""
    ANCHORS = "anchors"
    """By the marks that the recorder left in each trace, whose Unix time its manifest tells, and by the messages that
    the hosts of engines exchanged with the process that asked them."""
    COLLECTIVES = "collectives"
    """By the ends of collectives that ranks ran together."""


@attrs.frozen
class Shifts:
    """What alignment found."""

    shift_ns: tuple[int, ...]
    """For each source, what to add to its times, which count from its ``baseTimeNanoseconds``."""
    unknown: tuple[TraceSource, ...]
    """Those about which nothing could be found out; they stay as they are."""
    error_ns: int | None
    """By how much the times of any can be wrong, as far as messages tell; with `Alignment.COLLECTIVES` the largest
    median distance of their ends from each other. None where that is unknown of one, or nothing was aligned."""


def align(
    sources: Sequence[TraceSource],
    how: Alignment,
    *,
    processes: int = 1,
    on_progress: Progress | None = None,
) -> Shifts:
    """Determine the clock offsets between traces.

    Args:
        sources: The traces. With `Alignment.COLLECTIVES`, the first trace of each group keeps its times.
        how: The alignment method.
        processes: Number of traces to read in parallel, if the method reads them.
        on_progress: Called with the number of bytes read so far and the total.
    """
    if how is Alignment.NONE:
        return Shifts((0,) * len(sources), (), None)
    if how is Alignment.ANCHORS:
        hosts = {source.facts.clock_host for source in sources if source.facts is not None}
        found = [_by_anchors(source, is_compared=len(hosts) == 1) for source in sources]
    else:
        found = _by_collectives(sources, processes, on_progress)
    errors_ns = [error_ns for shift_ns, error_ns in found if shift_ns is not None]
    known_ns = [error_ns for error_ns in errors_ns if error_ns is not None]
    return Shifts(
        tuple(shift_ns or 0 for shift_ns, _ in found),
        tuple(source for source, (shift_ns, _) in zip(sources, found, strict=True) if shift_ns is None),
        max(known_ns, default=None) if len(known_ns) == len(errors_ns) else None,
    )


_Found = tuple[int | None, int | None]
"""What to add to the times of a trace, and by how much that can be wrong, in nanoseconds; None where nothing tells."""


def _by_anchors(source: TraceSource, *, is_compared: bool) -> _Found:
    """Return a trace's clock shift and its maximum error in nanoseconds, based on the recorder's clock anchors.

    Args:
        source: The trace.
        is_compared: True if the offsets of all traces refer to the same host's clock. Otherwise the error is unknown.
    """
    facts = source.facts
    if facts is None or facts.clock_offset_ns is None:
        return None, None
    return facts.clock_offset_ns - (facts.base_time_ns or 0), facts.clock_error_ns if is_compared else None


def _by_collectives(sources: Sequence[TraceSource], processes: int, on_progress: Progress | None) -> list[_Found]:
    function = functools.partial(_collectives, classifier=Classifier())
    sizes = [source.size_bytes for source in sources]
    read = map_traces(function, sources, sizes, processes=processes, on_progress=on_progress)
    readable = [number for number, found in enumerate(read) if not isinstance(found, TraceError)]
    collectives = [found for found in read if not isinstance(found, TraceError)]
    places = zip(collectives, places_in_paths(collectives), strict=True)
    offsets = clock_offsets([attrs.evolve(of, rank=rank, replica=replica) for of, (rank, replica) in places])
    shifts: list[_Found] = [(None, None)] * len(sources)
    for number, offset in zip(readable, offsets, strict=True):
        if offset.source is not OffsetSource.UNKNOWN:
            shifts[number] = offset.offset_ns, offset.spread_ns
    return shifts


def _collectives(source: TraceSource, on_progress: Progress | None, *, classifier: Classifier) -> Collectives:
    reading = read_summary(
        source,
        classifier=classifier,
        step_names=StepNames(()),
        cold_first_step=source.cold_first_step,
        last_step=source.last_step,
        on_progress=on_progress,
    )
    return reading.with_facts(source).collectives
