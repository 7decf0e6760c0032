"""Critical path of a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.borders import Borders, find_borders
from profdeck_traces.account.contexts import mark_file_functions
from profdeck_traces.account.device_work import DeviceEvents
from profdeck_traces.account.host_threads import HostThreads
from profdeck_traces.account.row_kinds import RowKind, row_kinds
from profdeck_traces.account.walk import BackwardWalk, Path
from profdeck_traces.attribution.rows import Attribution
from profdeck_traces.reading.intervals import Int


@attrs.frozen(eq=False)
class StepAnnotations:
    """Step annotations as parallel arrays, sorted by start time. Times are in nanoseconds."""

    track: Int
    begin: Int
    end: Int


@attrs.frozen(eq=False)
class RecordingPath:
    """The critical path of a recording, and the borders of its steps."""

    kinds: NDArray[np.uint8]
    """`profdeck_traces.account.row_kinds.RowKind` of each complete event."""
    borders: Borders
    path: Path
    """The path from the first to the last border."""
    work: DeviceEvents
    steps: Int
    """Index of the step annotation for each interval between borders."""
    threads: HostThreads
    walk: BackwardWalk

    def parts(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the start, end and path of each step."""
        for begin, end in zip(self.borders.times[:-1].tolist(), self.borders.times[1:].tolist(), strict=True):
            yield begin, end, self.path.between(begin, end)


def path_of(
    names: Attribution,
    steps: StepAnnotations,
    *,
    is_step: Callable[[str], bool],
    is_collective: Callable[[str], bool],
    is_valid: NDArray[np.bool_] | None = None,
) -> RecordingPath:
    """Find the critical path of a recording.

    Args:
        names: Events of the trace and their launches.
        steps: Step annotations. If several threads have annotations, only the thread with the most is used.
        is_step: Returns whether a name is a step name.
        is_collective: Returns whether a kernel name is the name of a collective.
        is_valid: Mask of the complete events to use. Default: all.
    """
    events = names.events
    kinds = row_kinds(events, is_step, is_collective)
    if is_valid is not None:
        kinds[~is_valid] = RowKind.OTHER
    mark_file_functions(events, kinds)
    tracks = steps.track
    main = int(np.bincount(tracks).argmax()) if len(tracks) else None
    used = np.flatnonzero(tracks == main) if main is not None else np.zeros(0, np.int64)
    threads = HostThreads(events, kinds, main)
    work = DeviceEvents(names, kinds, np.flatnonzero(kinds >= RowKind.KERNEL))
    borders = find_borders(threads, work, steps.begin[used], steps.end[used])
    walk = BackwardWalk(events, kinds, threads, work)
    if not len(borders.times):
        none = np.zeros(0, np.int64)
        return RecordingPath(
            kinds, borders, Path(none, none, kinds[:0], none.astype(np.int32)), work, none, threads, walk
        )
    begin, end = int(borders.times[0]), int(borders.times[-1])
    path = walk.path(begin, end, borders.end)
    return RecordingPath(kinds, borders, path, work, used, threads, walk)
