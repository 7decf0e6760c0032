"""Checks whether a trace file is intact by reading it to its end.

If a profiler crashes, the disk fills up, or two ranks write to the same file, the result can still look like a trace.
A file that can be read without an exception is not necessarily intact. `TraceCheck` lists what is verified.
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

    If ``whole`` is True, all of the following hold, regardless of how the JSON is laid out. Files may be plain, gzip,
    bzip2, or a zip archive of one file, in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark.

    - The compressed stream is complete, its checksums and lengths match, and nothing follows it.
    - Every byte of the document was parsed. The text is correctly encoded, it is valid JSON (RFC 8259, plus ``NaN``
      and ``Infinity``, as in Python's ``json``), and only whitespace follows the document.
    - No value in an event is nested more than 512 levels deep, and no event or top-level member is longer than 64 MiB.
    - The document is a Chrome trace: an array of events, or an object with exactly one ``traceEvents`` array.
    - The trace has at least one event.
    """

    size_bytes: int
    """The file's size on disk."""
    json_bytes: int
    """Size in bytes of the uncompressed JSON that could be read, encoded in UTF-8."""
    events: int
    """Number of objects in the events array that have a ``ph`` member. Malformed events are not counted."""
    whole: bool
    problem: str | None
    """The first problem and its position, in one sentence; ``None`` if the trace is intact."""


class TraceChecker:
    """Checks a trace chunk by chunk in bounded memory, so that a writer can check its own output.

    Args:
        name: Keep columns for the events with this name, which must not contain characters that JSON escapes.
    """

    def __init__(self, name: str = "") -> None:
        parser = new_parser({})
        parser.count_events(name.encode())
        self.parser = parser
        """Parser that holds the columns of the events with the given name, and the top-level members."""
        self._walker = Walker(parser)

    def read(self, chunks: Generator[Chunk, None, None], max_json_bytes: int = MAX_JSON_BYTES) -> None:
        """Check all UTF-8 chunks of a document. If the stream is damaged, the result's ``problem`` says how.

        Args:
            chunks: Chunks from `profdeck_traces.reading.content`.
            max_json_bytes: Maximum size of the document.

        Raises:
            TraceError: The file cannot be read.
        """
        self._walker.add_all(chunks, max_json_bytes)

    def finish(self, size_bytes: int) -> TraceCheck:
        """Finish the check after the last chunk, and return the result.

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
    """Check whether a trace file is intact by reading it to its end.

    Decompression runs on a second thread. Memory use does not depend on the file size.

    Args:
        path: A Chrome trace: a plain, gzip, bzip2 or zip file in UTF-8, UTF-16 or UTF-32.
        on_progress: Called from the reading thread with the number of bytes read so far and the file size.
        max_json_bytes: Maximum uncompressed size, needed because a small file can expand to an enormous size.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    checker = TraceChecker()
    checker.read(read_content(path, on_read=on_read), max_json_bytes)
    return checker.finish(size_bytes)


def file_size(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        TraceError: The file does not exist or cannot be accessed.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error
