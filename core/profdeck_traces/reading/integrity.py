"""Whether a trace file is whole, established by reading all of it.

A profiler that dies, a full disk or two ranks that share a file name leave a file that looks like a trace;
the absence of an exception says nothing. What is proved here is said at :class:`TraceCheck`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import attrs
import msgspec

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.handler import TraceHandler
from profdeck_traces.reading.json_patterns import decode_leniently
from profdeck_traces.reading.phases import PHASES, any_of, phase_type
from profdeck_traces.reading.scanner import MalformedJsonError, TraceScanner
from profdeck_traces.reading.stream import CHUNK_BYTES, Chunk, DamagedStreamError, read_ahead

MAX_JSON_BYTES = 64 << 30
# Traces of real jobs inflate to 8 to 30 times their size.
_MOST_INFLATION, _SMALL_BYTES = 300, 128 << 20


@attrs.frozen
class TraceCheck:
    """What reading a trace file to its end established.

    ``whole`` means all of the following, for plain and gzip files and in every layout of the JSON:

    - the gzip stream ended with its trailer, the CRC-32 and length of every member fit, and nothing follows;
    - every byte of the document was parsed: it is UTF-8, it is JSON (RFC 8259; ``NaN`` and ``Infinity`` are let
      through, as Python's ``json`` does), it is closed, and nothing but white space follows;
    - it is a Chrome trace: an array of events or an object with exactly one ``traceEvents`` array;
    - it has at least one event.
    """

    size_bytes: int
    """The file's size on disk."""
    json_bytes: int
    """Bytes of uncompressed JSON that could be read."""
    events: int
    """Trace events: objects in the events array that have a ``ph`` member. Up to the problem, if there is one."""
    whole: bool
    problem: str | None
    """One sentence that says what is wrong and where; ``None`` when the trace is whole."""


# Other phases are counted, more slowly, by the lenient decoder.
_EVENT: Any = any_of(map(phase_type, PHASES))
_decode = msgspec.json.Decoder(list[_EVENT]).decode


class CountingHandler:
    """Validates batches of events and counts them; the base for handlers that also want something from them."""

    wants_text = False
    keys: frozenset[str] = frozenset()

    def batch(self, text: memoryview) -> int | None:
        """Count the events in a JSON array. See :meth:`profdeck_traces.reading.handler.TraceHandler.batch`."""
        try:
            return len(_decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            events = decode_leniently(text)
        return None if events is None else sum("ph" in event for event in events if isinstance(event, dict))

    def event(self, text: bytes) -> None:
        """Ignore it: the scanner counts."""

    def member(self, key: str, text: bytes) -> None:
        """Ignore it."""


class TraceChecker:
    """Checks a trace that arrives in pieces, so that a writer can check what it writes in the same pass.

    Args:
        handler: Takes the events as well; counts only, if none is given.
    """

    def __init__(self, handler: TraceHandler | None = None) -> None:
        self._scanner = TraceScanner(handler or CountingHandler())
        # As in json.loads, lone surrogates pass.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("surrogatepass")
        self._problem: str | None = None
        self.json_bytes = 0
        """Bytes fed so far."""

    def feed(self, chunk: Chunk) -> None:
        """Check the next piece of uncompressed JSON, of any size. Never raises for what is in it."""
        if len(chunk) <= CHUNK_BYTES:
            self._feed(chunk)
            return
        for at in range(0, len(chunk), CHUNK_BYTES):
            self._feed(chunk[at : at + CHUNK_BYTES])

    def finish(self, size_bytes: int, *, damage: str | None = None) -> TraceCheck:
        """Say what was found.

        Args:
            size_bytes: The file's size on disk.
            damage: What was wrong with the stream that the pieces came from, in one sentence.
        """
        if self._problem is None:
            try:
                self._scanner.finish()
                self._utf8.decode(b"", final=True)
            except MalformedJsonError as error:
                self._problem = str(error)
            except UnicodeDecodeError:
                self._problem = "The JSON ends inside a UTF-8 character."
        problem = damage or self._problem or self._shortfall()
        return TraceCheck(
            size_bytes=size_bytes,
            json_bytes=self.json_bytes,
            events=self._scanner.events,
            whole=problem is None,
            problem=problem,
        )

    def _feed(self, piece: Chunk) -> None:
        if self._problem is None:
            try:
                sound = self._sound_bytes(piece)
                self._scanner.feed(piece[:sound] if sound < len(piece) else piece)
            except MalformedJsonError as error:
                self._note(str(error))
        self.json_bytes += len(piece)

    def _note(self, problem: str) -> None:
        """Keep what is found first."""
        self._problem = self._problem or problem

    def _sound_bytes(self, piece: Chunk) -> int:
        """Return how many bytes of a piece are UTF-8 from its beginning on; what follows is noted as the problem."""
        held = len(self._utf8.getstate()[0])
        if piece.isascii() and not held:
            return len(piece)
        try:
            self._utf8.decode(piece)
        except UnicodeDecodeError as error:
            self._note(f"The text is not UTF-8 at offset {self.json_bytes - held + error.start:,}.")
            return max(0, error.start - held)
        return len(piece)

    def _shortfall(self) -> str | None:
        scanner = self._scanner
        if not self.json_bytes:
            return "The file is empty."
        if not scanner.done:
            return (
                f"The JSON is not closed: it ends after {self.json_bytes:,} bytes"
                f" with {scanner.open_brackets} brackets open."
            )
        if scanner.events_arrays != 1:
            return (
                'It is not a Chrome trace: neither an array nor an object with "traceEvents".'
                if not scanner.events_arrays
                else f'"traceEvents" stands {scanner.events_arrays} times: readers disagree on which one counts.'
            )
        return None if scanner.events else "There are no events in the trace."


def check_trace(
    path: Path,
    handler: TraceHandler | None = None,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> TraceCheck:
    """Read a trace file to its end and say whether it is whole.

    Inflating runs on a second thread. Memory does not depend on the size of the file.

    Args:
        path: A Chrome trace, plain or gzip.
        handler: Takes the events as well, up to the problem if there is one.
        on_progress: Called with the bytes of the file read so far and its size, from the reading thread.
        max_json_bytes: Give up after so many uncompressed bytes, against files that inflate without end.

    Raises:
        TraceError: The file cannot be opened or read.
    """
    size_bytes = file_size(path)
    on_read = None if on_progress is None else lambda read: on_progress(read, size_bytes)
    checker = TraceChecker(handler)
    damage = feed_chunks(checker.feed, read_ahead(path, on_read=on_read), size_bytes, max_json_bytes)
    return checker.finish(size_bytes, damage=damage)


def file_size(path: Path) -> int:
    """Return the size in bytes.

    Raises:
        TraceError: There is no such file.
    """
    try:
        return path.stat().st_size
    except OSError as error:
        raise TraceError(f"Cannot read {path}: {error.strerror or error}.") from error


def feed_chunks(
    feed: Callable[[Chunk], None],
    chunks: Generator[Chunk, None, None],
    size_bytes: int,
    max_json_bytes: int = MAX_JSON_BYTES,
) -> str | None:
    """Feed all chunks of a stream; return what is wrong with the stream.

    Args:
        feed: Takes them.
        chunks: Those of the stream.
        size_bytes: What the stream has on disk; of a trace that inflates to very much more nothing is true.
        max_json_bytes: Give up after so many bytes.

    Raises:
        TraceError: The stream cannot be opened or read.
    """
    json_bytes, most_inflated = 0, max(_SMALL_BYTES, size_bytes * _MOST_INFLATION)
    try:
        for chunk in chunks:
            json_bytes += len(chunk)
            if json_bytes > max_json_bytes:
                return f"There are more than {max_json_bytes:,} bytes of JSON (max_json_bytes): the rest was not read."
            if json_bytes > most_inflated:
                return (
                    f"It inflates to more than {_MOST_INFLATION} times its size, as no trace does: what comes after "
                    f"{most_inflated:,} bytes was not read."
                )
            feed(chunk)
    except DamagedStreamError as error:
        return str(error)
    finally:
        chunks.close()
    return None
