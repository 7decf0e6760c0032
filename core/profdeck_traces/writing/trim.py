"""Write the part of a trace that a selection keeps, in one pass and bounded memory.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an
object with the member ``traceEvents``, or the bare array of events.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO

import attrs

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import new_file, write_all
from profdeck_traces.base.progress import Progress
from profdeck_traces.inputs.artifact_kinds import chrome_trace
from profdeck_traces.reading.integrity import TraceCheck, TraceChecker, feed_chunks, file_size
from profdeck_traces.reading.stream import Chunk, read_ahead
from profdeck_traces.writing.deflate import gzip_deflater
from profdeck_traces.writing.selection import Picked, Selection
from profdeck_traces.writing.windows import read_extent

# Events that come one by one are collected up to this, so that pairs of them are found.
_MAX_LOOSE_BYTES = 1 << 20


def trim_trace(
    source: Path, destination: Path, selection: Selection, *, on_progress: Progress | None = None
) -> TraceCheck:
    """Write the selected events of a trace to a new trace.

    Events are copied byte for byte, in their order. Other members of the trace are copied too, and remain before or
    after the events. If the trace is damaged, the readable part is trimmed and its JSON is closed. Events that are
    nested too deeply to be read are kept.

    Args:
        source: A Chrome trace, plain or gzip, or an artifact that contains one.
        destination: The new file, in an existing directory. If its name ends in ``.gz``, the file is a single gzip
            member; otherwise, the file is plain JSON. It appears only when it is complete and on disk (fsync).
        selection: The events to keep.
        on_progress: Called from the reading thread with the number of bytes of the source (as on disk) read so far and
            the total.

    Returns:
        The check of the new file, made while it was written. If the source is damaged, ``whole`` is
        False and ``problem`` describes the damage.

    Raises:
        FileExistsError: ``destination`` exists. It is not changed.
        TraceError: ``source`` cannot be read, or only metadata is selected.
        OSError: The new file cannot be written.
    """
    file_of_source = chrome_trace(source)
    with new_file(destination) as file:
        return _trim(file_of_source, _Trimmer(selection, file, gzip=destination.suffix == ".gz"), on_progress)


def _trim(source: Path, trimmer: _Trimmer, on_progress: Progress | None) -> TraceCheck:
    size_bytes = file_size(source)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    checker = TraceChecker(trimmer)

    def feed(chunk: Chunk) -> None:
        if not checker.json_bytes:
            trimmer.begin(is_array=chunk.lstrip().startswith(b"["))
        checker.feed(chunk)

    damage = feed_chunks(feed, read_ahead(source, on_read=on_read), size_bytes)
    read = checker.finish(size_bytes, damage=damage)
    check = trimmer.finish()
    if not read.events:
        raise TraceError(f"{source}: {read.problem}")
    if not trimmer.selected:
        raise _nothing_selected(source, read)
    problems = [f"{source}: {read.problem}"] if read.problem else []
    if lost := read.events - trimmer.events:
        problems.append(f"{lost:,} events are too long to be copied.")
    if read.whole and (left_out := trimmer.begun - trimmer.written):
        keys = ", ".join(map(json.dumps, sorted(left_out)))
        problems.append(f"Members of the trace are too long to be copied: {keys}.")
    return attrs.evolve(check, whole=False, problem=" ".join(problems)) if problems else check


def _nothing_selected(source: Path, read: TraceCheck) -> TraceError:
    extent = read_extent(source)
    damage = f" It is damaged: {read.problem}" if read.problem else ""
    return TraceError(
        f"No event of {source} is selected. It lasts {extent.duration_s:.6g} s from its first complete event to its "
        f"last; its categories are {', '.join(extent.categories) or 'none'}.{damage}"
    )


class _AllKeys(frozenset[str]):
    """Contains every key, and notes those that it was asked for."""

    def __init__(self, asked: set[str]) -> None:
        super().__init__()
        self._asked = asked

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return True


class _Trimmer:
    """Takes a trace from a scanner; selects, deflates, checks and writes.

    Args:
        selection: What is kept.
        file: The new file.
        gzip: Write one gzip member rather than plain JSON.
    """

    wants_text = True

    def __init__(self, selection: Selection, file: BinaryIO, *, gzip: bool) -> None:
        self._selection = selection
        self._file = file
        self._deflater = gzip_deflater() if gzip else None
        self._checker = TraceChecker()
        self._loose: list[bytes] = []
        self._loose_bytes = 0
        self._is_array = False
        self._has_array = self._in_array = False
        self._before_member, self._before_event = b"\n", b""
        self._between = b",\n"
        self.begun: set[str] = set()
        """The keys of the members that the source has."""
        self.written: set[str] = set()
        """The keys of the members that were written."""
        self.keys: frozenset[str] = _AllKeys(self.begun)
        self.events = 0
        """Events of the source so far, as the scanner counts them."""
        self.selected = 0
        """Kept events so far, without metadata."""

    def begin(self, *, is_array: bool) -> None:
        """Open the document."""
        self._is_array = is_array
        if not is_array:
            self._write(b"{")

    def batch(self, text: memoryview) -> int | None:
        """Process a JSON array of events. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        picked = self._selection.pick(text)
        if picked is None:
            return None
        self._between = picked.between or self._between
        self._flush()
        self._put(picked)
        return picked.events

    def event(self, text: bytes) -> None:
        """Take one event."""
        self._loose.append(text)
        self._loose_bytes += len(text)
        if self._loose_bytes > _MAX_LOOSE_BYTES:
            self._flush()

    def member(self, key: str, text: bytes) -> None:
        """Take a member of the top-level object."""
        self._flush()
        if not key:  # it was too long for the scanner
            return
        self._close_array()
        self._member(key, text)
        self.written.add(key)

    def finish(self) -> TraceCheck:
        """Close the document."""
        self._flush()
        if not self._has_array:
            self._open_array()
        self._close_array()
        self._write(b"\n" if self._is_array else b"\n}\n")
        if self._deflater is not None:
            write_all(self._file, self._deflater.flush())
        return self._checker.finish(self._file.tell())

    def _flush(self) -> None:
        """Take the events that came one by one."""
        loose, self._loose, self._loose_bytes = self._loose, [], 0
        if not loose:
            return
        picked = self._selection.pick(b"[%b]" % self._between.join(loose))
        if picked is not None:
            self._put(picked)
        elif len(loose) == 1:
            self._put(Picked(text=loose[0], between=None, events=1, selected=1))
        else:  # one of them is too deep
            for text in loose:
                self.event(text)
                self._flush()

    def _put(self, picked: Picked) -> None:
        if not self._in_array:
            self._open_array()
        if picked.text:
            self._write(self._before_event + picked.text)
            self._before_event = self._between
        self.events += picked.events
        self.selected += picked.selected

    def _open_array(self) -> None:
        if self._is_array:
            self._write(b"[\n")
        else:
            self._member("traceEvents", b"[\n")
        self._has_array = self._in_array = True
        self._before_event = b""

    def _close_array(self) -> None:
        if self._in_array:
            self._write(b"\n]")
            self._in_array = False

    def _member(self, key: str, text: bytes) -> None:
        self._write(b"%b%b: %b" % (self._before_member, json.dumps(key).encode(), text))
        self._before_member = b",\n"

    def _write(self, data: bytes) -> None:
        self._checker.feed(data)
        write_all(self._file, data if self._deflater is None else self._deflater.compress(data))
