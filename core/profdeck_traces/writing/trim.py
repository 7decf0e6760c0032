"""Write the selected part of a trace.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an
object with the member ``traceEvents``, or the bare array of events.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np

from profdeck_traces.account.owned_path import OwnedPath
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import new_file, write_all
from profdeck_traces.base.progress import Progress, halves
from profdeck_traces.inputs.artifact_kinds import chrome_trace
from profdeck_traces.reading.copying import copy_events, strict_json
from profdeck_traces.reading.events import TEXT, read_events
from profdeck_traces.reading.integrity import TraceCheck
from profdeck_traces.reading.walking import Changes
from profdeck_traces.writing.chrome_path import path_events
from profdeck_traces.writing.deflate import gzip_deflater
from profdeck_traces.writing.selection import Selection
from profdeck_traces.writing.windows import read_extent

_EVENTS = (b'"traceEvents"', b"")


def trim_trace(
    source: Path,
    destination: Path,
    selection: Selection,
    *,
    path: OwnedPath | None = None,
    on_progress: Progress | None = None,
) -> TraceCheck:
    """Write the selected events of a trace to a new trace.

    The source is read twice: once to select the events, and once to copy their text in the original order. Other
    top-level members are also copied and stay before or after the events. If the trace is damaged, only its readable
    part is trimmed, and the new file is still complete JSON. The new file is encoded in UTF-8.

    Args:
        source: A Chrome trace, plain or compressed, or an artifact that contains one.
        destination: The new file, in an existing directory. If its name ends in ``.gz``, the file is a single gzip
            member; otherwise, the file is plain JSON. It appears only when it is complete and on disk (fsync).
        selection: The events to keep.
        path: Critical path to append as a thread. Only segments that overlap the window of host events are added.
        on_progress: Called from the reading thread with the number of bytes of the source (as on disk) read so far and
            the total. Each of the two passes counts half.

    Returns:
        The check result for the new file, computed while it was written. If the source is damaged, ``whole`` is
        False and ``problem`` describes the damage.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: ``source`` cannot be read, or only metadata is selected.
        OSError: The new file cannot be written.
    """
    chrome = chrome_trace(source)
    with new_file(destination) as file:
        return _trim(chrome, selection, path, _Writer(file, gzip=destination.suffix == ".gz"), on_progress)


def _trim(
    source: Path, selection: Selection, path: OwnedPath | None, writer: _Writer, on_progress: Progress | None
) -> TraceCheck:
    on_selection, on_copying = halves(on_progress)
    events = read_events(source, args={"name": TEXT}, on_progress=on_selection)  # the process names are in this arg
    check, members = events.check, events.member_texts
    if not len(events):
        raise TraceError(f"{source}: {check.problem}")
    keep = selection.rows(events)
    if not (keep & events.in_file_order(events.all["phase"] != ord("M"))).any():
        raise _nothing_selected(source, check)
    del events  # frees the columns before the second pass

    if members and _EVENTS[1] not in (value for _, value in members):
        members = [*members, _EVENTS]  # "traceEvents" is in a damaged part of the trace
    copied = 0
    writer.write(b"{\n" if members else b"[\n")
    for number, (key, value) in enumerate(members or [_EVENTS]):
        if members:
            writer.write(b"%b%b: %b" % (b",\n" if number else b"", strict_json(key), strict_json(value) or b"[\n"))
        if not value:
            copied = copy_events(source, Changes(keep=keep.astype(np.uint8)), writer.write, on_progress=on_copying)
            if path is not None:
                for text in path_events(path.overlapping(*selection.host_bounds), path.process, 0):
                    writer.write(b",\n" + text if copied else text)
                    copied += 1
            writer.write(b"\n]")
    writer.write(b"\n}\n" if members else b"\n")
    size_bytes = writer.finish()
    problem = None if check.problem is None else f"{source}: {check.problem}"
    return TraceCheck(size_bytes, writer.json_bytes, copied, whole=problem is None, problem=problem)


def _nothing_selected(source: Path, check: TraceCheck) -> TraceError:
    extent = read_extent(source)
    damage = f" It is damaged: {check.problem}" if check.problem else ""
    return TraceError(
        f"No event of {source} is selected. It lasts {extent.duration_s:.6g} s from its first complete event to its "
        f"last; its categories are {', '.join(extent.categories) or 'none'}.{damage}"
    )


class _Writer:
    """Writes text to a file, plain or as one gzip member."""

    def __init__(self, file: BinaryIO, *, gzip: bool) -> None:
        self._file = file
        self._deflater = gzip_deflater() if gzip else None
        self.json_bytes = 0

    def write(self, text: bytes) -> None:
        self.json_bytes += len(text)
        write_all(self._file, text if self._deflater is None else self._deflater.compress(text))

    def finish(self) -> int:
        """Finish the file and return its size."""
        if self._deflater is not None:
            write_all(self._file, self._deflater.flush())
        return self._file.tell()
