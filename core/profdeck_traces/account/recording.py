"""Critical path of a recording."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
from numpy.typing import NDArray

from profdeck_traces.account.borders import Borders, find_borders
from profdeck_traces.account.device_work import DeviceEvents
from profdeck_traces.account.host_threads import HostThreads
from profdeck_traces.account.walk import BackwardWalk, Path
from profdeck_traces.reading.events import Events
from profdeck_traces.reading.intervals import Int


@attrs.frozen(eq=False)
class StepAnnotations:
    """Step annotations as parallel arrays, sorted by start time. Times are in nanoseconds."""

    track: Int
    begin: Int
    end: Int
    switched_from: Int = attrs.field()
    """End of the previous step if only the profiler runs until `begin`; otherwise `begin`."""

    @switched_from.default
    def _(self) -> Int:
        return self.begin

    def __getitem__(self, selection: slice | NDArray[np.bool_] | Int) -> StepAnnotations:
        return StepAnnotations(
            self.track[selection], self.begin[selection], self.end[selection], self.switched_from[selection]
        )


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
    events: Events, launch: NDArray[np.int32], kinds: NDArray[np.uint8], steps: StepAnnotations, rule: str | None = None
) -> RecordingPath:
    """Find the critical path of a recording.

    Args:
        events: Events of the trace.
        launch: Row of each event's launch call, or -1.
        kinds: `profdeck_traces.account.row_kinds.RowKind` of each event.
        steps: Step annotations. If several threads have annotations, only the thread with the most is used.
        rule: Rule for step borders. Default: the result of `profdeck_traces.account.borders.border_rule`.
    """
    tracks = steps.track
    main = int(np.bincount(tracks).argmax()) if len(tracks) else None
    used = np.flatnonzero(tracks == main) if main is not None else np.zeros(0, np.int64)
    of_main = steps[used]
    threads = HostThreads(events, kinds, main, (of_main.switched_from, of_main.begin))
    work = DeviceEvents(events, launch, kinds)
    borders = find_borders(threads, work, of_main.begin, of_main.end, rule)
    walk = BackwardWalk(events, kinds, threads, work)
    if not len(borders.times):
        none = np.zeros(0, np.int64)
        return RecordingPath(
            kinds, borders, Path(none, none, kinds[:0], none.astype(np.int32)), work, none, threads, walk
        )
    begin, end = int(borders.times[0]), int(borders.times[-1])
    path = walk.path(begin, end, borders.end)
    return RecordingPath(kinds, borders, path, work, used, threads, walk)
