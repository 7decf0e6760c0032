"""Checks whether a trace file is intact, by reading all of it.

A profiler that dies, a full disk or two ranks with the same file name leave a file that looks like a trace. The
absence of an exception does not prove that it is intact. `TraceCheck` defines what is proved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import attrs

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.content import read_content
from profdeck_traces.reading.parsers import new_parser
from profdeck_traces.reading.stream import Chunk
from profdeck_traces.reading.walking import Walker

MAX_JSON_BYTES = 64 << 30


@attrs.frozen
class TraceCheck:
    """Result of reading a trace file to its end.

    ``whole`` means all of the following, in every layout of the JSON. Files may be plain, gzip, bzip2, or a zip archive
    of one file, in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark.

    - The compressed stream is complete, its checksums and lengths match, and nothing follows it.
    - Every byte of the document was parsed. It is valid text and JSON (RFC 8259, plus ``NaN`` and ``Infinity``, as in
      Python's ``json``), and only white space follows.
    - No event has values of more than 512 levels, and no event or other member is longer than 64 MiB.
    - It is a Chrome trace: an array of events, or an object with exactly one ``traceEvents`` array.
    - It has at least one event.
    """

    size_bytes: int
    """The file's size on disk."""
    json_bytes: int
    """Bytes of uncompressed JSON that could be read, in UTF-8."""
    events: int
    """Trace events: objects in the events array that have a ``ph`` member. Malformed events are skipped."""
    whole: bool
    problem: str | None
    """The first problem and its position, in one sentence; ``None`` if the trace is intact."""


class TraceChecker:
    """Checks the chunks of a trace in bounded memory, so that a writer can check what it writes.

    Args:
        name: Keep the columns of the events with this name, which JSON must not escape.
    """

    def __init__(self, name: str = "") -> None:
        parser = new_parser({})
        parser.count_events(name.encode())
        self.parser = parser
        """Has the columns of the events with the name, and members of the top-level object."""
        self._walker = Walker(parser)

    def read(self, chunks: Generator[Chunk, None, None], max_json_bytes: int = MAX_JSON_BYTES) -> None:
        """Check all chunks of a document in UTF-8, and damage of their stream.

        Args:
            chunks: From `profdeck_traces.reading.content`.
            max_json_bytes: Limit of the size of the document.

        Raises:
            TraceError: The file cannot be read.
        """
        self._walker.add_all(chunks, max_json_bytes)

    def finish(self, size_bytes: int) -> TraceCheck:
        """Return the result after the last chunk.

        Args:
            size_bytes: The file's size on disk.
        """
        result = self._walker.finish()
        return TraceCheck(
            size_bytes=size_bytes,
            json_bytes=result.json_bytes,
            events=self.parser.rows,
            whole=result.problem is None,
            problem=result.problem,
        )


def check_trace(
    path: Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> TraceCheck:
    """Read a trace file to its end, and return whether it is intact.

    Decompression runs on a second thread. Memory does not depend on the size of the file.

    Args:
        path: A Chrome trace: plain, gzip, bzip2 or zip; UTF-8, UTF-16 or UTF-32.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.
        max_json_bytes: Limit of the uncompressed size, because a small file can inflate without end.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    checker = TraceChecker()
    checker.read(read_content(path, on_read=on_read), max_json_bytes)
    return checker.finish(size_bytes)


def file_size(path: Path) -> int:
    """Return the size in bytes.

    Raises:
        TraceError: The file does not exist.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
