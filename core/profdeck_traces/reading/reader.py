"""Reads one trace, whichever kind it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import kind_of
from profdeck_traces.reading.all_events import AllEvents
from profdeck_traces.reading.chrome import DEVICE_LANES, ReadingArguments, read_chrome
from profdeck_traces.reading.columns import DEVICE_PROCESSES
from profdeck_traces.reading.device_events import DeviceEvents
from profdeck_traces.reading.integrity import MAX_JSON_BYTES, file_size
from profdeck_traces.reading.time_slices import SLICE_EVENTS
from profdeck_traces.reading.trace import Trace

# Files of less are read by one process: to start others takes as long.
_LEAST_BYTES = 16 << 20


def read_trace(  # noqa: PLR0913 - all but the path have defaults
    path: Path,
    *,
    devices_only: bool = False,
    is_step: Callable[[str], bool] = lambda _name: False,
    on_progress: Progress | None = None,
    processes: int = 1,
    max_json_bytes: int = MAX_JSON_BYTES,
    slice_events: int = SLICE_EVENTS,
) -> Trace:
    """Read a Chrome trace, plain or gzip, or an artifact of another kind, in one pass and bounded memory.

    Of a damaged file, what is readable is read, and the check says where that ends.

    Times are exact to the nanosecond, also where the file has them as strings or as numbers of more digits than a
    float holds.

    Args:
        path: A Chrome trace, or what a plugin reads: see `profdeck_traces.inputs.artifact_kinds`.
        devices_only: Search the lanes of devices and annotations instead of parsing everything: three times as fast.
            Damage to the JSON outside of them is not noticed, damage to the gzip stream is.
        is_step: Whether a name is that of a step, asked once for each name of operators: some recorders mark steps by
            operators.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.
        processes: How many processes read a large Chrome trace together; the answer is the same.
        max_json_bytes: Give up after so many uncompressed bytes, against files that inflate without end.
        slice_events: How many events start in a slice of time, about: the unit of memory.

    Raises:
        TraceError: The file cannot be opened or read, or has not been analysed yet.
        OSError: There is no room for temporary files.
    """
    how = ReadingArguments(
        is_step=is_step, on_progress=on_progress, max_json_bytes=max_json_bytes, slice_events=slice_events
    )
    if (kind := kind_of(path)) is not None:
        read_kind: Trace = kind.read(path, devices_only=devices_only, **how)
        return read_kind
    read = functools.partial(_read_chrome, path, how, processes)
    if devices_only:
        trace = read(DeviceEvents, DEVICE_LANES)
        # Where a cut went wrong, the file is damaged or the process tells what is a device, the parser knows.
        if trace.check.whole and DEVICE_PROCESSES.isdisjoint(trace.process_names.values()):
            return trace
    return read(AllEvents, DEVICE_LANES if devices_only else None)


def _read_chrome(
    path: Path, how: ReadingArguments, processes: int, kind: type[AllEvents], categories: frozenset[str] | None
) -> Trace:
    if processes > 1 and file_size(path) >= _LEAST_BYTES:
        from profdeck_traces.reading.parallel_read import HowToRead, read_in_parts

        parts = HowToRead(
            path=path,
            kind=kind,
            categories=categories,
            is_step=how["is_step"],
            max_json_bytes=how["max_json_bytes"],
            slice_events=how["slice_events"],
            parts=processes,
        )
        if (trace := read_in_parts(parts, how["on_progress"], processes)) is not None:
            return trace
    return read_chrome(path, kind, categories, **how)
